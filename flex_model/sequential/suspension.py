"""Calls that can stop anywhere inside and go on later: each has a greenlet of its own.

A greenlet has its own stack, C's included, in the caller's thread, so any code can be stopped from
within, and to go on costs about a microsecond. What torch keeps per thread is exchanged where a
call has changed it (`thread_state.ThreadState`); context variables are each greenlet's own.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

from greenlet import greenlet

from flex_model import _C
from flex_model.sequential import native_calls
from flex_model.sequential.interrupts import Deferral, NoDeferral
from flex_model.sequential.thread_state import ThreadState


class AbandonedError(BaseException):
    """Raised where a call has stopped that won't go on, so that what it entered is left."""


class SuspendedCall:
    """``function()``, which the first ``resume()`` begins.

    Args:
        before: What the caller's thread is like when a call begins, goes on or stops.
        deferral: Holds Ctrl-C back while the caller goes on, not while the call does.

    Attributes:
        is_done: Whether it has returned or raised.
        value: What it returned.
        has_changed_thread: Whether it has stopped where the thread was not like ``before``.
        greenlet: That it is in.
    """

    def __init__(
        self, function: Callable[[], Any], before: ThreadState, deferral: Deferral | NoDeferral
    ) -> None:
        self.is_done = False
        self.value: Any = None
        self.has_changed_thread = False
        self._function = function
        self._before = before
        self._deferral = deferral
        self._is_abandoned = False
        self._base = 0  # of its stack
        self.greenlet = greenlet(self._run)
        self.greenlet.gr_context = contextvars.copy_context()

    def resume(self) -> None:
        """Let it go on until it stops or is done. Raises what it raises."""
        try:
            ended_by = self.greenlet.switch()
        finally:
            self._deferral.is_held = True
        if ended_by:  # a GreenletExit, which a greenlet returns
            raise ended_by

    def stop(self) -> None:
        """Called inside: let the caller go on, until the next ``resume()``."""
        if not self._is_abandoned:
            self._deferral.is_held = True
            parent = self.greenlet.parent
            assert parent is not None
            if self._before.is_now:
                parent.switch()
            else:
                self.has_changed_thread = True
                with self._before.during():
                    parent.switch()
        if self._is_abandoned:  # and left without an interruption
            raise AbandonedError
        self._deferral.release()

    def depth(self) -> int:
        """Asked inside: of C's stack, in bytes. Where C has called Python elsewhere, it differs."""
        return self._base - _C.stack_pointer()

    @property
    def hinderer(self) -> str:
        """Asked inside: the library that keeps it from being stopped here; "" where none does."""
        return native_calls.hinderer(self._base)

    def abandon(self) -> None:
        """End it where it stopped. Raises what it raises."""
        self._is_abandoned = True
        if self.greenlet:  # begun, not done
            self.resume()
        else:
            self.is_done = True

    def _run(self) -> None:
        self._base = _C.stack_pointer()
        try:
            with contextlib.suppress(AbandonedError):
                self._deferral.release()
                self.value = self._function()
        finally:
            self.is_done = True
            del self._function  # and with it a batch
