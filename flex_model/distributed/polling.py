"""Waits by polling, for events that can't wake the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

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
