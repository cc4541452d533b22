"""A thread that writes what a run hands over, in order, while the run goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

_LOOK_S = 0.5  # how often a wait looks up: Ctrl-C is heard within a second


class Writer:
    """Tasks are done one after the other. After one that failed, no other is begun.

    What waits is bounded in bytes: who hands over more is blocked until there is room, and nothing
    is dropped. The thread begins with the first task; a forked child has none.

    Args:
        max_bytes: That may be held. One batch that is larger is held alone.

    Attributes:
        error: What a task raised.
        held_bytes: Of what was reserved and is not released.
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
        """Wait until there is room for so many bytes, or nothing that could make room."""
        with self._changed:
            while (
                self.held_bytes + num_bytes > self._max_bytes
                and (self._tasks or self._is_busy)
                and not self._is_closed
            ):
                self._changed.wait(_LOOK_S)
            self.held_bytes += num_bytes

    def submit(self, task: Callable[[], None], num_bytes: int = 0) -> None:
        """Do this after all that was submitted before, and release so many bytes then."""
        with self._changed:
            self._tasks.append((task, num_bytes))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="flex_model store", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is ending: it is done here
                    self._do(*self._tasks.popleft())
                    return
                self._thread = thread
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all that was submitted is done, or was given up after an error."""
        with self._changed:
            while (self._tasks or self._is_busy) and not self._is_closed:
                self._changed.wait(_LOOK_S)

    def close(self) -> None:
        """End the thread; what it has not begun is given up. Not for a forked child."""
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
            del task  # with the tensors that it holds
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
