"""Copies shards from GPUs into full tensors in host memory that the ranks of a host share, and
page-locks that memory, so that a GPU of this process can write to it.

Each rank copies its own shard into the full tensor, over its own bus: no full tensor is on any GPU,
and none is sent between GPUs. Meanwhile the model continues to compute.

Each process that shares memory locks it for itself: one segment of a pool at a time, when a GPU
first writes to it, and only once, because locking costs as much as a copy. A segment is unlocked
before it is unmapped: those of other ranks with their group, this process's own when its pool is
closed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.polling import sleeps


def lock(address: int, num_bytes: int, device: torch.device) -> None:
    """Page-lock memory of this process for all its GPUs; ``device`` is one in use. Local.

    RuntimeError if CUDA refuses, for example by the limit on locked memory.
    """
    torch.ops.flex_model.page_lock(torch.empty(0, device=device), address, num_bytes)


def unlock(address: int, device: torch.device) -> None:
    """Undo ``lock``, before the memory is unmapped; copies to it must have ended. Local."""
    torch.ops.flex_model.page_unlock(torch.empty(0, device=device), address)


class PageLocks:
    """The segments that were locked, and those that could not be. All methods are local.

    Attributes:
        why_refused: Why some memory is not locked; empty if all requested memory is.
    """

    def __init__(self) -> None:
        self.why_refused = ""
        self._pid = os.getpid()
        # By the segment's address: the GPU with which it was locked; None where CUDA refused.
        self._devices: dict[int, torch.device | None] = {}

    def has(self, segment: int, num_bytes: int, device: torch.device) -> bool:
        """Lock a segment if it is not locked yet; whether it is locked now."""
        if segment not in self._devices:
            try:
                lock(segment, num_bytes, device)
                self._devices[segment] = device
            except RuntimeError as error:
                self._devices[segment] = None
                self.why_refused = " ".join(str(error).split())[:200]
        return self._devices[segment] is not None

    def release(self) -> None:
        """Unlock all segments. A forked child only forgets them: CUDA is its parent's."""
        for segment, device in self._devices.items():
            if device is not None and self._pid == os.getpid():
                with contextlib.suppress(RuntimeError):  # CUDA may have ended before
                    unlock(segment, device)
        self._devices.clear()
        self.why_refused = ""


of_arena = PageLocks()  # this process's own pool


# ---- Copies --------------------------------------------------------------------------------------

_FIRST_PAUSE_S, _MAX_PAUSE_S = 2e-5, 0.0005  # between polls


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@dataclass(frozen=True)
class Ready:
    """An event after the work queued so far on a stream of a GPU."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self, tensor: Tensor) -> None:
        """Make the current stream of the GPU, which will read the tensor, wait for the event; the
        host does not wait. Once freed, the tensor's memory is not reused before it was read.
        """
        stream = torch.cuda.current_stream(self.device)
        self.event.wait(stream)
        tensor.record_stream(stream)


def ready_now(tensor: Tensor) -> Ready:
    """Record an event on the current stream of a tensor's GPU."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return Ready(event, tensor.device)


class SideStream:
    """A stream of a GPU beside the model's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, start: Callable[[], None], ready: Ready | None) -> None:
        """Queue copies after ``ready``; None: after the work queued so far on the current
        stream.
        """
        if ready is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(ready.event)
        with torch.cuda.stream(self._stream):
            start()

    def is_done(self) -> bool:
        return self._stream.query()


class HostCopies:
    """Copies this process's shards to host memory, on a side stream for each GPU. All methods are
    local.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}
        # Shards and targets of unfinished copies: their memory is not reused, even if the wait for
        # them is interrupted.
        self._in_use: list[tuple[Tensor, Tensor | None]] = []

    def start(
        self,
        shard: Tensor,
        address: int,
        plan: GatherPlan,
        rank: int,
        ready: Ready | None = None,
        target: Tensor | None = None,
    ) -> None:
        """Start the copy of rank ``rank``'s shard into the full tensor at ``address``, contiguous
        and page-locked. The shard must not change until it is done.

        Args:
            ready: The event after which the shard has its values; None: the current stream's work.
            target: The full tensor, if it is this process's and nothing else keeps its memory.
        """
        shard = shard.detach()
        if shard.is_conj() or shard.is_neg() or not shard.is_contiguous():
            if ready is not None:
                ready.wait(shard)
            shard, ready = shard.resolve_conj().resolve_neg().contiguous(), None
        self._in_use.append((shard, target))
        code = plan.code
        copy = torch.ops.flex_model.copy_to_host
        if shard.device not in self._streams:
            self._streams[shard.device] = SideStream(shard.device)
        stream = self._streams[shard.device]
        stream.run(lambda: copy(shard, address, code, rank, "auto"), ready)

    def is_completed(self) -> bool:
        """Whether all copies are done. Then this process may read the results, and others after a
        message.
        """
        started = len(self._in_use)
        if started and all(stream.is_done() for stream in self._streams.values()):
            del self._in_use[:started]
        return not self._in_use

    def may_run(self) -> bool:
        """Whether a GPU may still write to a target: also if CUDA has failed and does not tell."""
        try:
            return not self.is_completed()
        except RuntimeError:
            return True

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until all copies are done or ``stop()`` is true. Ctrl-C ends the wait; it has no
        deadline, because the GPU may have to run much of the model first.
        """
        for _ in sleeps(lambda: self.is_completed() or stop(), _FIRST_PAUSE_S, _MAX_PAUSE_S):
            pass


of_process = HostCopies()
