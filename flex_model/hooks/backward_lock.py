"""Has the hooks of a backward run one at a time."""

from __future__ import annotations

import threading

from flex_model.errors import HookError

_of_process = threading.RLock()


class BackwardLock:
    """A lock for the hooks of a backward: autograd has a thread for each device, so a backward
    through a model on several devices calls hooks of two of them at the same time. They share the
    runs, the records, and the process's random numbers on the CPU. Local.

    Args:
        timeout_s: The deadline of a wait, in seconds.
        is_local: All hooks of this process take turns, also those of other FlexModels; where they
            wait for other ranks, only those of one FlexModel, for two FlexModels could wait for
            each other.
    """

    def __init__(self, timeout_s: float, is_local: bool) -> None:
        self._lock = _of_process if is_local else threading.RLock()
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)

    def __enter__(self) -> None:
        """Wait for the hooks of other threads; HookError after the deadline."""
        if self._lock.acquire(blocking=False) or self._lock.acquire(timeout=self._timeout_s):
            return
        raise HookError(
            f"a gradient hook waited {self._timeout_s:g} s for one in the thread of another "
            "device; an editing function there takes longer, or waits for a backward through the "
            "hooked model, which it must not run; give FlexModel a longer timeout= if it is slow"
        )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
