"""A job on a simulated cluster: every rank wraps a model, makes some runs, and restores it.

A run is what a FlexModel asks of its communicator for one hook of each kind: headers, the gather of
an edit, the round trip of an edit on rank 0, and the records on rank 0. Every result is compared
with the full tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counted_traffic import Connected
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shard, ShardLayout
from simulation.cluster import Cluster, Counted, Fault, Process, Speeds
from simulation.product import simulated
from simulation.scheduler import current_owner
from simulation.store import Server

_SITE = site_hash("simulated")
_DTYPE = torch.float32
_SLACK_S = 3.5  # after the deadline: to ask who lives, and to tell the ranks of a host
_STORE = "the store of torch.distributed at host0:"  # as errors name it
_UNTIL_S = 3600.0  # of virtual time; whoever waits then waits forever


@dataclass(frozen=True)
class Plan:
    """What a job does.

    Attributes:
        tp, pp: The sizes of these axes; dp has the other ranks.
        rows, columns: The size of each rank's shard.
        late_s: How late ranks come, at most; each at a random time.
        num_wraps: How often they wrap, one after the other.
        threads: Of each thread of a rank, the ranks of the models that it wraps, one after the
            other; it leaves out those that it has no part in. Default: one thread, one model.
        is_turned: Whether each rank begins at the entry of its number, and turns round.
        stays: Whether the store is on a host of its own, which no fault ends; else it ends with
            rank 0.
    """

    num_ranks: int
    num_hosts: int
    tp: int
    pp: int = 1
    rows: int = 1
    columns: int = 2
    timeout_s: float = 20.0
    late_s: float = 0.5
    num_wraps: int = 1
    threads: tuple[tuple[tuple[int, ...], ...], ...] = ()
    is_turned: bool = False
    num_runs: int = 2
    stays: bool = True


class Job:
    """One job, in one process.

    Attributes:
        errors: The error of each rank that raised one.
        ended_s: When each rank ended, or raised its error.
    """

    def __init__(self, plan: Plan, seed: int, speeds: Speeds, fault: Fault | None = None) -> None:
        self.plan = plan
        self.cluster = Cluster(plan.num_ranks, plan.num_hosts, seed, speeds)
        self.cluster.fault = fault
        self.errors: dict[int, Exception] = {}
        self.ended_s: dict[int, float] = {}

    def run(self) -> Job:
        """Run it. HangError: ranks wait forever."""
        processes = self.cluster.processes
        server = Server(
            self.cluster, self.cluster.hosts[0], None if self.plan.stays else processes[0]
        )
        with simulated(self.cluster, server):
            everyone = ((tuple(range(self.plan.num_ranks)),),)
            for process in processes:
                for groups in self.plan.threads or everyone:
                    self.cluster.scheduler.spawn(process, self._of(process, groups))
            self.cluster.scheduler.run(_UNTIL_S)
        return self

    def _of(self, process: Process, groups: Sequence[tuple[int, ...]]) -> Callable[[], None]:
        turn = process.rank if self.plan.is_turned else 0
        groups = [*groups[turn:], *groups[:turn]]

        def run() -> None:
            try:
                for ranks in groups:
                    if process.rank in ranks:
                        self._run_rank(process.rank, ranks)
            except Exception as error:
                self.errors.setdefault(process.rank, error)
            self.ended_s[process.rank] = self.cluster.scheduler.now

        return run

    def _run_rank(self, rank: int, ranks: tuple[int, ...]) -> None:
        plan, scheduler = self.plan, self.cluster.scheduler
        mesh = self.mesh(rank, ranks)
        for _ in range(plan.num_wraps):
            scheduler.sleep(plan.late_s * scheduler.dice.random())
            self._begin("wrap")
            communicator = Communicator(mesh, plan.timeout_s)
            self._begin("runs")
            spec = self._spec(communicator)
            full, shard = self._tensors(mesh)
            for _ in range(plan.num_runs):
                self._run_hooks(communicator, spec, full, shard)
            self._begin("end")
            communicator.close()

    def mesh(self, rank: int, ranks: tuple[int, ...] = ()) -> Mesh:
        """The mesh of some ranks, by default all, as a rank has it."""
        plan = self.plan
        ranks = ranks or tuple(range(plan.num_ranks))
        dp = len(ranks) // plan.tp // plan.pp
        return Mesh(ranks, ranks.index(rank), plan.pp, dp, plan.tp)

    def _spec(self, communicator: Communicator) -> TensorSpec:
        layout, shape = ShardLayout(Shard(0), Shard(1)), (self.plan.rows, self.plan.columns)
        shapes = [shape] * len(communicator.mesh.stage_ranks)
        return TensorSpec.of(communicator, layout, shapes, _DTYPE)

    def _tensors(self, mesh: Mesh) -> tuple[Tensor, Tensor]:
        """The full tensor, and this rank's shard of it."""
        sizes = self.plan.rows * mesh.dp_size, self.plan.columns * mesh.tp_size
        full = torch.arange(sizes[0] * sizes[1], dtype=_DTYPE).reshape(sizes)
        dp, tp = divmod(mesh.group_rank, mesh.tp_size)
        rows, columns = self.plan.rows, self.plan.columns
        return full, full[dp * rows :][:rows, tp * columns :][:, :columns].contiguous()

    def _run_hooks(
        self, communicator: Communicator, spec: TensorSpec, full: Tensor, shard: Tensor
    ) -> None:
        def compare(kind: str) -> None:
            _check(communicator, kind, shard)

        is_first = communicator.mesh.group_rank == 0

        def gather_to_first() -> None:
            gathered = spec.gather_to_first(shard)
            assert torch.equal(gathered, full) if is_first else gathered is None

        compare("forward")  # an edit
        assert torch.equal(spec.all_gather(shard), full)
        compare("forward_pre")  # an edit on rank 0
        gather_to_first()
        scattered = spec.scatter_from_first(full * 2 if is_first else None, shard)
        assert torch.equal(scattered, shard * 2)
        compare("end of the run")
        gather_to_first()

    def _begin(self, phase: str) -> None:
        """Begin a phase of the calling rank: ``"wrap"``, ``"runs"`` or ``"end"``."""
        current_owner().phase = phase

    def counted(self, phase: str) -> Counted:
        """What was counted in a phase of the ranks."""
        return self.cluster.counted[phase]

    # ---- What is predicted -----------------------------------------------------------------------

    @property
    def _stage(self) -> int:
        return self.plan.num_ranks // self.plan.pp

    def predicted_requests(self) -> list[int]:
        """The requests of each rank's first wrap."""
        names = [process.host.name for process in self.cluster.processes]
        size = self._stage
        requests = []
        for rank, name in enumerate(names):
            stage = names[rank // size * size :][:size]
            is_first = stage.index(name) == rank % size
            requests.append(Connected.of(len(set(stage)), is_first).requests)
        return requests

    # ---- What became of a fault ------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What is wrong after a fault: ranks that live and have not ended in time, or whose error
        does not name a rank that failed, or says that a rank that lives has ended. The ranks of a
        host that is cut off can name those of others. The same of the ranks of a host that is too
        slow, for which a rank may wait twice: at the meeting, and to connect. Others may then name
        the first rank of their host, which still waits for answers.
        """
        died = self.cluster.died
        is_slow = not died and bool(self.errors)
        limit = self.plan.late_s + self.plan.timeout_s + _SLACK_S
        if died:
            limit += max(died.values())
        elif is_slow:
            died = {p.rank: 0.0 for p in self.cluster.processes if p.host.times > 1}
            limit += self.plan.timeout_s + 2 * _SLACK_S
        if not died:
            return [f"{rank}: {error!r}" for rank, error in self.errors.items()]
        found = []
        for process in self.cluster.processes:
            rank = process.rank
            if process.is_dead:
                continue
            if self.ended_s.get(rank, _UNTIL_S) > limit:
                found.append(f"rank {rank}: ended at {self.ended_s.get(rank)}, not by {limit:.1f}")
            error = self.errors.get(rank)
            if error is None:
                continue
            named, text = named_in(str(error)), str(error)
            gone = set(died)
            if process.host.is_silent:
                gone = set(range(self.plan.num_ranks)) - gone
            elif rank in died:  # slow
                gone = set(range(self.plan.num_ranks))
            elif is_slow:
                gone.add(process.host.processes[0].rank)
            if not named & gone and not (self._has_lost_store(process) and _STORE in text):
                found.append(f"rank {rank}: names none of {sorted(gone)}: {error!r}")
            ended = named_in(re.sub(r"^global rank \d+: ", "", text))  # without who tells it
            if ended - gone and ("ended" in text or "died" in text):
                found.append(f"rank {rank}: names {sorted(ended)}, which live: {error!r}")
        return found

    def _has_lost_store(self, process: Process) -> bool:
        has_ended = not self.plan.stays and self.cluster.processes[0].is_dead
        here, there = process.host, self.cluster.hosts[0]
        is_slow = max(here.times, there.times) > 1
        return has_ended or is_slow or not self.cluster.can_reach(here, there)


def named_in(text: str) -> set[int]:
    """The ranks that an error names as the reason."""
    text = re.sub(r"global ranks \[[\d, ]+\] have waited, and left", "", text)
    named = {int(number) for number in re.findall(r"global rank (\d+)", text)}
    for listed in re.findall(r"global ranks \[([\d, ]+)\]", text):
        named |= {int(number) for number in listed.split(",")}
    return named


def _check(communicator: Communicator, kind: str, shard: Tensor) -> None:
    header = Header(kind, _SITE, dtype=_DTYPE, shape=tuple(shard.shape))
    communicator.check_consistency(header, f"a {kind} hook")
