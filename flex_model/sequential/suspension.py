"""Calls that can stop anywhere inside and go on later: each has a thread of its own.

The caller and the calls take turns; never do two run. A call that stops gives the turn to the next
call directly, and the last one to the caller: to wake a thread costs more than all else here. A
thread rather than a coroutine: any code can be stopped from within, and torch's grad mode, autocast
and modes are a thread's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from flex_model import _C
from flex_model.sequential.interrupts import deferred
from flex_model.sequential.thread_state import CallerState

_POLL_S = 0.1  # between the caller's looks for Ctrl-C, which any thread may have been told
_LONG_S = 1e6


class AbandonedError(BaseException):
    """Raised where a call has stopped that won't go on, so that what it entered is left."""


class Turns:
    """Whose turn it is.

    Attributes:
        caller: What the caller waits for.
        holder: The call whose turn it is; None: the caller's. It is set before the turn is given:
            an interruption may come between any two instructions, and then a turn is given twice
            rather than never.
        is_interrupted: The caller was: no call gives the turn to another.
    """

    def __init__(self) -> None:
        self.caller = _C.Turn()
        self.holder: SuspendedCall | None = None
        self.is_interrupted = False


class Threads:
    """Threads that wait for calls; those of one window serve the next. To start one costs as much
    as many turns do.
    """

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self.turns = Turns()

    def take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.thread.is_alive():
                return worker
        worker = _Worker()
        self._all.append(worker)
        return worker

    def give_back(self, worker: _Worker) -> None:
        self._idle.append(worker)

    def close(self) -> None:
        """End them all, when their calls are done; they are gone then."""
        for worker in self._all:
            worker.is_over = True
            worker.turn.give()
        for worker in self._all:
            worker.thread.join()


class _Worker:
    """
    Attributes:
        turn: Of the call that it serves; it isn't woken before.
        job: That call's.
    """

    def __init__(self) -> None:
        self.turn = _C.Turn()
        self.job: Callable[[], None] | None = None
        self.is_over = False
        # A daemon, else an interpreter that is being ended would wait for it.
        self.thread = threading.Thread(target=self._work, name="flex_model batch", daemon=True)
        self._allowed = os.sched_getaffinity(0)
        with contextlib.suppress(OSError, ValueError):  # it is a hint, as in csrc/engine/turns
            os.sched_setaffinity(0, {_C.current_core()})
        try:
            self.thread.start()
        finally:
            self._run_anywhere()

    def _run_anywhere(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._allowed)

    def _work(self) -> None:
        self._run_anywhere()
        # An interruption of a call may come when it is just over: the run ends all the same.
        with contextlib.suppress(KeyboardInterrupt):
            while not self.is_over:
                self.turn.take(_LONG_S)
                job, self.job = self.job, None
                if job is not None:
                    job()
                    del job  # and with it a batch


class SuspendedCall:
    """``function()``, begun by ``start()`` and the first ``resume()``.

    Args:
        following: Called in the call's thread when it stops or is done: the call whose turn is
            next, None for the caller's.

    Attributes:
        is_done: Whether it has returned or raised.
        value: What it returned.
        error: What it raised.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        caller: CallerState,
        threads: Threads,
        following: Callable[[], SuspendedCall | None],
    ) -> None:
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._caller = caller
        self._following = following
        self._is_abandoned = False
        self._threads = threads
        self._turns = threads.turns
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Have a thread wait for its first turn; once."""
        with deferred():
            self._worker = self._threads.take()
            self._worker.job = functools.partial(self._caller.context.copy().run, self._run)

    def resume(self) -> None:
        """Let it go on, and those that follow it, until a call gives the turn back. Called by the
        caller; raises what interrupted it meanwhile (Ctrl-C), which is raised in the call that
        goes on, too, as in a plain one.
        """
        interruption = self._run_on()
        if interruption is not None:
            raise interruption

    def stop(self) -> None:
        """Called inside: give the turn away, until it comes back."""
        if not self._is_abandoned:
            self._give_away(waits=True)
            self._wait()
        if self._is_abandoned:
            raise AbandonedError

    @property
    def is_here(self) -> bool:
        """Whether the thread that asks is that of the call."""
        return self._worker is not None and threading.current_thread() is self._worker.thread

    def abandon(self) -> None:
        """End it where it stopped. Raises what interrupted the caller meanwhile."""
        self._is_abandoned = True
        if self._worker is None or self.is_done:
            self.is_done = True
            return
        self.resume()

    def give_back_thread(self) -> None:
        """It is done: another call may have its thread."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            self._threads.give_back(worker)

    def _run_on(self) -> BaseException | None:
        """Give it the turn and wait until it comes back; what interrupted the wait."""
        turns = self._turns
        interruption: BaseException | None = None
        told: SuspendedCall | None = None  # of the interruption
        turns.is_interrupted = False
        turns.holder = self
        while (holder := turns.holder) is not None:
            try:
                assert holder._worker is not None
                if interruption is not None:
                    if holder is not told:
                        told = holder
                        _raise_in(holder._worker.thread, type(interruption))
                    elif not holder._worker.thread.is_alive():  # on its last steps
                        holder.is_done, turns.holder = True, None
                        break
                # Once more, if it was given already: it may not have been, when all is interrupted.
                if holder is self or interruption is not None:
                    holder._worker.turn.give_and_take(turns.caller, _POLL_S)
                else:
                    turns.caller.take(_POLL_S)
            except BaseException as error:
                if interruption is None:
                    turns.is_interrupted, interruption = True, error
        return interruption

    def _run(self) -> None:
        try:
            self._wait()
            if self._is_abandoned:
                raise AbandonedError
            with self._caller.entered():
                self.value = self._function()
        except AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.is_done = True
            del self._function
            self._give_away(waits=False)
            del self._following  # and with it a batch

    def _give_away(self, waits: bool) -> None:
        following = self._following()
        self._turns.holder = following
        turn = self._turns.caller if following is None else following._own_turn
        if waits:
            turn.give_and_take(self._own_turn, _LONG_S)
        else:
            turn.give()

    def _wait(self) -> None:
        while self._turns.holder is not self:
            self._own_turn.take(_LONG_S)

    @property
    def _own_turn(self) -> _C.Turn:
        assert self._worker is not None
        return self._worker.turn


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Have ``kind`` raised in another thread, when it next runs Python."""
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
