"""Host memory that this process has page-locked, so that its GPU can write there.

Processes that share memory lock it each for itself: a segment of a pool at a time, when a GPU first
writes to it, and once, for locking costs as much as a copy. A segment is unlocked before it is
unmapped: those of other ranks with their group, this process's own when its pool is closed.
"""

from __future__ import annotations

import contextlib
import os

import torch


def lock(address: int, num_bytes: int, device: torch.device) -> None:
    """Page-lock memory of this process for all its GPUs, of which ``device`` is one in use. Local.

    RuntimeError if CUDA refuses: the limit on locked memory, for one.
    """
    torch.ops.flex_model.page_lock(torch.empty(0, device=device), address, num_bytes)


def unlock(address: int, device: torch.device) -> None:
    """Undo ``lock``, before the memory is unmapped; copies to it must be done. Local."""
    torch.ops.flex_model.page_unlock(torch.empty(0, device=device), address)


class PageLocks:
    """The segments that were locked, or could not be. All methods are local.

    Attributes:
        why_refused: Why some memory is not locked; empty if all that was asked for is.
    """

    def __init__(self) -> None:
        self.why_refused = ""
        self._pid = os.getpid()
        # By the segment's address: with which GPU it was locked; None where it was refused.
        self._devices: dict[int, torch.device | None] = {}

    def has(self, segment: int, num_bytes: int, device: torch.device) -> bool:
        """Whether a segment is locked, which it is now if it can be."""
        if segment not in self._devices:
            try:
                lock(segment, num_bytes, device)
                self._devices[segment] = device
            except RuntimeError as error:
                self._devices[segment] = None
                self.why_refused = " ".join(str(error).split())[:200]
        return self._devices[segment] is not None

    def release(self) -> None:
        """Unlock all. A forked child forgets them: CUDA is its parent's."""
        for segment, device in self._devices.items():
            if device is not None and self._pid == os.getpid():
                with contextlib.suppress(RuntimeError):  # CUDA may have ended before
                    unlock(segment, device)
        self._devices.clear()
        self.why_refused = ""


of_arena = PageLocks()  # this process's own pool
