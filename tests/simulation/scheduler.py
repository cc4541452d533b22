"""Runs many threads, one at a time and in virtual time, so that a run is the same for each seed.

A thread runs until it waits. Then the clock turns to the next event, and the thread that it wakes
runs next. Waits of minutes cost nothing. Threads are greenlets: no two run at once, and the system
takes much longer to let one real thread follow another, most of all one on another core.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

import torch
from greenlet import getcurrent, greenlet

T = TypeVar("T")

# What yields whenever it waits: for a signal, at most so many seconds. Either may be None.
Steps = Generator[tuple["Signal | None", "float | None"], None, T]


class Killed(BaseException):
    """The process of a thread has ended: nothing that it does has an effect any more."""


class HangError(Exception):
    """Threads wait for what never happens; the message has where."""


class Owner:
    """What threads belong to: a process. ``is_dead``: it has ended, and so do its threads."""

    is_dead = False


class Waiter(Protocol):
    def wake(self) -> None: ...


class Signal:
    """Something that threads wait for."""

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}

    def notify(self) -> None:
        """Wake all that wait for it."""
        waiters, self.waiters = self.waiters, {}
        for waiter in waiters:
            waiter.wake()


class Thread(greenlet):
    """A thread of a process; at its end it returns which one runs next."""

    def __init__(
        self, scheduler: Scheduler, owner: Any, function: Callable[[], object], is_awaited: bool
    ) -> None:
        super().__init__(parent=scheduler.caller)
        self.owner, self.function, self.is_awaited = owner, function, is_awaited
        self.num_wakes = 0
        self._scheduler = scheduler

    def run(self) -> Thread | None:
        return self._scheduler.run_thread(self)

    def wake(self, after_s: float = 0.0) -> None:
        """Let it run, in so many seconds, unless something wakes it before."""
        number = self.num_wakes
        self._scheduler.after(after_s, lambda: self._scheduler.resume(self, number))


class Scheduler:
    """The clock, and the threads.

    Args:
        seed: Of the order of what happens at the same time.

    Attributes:
        now: The virtual time in seconds.
        dice: For latencies that vary.
        caller: The greenlet that has made it, and runs it.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.caller = getcurrent()
        self._events: list[tuple[float, float, int, Callable[[], object]]] = []
        self._num_events = 0
        self._threads: dict[Thread, None] = {}  # a set would have another order each time
        self._num_awaited = 0
        self._next: Thread | None = None
        self._crashes: list[str] = []
        self._until_s = 0.0
        self._is_over = False

    # ---- For what runs in it ---------------------------------------------------------------------

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Call a function, which must not wait, in so many seconds."""
        self._num_events += 1
        event = (self.now + seconds, self.dice.random(), self._num_events, act)
        heapq.heappush(self._events, event)

    def spawn(self, owner: Any, function: Callable[[], object], is_awaited: bool = True) -> None:
        """Start a thread, for whose end the run waits or not."""
        thread = Thread(self, owner, function, is_awaited)
        self._threads[thread] = None
        self._num_awaited += is_awaited
        thread.wake()

    def follow(self, owner: Any, steps: Steps[None]) -> None:
        """Run steps beside the calling thread, as if they had one: that is cheaper."""
        _Followed(self, owner, steps).run()

    def complete(self, steps: Steps[T]) -> T:
        """Run steps in the calling thread, and return what they return."""
        while True:
            try:
                signal, within_s = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            self.wait(signal, within_s)

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait."""
        self.wait(None, seconds)

    def wait(self, signal: Signal | None, within_s: float | None = None) -> None:
        """Let the calling thread wait for a signal, at most so many seconds."""
        thread: Thread = getcurrent()
        self.check_lives(thread.owner)
        if signal is not None:
            signal.waiters[thread] = None
        if within_s is not None:
            thread.wake(within_s)
        chosen = self._pick()
        if chosen is not thread:
            has_gradients = torch.is_grad_enabled()  # torch keeps one for the real thread
            self._switch_to(chosen)
            if torch.is_grad_enabled() != has_gradients:
                torch.set_grad_enabled(has_gradients)
        if signal is not None:
            signal.waiters.pop(thread, None)
        self.check_lives(thread.owner)

    def kill(self, owner: Any) -> None:
        """End a process, with its threads."""
        owner.is_dead = True
        for thread in self._threads:
            if thread.owner is owner:
                thread.wake()

    def check_lives(self, owner: Any) -> None:
        """Raise Killed if a process has ended, or the simulation has."""
        if self._is_over or owner.is_dead:
            raise Killed

    # ---- For the one who made it -----------------------------------------------------------------

    def run(self, until_s: float) -> None:
        """Run until all threads that are awaited have ended.

        Raises:
            HangError: some have not, at ``until_s`` or where nothing can happen any more.
        """
        self._until_s = until_s
        has_gradients, chosen = torch.is_grad_enabled(), self._pick()
        while chosen is not None:
            torch.set_grad_enabled(True)  # as in a new thread
            chosen = chosen.switch()
        waiting = [t for t in self._threads if t.is_awaited and not t.owner.is_dead]
        where = _stacks(waiting)
        for thread in list(self._threads):
            if thread:  # it has begun, and ends now: as if its process did
                thread.switch()
        torch.set_grad_enabled(has_gradients)
        if self._crashes:
            raise RuntimeError("a thread failed:\n" + "\n".join(self._crashes))
        if waiting:
            raise HangError(f"{len(waiting)} threads wait at {self.now:.1f} s, as here:\n{where}")

    # ---- Turns -----------------------------------------------------------------------------------

    def resume(self, thread: Thread, number: int) -> None:
        """Let a thread run next, unless it was woken since this was asked for."""
        if thread.num_wakes == number and thread in self._threads:
            thread.num_wakes += 1
            self._next = thread

    def run_thread(self, thread: Thread) -> Thread | None:
        """Run a thread to its end; return which one runs next."""
        try:
            if not thread.owner.is_dead:
                thread.function()
        except Killed:
            pass
        except Exception:  # others, as Ctrl-C, are raised by the caller's `run`
            self._crashes.append(traceback.format_exc())
        self._threads.pop(thread)
        self._num_awaited -= thread.is_awaited
        return self._pick()

    def _pick(self) -> Thread | None:
        """Turn the clock until a thread can run; None if none can any more."""
        self._next = None
        while self._next is None:
            if not self._num_awaited or not self._events or self._events[0][0] > self._until_s:
                self._is_over = True
            self._is_over |= bool(self._crashes)
            if self._is_over:
                return None
            self.now, _, _, act = heapq.heappop(self._events)
            act()
        return self._next

    def _switch_to(self, thread: Thread | None) -> None:
        """Let the calling thread wait, and another one run, which has begun or not."""
        if thread is not None and thread:
            thread.switch()
        else:
            self.caller.switch(thread)


class _Followed:
    """Steps that run without a thread."""

    def __init__(self, scheduler: Scheduler, owner: Any, steps: Steps[None]) -> None:
        self._scheduler, self._owner, self._steps = scheduler, owner, steps
        self._num_wakes = 0
        self._signal: Signal | None = None

    def wake(self, after_s: float = 0.0) -> None:
        number = self._num_wakes
        self._scheduler.after(after_s, lambda: self._resume(number))

    def _resume(self, number: int) -> None:
        if self._num_wakes == number:
            self._num_wakes += 1
            if self._signal is not None:
                self._signal.waiters.pop(self, None)
            self.run()

    def run(self) -> None:
        try:
            self._scheduler.check_lives(self._owner)
            self._signal, within_s = next(self._steps, (None, None))
        except Killed:
            return
        if self._signal is not None:
            self._signal.waiters[self] = None
        if within_s is not None:
            self.wake(within_s)


def current_owner() -> Any:
    """The process of the calling thread; None outside of all."""
    return getattr(getcurrent(), "owner", None)


def _stacks(threads: list[Thread]) -> str:
    """Where threads wait, of some that wait in different places."""
    texts: dict[str, list[str]] = {}
    for thread in threads:
        if thread.gr_frame is not None:
            text = "".join(traceback.format_stack(thread.gr_frame)[-10:-2])
            texts.setdefault(text, []).append(str(thread.owner))
    listed = [f"{', '.join(names[:4])} ({len(names)}):\n{text}" for text, names in texts.items()]
    return "\n".join(listed[:4])
