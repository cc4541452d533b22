"""Calls that can be suspended anywhere inside and resumed later: each runs in a greenlet.

A greenlet has its own stack, C's included, in the caller's thread, so any code can be suspended
from within, and a switch costs about a microsecond. What torch keeps per thread is exchanged if a
call has changed it (`thread_state.ThreadState`); context variables are each greenlet's own.

A call can't be suspended inside C++ that has called Python through pybind11, which keeps a list of
its calls in progress per thread, and ends the process if they don't end in order.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import mmap
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from greenlet import greenlet

from flex_model import _C
from flex_model.integrations import torch_private
from flex_model.runs.interrupts import Deferral
from flex_model.sequential.thread_state import ThreadState

_PYBIND11_MARK = b"pybind11_internals"  # in each library that is made with it


class AbandonedError(BaseException):
    """Raised in a suspended call that won't be resumed, so that its contexts are left."""


class SuspendedCall:
    """``function()``, which the first ``resume()`` begins.

    Args:
        before: The state of the caller's thread when a call begins, is resumed or suspended.
        deferral: Defers Ctrl-C while the caller runs, not while the call does.

    Attributes:
        is_done: Whether it has returned or raised.
        has_changed_thread: Whether it was suspended where the thread was not in state ``before``.
        greenlet: The greenlet that it runs in.
    """

    def __init__(
        self, function: Callable[[], Any], before: ThreadState, deferral: Deferral
    ) -> None:
        self.is_done = False
        self.has_changed_thread = False
        self._value: Any = None
        self._function = function
        self._before = before
        self._deferral = deferral
        self._base = 0  # of its stack
        self.greenlet = greenlet(functools.partial(contextvars.copy_context().run, self._run))

    def resume(self) -> None:
        """Run it until it is suspended or done. Raises what it raises."""
        self._enter(self.greenlet.switch)

    def suspend(self) -> None:
        """Called inside: switch to the caller, until the next ``resume()``."""
        self._deferral.hold()
        parent = self.greenlet.parent
        assert parent is not None
        with self._before.during() as has_changed:
            self.has_changed_thread |= has_changed
            parent.switch()
        self._deferral.release()

    def abandon(self) -> None:
        """End it where it is suspended. Raises what it raises."""
        if self.greenlet:  # begun, not done
            self._enter(functools.partial(self.greenlet.throw, AbandonedError))
        else:
            self.is_done = True

    def _enter(self, switch: Callable[[], Any]) -> None:
        try:
            ended_by = switch()
        finally:
            self._deferral.hold()
        if ended_by:  # a GreenletExit, which a greenlet returns
            raise ended_by

    def take_value(self) -> Any:
        """Return what it returned, and drop it here."""
        value, self._value = self._value, None
        return value

    def depth(self) -> int:
        """Called inside: the bytes on C's stack. They differ if C has called Python elsewhere."""
        return self._base - _C.stack_pointer()

    def unsuspendable_in(self) -> str:
        """Called inside: the library inside which it can't be suspended; "" if there is none."""
        # All functions that pybind11 makes in one library begin at one address; these two have two.
        begins_at = dict(map(_C.code_of, (torch_private.PYBIND11_FUNCTION, _C.flatten)))
        for file, function in _C.native_frames(self._base):
            if function == begins_at.get(file, function) and _is_made_with_pybind11(file):
                return file
        return ""

    def _run(self) -> None:
        self._base = _C.stack_pointer()
        try:
            with contextlib.suppress(AbandonedError):
                self._deferral.release()
                self._value = self._function()
        finally:
            self.is_done = True
            del self._function  # and with it a batch


def is_in_functional_call() -> bool:
    """Whether the running call is inside ``functional_call``, which puts other parameters into the
    model.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch_private.functional_call_code:
        frame = frame.f_back
    return frame is not None


@functools.cache
def _is_made_with_pybind11(file: str) -> bool:
    try:
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(_PYBIND11_MARK) >= 0
    except (OSError, ValueError):  # no file: the kernel's own code
        return False
