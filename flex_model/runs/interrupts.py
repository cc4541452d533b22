"""Ctrl-C while a run cleans up or switches batches, or a notebook sends a call to its ranks: it is
handled when all is in order.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

_MOST_NOTED = 3  # the third Ctrl-C that waits is handled at once


class Deferral:
    """A handler of SIGINT that can defer it.

    Args:
        handler: The handler that it replaces; None if this one is never called.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None = None) -> None:
        self._is_held = False
        self._handler = handler
        self._noted: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_held, self._is_held = self._is_held, True
        self._noted.append(frame)
        if not is_held or len(self._noted) >= _MOST_NOTED:
            # An exception of the handler unwinds without another one, also out of ``released``.
            self._handle_noted()
            self._is_held = is_held

    def hold(self) -> None:
        """From now on SIGINT is noted, to be handled later."""
        self._is_held = True

    def release(self) -> None:
        """From now on SIGINT is handled at once, and what was noted is handled now."""
        self._is_held = False
        self._handle_noted()

    def held(self) -> AbstractContextManager[None]:
        """A context in which SIGINT is noted; it is handled at the end of the outermost one."""
        return self._set(True)

    def released(self) -> AbstractContextManager[None]:
        """A context inside ``held`` in which SIGINT is handled at once."""
        return self._set(False)

    @contextlib.contextmanager
    def _set(self, is_held: bool) -> Iterator[None]:
        before = self._is_held
        if not is_held:
            self._handle_noted()
        self._is_held = is_held
        try:
            yield
        finally:
            self._is_held = before
            if not before:
                self._handle_noted()

    def _handle_noted(self) -> None:
        if self._noted and self._handler is not None:
            frame = self._noted[0]
            self._noted.clear()
            self._handler(signal.SIGINT, frame)


@contextlib.contextmanager
def deferrable() -> Iterator[Deferral]:
    """A context with a Deferral as the handler of SIGINT, inside which ``deferred()`` is cheap."""
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):  # only Python's main thread handles signals
        yield Deferral()
    elif isinstance(handler, Deferral):
        yield handler
    else:
        deferral = Deferral(handler)
        try:
            signal.signal(signal.SIGINT, deferral)
            yield deferral
        finally:
            with deferral.held():
                if signal.getsignal(signal.SIGINT) is deferral:  # not one that was set inside
                    signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A context in which SIGINT is noted; it is handled at the end as it would have been."""
    with deferrable() as deferral, deferral.held():
        yield


class Cleanup(contextlib.ExitStack):
    """An ExitStack that is not interrupted while it unwinds."""

    def __exit__(self, *exc_info) -> bool:
        with deferred():
            return bool(super().__exit__(*exc_info))
