"""Transfers by reading and writing the memory of peer GPUs on one host.

Every rank has a buffer of two slots. A rank copies its shard into one slot; then one kernel waits
in a barrier, reads every peer's slot and writes the final layout. The next transfer uses the other
slot: a rank that reaches a barrier has finished the reads of the transfer before, so a slot is free
again two transfers later, without a second barrier. So a transfer of one tensor takes at most two
launches, all in the order of the current stream: the host waits for nothing.

In an all-gather a rank's own shard is read from its slot, too: the others need it there, and it is
aligned as theirs are, so that one launch copies all of them.

Every process opens the others' memory by CUDA IPC, of GPUs that are peers or the same one. Ranks
with different GPUs have barriers on their streams, by signal pads in the first page of each other's
buffers, which is zero before any rank uses it. Ranks that share a GPU are time-sliced, so a kernel
that waits for another process may block that process: their barriers are on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.bounded_store import BoundedStore
from flex_model.distributed.polling import sleeps
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import buffer_layout
from flex_model.distributed.transports.transport import (
    Gathered,
    TensorTransport,
    TransferError,
    Transport,
    UnavailableError,
    Wait,
    end_to_end,
    on_every_rank,
)

MAX_RANKS = 128  # kMaxPeers of csrc/cuda/peers.h
_FLAG_BYTES = 4096  # of the signal pad at the head of a buffer: a uint32 per rank
_IPC_HANDLE_BYTES = 64
_CLOSE_S = 2.0  # how long to wait for kernels, which give up at once but may come after others


def _exchange(on_cpu: Transport, numbers: list[int]) -> list[int]:
    """Gather equally many numbers of every rank, in one list. Collective."""
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return on_cpu.exchange(own).reshape(-1).tolist()


def number_of(device: torch.device) -> int:
    """A number that identifies a GPU, of 60 bits."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(str(properties.uuid).replace("-", "")[:15], 16)


class _Recorded:
    """An event, as a work of torch.distributed to wait for."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.is_completed, self.wait = event.query, event.synchronize


class CudaIpc:
    """Buffers of equal size on every rank, which all ranks can access, and barriers of the ranks.

    Memory must not be freed while another process has it open: the buffer outlives this object
    until all have closed it.

    Args:
        on_cpu: The CPU transport of the same ranks.
        wait: Waits for works with a deadline, then raises what they raise.
        device: This rank's GPU.

    Raises:
        UnavailableError: the ranks can't have such buffers; on every rank, also by ``allocate``.
    """

    def __init__(self, on_cpu: Transport, wait: Wait, device: torch.device) -> None:
        group = self.group = on_cpu.group
        if group.size > MAX_RANKS:
            raise UnavailableError(f"at most {MAX_RANKS} ranks can share memory, got {group.size}")
        self._on_cpu = on_cpu
        self._wait = wait
        self._device = device
        # Shorter than the host's waits, because a kernel finds which rank is missing.
        self._timeout_s = 0.9 * group.timeout_s
        self._number = 0  # of barriers so far
        self._signal_pads: list[int] = []  # addresses of each rank's
        self._buffer: Tensor | None = None
        self._last = torch.cuda.Event()  # after the last transfer
        self._is_unfinished = False  # the host has not waited for it
        self._stream: torch.cuda.Stream | None = None  # of the last transfer
        self._state = on_every_rank(
            on_cpu, lambda: torch.zeros(2, dtype=torch.int32, pin_memory=True, device="cpu")
        )
        # WaitState of csrc/cuda/peers.h: 1 + a rank that kernels missed, and whether they give up.
        self._words = (ctypes.c_int32 * 2).from_address(self._state.data_ptr())
        self.has_device_barrier = len({*_exchange(on_cpu, [number_of(device)])}) == group.size
        self._opened: list[int] = []
        # Keys outlive the group, so none is used twice; ranks count equally.
        store, key = group.bounded_store, f"cuda_ipc/{group.rank}"
        number = on_every_rank(on_cpu, lambda: store.next_number(key))
        self._place = f"cuda_ipc/{number}/closed"
        _kept[:] = [kept for kept in _kept if not kept.is_closed_by_all()]

    def begin_barrier(self) -> list[int]:
        """Begin a barrier that the next ``pull_`` completes: return its argument ``barrier``, empty
        where the current stream waits already. Collective.
        """
        self._number += 1
        if self.has_device_barrier:
            timeout_ms = int(1000 * self._timeout_s)
            state = self._state.data_ptr()
            return [self.group.rank, self._number, timeout_ms, state, *self._signal_pads]
        self.end_transfer()
        self.finish()
        _exchange(self._on_cpu, [0])
        return []

    def barrier(self) -> None:
        """Make the current stream wait for the work queued before on all ranks. Collective."""
        waits_for = self.begin_barrier()
        if waits_for:
            torch.ops.flex_model.peer_barrier(self._buffer, waits_for)

    def begin_transfer(self) -> None:
        """Make the current stream wait for the transfer before, which may be on another stream.
        Local.
        """
        self._stream = torch.cuda.current_stream(self._device)
        self._last.wait(self._stream)

    def end_transfer(self) -> None:
        """Note that a transfer ends with the work queued so far. Local."""
        self._last.record(self._stream)
        self._is_unfinished = True

    def check(self) -> None:
        """See ``GpuTransport``, as for what follows."""
        missing = self._words[0]
        if missing:
            raise TransferError(
                f"the GPU of rank {self.group.rank} waited {self._timeout_s:g} s; missing: "
                f"{self.group.name_of(missing - 1)}"
            )

    def finish(self) -> None:
        if self._is_unfinished:
            self._wait([_Recorded(self._last)])
            self._is_unfinished = False
        self.check()

    def abort(self) -> None:
        self._words[1] = 1

    def close(self) -> None:
        """Free the buffer; where its kernels still run after a while, at a later close."""
        self.abort()
        if self._stream is not None:
            self._last.record(self._stream)  # an interrupted transfer may not have
        until = time.monotonic() + _CLOSE_S
        for _ in sleeps(self._is_idle):
            if time.monotonic() > until:
                break
        _in_use.append(self)
        for buffers in [buffers for buffers in _in_use if buffers._is_idle()]:
            _in_use.remove(buffers)
            buffers._free()

    def _is_idle(self) -> bool:
        """Whether no kernel of this process uses the buffers; False if CUDA has failed."""
        try:
            return self._last.query()
        except RuntimeError:
            return False

    def _reset(self) -> None:
        """Reset the count of barriers: new signal pads are zero."""
        self._number = 0
        self._signal_pads = []
        self._buffer = None

    def allocate(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """Return this rank's buffer (uint8), and the address here of every rank's buffer. Frees the
        buffers allocated before. Collective.

        UnavailableError, on every rank, if one can't have the memory.
        """
        self._close_peers()
        _exchange(self._on_cpu, [0])  # all have closed the buffers that are freed below
        self._reset()
        try:
            handle = on_every_rank(self._on_cpu, lambda: self._allocate(_FLAG_BYTES + num_bytes))
            handles = _exchange(self._on_cpu, handle)
            addresses = on_every_rank(self._on_cpu, lambda: self._open(handles))
        except UnavailableError:
            self._close_peers()
            _exchange(self._on_cpu, [0])  # as above
            self._reset()
            raise
        assert self._buffer is not None
        self._signal_pads = addresses
        return self._buffer[_FLAG_BYTES:], [address + _FLAG_BYTES for address in addresses]

    def _allocate(self, num_bytes: int) -> list[int]:
        """Allocate this rank's buffer; return its handle."""
        if torch.cuda.mem_get_info(self._device)[0] < 2 * num_bytes:
            torch.cuda.empty_cache()  # torch's allocator keeps what others can't use then
        like = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._buffer = torch.ops.flex_model.ipc_buffer(like, num_bytes)
        return torch.ops.flex_model.ipc_handle(self._buffer).tolist()

    def _open(self, handles: list[int]) -> list[int]:
        """Open the buffers of all ranks by their handles; return their addresses here."""
        assert self._buffer is not None
        addresses = [self._buffer.data_ptr()] * self.group.size
        for rank in range(self.group.size):
            if rank != self.group.rank:
                handle = handles[rank * _IPC_HANDLE_BYTES : (rank + 1) * _IPC_HANDLE_BYTES]
                addresses[rank] = torch.ops.flex_model.ipc_open(self._buffer, handle)
                self._opened.append(addresses[rank])
        return addresses

    def _free(self) -> None:
        self._close_peers()
        if self._buffer is not None:
            with contextlib.suppress(RuntimeError):  # the store may have died with its host
                self.group.bounded_store.set(f"{self._place}/{self.group.rank}", "")
            kept = _Kept(self._buffer, self.group.bounded_store, self._place, self.group.size)
            if not kept.is_closed_by_all():
                _kept.append(kept)
        self._reset()

    def _close_peers(self) -> None:
        like = torch.empty(0, dtype=torch.uint8, device=self._device)
        for address in self._opened:
            with contextlib.suppress(RuntimeError):  # its owner may be gone
                torch.ops.flex_model.ipc_close(like, address)
        self._opened = []


@dataclass(frozen=True)
class _Kept:
    """A buffer that other processes may still have open."""

    buffer: Tensor
    store: BoundedStore
    place: str
    num_ranks: int

    def is_closed_by_all(self) -> bool:
        keys = [f"{self.place}/{rank}" for rank in range(self.num_ranks)]
        try:
            return self.store.call(lambda store: store.check(keys))
        except RuntimeError:
            return not self.store.is_silent  # lost: the ranks are gone, with their store


_kept: list[_Kept] = []
_in_use: list[CudaIpc] = []  # closed, while kernels of this process used them


# ---- The transfers -------------------------------------------------------------------------------

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
        self.check, self.finish, self.abort = peers.check, peers.finish, peers.abort
        self._slot_bytes = 0
        self._number = 0  # of transfers so far
        self._own: Tensor | None = None
        self._addresses: list[int] = []

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
