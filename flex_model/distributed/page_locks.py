"""Page-locks host memory, so that a GPU of this process can write to it.

Each process that shares memory locks it for itself: one segment of a pool at a time, when a GPU
first writes to it, and only once, because locking costs as much as a copy. A segment is unlocked
before it is unmapped: those of other ranks with their group, this process's own when its pool is
closed.
"""

from __future__ import annotations

import contextlib
import os

import torch


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
