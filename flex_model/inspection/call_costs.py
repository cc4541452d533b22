"""What calls of hooks add to a run: collectives, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from flex_model.distributed import costs
from flex_model.distributed.costs import HEADER_BYTES, BetweenHosts, Traffic, added
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import GRID, Axis, Mesh
from flex_model.distributed.placement import Replicate, Shard
from flex_model.hooks.registration import Registration
from flex_model.inspection import text
from flex_model.inspection.on_shapes import Seen
from flex_model.layouts.expected_shape import rows_dim
from flex_model.layouts.statements import Statements

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

_HASH_BYTES = 8


@dataclass(frozen=True)
class Setup:
    """What the costs of a FlexModel's hooks depend on, besides their tensors.

    Attributes:
        hosts: As in ``BetweenHosts``.
        edits_on_all: Whether every rank edits, not rank 0 alone.
        is_step: Whether they are called in the steps of a pipeline's schedule.
        records_on_all, keeps_parts: As in ``Records``.
        rows_dim: The dim in which data-parallel ranks hold rows.
        statements: The layouts that the user states.
    """

    mesh: Mesh
    hosts: tuple[str, ...]
    edits_on_all: bool = True
    records_on_all: bool = False
    keeps_parts: bool = False
    is_step: bool = False
    rows_dim: int | None = 0
    statements: Statements | None = None

    @staticmethod
    def of(core: HookCore) -> Setup:
        """That of a FlexModel. Local."""
        records = core.records
        return Setup(
            core.mesh,
            core.communicator.hosts,
            core.executor.edits_on_all,
            records.on_all_ranks,
            records.keeps_parts,
            rows_dim=rows_dim(core.tracking.batch_dim),
            statements=core.tracking.statements,
        )

    @property
    def is_local(self) -> bool:
        return len(self.mesh.stage_ranks) == 1

    @property
    def between(self) -> BetweenHosts:
        return BetweenHosts(self.mesh, self.hosts)

    @cached_property
    def header(self) -> Cost:
        """The cost of one header."""
        return Cost(headers=1, between=self.between.exchange(HEADER_BYTES))


@dataclass(frozen=True)
class Cost:
    """What the calls of one hook add to a run whose layouts are known.

    Attributes:
        headers: Exchanges of 64 bytes, each with all ranks.
        payloads: Collectives that move tensors.
        bytes_by_rank: What each rank of the grid sends of its own and receives of others'; a
            transport may send more.
        between: What moves between hosts, of tensors on the CPU; headers included.
        record_bytes: What rank 0 keeps as records.
        held: What each rank of the grid holds of the records that wait for the end of the run, to
            be sent to rank 0 in one transfer; empty if none waits.
        is_compared: Whether the end of the run compares replicas of a record.
    """

    headers: int = 0
    payloads: int = 0
    bytes_by_rank: tuple[int, ...] = ()
    between: Traffic = field(default_factory=Traffic)
    record_bytes: int = 0
    held: tuple[int, ...] = ()
    is_compared: bool = False

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.headers + other.headers,
            self.payloads + other.payloads,
            added(self.bytes_by_rank, other.bytes_by_rank),
            self.between + other.between,
            self.record_bytes + other.record_bytes,
            added(self.held, other.held),
            self.is_compared or other.is_compared,
        )

    @property
    def is_nothing(self) -> bool:
        """Whether ranks neither wait for others nor move anything."""
        return not (self.headers or self.payloads or any(self.bytes_by_rank))

    def __str__(self) -> str:
        most = max(self.bytes_by_rank, default=0)
        moved = f"{self.headers} + {self.payloads}, {text.size(most)}"
        between = self.between.most_bytes
        return f"{moved}, {text.size(between)} between hosts" if between else moved


class CallCosts:
    """What a call of one hook costs, as ``HookExecutor``, ``gather`` and ``Records`` do it."""

    def __init__(
        self,
        setup: Setup,
        registration: Registration,
        spec: TensorSpec,
        ranks: Sequence[Seen],
    ) -> None:
        self._setup, self._between = setup, setup.between
        self._registration = registration
        self._spec = spec
        self._mesh = setup.mesh
        self._on_all = setup.edits_on_all
        self._records_on_all = setup.records_on_all
        self._keeps_parts = setup.keeps_parts
        self._seen = ranks[0]
        known = ranks[0].known
        self._is_mean = known is not None and isinstance(known.dp, Shard)  # FSDP2 made it
        self._shard_bytes = [self._part_bytes(place) for place in range(len(ranks))]
        self._full_bytes = spec.plan.full_bytes

    def _part_bytes(self, place: int) -> int:
        """What the rank at this place of the grid moves."""
        members = self._mesh.ranks_along(self._spec.axes, place=place)
        return self._spec.plan.shard_bytes[members.index(place)]

    def of_calls(self, needs_gradient: bool) -> tuple[Cost, Cost]:
        """In the forward, and in the backward."""
        kept = Cost(record_bytes=self._record_bytes)
        if self._setup.is_local:
            return (Cost(), kept) if self._is_of_backward else (kept, Cost())
        if self._registration.kind == "tensor":
            return Cost(), kept + self._mean_over_dp() + self._look_or_edit()
        if self._registration.is_backward:
            return Cost(), kept + self._look_or_edit()
        if not self._registration.edits or not needs_gradient:
            return kept + self._look_or_edit(), Cost()
        return kept + self._look_or_edit(), self._backward_of_edit()

    @property
    def _is_of_backward(self) -> bool:
        return self._registration.is_backward or self._registration.kind == "tensor"

    @property
    def _record_bytes(self) -> int:
        is_kept = self._registration.hook_function.record and not self._keeps_parts
        return self._full_bytes if is_kept else 0

    def _look_or_edit(self) -> Cost:
        if not self._registration.edits:
            return self._look()
        if not self._registration.hook_function.record:
            return self._edit()
        if self._keeps_parts:  # summed again, for the record
            return self._edit() + self._look()
        cost = self._edit()
        return cost + self._all_gather() if self._records_on_all and not self._on_all else cost

    def _look(self) -> Cost:
        """Of a record that is delivered when the run ends, with all others."""
        cost = self._sums() + self._comparison()
        if self._keeps_parts:
            return cost
        if self._records_on_all:
            return cost + self._all_gather()
        to_first = self._to_first(GRID)
        between = to_first.between.of_shared
        held = tuple(self._held_of_first()) if self._spec.axes else ()
        return cost + replace(to_first, payloads=0, between=between, held=held)

    def _comparison(self) -> Cost:
        """The comparison of replicas, all in one exchange; see ``Records``."""
        dp, tp = self._spec.layout.dp, self._spec.layout.tp
        is_replicated = (self._mesh.dp_size > 1 and isinstance(dp, Replicate)) or (
            self._mesh.tp_size > 1 and isinstance(tp, Replicate)
        )
        if not is_replicated or not self._seen.is_compared:
            return Cost()
        traffic = self._between.exchange(_HASH_BYTES)
        return Cost(between=traffic.of_shared, is_compared=True)

    def _edit(self) -> Cost:
        if self._on_all:
            checked = self._setup.is_step and self._registration.calls_function
            return self._headers(1 + checked) + self._sums() + self._all_gather()
        # Of tensors edited together, rank 0 sends the result once.
        cost = self._headers(1 + self._registration.calls_function)
        return cost + self._sums() + self._to_first(self._spec.axes) + self._from_first()

    def _backward_of_edit(self) -> Cost:
        """Of one whose layout is known, and of whose gradient replicas hold the whole."""
        spec, cost = self._spec, Cost()
        if self._on_all:
            if spec.is_shared_over_dp:
                full = [self._full_bytes] * len(self._shard_bytes)
                cost += self._headers(1) + self._all_reduce("dp", full)
            return cost + self._headers(1) + self._all_gather() if spec.axes else cost
        if spec.is_shared_over_dp:
            cost += self._all_reduce("dp", self._shard_bytes)
        return cost + self._headers(2) + self._to_first(spec.axes) + self._from_first()

    def _mean_over_dp(self) -> Cost:
        if self._mesh.dp_size == 1 or self._is_mean:
            return Cost()
        return self._headers(1) + self._all_reduce("dp", self._shard_bytes)

    def _headers(self, number: int) -> Cost:
        return sum([self._setup.header] * number, Cost())

    def _sums(self) -> Cost:
        axes = self._spec.layout.partial_axes
        return sum((self._all_reduce(axis, self._shard_bytes) for axis in axes), Cost())

    def _all_reduce(self, axis: str, held: list[int]) -> Cost:
        between = self._between.all_reduce((axis,), held)
        return Cost(payloads=1, bytes_by_rank=tuple(2 * n for n in held), between=between)

    def _all_gather(self) -> Cost:
        if not self._spec.axes:
            return Cost()
        return self._alike(self._between.all_gather(self._spec.axes, self._shard_bytes))

    def _to_first(self, group: tuple[Axis, ...]) -> Cost:
        """Of a gather on rank 0, by the transport of the ranks along ``group``."""
        if not self._spec.axes:
            return Cost()
        holders = self._mesh.ranks_along(self._spec.axes, place=0)
        ranks = range(len(self._shard_bytes))
        moved = [costs.of_gather_to_first(self._spec.plan, holders, rank) for rank in ranks]
        between = self._between.to_first(group, self._held_of_first())
        return Cost(payloads=1, bytes_by_rank=tuple(moved), between=between)

    def _held_of_first(self) -> list[int]:
        """What each rank holds of the full tensor that rank 0 gathers."""
        holders = self._mesh.ranks_along(self._spec.axes, place=0)
        return [n if place in holders else 0 for place, n in enumerate(self._shard_bytes)]

    def _from_first(self) -> Cost:
        if not (self._spec.covers_grid and self._spec.axes):
            return self._alike(self._between.broadcast(self._full_bytes))
        between = self._between.from_first(self._spec.axes, self._shard_bytes)
        return replace(self._to_first(GRID), between=between)

    def _alike(self, between: Traffic) -> Cost:
        """Of a transfer in which each rank moves the full tensor."""
        by_rank = (self._full_bytes,) * len(self._shard_bytes)
        return Cost(payloads=1, bytes_by_rank=by_rank, between=between)


def of_end(setup: Setup, of_hooks: Cost, is_backward: bool) -> Cost:
    """Of the end of a forward or a backward, which its hooks share: one status header, and one
    transfer if records wait for it; one comparison of replicas, if there are such records. For a
    store: a second header after a forward, and no transfer; what describes the batch between hosts
    is not predicted.

    Args:
        of_hooks: What the hooks cost, with the bytes of the records.
    """
    compared = setup.between.exchange(_HASH_BYTES).without_bytes
    cost = Cost(between=compared) if of_hooks.is_compared else Cost()
    if setup.keeps_parts:
        return cost + setup.header if is_backward else cost + setup.header + setup.header
    cost += setup.header
    if not of_hooks.held:
        return cost
    between = setup.between.to_first(GRID, of_hooks.held).without_bytes
    return cost + Cost(payloads=1, between=between)
