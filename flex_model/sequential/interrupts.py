"""Ctrl-C while a run cleans up or hands over: it waits until all is in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

_PATIENCE = 3  # who presses Ctrl-C that often gets it now


class Deferral:
    """A handler of SIGINT that can wait.

    Attributes:
        is_held: SIGINT is noted, to be handled later as it would have been.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.is_held = False
        self._handler = handler
        self._noted: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_held:
            self._noted.append(frame)
            if len(self._noted) >= _PATIENCE:
                self.handle_noted()
            return
        # What it raises unwinds without another interruption, where that has left ``released``.
        self.is_held = True
        self._handler(number, frame)
        self.is_held = False

    def release(self) -> None:
        """It is ``is_held`` no longer."""
        self.is_held = False
        if self._noted:
            self.handle_noted()

    def held(self) -> AbstractContextManager[None]:
        """Inside, SIGINT is noted; at the end of the outermost one it is handled."""
        return _Held(self, True)

    def released(self) -> AbstractContextManager[None]:
        """Inside of ``held``: SIGINT is handled at once."""
        return _Held(self, False)

    def handle_noted(self) -> None:
        if self._noted:
            frame = self._noted[0]
            self._noted.clear()
            self._handler(signal.SIGINT, frame)


class _Held:
    __slots__ = "_before", "_deferral", "_is_held"

    def __init__(self, deferral: Deferral, is_held: bool) -> None:
        self._deferral, self._is_held = deferral, is_held

    def __enter__(self) -> None:
        self._before = self._deferral.is_held
        if not self._is_held:
            self._deferral.handle_noted()
        self._deferral.is_held = self._is_held

    def __exit__(self, *exc_info: object) -> None:
        self._deferral.is_held = self._before
        if not self._before:
            self._deferral.handle_noted()


class NoDeferral:
    """In place of one where no SIGINT is handled."""

    is_held = False
    held = released = contextlib.nullcontext

    def release(self) -> None: ...


@contextlib.contextmanager
def deferrable() -> Iterator[Deferral | NoDeferral]:
    """Inside, the contexts of what is yielded, and ``deferred()``, cost little."""
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):  # only Python's main thread handles signals
        yield NoDeferral()
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
    """Inside, SIGINT is noted; it is handled at the end as it would have been."""
    with deferrable() as deferral, deferral.held():
        yield


class Cleanup(contextlib.ExitStack):
    """An ExitStack that is not interrupted while it unwinds."""

    def __exit__(self, *exc_info) -> bool:
        with deferred():
            return bool(super().__exit__(*exc_info))
