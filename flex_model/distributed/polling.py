"""Waits by polling, for events that can't wake the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between looks
_LOOKS_IN_DEADLINE = 10  # at least
_YIELDS = 49  # polls that only yield the processor, before the first sleep


def sleeps(
    is_done: Callable[[], bool], first_s: float = 5e-5, longest_s: float = 0.002
) -> Iterator[None]:
    """Poll until ``is_done()``: first yield the processor, then sleep, each time half as long again
    as the last up to ``longest_s`` seconds. The iterator yields after each sleep.
    """
    polls, pause_s = 0, first_s
    while not is_done():
        polls += 1
        if polls <= _YIELDS:
            time.sleep(0)
            continue
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
        yield


class Looks:
    """Decides when a long wait asks the store what others have reported: after a longer pause each
    time, up to a second, since of a thousand ranks that wait for a slow one each asks.

    Args:
        first_s: How long to wait before the first look.
        pause_s: The pause after it.
    """

    def __init__(self, first_s: float = 0.0, pause_s: float = _FIRST_PAUSE_S) -> None:
        self._look_at, self._pause_s = first_s, pause_s

    def are_due(self, waited_s: float, timeout_s: float) -> bool:
        """Whether to look now, after ``waited_s`` seconds; always at the deadline ``timeout_s``."""
        if waited_s < min(self._look_at, timeout_s):
            return False
        pause_s = min(self._pause_s, _LONGEST_PAUSE_S, timeout_s / _LOOKS_IN_DEADLINE)
        self._look_at, self._pause_s = waited_s + pause_s, 1.5 * pause_s
        return True
