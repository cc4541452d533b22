"""What calls of hooks add to a run: collectives, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flex_model.distributed import costs
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.placement import Shard
from flex_model.hooks.registration import Registration
from flex_model.inspection import text
from flex_model.inspection.on_shapes import Seen

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore


@dataclass(frozen=True)
class Cost:
    """What the calls of one hook add to a run whose layouts are known.

    Attributes:
        headers: Exchanges of 64 bytes, each with all ranks.
        payloads: Collectives that move tensors.
        bytes_by_rank: What each rank of the grid sends of its own and receives of others'; a
            transport may send more.
    """

    headers: int = 0
    payloads: int = 0
    bytes_by_rank: tuple[int, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(self.bytes_by_rank, other.bytes_by_rank)
        added = tuple(a + b for a, b in pairs) or self.bytes_by_rank or other.bytes_by_rank
        return Cost(self.headers + other.headers, self.payloads + other.payloads, added)

    def __str__(self) -> str:
        most = max(self.bytes_by_rank, default=0)
        return f"{self.headers} + {self.payloads}, {text.size(most)}"


class CallCosts:
    """What a call of one hook costs, as ``HookExecutor``, ``gather`` and ``Records`` do it."""

    def __init__(
        self,
        core: HookCore,
        registration: Registration,
        spec: TensorSpec,
        ranks: Sequence[Seen],
    ) -> None:
        self._registration = registration
        self._spec = spec
        self._mesh = core.mesh
        self._is_local = core.communicator.is_local
        self._on_all = core.executor.edits_on_all
        self._records_on_all = core.records.on_all_ranks
        self._keeps_parts = core.records.keeps_parts
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
        if self._is_local:
            return Cost(), Cost()
        if self._registration.kind == "tensor":
            return Cost(), self._mean_over_dp() + self._look_or_edit()
        if self._registration.is_backward:
            return Cost(), self._look_or_edit()
        if not self._registration.edits or not needs_gradient:
            return self._look_or_edit(), Cost()
        return self._look_or_edit(), self._backward_of_edit()

    def _look_or_edit(self) -> Cost:
        if self._keeps_parts and not self._registration.edits:
            return self._sums()
        if not self._registration.edits:
            if self._records_on_all:
                return self._sums() + self._all_gather()
            return self._sums() + replace(self._to_first(), payloads=0)
        if not self._registration.hook_function.record:
            return self._edit()
        if self._keeps_parts:  # summed again, for the record
            return self._edit() + self._sums()
        cost = self._edit()
        return cost + self._all_gather() if self._records_on_all and not self._on_all else cost

    def _edit(self) -> Cost:
        if self._on_all:
            return Cost(headers=1) + self._sums() + self._all_gather()
        # Of tensors edited together, rank 0 sends the result once.
        cost = Cost(headers=1 + self._registration.calls_function)
        return cost + self._sums() + self._to_first() + self._from_first()

    def _backward_of_edit(self) -> Cost:
        """Of one whose layout is known, and of whose gradient replicas hold the whole."""
        spec, cost = self._spec, Cost()
        if self._on_all:
            if spec.is_shared_over_dp:
                cost += Cost(headers=1) + self._all_reduce()
            return cost + Cost(headers=1) + self._all_gather() if spec.axes else cost
        if spec.is_shared_over_dp:
            cost += self._all_reduce()
        return cost + Cost(headers=2) + self._to_first() + self._from_first()

    def _mean_over_dp(self) -> Cost:
        if self._mesh.dp_size == 1 or self._is_mean:
            return Cost()
        return Cost(headers=1) + self._all_reduce()

    def _sums(self) -> Cost:
        return sum((self._all_reduce() for _ in self._spec.layout.partial_axes), Cost())

    def _all_reduce(self) -> Cost:
        return Cost(payloads=1, bytes_by_rank=tuple(2 * held for held in self._shard_bytes))

    def _all_gather(self) -> Cost:
        return self._alike() if self._spec.axes else Cost()

    def _to_first(self) -> Cost:
        if not self._spec.axes:
            return Cost()
        holders = self._mesh.ranks_along(self._spec.axes, place=0)
        ranks = range(len(self._shard_bytes))
        moved = [costs.of_gather_to_first(self._spec.plan, holders, rank) for rank in ranks]
        return Cost(payloads=1, bytes_by_rank=tuple(moved))

    def _from_first(self) -> Cost:
        if self._spec.covers_grid and self._spec.axes:
            return self._to_first()
        return self._alike()

    def _alike(self) -> Cost:
        """Of a transfer in which each rank moves the full tensor."""
        return Cost(payloads=1, bytes_by_rank=(self._full_bytes,) * len(self._shard_bytes))


def of_end(core: HookCore, waits: bool, is_backward: bool) -> Cost:
    """Of the end of a forward or a backward, which its hooks share: one status header, and one
    message if records wait for it. For a store: a second header after a forward, and no message.
    """
    if core.records.keeps_parts:
        return Cost(headers=1 if is_backward else 2)
    return Cost(headers=1, payloads=int(waits and not core.records.on_all_ranks))
