"""The engine's shared memory, simulated: arenas by which the ranks of a host find each other, and
rounds of messages. Its rules are those of csrc/engine/shared_memory/group.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flex_model import _C
from flex_model.distributed.transports.gloo import assemble, split
from simulation.cluster import Cluster, Process
from simulation.scheduler import current_owner

_SMALL_BYTES = 64 << 10  # that fit a message


class Control:
    """The block of memory that all ranks of a group share."""

    def __init__(self, size: int) -> None:
        process: Process = current_owner()
        process.cluster.step("make a control block")
        self.size = size
        self.is_broken, self.reason = False, ""
        self.is_open = [False] * size
        self.posted = [0] * size
        self.messages: list[list[Any]] = [[None, None] for _ in range(size)]  # the last two
        self.notices = [""] * size
        self.positions = [""] * size


class HostGroup:
    """See ``_C.HostGroup``."""

    def __init__(self, control: Control, tables: Sequence[Any], rank: int) -> None:
        self._process: Process = current_owner()
        self._cluster = self._process.cluster
        self._host = self._process.host
        self._control, self.rank, self.size = control, rank, control.size
        self._tables = [self._cluster.of_pid[pid] for pid, *_ in tables]
        self._round, self._op, self._detail = 0, "", 0
        self._timeout_s, self._position = 60.0, ""
        self._watch: Callable[[float], None] | None = None
        control.is_open[rank] = True
        self._changed()

    @staticmethod
    def made(control: Control, tables: Sequence[Any], rank: int) -> HostGroup:
        current_owner().cluster.step("make a group of the host")
        return HostGroup(control, tables, rank)

    @staticmethod
    def open(address: Any, tables: Sequence[Any], rank: int) -> HostGroup:
        process: Process = current_owner()
        process.cluster.step("open a group of the host")
        if any(process.cluster.of_pid[pid].is_dead for pid, *_ in tables):
            raise RuntimeError("shared memory: can't open the memory of another rank")
        return HostGroup(process.cluster.addresses[tuple(address)], tables, rank)

    @property
    def is_broken(self) -> bool:
        return self._control.is_broken

    def who_opened(self, number: int) -> list[int]:
        refused = [process.arena.get("refused") == number for process in self._tables]
        return [
            -1 if refuses else int(is_open)
            for refuses, is_open in zip(refused, self._control.is_open)
        ]

    def set_timeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def set_position(self, text: str) -> None:
        self._position = text

    def set_watch(self, watch: Callable[[float], None] | None) -> None:
        self._watch = watch

    def publish(self, notice: str) -> None:
        self._cluster.step("publish a notice")
        self._control.notices[self.rank] = notice

    def published(self, rank: int) -> str | None:
        return self._control.notices[rank]

    def position_of(self, rank: int) -> str:
        return self._control.positions[rank]

    def is_behind(self, rank: int) -> bool:
        return self._control.posted[rank] < self._round

    def abort(self, reason: str) -> None:
        self._cluster.scheduler.check_lives(self._process)
        if not self.is_broken:
            self._control.is_broken, self._control.reason = True, reason
        elif not self._control.reason:
            self._control.reason = reason
        self._changed()

    # ---- Transfers -------------------------------------------------------------------------------

    def exchange_bytes(self, local: bytes) -> list[bytes]:
        return self._to_all("exchange", len(local), bytes(local))

    def exchange(self, local: Any, num_bytes: int, everyone: Any) -> None:
        for rank, row in enumerate(self._to_all("exchange", num_bytes, local.clone())):
            everyone[rank].copy_(row)

    def all_gather(self, plan: Any, shard: Any, fulls: Sequence[Any]) -> None:
        shards = self._to_all("all gather", hash(tuple(plan.code)), shard.clone())
        if fulls:
            full = _assembled(shards, plan, fulls[0].dtype)
        for one in fulls:
            one.copy_(full)
        if max(plan.shard_bytes) > _SMALL_BYTES:
            self._to_all("done", 0, None)

    def gather_to_first(self, items: Sequence[tuple[Any, Sequence[int], Any, Any]]) -> None:
        shards = [None if shard is None else shard.clone() for _, _, shard, _ in items]
        of_ranks = self._to_first("gather", len(items), shards)
        if max((max(plan.shard_bytes) for plan, *_ in items), default=0) > _SMALL_BYTES:
            self._to_first("done", 0, None)
        if of_ranks is None:
            return
        for i, (plan, ranks, _, full) in enumerate(items):
            full.copy_(_assembled([of_ranks[rank][i] for rank in ranks], plan, full.dtype))

    def scatter_from_first(self, plan: Any, full: Any, shard: Any) -> None:
        held = self._from_first(plan.full_bytes, None if full is None else full.clone())
        shard.copy_(split(held, plan, self.rank).reshape(shard.shape))

    def broadcast(self, source: Any, num_bytes: int, to: Any) -> None:
        held = self._from_first(num_bytes, None if source is None else source.clone())
        if to is not None and num_bytes:
            to.view(-1).view(torch.uint8).copy_(held.reshape(-1).view(torch.uint8))

    def _to_all(self, op: str, detail: int, data: Any) -> list[Any]:
        self._post(op, detail, data)
        return [self._message(rank) for rank in range(self.size)]

    def _to_first(self, op: str, detail: int, data: Any) -> list[Any] | None:
        self._post(op, detail, data)
        return [self._message(rank) for rank in range(self.size)] if self.rank == 0 else None

    def _from_first(self, num_bytes: int, data: Any) -> Any:
        self._post("from first", num_bytes, data)
        held = self._message(0)
        if num_bytes > _SMALL_BYTES:
            self._to_first("done", 0, None)
        return held

    # ---- Rounds ----------------------------------------------------------------------------------

    def _post(self, op: str, detail: int, data: Any) -> None:
        self._cluster.step(f"shared memory: {op}")
        self._check_unbroken()
        for rank in range(self.size):
            self._wait(rank)
        self._round += 1
        self._op, self._detail = op, detail
        control = self._control
        control.messages[self.rank][self._round % 2] = (self._round, op, detail, data)
        control.posted[self.rank] = self._round
        self._changed()

    def _message(self, rank: int) -> Any:
        self._wait(rank)
        number, op, detail, data = self._control.messages[rank][self._round % 2]
        if (number, op, detail) != (self._round, self._op, self._detail):
            self._fail("out of step", [rank], f"rank {rank} does {op}, not {self._op}")
        return data

    def _wait(self, rank: int) -> None:
        scheduler, start = self._cluster.scheduler, self._cluster.scheduler.now
        while self._control.posted[rank] < self._round:
            at = scheduler.now
            scheduler.wait(self._host.changed, self._cluster.speeds.poll_s)
            if self._control.posted[rank] >= self._round:
                return
            if self.is_broken or scheduler.now >= at + self._cluster.speeds.poll_s:
                self._on_poll(rank, start)

    def _on_poll(self, rank: int, start: float) -> None:
        control = self._control
        control.positions[self.rank] = self._position
        self._check_unbroken()
        if self._watch is not None:
            try:
                self._watch(self._cluster.scheduler.now - start)
            except BaseException:
                control.is_broken = True
                raise
        self._check_unbroken()
        missing = [r for r, posted in enumerate(control.posted) if posted < self._round]
        dead = [r for r in missing if self._tables[r].is_dead]
        if dead:
            self._fail("dead", dead, "")
        if self._cluster.scheduler.now - start > self._timeout_s and rank in missing:
            self._fail("late", missing, "")

    def _check_unbroken(self) -> None:
        if not self.is_broken:
            return
        if not self._control.reason:  # the rank that aborted writes it in a moment
            self._cluster.scheduler.wait(self._host.changed, 0.1)
        self._fail("broken", [], self._control.reason)

    def _fail(self, reason: str, ranks: list[int], text: str) -> None:
        self._control.is_broken = True
        raise _C.WaitError(reason, ranks, text)

    def _changed(self) -> None:
        changed(self._process)


def changed(process: Process) -> None:
    """Wake whoever waits for the memory of a process's host."""
    process.host.changed.notify()
    for other in process.host.processes:
        other.changed.notify()


def _assembled(shards: Sequence[Any], plan: Any, dtype: torch.dtype) -> Any:
    flat = [shard.reshape(-1).view(torch.uint8) for shard in shards]
    offsets = [0]
    for shard in flat:
        offsets.append(offsets[-1] + shard.numel())
    return assemble(torch.cat(flat), offsets[:-1], plan, dtype)


class Engine:
    """The functions of ``_C`` that concern processes and their memory."""

    ControlBlock = Control
    HostGroup = HostGroup

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def arena_table(self) -> tuple[Any, ...]:
        return (current_owner().pid, 0, 0, 0)

    def offer_control(self, number: int, control: Control) -> None:
        process: Process = current_owner()
        self._cluster.step("offer a group of the host")
        address = (process.pid, 1, number, 0)
        self._cluster.addresses[address] = control
        process.arena["offered"] = number, address
        changed(process)

    def offered_control(self, table: Sequence[Any], number: int) -> Any:
        process = self._cluster.of_pid[table[0]]
        if process.is_dead:
            raise RuntimeError("shared memory: can't open the memory of another rank")
        if process.arena.get("offered", (None,))[0] == number:
            return process.arena["offered"][1]
        if process.arena.get("refused") == number:
            raise RuntimeError("shared memory: the first rank of this host can't share it")
        return None

    def refuse_group(self, number: int) -> None:
        self._cluster.step("refuse a group of the host")
        current_owner().arena["refused"] = number
        changed(current_owner())

    def process_start(self, pid: int) -> int:
        process = self._cluster.of_pid[pid]
        return 0 if process.is_dead else process.rank + 1

    def set_arena_limit(self, num_bytes: int) -> None:
        pass

    def worthwhile_view_bytes(self) -> int:
        return -1

    def close_arena(self) -> None:
        pass
