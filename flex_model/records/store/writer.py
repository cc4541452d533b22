"""A thread that writes what a run submits, in order, while the run continues."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

_POLL_S = 0.5  # how often a wait wakes up, so that Ctrl-C is handled within a second


class Writer:
    """Runs tasks one after another. After one that failed, no other is started.

    Pending tasks are bounded in bytes: ``reserve`` blocks until there is room, and nothing is
    dropped. The thread starts with the first task; a forked child has none.

    Args:
        max_bytes: The most bytes that may be held. One batch that is larger is held alone.

    Attributes:
        error: The exception that a task raised.
        held_bytes: The bytes reserved and not released yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self.error: Exception | None = None
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._tasks: deque[tuple[Callable[[], None], int]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_child(self) -> bool:
        """Whether this process was forked from the writer's."""
        return os.getpid() != self._pid

    def reserve(self, num_bytes: int) -> None:
        """Wait until there is room for so many bytes, or no task left that could free some."""
        with self._changed:
            while (
                self.held_bytes + num_bytes > self._max_bytes
                and (self._tasks or self._is_busy)
                and not self._is_closed
            ):
                self._changed.wait(_POLL_S)
            self.held_bytes += num_bytes

    def submit(self, task: Callable[[], None], num_bytes: int = 0) -> None:
        """Run a task after all that were submitted before, and release so many bytes then."""
        with self._changed:
            self._tasks.append((task, num_bytes))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="flex_model store", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter exits: run it in this thread
                    self._do(*self._tasks.popleft())
                    return
                self._thread = thread
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all submitted tasks ended, or were dropped after an error."""
        with self._changed:
            while (self._tasks or self._is_busy) and not self._is_closed:
                self._changed.wait(_POLL_S)

    def close(self) -> None:
        """End the thread and drop the tasks that it has not started. Not for a forked child."""
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                task, num_bytes = self._tasks.popleft()
                self._is_busy = True
            self._do(task, num_bytes)
            del task  # and the tensors that it holds
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _do(self, task: Callable[[], None], num_bytes: int) -> None:
        try:
            if self.error is None:
                task()
        except Exception as error:
            self.error = error
        with self._changed:
            self.held_bytes -= num_bytes
