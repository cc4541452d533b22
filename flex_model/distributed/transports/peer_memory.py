"""Transfers by reading and writing the memory of peer GPUs on one host.

Every rank has a buffer of two slots. A rank copies its shard into one slot; then one kernel waits
in a barrier, reads every peer's slot and writes the final layout. The next transfer uses the other
slot: a rank that reaches a barrier has finished the reads of the transfer before, so a slot is free
again two transfers later, without a second barrier. So a transfer of one tensor takes at most two
launches, all in the order of the current stream: the host waits for nothing.

In an all-gather a rank's own shard is read from its slot, too: the others need it there, and it is
aligned as theirs are, so that one launch copies all of them.

``peer_buffers`` implements the memory and the barriers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import buffer_layout
from flex_model.distributed.transports.peer_buffers import CudaIpc
from flex_model.distributed.transports.transport import Gathered, TensorTransport, end_to_end

_MIN_SLOT_BYTES = 1 << 20
_STEP_BYTES = 64 << 20  # of the sizes of large slots
_ROUND_BYTES = 256 << 20  # of tensors gathered at once


class PeerMemory(TensorTransport):
    """Implements ``GpuTransport`` by reading and writing the memory of peers; see ``ByDevice``.

    The transfers are collective over the group.

    Args:
        group: The ranks, on one host.
        peers: The memory that all of them can access.
    """

    name = "peer_memory"

    def __init__(self, group: PrivateGroup, peers: CudaIpc) -> None:
        self.group = group
        self._peers = peers
        self._slot_bytes = 0
        self._number = 0  # of transfers so far
        self._own: Tensor | None = None
        self._addresses: list[int] = []

    def check(self) -> None:
        """See ``GpuTransport``."""
        self._peers.check()

    def finish(self) -> None:
        """See ``GpuTransport``."""
        self._peers.finish()

    def abort(self) -> None:
        """See ``GpuTransport``."""
        self._peers.abort()

    def close(self) -> None:
        """Free the buffer."""
        self._own = None
        self._slot_bytes = 0
        self._peers.close()

    def _take_slot(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """Return this rank's next slot, and the address of every rank's. ``num_bytes`` is the same
        on all ranks.
        """
        if num_bytes > self._slot_bytes:
            self._peers.finish()  # else what is freed would still be read
            self._own, self._slot_bytes = None, 0
            slot_bytes = slot_bytes_for(num_bytes)
            self._own, self._addresses = self._peers.allocate(2 * slot_bytes)
            self._slot_bytes = slot_bytes
        assert self._own is not None
        self._peers.begin_transfer()
        start = self._number % 2 * self._slot_bytes
        self._number += 1
        own = self._own[start : start + self._slot_bytes]
        return own, [address + start for address in self._addresses]

    def _publish(self, tensors: list[Gathered], for_peers: bool = True) -> list[list[int]]:
        """Copy shards to where peers can read them after a barrier; return addresses by tensor and
        holder. Unless it is ``for_peers``, this rank copies nothing: no other one reads.
        """
        packing = buffer_layout.Packing.of([(t.plan, t.ranks) for t in tensors], self.group.size)
        own, addresses = self._take_slot(max(packing.totals))
        for i, offset in packing.of_rank(self.group.rank) if for_peers else ():
            shard = tensors[i].shard.detach()
            _place(own, offset, shard).copy_(shard)
        return [
            [addresses[holder] + offset for holder, offset in zip(holders, placed)]
            for holders, placed in zip(packing.holders, packing.offsets)
        ]

    def _pull(
        self, full: Tensor, addresses: list[int], plan: GatherPlan, barrier: list[int]
    ) -> None:
        # Each rank begins with the rank after it, so that they don't all read from the same one.
        first = (self.group.rank + 1) % len(addresses)
        torch.ops.flex_model.pull_(full, addresses, plan.code, first, barrier)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        """Gather as ``Transport.all_gather`` does."""
        if plan.full_bytes == 0:
            return [shard.detach().new_empty(plan.full_sizes) for _ in range(num_copies)]
        fulls: list[Tensor] = []
        (addresses,) = self._publish([Gathered(plan, list(range(self.group.size)), shard)])
        if num_copies:
            full = shard.detach().new_empty(plan.full_sizes)
            self._pull(full, addresses, plan, self._peers.begin_barrier())
            fulls = [full, *(full.clone() for _ in range(num_copies - 1))]
        else:
            self._peers.barrier()
        self._peers.end_transfer()
        return fulls

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """Gather as ``Transport.gather_to_first`` does, with one barrier for many tensors; only
        rank 0 reads.
        """
        fulls: list[Tensor] = []
        for part in buffer_layout.rounds([tensor.plan for tensor in tensors], _ROUND_BYTES):
            some = [tensors[i] for i in part]
            if self.group.rank == 0:
                for tensor, full in zip(some, self._pull_all(some)):
                    fulls += tensor.copies(full)
            elif any(tensor.plan.full_bytes for tensor in some):
                self._publish(some)
                self._peers.barrier()
                self._peers.end_transfer()
        return fulls if self.group.rank == 0 else None

    def _pull_all(self, tensors: list[Gathered]) -> list[Tensor]:
        """Pull one round of tensors on rank 0; its own shards directly from their memory."""
        fulls = [tensor.shard.detach().new_empty(tensor.plan.full_sizes) for tensor in tensors]
        if not any(tensor.plan.full_bytes for tensor in tensors):
            return fulls
        addresses = self._publish(tensors, for_peers=False)
        barrier = self._peers.begin_barrier()
        for tensor, full, where in zip(tensors, fulls, addresses):
            shard = tensor.shard.detach().contiguous()
            own = [shard.data_ptr() if holder == 0 else 0 for holder in tensor.ranks]
            self._pull(full, [a or b for a, b in zip(own, where)], tensor.plan, barrier)
            barrier = []  # what comes later on the stream has waited, too
        self._peers.end_transfer()
        return fulls

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        """This rank's shard of rank 0's ``full``, with the shape, dtype and device of ``like``.

        Rank 0 writes each rank's shard into that rank's slot, and its own into the result: only the
        needed bytes are sent.
        """
        shard = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if plan.full_bytes == 0:
            return shard
        _, addresses = self._take_slot(buffer_layout.aligned(max(plan.shard_bytes)))
        if self.group.rank == 0:
            assert full is not None
            targets = [shard.data_ptr(), *addresses[1:]]
            first = 1 % self.group.size
            torch.ops.flex_model.push(full.detach().contiguous(), targets, plan.code, first)
            self._peers.barrier()
        else:
            self._pull_whole(shard, addresses[self.group.rank])
        self._peers.end_transfer()
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
        else:
            result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self._pull_whole(result, addresses[0])
        self._peers.end_transfer()
        return result

    def _pull_whole(self, tensor: Tensor, address: int) -> None:
        """Fill a tensor with what is at the address after a barrier."""
        self._pull(tensor, [address], end_to_end([tensor.nbytes]), self._peers.begin_barrier())


def slot_bytes_for(num_bytes: int) -> int:
    """The size of a slot for ``num_bytes``: rounded up, so that it can be reused for a larger
    tensor.
    """
    if num_bytes > _STEP_BYTES:
        return -(-num_bytes // _STEP_BYTES) * _STEP_BYTES
    return max(_MIN_SLOT_BYTES, 1 << (num_bytes - 1).bit_length())


def _place(slot: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view of a slot with the shape and dtype of a tensor."""
    return slot[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
