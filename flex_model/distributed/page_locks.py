"""Host memory that this process has page-locked, so that its GPU can write there.

Processes that share memory lock it each for itself: a segment of a pool at a time, when a GPU first
writes to it, and once, for locking costs as much as a copy. A segment is unlocked before it is
unmapped: those of other ranks with their group, this process's own when its pool is closed.
"""

from __future__ import annotations

import contextlib
import os

import torch


def lock(address: int, num_bytes: int) -> None:
    """Page-lock memory of this process for all its GPUs. Local.

    RuntimeError if CUDA refuses: the limit on locked memory, for one.
    """
    torch.ops.flex_model.page_lock(torch.empty(0, device="cuda"), address, num_bytes)


def unlock(address: int) -> None:
    """Undo ``lock``, before the memory is unmapped; copies to it must be done. Local."""
    torch.ops.flex_model.page_unlock(torch.empty(0, device="cuda"), address)


class PageLocks:
    """The segments that were locked, or could not be. All methods are local.

    Attributes:
        why_refused: Why some memory is not locked; empty if all that was asked for is.
    """

    def __init__(self) -> None:
        self.why_refused = ""
        self._pid = os.getpid()
        self._is_locked: dict[int, bool] = {}  # by the segment's address

    def has(self, segment: int, num_bytes: int) -> bool:
        """Whether a segment is locked, which it is now if it can be."""
        if segment not in self._is_locked:
            try:
                lock(segment, num_bytes)
                self._is_locked[segment] = True
            except RuntimeError as error:
                self._is_locked[segment] = False
                self.why_refused = " ".join(str(error).split())[:200]
        return self._is_locked[segment]

    def release(self) -> None:
        """Unlock all. A forked child forgets them: CUDA is its parent's."""
        for segment, is_locked in self._is_locked.items():
            if is_locked and self._pid == os.getpid():
                with contextlib.suppress(RuntimeError):  # CUDA may have ended before
                    unlock(segment)
        self._is_locked.clear()


of_arena = PageLocks()  # this process's own pool
