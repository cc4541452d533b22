"""Predicts what hooks cost in a step of a pipeline's schedule, from one process and without
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flex_model.distributed.costs import BetweenHosts, Connected, Traffic
from flex_model.distributed.mesh import GRID, Mesh
from flex_model.inspection import call_costs
from flex_model.inspection.call_costs import Cost, Setup
from flex_model.inspection.dry_run import DryRunRow
from flex_model.inspection.hook_costs import (
    HookCosts,
    HookLine,
    Link,
    Part,
    are_firsts,
    calls_of,
    parts_of,
    rows_of,
)
from flex_model.inspection.offline import Input, OfflineRun

_OF_ALL = "all stages"


@dataclass(frozen=True)
class Stages:
    """The stages of a model that is split in equal parts of its list of blocks.

    Attributes:
        run: A run of the unsplit model.
        blocks: The names of the blocks, in their order.
        per_stage: The number of blocks of a stage.
    """

    run: OfflineRun
    blocks: tuple[str, ...]
    per_stage: int

    @staticmethod
    def of(run: OfflineRun, num_stages: int) -> Stages:
        """Those of ``num_stages`` stages.

        Raises:
            ValueError: the model runs no list of blocks, or it has no equal parts.
        """
        lists: dict[str, list[str]] = {}
        for name in run.nodes:
            parent, _, number = name.rpartition(".")
            if number.isdecimal():
                lists.setdefault(parent, []).append(name)
        called = [name for name, kind, _ in run.calls if kind == "input"]
        in_order = [
            blocks
            for blocks in lists.values()
            if len(blocks) > 1 and [name for name in called if name in set(blocks)] == blocks
        ]
        outermost = [
            blocks
            for blocks in in_order
            if not any(blocks[0].startswith(f"{outer}.") for other in in_order for outer in other)
        ]
        most = max(map(len, outermost), default=0)
        found = [blocks for blocks in outermost if len(blocks) == most]
        if len(found) != 1:
            lists_found = ", ".join(f"{blocks[0]!r} to {blocks[-1]!r}" for blocks in found)
            raise ValueError(
                "stages are parts of one list of blocks that the model runs once each, in order, "
                f"and it has {lists_found or 'none'}; the costs of its pipeline can't be predicted"
            )
        (blocks,) = found
        if len(blocks) % num_stages:
            raise ValueError(
                f"the {len(blocks)} blocks {blocks[0]!r} to {blocks[-1]!r} have no {num_stages} "
                "equal parts; give a number of stages that divides them"
            )
        return Stages(run, tuple(blocks), len(blocks) // num_stages)

    def __str__(self) -> str:
        firsts = self.blocks[self.per_stage :: self.per_stage]
        return f"stages begin at {', '.join(('the inputs', *firsts))}"

    def stage_of(self, name: str) -> int:
        """The stage of a module: of what is not in a block, the first or the last one.

        Raises:
            ValueError: several stages may have it.
        """
        for i, block in enumerate(self.blocks):
            if name == block or name.startswith(f"{block}."):
                return i // self.per_stage
            if not name or block.startswith(f"{name}."):
                raise ValueError(
                    f"module {name!r} is spread over the stages; hook a module that one of them "
                    f"has, as {block!r}"
                )
        calls = [called for called, _, _ in self.run.calls]
        places = [i for i, called in enumerate(calls) if called == name]
        if name in self.run.with_parameters:
            if places[-1] < calls.index(self.blocks[0]):
                return 0
            if places[0] > len(calls) - 1 - calls[::-1].index(self.blocks[-1]):
                return (len(self.blocks) - 1) // self.per_stage
        raise ValueError(
            f"module {name!r} is outside of the blocks {self.blocks[0]!r} to {self.blocks[-1]!r}, "
            "and has no parameters or is not called before or behind them only, so several stages "
            "may have it; hook a module in a block"
        )


@dataclass(frozen=True)
class Step:
    """A step of a schedule with one stage for each rank along the pipeline, and a loss.

    Attributes:
        mesh: The ranks of one stage.
        hosts: The host of each rank of the pipeline, in the order (pp, dp, tp).
        number: The number of micro-batches.
        num_rows: The rows of a micro-batch, of all data-parallel ranks together.
    """

    mesh: Mesh
    hosts: tuple[str, ...]
    edits_on_all: bool
    number: int
    num_rows: int

    @property
    def per_stage(self) -> int:
        """The number of ranks of a stage."""
        return len(self.mesh.stage_ranks)

    @property
    def world(self) -> BetweenHosts:
        """The traffic of transfers of all ranks."""
        ranks = tuple(range(len(self.hosts)))
        return BetweenHosts(Mesh(ranks, 0, tp_size=len(ranks)), self.hosts)

    def setup(self, stage: int) -> Setup:
        """That of a stage's hooks."""
        hosts = self.hosts[stage * self.per_stage :][: self.per_stage]
        return Setup(self.mesh, hosts, self.edits_on_all, is_step=True)

    def of_row(self, row: DryRunRow, stage: int) -> DryRunRow:
        """The row of a stage's hooks in all micro-batches, from that of one; its records are sent
        to rank 0.

        Raises:
            ValueError: micro-batches have gradients that can't be joined.
        """
        is_batched = row.full_shape is None or row.full_shape[:1] == (self.num_rows,)
        if not is_batched and self.number > 1 and row.kind not in ("forward", "forward_pre"):
            raise ValueError(
                f"{row.kind} hooks on {row.name!r} see gradients of shape {row.full_shape}, which "
                f"have no rows of the batch ({self.num_rows} in a micro-batch), so a step can't "
                "join those of its micro-batches; give --microbatches 1, for batch_mode='full'"
            )
        # Without rows of the batch, one is kept: a step raises an error unless all are the same.
        num_kept = self.number if is_batched else 1
        both = []
        for cost in (row.forward, row.backward):
            if cost == Cost():
                both.append(cost)
                continue
            kept = cost.record_bytes * num_kept
            of_all = self._placed(sum([cost] * self.number, Cost()), stage)
            held = tuple(num_bytes * num_kept for num_bytes in cost.held)
            sent = self.world.to_first(GRID, self._held(stage, kept)).of_shared
            between = of_all.between + sent
            both.append(replace(of_all, between=between, record_bytes=kept, held=held))
        return replace(row, calls=self.number * row.calls, forward=both[0], backward=both[1])

    def of_stage(self, rows: Sequence[DryRunRow], stage: int) -> Cost:
        """All that a stage's ranks exchange: their hooks, the start of each forward, and the end.

        Args:
            rows: Those of the stage, by ``of_row``.
        """
        setup = self.setup(stage)
        cost = sum((row.forward + row.backward for row in rows), Cost())
        if setup.is_local or not rows:
            return cost
        shared = sum([setup.header] * self.number, Cost())
        shared += call_costs.of_end(setup, cost, is_backward=False)
        return cost + self._placed(shared, stage)

    def of_ends(self, record_bytes: Sequence[int]) -> Cost:
        """What the ranks of all stages exchange at the start and the end: each time a header, and
        texts whose bytes are not predicted.

        Args:
            record_bytes: Of each stage.
        """
        header = Cost(headers=1, between=self.world.exchange(call_costs.HEADER_BYTES))
        text = Cost(between=self.world.exchange(1).without_bytes)
        cost = header + text + header + text
        if any(record_bytes[1:]):
            held = [self._held(stage, kept) for stage, kept in enumerate(record_bytes)]
            sent = self.world.to_first(GRID, [sum(of_rank) for of_rank in zip(*held)])
            cost += Cost(payloads=1, between=sent.without_bytes)
        return cost

    def connected(self) -> list[Connected]:
        """What ``FlexModel(...)`` takes of each rank: groups of its stage, of its line along the
        pipeline, and of all.
        """
        ranks, size = range(len(self.hosts)), self.per_stage
        found = []
        for rank in ranks:
            groups = {tuple(ranks), tuple(ranks[rank % size :: size])}
            groups.add(tuple(ranks[rank // size * size :][:size]))
            of_groups = [self._connected(group, rank) for group in groups if len(group) > 1]
            found.append(Connected.of_groups(of_groups))
        return found

    def _connected(self, group: Sequence[int], rank: int) -> tuple[int, bool]:
        names = [self.hosts[one] for one in group]
        return len(set(names)), are_firsts(names)[group.index(rank)]

    def _held(self, stage: int, num_bytes: int) -> list[int]:
        """The bytes of each rank, of which the first one of a stage holds some for rank 0."""
        held = [0] * len(self.hosts)
        held[stage * self.per_stage] = num_bytes if stage else 0
        return held

    def _placed(self, cost: Cost, stage: int) -> Cost:
        """The cost of a stage's ranks, with the traffic of all hosts."""
        names = list(dict.fromkeys(self.hosts))
        own = list(dict.fromkeys(self.setup(stage).hosts))
        between = cost.between

        def of_all(counts: tuple[int, ...]) -> tuple[int, ...]:
            by_name = dict(zip(own, counts))
            return tuple(by_name.get(name, 0) for name in names)

        traffic = Traffic(
            of_all(between.sent),
            of_all(between.received),
            of_all(between.messages),
            between.steps,
            between.waited_bytes,
        )
        return replace(cost, between=traffic, bytes_by_rank=())


def predict_step(
    run: OfflineRun,
    lines: Sequence[HookLine],
    hosts: tuple[str, ...],
    edit_on: str,
    link: Link,
    num_stages: int,
    number: int,
) -> HookCosts:
    """Predict what the hooks cost in a training step whose layouts are known. Local.

    Args:
        run: Of the unsplit model, on the ranks of one stage, with the rows of a micro-batch.
        hosts, number: As in ``Step``.

    Raises:
        ValueError: the model has no such stages, a line names no module that is called or one that
            several stages have, or a micro-batch has one row.
    """
    stages = Stages.of(run, num_stages)
    num_rows = run.num_rows
    if number > 1 and num_rows == 1:
        raise ValueError(
            "which records have rows of the batch can't be predicted for micro-batches of one row; "
            "give inputs of more rows"
        )
    step = Step(run.mesh, hosts, edit_on == "all", number, num_rows)
    parts: list[Part] = []
    of_stages: list[Part] = []
    total, record_bytes = Cost(), []
    for stage in range(num_stages):
        rows = []
        for line in lines:
            calls = [call for call in calls_of(run, line) if stages.stage_of(call[0]) == stage]
            rows += [step.of_row(row, stage) for row in rows_of(step.setup(stage), calls, line)]
        parts += [part for row in rows for part in parts_of(row, f", stage {stage}")]
        cost = step.of_stage(rows, stage)
        record_bytes.append(cost.record_bytes)
        total += cost
        of_stages.append(Part(f"stage {stage}, with what its hooks share", "step", cost))
    ends = step.of_ends(record_bytes)
    of_stages.append(Part("start and end, of all ranks", "step", ends))
    of_stages.append(Part(_OF_ALL, "step", total + ends))
    title = f"{num_stages} stages x {step.per_stage} ranks, {number} micro-batches; {stages}"
    notes = (
        "not predicted: the bytes of the texts, some hundred of each rank, that describe a step at "
        "its start and end, and how stages overlap: the ms of all are of one after the other; "
        "records without rows of the batch are taken to be the same in all micro-batches"
    )
    return HookCosts(title, hosts, edit_on, [*parts, *of_stages], step.connected(), link, notes)


def of_microbatch(inputs: list[Input] | None, number: int) -> list[Input] | None:
    """Return the inputs of a micro-batch, of which there are ``number``. None: the default.

    Raises:
        ValueError: the rows of an input have no such parts.
    """
    if number < 1 or any(not shape or shape[0] % number for shape, _ in inputs or ()):
        raise ValueError(
            f"dim 0 of every input is the batch, which is split into {number} micro-batches of "
            "one size; give a number of micro-batches that divides the rows"
        )
    return inputs and [((shape[0] // number, *shape[1:]), dtype) for shape, dtype in inputs]
