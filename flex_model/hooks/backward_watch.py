"""Backward passes that are left in the middle: by an error of the model's own, or by Ctrl-C.

No code of ours is on the stack there. But autograd drops what was to be called at the end of the
pass, and that is seen; so a rank can tell the others, who wait for it in a hook.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from flex_model import _C
from flex_model.distributed.communicator import Communicator

_GRACE_S = 0.5  # for the others to come and hear of it; Ctrl-C has to leave within a second
_FAILURE = "the model's own backward failed or was interrupted; see that rank's own traceback"


class BackwardWatch:
    """Of one wrap. Nothing is watched with one rank."""

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._tasks: set[int] = set()  # the passes that go on and are watched
        self._is_owing = False  # a pass was left in a thread of autograd's, which can't tell of it
        self.is_closed = False
        self.thread: int | None = None  # that runs the model

    def watch(self) -> None:
        """The pass that goes on, if any; as often as one likes. Local."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks or self._channel.is_local:
            return
        self._tasks.add(task)
        going_on = _Pass(self, task, self._channel.num_agreed)
        _call_last(_C.watched(going_on.end, going_on.broken_off))

    def at_end(self, act: Callable[[], None], has_begun: Callable[[], bool]) -> None:
        """Have autograd call ``act`` at the end of the pass that goes on, after what was queued
        during it: DDP, whose reducer an error before its own end would leave unusable. Once it
        ``has_begun``, it tells of its own troubles; of a Ctrl-C before that it can't.
        """

        def if_raised() -> None:
            if not has_begun():
                self._tell()

        _call_last(_C.watched(act, if_raised))

    def watch_from(self, output: Any) -> None:
        """The passes that begin at an output of the model, from their first step on. Local."""
        if self._channel.is_local or not torch.is_grad_enabled():
            return
        hook = _C.watched(self.watch, self._tell)
        for leaf in _C.flatten(output)[0]:
            if leaf.grad_fn is not None:
                leaf.register_hook(hook)

    def tell_what_is_owed(self) -> None:
        """Of passes that were left in a thread of autograd's. Collective if there was one."""
        if self._is_owing:
            self._is_owing = False
            self._tell()

    def ended(self, task: int) -> None:
        self._tasks.discard(task)

    def left(self, task: int, num_agreed: int) -> None:
        """A pass ends before its end. Unless all ranks know why, they hear of it now."""
        self._tasks.discard(task)
        if num_agreed != self._channel.num_agreed or self.is_closed or sys.is_finalizing():
            return
        if threading.get_ident() in (self.thread, threading.main_thread().ident):
            self._tell()
        else:
            self._is_owing = True

    def _tell(self) -> None:
        # A Ctrl-C, for one, is not raised: the error that ends the pass is.
        with contextlib.suppress(BaseException):
            self._channel.report_failure(_FAILURE, None, "end of the backward", _GRACE_S)


def _call_last(end: Callable[..., None]) -> None:
    """Have autograd call ``end`` after all that is queued during the pass. A Ctrl-C before that
    drops ``end``, which is seen; no Python runs between the two, where one would not be.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(functools.partial(queue, end))


class _EndedPass:
    """What becomes of a pass that ended well: without a ``__del__``, in which a Ctrl-C is lost."""


class _Pass:
    """Lives as long as autograd's task of a backward pass."""

    def __init__(self, watch: BackwardWatch, task: int, num_agreed: int) -> None:
        self._watch = watch
        self._task = task
        self._num_agreed = num_agreed

    def end(self) -> None:
        """What autograd calls at the end of a pass that ends well."""
        self._watch.ended(self._task)
        self.__class__ = _EndedPass  # type: ignore[assignment]

    def broken_off(self) -> None:
        """A Ctrl-C came at the end: its traceback would keep this object alive."""
        if type(self) is _Pass:
            self.end()
            self._watch.left(self._task, self._num_agreed)

    def __del__(self) -> None:
        self._watch.left(self._task, self._num_agreed)
