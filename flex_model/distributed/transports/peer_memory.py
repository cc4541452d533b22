"""Transfers through memory of each other that all ranks of a host can reach: GPUs that are peers.

Every rank has a buffer of two slots. It copies its shard into one; all meet; then each rank reads
every peer's slot and writes the final layout, in one kernel. The next transfer takes the other
slot: when a rank comes to a meeting, it has done the reading of the transfer before, so a slot is
free again two transfers later and no second meeting is needed.

What the memory is, and how ranks meet, is ``peer_buffers``' affair.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import buffer_layout
from flex_model.distributed.transports.transport import Gathered, end_to_end

_MIN_SLOT_BYTES = 1 << 20
_STEP_BYTES = 64 << 20  # of large slots
_ROUND_BYTES = 256 << 20  # of what one rank offers at once


class PeerBuffers(Protocol):
    """Memory of equal size on every rank, which all can reach, and meetings of the ranks."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """This rank's buffer (uint8) and every rank's address of its own. Collective; what was
        allocated before is freed.
        """
        ...

    def barrier(self) -> None:
        """Order this rank's current stream after what all ranks' streams did before. Collective."""
        ...

    def finish(self) -> None:
        """Wait on the host until the current stream is done, with a deadline; raise if a rank did
        not come to a meeting. Collective.
        """
        ...

    def close(self) -> None:
        """Free the buffer. Local."""
        ...


class PeerMemory:
    """What ``Transport`` says, by reading and writing the memory of peers; see ``ByDevice``.

    All methods but ``close`` are collective over the group.

    Args:
        group: The ranks, on one host.
        peers: The memory that they can all reach.
    """

    name = "peer_memory"

    def __init__(self, group: PrivateGroup, peers: PeerBuffers) -> None:
        self.group = group
        self._peers = peers
        self._slot_bytes = 0
        self._number = 0  # of transfers so far
        self._own: Tensor | None = None
        self._addresses: list[int] = []

    def close(self) -> None:
        """Free the buffer. Local."""
        self._own = None
        self._slot_bytes = 0
        self._peers.close()

    def _take_slot(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """This rank's bytes of the next slot, and every rank's address of it. ``num_bytes`` is the
        same on all ranks.
        """
        if num_bytes > self._slot_bytes:
            self._own = None
            self._slot_bytes = slot_bytes_for(num_bytes)
            self._own, self._addresses = self._peers.allocate(2 * self._slot_bytes)
        assert self._own is not None
        start = self._number % 2 * self._slot_bytes
        self._number += 1
        own = self._own[start : start + self._slot_bytes]
        return own, [address + start for address in self._addresses]

    def _offer(self, tensors: list[Gathered]) -> list[list[int]]:
        """Put shards where peers can read them; by tensor, then by holder, the addresses."""
        packing = buffer_layout.Packing.of([(t.plan, t.ranks) for t in tensors], self.group.size)
        own, addresses = self._take_slot(max(packing.totals))
        for i, offset in packing.of_rank(self.group.rank):
            shard = tensors[i].shard.detach()
            _place(own, offset, shard).copy_(shard)
        self._peers.barrier()
        return [
            [addresses[holder] + offset for holder, offset in zip(holders, placed)]
            for holders, placed in zip(packing.holders, packing.offsets)
        ]

    def _pull(self, full: Tensor, addresses: list[int], plan: GatherPlan) -> Tensor:
        # Each rank begins with the rank after it, so that they do not all ask the same one.
        first = (self.group.rank + 1) % len(addresses)
        torch.ops.flex_model.pull_(full, addresses, plan.code, first)
        return full

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        """``num_copies`` full tensors, on the device of ``shard``; each rank's own number."""
        fulls: list[Tensor] = []
        if plan.full_bytes == 0:
            return [shard.detach().new_empty(plan.full_sizes) for _ in range(num_copies)]
        (addresses,) = self._offer([Gathered(plan, list(range(self.group.size)), shard)])
        if num_copies:
            full = self._pull(shard.detach().new_empty(plan.full_sizes), addresses, plan)
            fulls = [full, *(full.clone() for _ in range(num_copies - 1))]
        self._peers.finish()
        return fulls

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """Many tensors share a meeting; who is not rank 0 reads nothing."""
        fulls: list[Tensor] = []
        for part in buffer_layout.rounds([tensor.plan for tensor in tensors], _ROUND_BYTES):
            some = [tensors[i] for i in part]
            first = self.group.rank == 0
            pulled = [t.shard.detach().new_empty(t.plan.full_sizes) for t in some if first]
            if any(tensor.plan.full_bytes for tensor in some):
                addresses = self._offer(some)
                for tensor, full, where in zip(some, pulled, addresses):
                    self._pull(full, where, tensor.plan)
                self._peers.finish()
            for tensor, full in zip(some, pulled):
                fulls += tensor.copies(memory.copy(full))
        return fulls if self.group.rank == 0 else None

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        """This rank's shard of rank 0's ``full``, with the shape, dtype and device of ``like``.

        Rank 0 writes each rank's shard into that rank's slot: only what a rank needs travels.
        """
        shard = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if plan.full_bytes == 0:
            return shard
        own, addresses = self._take_slot(buffer_layout.aligned(max(plan.shard_bytes)))
        if self.group.rank == 0:
            assert full is not None
            full = full.detach().contiguous()
            others = [0, *addresses[1:]]
            first = 1 % self.group.size
            torch.ops.flex_model.push(full, others, plan.code, first)
            shard = torch.ops.flex_model.split(full, plan.code, 0, list(like.shape))
        self._peers.barrier()
        if self.group.rank != 0:
            shard.copy_(_place(own, 0, like))
        self._peers.finish()
        return shard

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; ``like`` has its shape, dtype and device."""
        if like.nbytes == 0:
            return like if tensor is None else tensor
        own, addresses = self._take_slot(buffer_layout.aligned(like.nbytes))
        if self.group.rank == 0:
            assert tensor is not None
            _place(own, 0, tensor).copy_(tensor.detach())
        self._peers.barrier()
        result = tensor
        if result is None or self.group.rank != 0:
            result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            whole = end_to_end([like.nbytes])
            torch.ops.flex_model.pull_(result, addresses[:1], whole.code, 0)
        self._peers.finish()
        return result


def slot_bytes_for(num_bytes: int) -> int:
    """The size of a slot that is to hold ``num_bytes``: with room to grow, but not much of a large
    one.
    """
    if num_bytes > _STEP_BYTES:
        return -(-num_bytes // _STEP_BYTES) * _STEP_BYTES
    return max(_MIN_SLOT_BYTES, 1 << (num_bytes - 1).bit_length())


def _place(slot: Tensor, offset: int, like: Tensor) -> Tensor:
    """The part of a slot where a tensor like this one lies."""
    return slot[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
