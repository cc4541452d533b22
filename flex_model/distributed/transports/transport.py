"""What every transport does, and what they share.

A transport moves bytes along GatherPlans among the ranks of one private group, and gives the same
bits as any other. That all ranks make the same calls, with the same plans, was agreed on before, by
the channel; so was what to do when a wait fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import buffer_layout
from flex_model.distributed.transports.host_copies import Ready

# Waits for works of torch.distributed with the channel's deadline, then raises what they raise.
Wait = Callable[[list], None]

_SUMMED_BYTES = 8 << 20  # of each rank at a time


@dataclass(eq=False)
class Gathered:
    """One tensor of several that are gathered together.

    Attributes:
        plan: Of its shards.
        ranks: Of the group, that hold them, in the plan's order.
        shard: This rank's; only its dtype counts on ranks that hold none.
        num_copies: How many full tensors of it are wanted.
        site: The hook that it is for, in the count of costs.
        ready: Of a shard on a GPU: when its values are there; None: when the current stream comes
            to the transfer.
    """

    plan: GatherPlan
    ranks: list[int]
    shard: Tensor
    num_copies: int = 1
    site: int = 0
    ready: Ready | None = None

    def copies(self, full: Tensor) -> list[Tensor]:
        """As many as are wanted of a full tensor, itself the first."""
        return copies(full, self.num_copies)


class Transport(Protocol):
    """All methods are collective over the group's ranks, whose first is rank 0.

    Attributes:
        name: As users name it in ``FLEX_MODEL_TRANSPORT``.
        group: Its ranks.
    """

    name: str
    group: PrivateGroup

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, all of one length."""
        ...

    def exchange(self, tensor: Tensor) -> Tensor:
        """``(num_ranks, *shape)`` of a CPU tensor that has one shape and dtype on all ranks."""
        ...

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        """The full tensor, ``num_copies`` times over, in memory of this rank's own and on the
        device of ``shard``; the number may differ by rank, and may be 0.

        The last ``num_read`` of them, or fewer, are expected to be read only: they may have memory
        that becomes this rank's own when something is written to it, which then takes longer.
        """
        ...

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """The full tensors on rank 0's CPU, copies one after the other; None elsewhere. No payload
        goes to other ranks.
        """
        ...

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        """Each rank's shard of rank 0's ``full``; shape, dtype and device are those of ``like``,
        this rank's own shard.
        """
        ...

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; ``like`` has its shape, dtype and device. On rank 0 it is
        ``tensor`` itself.
        """
        ...


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a contiguous 1-D uint8 CPU tensor; shares memory where it can."""
    return buffer_layout.as_bytes(tensor.detach().cpu())


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor of the same values; shares memory where it can."""
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


@lru_cache(maxsize=256)
def stacking(num_ranks: int, num_elements: int, element_bytes: int) -> GatherPlan:
    """Tensors of one size, one above the other in rank order: ``(num_ranks, num_elements)``."""
    sizes = [1, num_elements]
    pieces = [(rank, [rank, 0], [0, 0], sizes) for rank in range(num_ranks)]
    return GatherPlan([num_ranks, num_elements], [sizes] * num_ranks, pieces, element_bytes)


def copies(full: Tensor, number: int) -> list[Tensor]:
    """A full CPU tensor and copies of it, ``number`` (at least 1) in all."""
    return [full, *(memory.copy(full) for _ in range(number - 1))]


def exchange_bytes(transport: Transport, data: bytes) -> list[bytes]:
    """As ``Transport.exchange_bytes``, by ``exchange``."""
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [bytes(other.tolist()) for other in transport.exchange(row)]


def pack_shards(
    tensors: list[Gathered], rank: int, num_ranks: int
) -> tuple[Tensor, list[int], list[list[int]]]:
    """Each rank's shards one after the other: the bytes of ``rank``'s, the number of every rank's,
    and where each tensor's shards begin in their holders'. Local.
    """
    sizes = [0] * num_ranks
    starts, mine = [], []
    for tensor in tensors:
        starts.append([sizes[holder] for holder in tensor.ranks])
        for i, holder in enumerate(tensor.ranks):
            sizes[holder] += tensor.plan.shard_bytes[i]
            if holder == rank:
                mine.append(as_bytes(tensor.shard))
    data = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8)
    return data, sizes, starts


def end_to_end(sizes: list[int]) -> GatherPlan:
    """Bytes of several ranks, one after the other."""
    pieces = [(r, [sum(sizes[:r])], [0], [size]) for r, size in enumerate(sizes)]
    return GatherPlan([sum(sizes)], [[size] for size in sizes], pieces, 1)


def all_reduce_sum(transport: Transport, tensor: Tensor) -> Tensor:
    """The sum over ranks, on every rank. Added in the order of ranks, in the tensor's own dtype:
    the same bits on all ranks, and by all transports.
    """
    shape, flat = tensor.shape, tensor.detach().contiguous().reshape(-1)
    total = torch.empty_like(flat)
    step = max(1, _SUMMED_BYTES // flat.element_size())
    for at in range(0, flat.numel(), step):
        part = flat[at : at + step]
        plan = stacking(transport.group.size, part.numel(), part.element_size())
        (rows,) = transport.all_gather(part.unsqueeze(0), plan, num_read=1)
        target = total[at : at + step]
        target.copy_(rows[0])
        for row in rows[1:]:
            target += row
    return total.reshape(shape)
