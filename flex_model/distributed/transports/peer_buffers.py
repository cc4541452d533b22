"""GPU memory that all ranks of a host can access, and their barriers, for ``PeerMemory``.

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

from flex_model.distributed.bounded_store import BoundedStore
from flex_model.distributed.polling import sleeps
from flex_model.distributed.transports.transport import (
    TransferError,
    Transport,
    UnavailableError,
    Wait,
    on_every_rank,
)

MAX_RANKS = 128  # kMaxPeers of csrc/cuda/peers.h
_FLAG_BYTES = 4096  # of the signal pad at the head of a buffer: a uint32 per rank
_IPC_HANDLE_BYTES = 64
_CLOSE_S = 2.0  # how long to wait for kernels, which give up at once but may come after others


def _exchange(on_cpu: Transport, numbers: list[int]) -> list[int]:
    """Gather equally many numbers of every rank, in one list. Collective."""
    return on_cpu.exchange(torch.tensor(numbers, dtype=torch.int64)).reshape(-1).tolist()


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
            on_cpu, lambda: torch.zeros(2, dtype=torch.int32, pin_memory=True)
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
