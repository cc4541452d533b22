"""Ctrl-C while a run cleans up: it waits until all is clean."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, SIGINT is noted; it is handled at the end as it would have been. Only Python's main
    thread handles signals: in another one nothing needs to be done.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    noted: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if noted:
        handler(signal.SIGINT, noted[0])


class Cleanup(contextlib.ExitStack):
    """An ExitStack that is not interrupted while it unwinds."""

    def __exit__(self, *exc_info) -> bool:
        with deferred():
            return bool(super().__exit__(*exc_info))
