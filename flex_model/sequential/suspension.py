"""A call that can stop anywhere inside and go on later: it has a thread of its own.

The caller and the call take turns; never do both run. A thread rather than a coroutine: any code
can be stopped from within, and torch's grad mode, autocast and modes are a thread's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from flex_model.sequential.interrupts import deferred
from flex_model.sequential.thread_state import CallerState

_POLL_S = 0.1


class AbandonedError(BaseException):
    """Raised where a call has stopped that won't go on, so that what it entered is left."""


class Threads:
    """Threads that wait for calls; those of one window serve the next. To start one costs as much
    as many turns do.
    """

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []

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
            worker.jobs.put(None)
        for worker in self._all:
            worker.thread.join()


class _Worker:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, else an interpreter that is being ended would wait for it.
        self.thread = threading.Thread(target=self._work, name="flex_model batch", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        # An interruption of a call may come when it is just over: the run ends all the same.
        with contextlib.suppress(KeyboardInterrupt):
            while (job := self.jobs.get()) is not None:
                job()
                del job  # and with it a batch


class SuspendedCall:
    """``function()``, begun by the first ``resume()``.

    Attributes:
        is_done: Whether it has returned or raised.
        value: What it returned.
    """

    def __init__(self, function: Callable[[], Any], caller: CallerState, threads: Threads) -> None:
        self.is_done = False
        self.value: Any = None
        self._function = function
        self._caller = caller
        self._error: BaseException | None = None
        self._is_abandoned = False
        # Turns are numbered, and the locks only wake who waits for his: an interruption may come
        # between any two instructions, and then a turn is announced twice rather than never.
        self._turn = self._turns_taken = 0
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._threads = threads
        self._worker: _Worker | None = None

    def resume(self) -> None:
        """Let it go on until it stops or is done. Raises what it raised.

        What interrupts the caller meanwhile (Ctrl-C) is raised in the call, as in a plain one.
        """
        interruption = self._run_on()
        if self._error is not None:
            error, self._error = self._error, None
            # The one that the caller's handler made, rather than its copy in the thread.
            raise interruption if type(interruption) is type(error) else error
        if interruption is not None:
            raise interruption

    def stop(self) -> None:
        """Called inside: give the turn to the caller until it resumes the call."""
        if not self._is_abandoned:
            self._give_back()
            self._await_turn()
        if self._is_abandoned:
            raise AbandonedError

    @property
    def is_here(self) -> bool:
        """Whether the thread that asks is that of the call."""
        return self._worker is not None and threading.current_thread() is self._worker.thread

    def abandon(self) -> BaseException | None:
        """End it where it stopped. What it raised besides, if anything."""
        self._is_abandoned = True
        if self._worker is None or self.is_done:
            self.is_done = True
            return None
        interruption = self._run_on()
        error = None if isinstance(self._error, AbandonedError) else self._error
        self._error = None
        return interruption or error

    def _run_on(self) -> BaseException | None:
        """Let it go on and wait; what interrupted the wait."""
        interruption: BaseException | None = None
        if self._worker is None:
            with deferred():
                self._worker = self._threads.take()
                self._worker.jobs.put(functools.partial(self._caller.context.copy().run, self._run))
        thread = self._worker.thread
        self._turn = self._turns_taken + 1
        while self._turns_taken != self._turn:
            try:
                _wake(self._go)
                self._back.acquire(timeout=-1 if interruption is None else _POLL_S)
                if interruption is not None and not thread.is_alive():  # on its last steps
                    self.is_done, self._turns_taken = True, self._turn
            except BaseException as error:
                if interruption is None:
                    interruption = error
                    _raise_in(thread, type(error))
        if self.is_done:
            self._threads.give_back(self._worker)
        return interruption

    def _run(self) -> None:
        try:
            self._await_turn()
            if self._is_abandoned:
                raise AbandonedError
            with self._caller.entered():
                self.value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.is_done = True
            del self._function
            self._give_back()

    def _await_turn(self) -> None:
        while self._turns_taken == self._turn:
            self._go.acquire()

    def _give_back(self) -> None:
        self._turns_taken = self._turn
        _wake(self._back)


def _wake(lock: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it is awake
        lock.release()


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Have ``kind`` raised in another thread, when it next runs Python."""
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))
