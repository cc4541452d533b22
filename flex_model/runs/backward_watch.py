"""Detects backward passes that are aborted: by an error of the model's own, or by Ctrl-C.

No code of ours is on the stack then. But autograd drops the callbacks that it would have called at
the end of the pass, and their deletion is detected, so a rank can report the failure to ranks that
wait for it in a hook.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.integrations.torch_private import call_last, current_graph_task
from flex_model.runs.graphs import tensors_with_graph

_GRACE_S = 0.5  # for the other ranks to receive the report; Ctrl-C must return within a second
_FAILURE = "the model's own backward failed or was interrupted; see that rank's own traceback"


class BackwardWatch:
    """Reports the aborted backward passes of a FlexModel. With one rank it does nothing."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._failure = communicator, communicator.failure
        self._tasks: set[int] = set()  # the running passes that are watched
        self._has_deferred = False  # a pass was aborted in autograd's thread, which can't report it
        self._is_closed = False
        self._thread: int | None = None  # the one that runs the model

    def begin_run(self, thread: int) -> None:
        """Report passes that were aborted in a thread of autograd; ``thread`` runs the model from
        now on. Collective if there was one.
        """
        self._thread = thread
        if self._has_deferred:
            self._has_deferred = False
            self._report()

    def close(self) -> None:
        """Report no more. Local."""
        self._is_closed = True

    def watch(self) -> None:
        """Watch the running pass, if there is one; repeated calls do nothing. Local."""
        task = current_graph_task()
        if task == -1 or task in self._tasks or self._communicator.is_local:
            return
        self._tasks.add(task)
        # Autograd drops `end`, and with it this object, where it does not call it.
        aborted = _C.Finalizer(functools.partial(self._aborted, task, self._failure.num_agreed))

        def end() -> None:
            self._tasks.discard(task)
            aborted.cancel()

        # A Ctrl-C in `end` is reported at once: its traceback keeps the finalizer alive.
        call_last(_C.watched(end, aborted.call))

    def at_end(self, act: Callable[[], None], has_begun: Callable[[], bool]) -> None:
        """Have autograd call ``act`` at the end of the running pass, after the callbacks that were
        queued during it: an error before the end of DDP's would leave its reducer unusable. Once
        ``act`` ``has_begun``, it reports its own errors; a Ctrl-C before that is reported here.
        """

        def if_raised() -> None:
            if not has_begun():
                self._report()

        call_last(_C.watched(act, if_raised))

    def watch_from(self, output: Any) -> None:
        """Watch the passes that begin at an output of the model, from their first node. Local."""
        if self._communicator.is_local:
            return
        hook = _C.watched(self.watch, self._report)
        for tensor in tensors_with_graph(output):
            tensor.register_hook(hook)

    def _aborted(self, task: int, num_agreed: int) -> None:
        """Handle a pass that ended early: report it, unless all ranks have the reason already."""
        self._tasks.discard(task)
        if num_agreed != self._failure.num_agreed or self._is_closed or sys.is_finalizing():
            return
        if threading.get_ident() in (self._thread, threading.main_thread().ident):
            self._report()
        else:
            self._has_deferred = True

    def _report(self) -> None:
        # A Ctrl-C here is suppressed: the error that ends the pass is raised anyway.
        with contextlib.suppress(BaseException):
            self._communicator.report_failure(_FAILURE, None, "end of the backward", _GRACE_S)
