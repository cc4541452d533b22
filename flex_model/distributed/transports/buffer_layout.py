"""The offsets of shards in the buffers of a collective: pure functions of plans, equal on all
ranks.

Offsets and sizes are in bytes. A plan's shards are numbered by rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model._C import GatherPlan

ALIGNMENT = 16  # of shards in a buffer: the widest load and store of a GPU


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def even_width(plan: GatherPlan) -> int:
    """The bytes that each rank passes to an all-gather, which needs equal sizes.

    If the shards have equal sizes, theirs: they need no copy into a wider buffer. Otherwise the
    largest, rounded up so that every rank's part is aligned.
    """
    widest = max(plan.shard_bytes)
    return widest if min(plan.shard_bytes) == widest else aligned(widest)


def is_concatenation(plan: GatherPlan) -> bool:
    """Whether the concatenation of equal shards is the full tensor."""
    num_ranks = len(plan.shard_bytes)
    width = plan.full_bytes // num_ranks
    boxes = [number for rank in range(num_ranks) for number in (rank, rank * width, 0, width, 0)]
    return (
        width > 0
        and plan.shard_bytes == [width] * num_ranks
        and plan.code[2 + num_ranks :] == [num_ranks, *boxes]
    )


def rounds(plans: Sequence[GatherPlan], max_bytes: int) -> list[range]:
    """Split plans into rounds whose full tensors, with gaps, fit ``max_bytes``; a larger one gets a
    round of its own.
    """
    parts, first, total = [], 0, 0
    for i, plan in enumerate(plans):
        num_bytes = sum(map(aligned, plan.shard_bytes))
        if i > first and total + num_bytes > max_bytes:
            parts.append(range(first, i))
            first, total = i, 0
        total += num_bytes
    return [*parts, range(first, len(plans))] if plans else []


@dataclass(frozen=True)
class Packing:
    """The layout of several tensors' shards in one buffer per rank, and of the buffers'
    concatenation.

    Attributes:
        offsets: ``offsets[i][j]``: where tensor i's j-th shard begins in its holder's buffer.
        holders: ``holders[i][j]``: the rank that has it.
        totals: ``totals[r]``: the size of rank r's buffer.
        starts: ``starts[r]``: where rank r's buffer begins among all.
    """

    offsets: list[list[int]]
    holders: list[list[int]]
    totals: list[int]
    starts: list[int]

    @staticmethod
    def of(tensors: Sequence[tuple[GatherPlan, list[int]]], num_ranks: int) -> Packing:
        """Lay out ``tensors``: plans, and the ranks that hold the shards of each."""
        totals = [0] * num_ranks
        offsets = []
        for plan, holders in tensors:
            placed = []
            for holder, num_bytes in zip(holders, plan.shard_bytes):
                placed.append(totals[holder])
                totals[holder] += aligned(num_bytes)
            offsets.append(placed)
        starts = list(itertools.accumulate(totals, initial=0))[:-1]
        return Packing(offsets, [holders for _, holders in tensors], totals, starts)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """The tensors of which a rank holds a shard, and its offset in the rank's buffer."""
        return [
            (i, placed[holders.index(rank)])
            for i, (placed, holders) in enumerate(zip(self.offsets, self.holders))
            if rank in holders
        ]

    def packed(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        """Pack a rank's shards into its buffer; those of tensors of which it has none don't count.
        Local.
        """
        own = self.of_rank(rank)
        if not own:
            return torch.empty(0, dtype=torch.uint8, device=shards[0].device)
        held, offsets = [shards[i].detach() for i, _ in own], [offset for _, offset in own]
        return torch.ops.flex_model.pack_tensors(held, offsets, self.totals[rank])

    def among_all(self) -> list[list[int]]:
        """The ``offsets`` in the concatenation of all buffers."""
        return [
            [self.starts[holder] + offset for holder, offset in zip(holders, placed)]
            for holders, placed in zip(self.holders, self.offsets)
        ]


def assemble_tensors(
    gathered: Tensor, packing: Packing, plans: Sequence[GatherPlan], like: list[Tensor]
) -> list[Tensor]:
    """Assemble full tensors from all ranks' buffers; ``like[i]`` has the i-th dtype. Local."""
    return torch.ops.flex_model.assemble_tensors(
        gathered,
        [offset for placed in packing.among_all() for offset in placed],
        [number for plan in plans for code in [plan.code] for number in (len(code), *code)],
        [size for plan in plans for size in (len(plan.full_sizes), *plan.full_sizes)],
        like,
    )


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, contiguous and 1-D, on its device; a view where possible."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:  # which is contiguous whatever its strides, but has no byte view
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # A tensor of one element is contiguous whatever its strides, which `reshape` keeps.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are alike, in dtype, shape and bits."""
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and torch.equal(as_bytes(one), as_bytes(other))
