"""GPU memory that all ranks of a host can access, and their barriers, for ``PeerMemory``.

The memory is torch's symmetric memory, or CUDA IPC where that does not work. Ranks with different
GPUs have barriers on their streams, by signal pads in the first page of each other's buffers, which
is zero before any rank uses it. Ranks that share a GPU are time-sliced, so a kernel that waits for
another process may block that process: their barriers are on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flex_model.distributed.bounded_store import BoundedStore
from flex_model.distributed.polling import sleeps
from flex_model.distributed.transports.transport import (
    TransferError,
    Transport,
    UnavailableError,
    Wait,
    on_every_rank,
)
from flex_model.integrations.torch_private import symmetric_memory

MAX_RANKS = 128  # kMaxPeers of csrc/cuda/peers.h
_FLAG_BYTES = 4096  # of the signal pad at the head of a buffer: a uint32 per rank
_IPC_HANDLE_BYTES = 64
_CLOSE_S = 2.0  # how long to wait for kernels, which give up at once but may come after others


def _exchange(on_cpu: Transport, numbers: list[int]) -> list[int]:
    """Gather equally many numbers of every rank, in one list. Collective."""
    return on_cpu.exchange(torch.tensor(numbers, dtype=torch.int64)).reshape(-1).tolist()


class _Recorded:
    """An event, as a work of torch.distributed to wait for."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.is_completed, self.wait = event.query, event.synchronize


class _CudaBuffers:
    """The barriers that both kinds of buffers share, and the outcome of transfers.

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
            on_cpu, lambda: torch.zeros(2, dtype=torch.int32, pin_memory=True)
        )
        # WaitState of csrc/cuda/peers.h: 1 + a rank that kernels missed, and whether they give up.
        self._words = (ctypes.c_int32 * 2).from_address(self._state.data_ptr())
        uuid = str(torch.cuda.get_device_properties(device).uuid).replace("-", "")
        words = _exchange(on_cpu, [int(uuid[:8], 16), int(uuid[8:16], 16)])
        gpus = set(zip(words[::2], words[1::2]))
        self.has_device_barrier = len(gpus) == group.size

    def begin_barrier(self) -> list[int]:
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
        waits_for = self.begin_barrier()
        if waits_for:
            torch.ops.flex_model.peer_barrier(self._buffer, waits_for)

    def begin_transfer(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)
        self._last.wait(self._stream)

    def end_transfer(self) -> None:
        self._last.record(self._stream)
        self._is_unfinished = True

    def check(self) -> None:
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

    def _free(self) -> None:
        raise NotImplementedError

    def _make_room(self, num_bytes: int) -> None:
        """Free memory that torch's allocator caches, which other allocators can't use."""
        if torch.cuda.mem_get_info(self._device)[0] < 2 * num_bytes:
            torch.cuda.empty_cache()

    def _reset(self) -> None:
        """Reset the count of barriers: new signal pads are zero."""
        self._number = 0
        self._signal_pads = []
        self._buffer = None


class SymmetricMemory(_CudaBuffers):
    """``torch.distributed._symmetric_memory``: driver allocations mapped by every rank.

    Ranks may share a GPU with ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``.
    """

    def __init__(self, on_cpu: Transport, wait: Wait, device: torch.device) -> None:
        super().__init__(on_cpu, wait, device)
        self._handle: Any = None
        self._group: Any = None
        try:
            on_every_rank(on_cpu, self._register)
        except UnavailableError:
            self.close()
            raise

    def _register(self) -> None:
        """Register a process group by whose name torch finds the ranks and their store."""
        backend = symmetric_memory._SymmetricMemory.get_backend(self._device)
        if backend != "CUDA":  # that of NVSHMEM allocates on all processes, not on a group's
            raise RuntimeError(f"torch's symmetric memory has the backend {backend}, not CUDA")
        group = self.group
        # Names and keys outlive the group, so none is used twice; ranks count equally.
        number = group.bounded_store.next_number(f"symmetric_memory/{group.rank}")
        ranks = "_".join(map(str, group.ranks))
        name = f"flex_model/symmetric_memory/{ranks}/{group.number}/{number}"
        self._name = cast(Any, name)  # a type of its own in torch's stubs
        store: Any = group.store
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            # A shorter deadline: the rendezvous waits on the store for a rank that failed, and must
            # end before the ranks that wait for this one abort.
            store = store.clone()
            store.set_timeout(timedelta(seconds=group.timeout_s / 2))
        store = dist.PrefixStore(f"symmetric_memory/{number}", store)
        made: Any = dist.ProcessGroup(store, group.rank, group.size)
        made._set_group_name(self._name)
        symmetric_memory._register_process_group(self._name, made)
        self._group = made

    def allocate(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        self._reset()
        self._handle = None
        memory = symmetric_memory._SymmetricMemory

        def allocate() -> Tensor:
            self._make_room(num_bytes)
            size = (_FLAG_BYTES + num_bytes,)
            buffer = memory.empty_strided_p2p(size, (1,), torch.uint8, self._device, self._name)
            # Signal pads of our own: torch may still be zeroing its when a peer signals.
            buffer[:_FLAG_BYTES].zero_()
            torch.cuda.current_stream(self._device).synchronize()
            return buffer

        def rendezvous() -> list[int]:
            self._handle = memory.rendezvous(buffer, self._name)
            addresses = list(self._handle.buffer_ptrs)
            if addresses[self.group.rank] != buffer.data_ptr() or not all(addresses):
                raise RuntimeError("symmetric memory is at another address than its buffer")
            return addresses

        buffer = on_every_rank(self._on_cpu, allocate)
        # If torch frees memory that a peer still maps, the peer's mapping keeps it.
        self._buffer, self._signal_pads = buffer, on_every_rank(self._on_cpu, rendezvous)
        return buffer[_FLAG_BYTES:], [address + _FLAG_BYTES for address in self._signal_pads]

    def _free(self) -> None:
        self._reset()
        self._handle = None
        if self._group is not None:
            with contextlib.suppress(Exception):
                symmetric_memory._unregister_process_group(self._name)
            self._group = None


class CudaIpc(_CudaBuffers):
    """Allocations that every process opens by a handle, of GPUs that are peers or the same one.

    Memory must not be freed while another process has it open: the buffer outlives this object
    until all have closed it.
    """

    def __init__(self, on_cpu: Transport, wait: Wait, device: torch.device) -> None:
        super().__init__(on_cpu, wait, device)
        self._opened: list[int] = []
        # Keys outlive the group, so none is used twice; ranks count equally.
        store, key = self.group.bounded_store, f"cuda_ipc/{self.group.rank}"
        number = on_every_rank(on_cpu, lambda: store.next_number(key))
        self._place = f"cuda_ipc/{number}/closed"
        _kept[:] = [kept for kept in _kept if not kept.is_closed_by_all()]

    def allocate(self, num_bytes: int) -> tuple[Tensor, list[int]]:
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
        self._make_room(num_bytes)
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
_in_use: list[_CudaBuffers] = []  # closed, while kernels of this process used them
