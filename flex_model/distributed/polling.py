"""Waiting by polling, for what can't wake us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_YIELDS = 49  # polls that only yield the processor, before the first sleep


def sleeps(is_done: Callable[[], bool], first_s: float, longest_s: float) -> Iterator[None]:
    """Ends when ``is_done``. Until then: yields of the processor, then sleeps, each half as long
    again as the last one up to ``longest_s`` seconds, and one step of the iterator after each.
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
