"""Calls of torch's store that end, also where its host can't be reached any more.

A call of a TCPStore waits for the answer without a deadline, and does not handle Ctrl-C. So it runs
in a thread of its own, for which the caller waits as long as it likes.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in another thread, which is left behind if it never returns."""
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="flex_model asks the store", daemon=True).start()
    return done


def is_done(future: Future[Any], within_s: float) -> bool:
    """Wait for the future, at most so many seconds; Ctrl-C is handled."""
    return bool(concurrent.futures.wait([future], within_s).done)


class BoundedStore:
    """A store that answers each call within ``limit_s`` seconds, or none from then on.

    Attributes:
        is_silent: Whether it left a call without an answer.

    Raises:
        RuntimeError: the store is lost, or did not answer.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self._store: Any = store  # torch's stubs leave `append` out
        self._limit_s = limit_s
        self.is_silent = False

    def call(self, function: Callable[[Any], T]) -> T:
        """Return ``function(store)``."""
        if not self.is_silent:
            answer = in_thread(lambda: function(self._store))
            if is_done(answer, self._limit_s):
                return answer.result()
            self.is_silent = True
        raise RuntimeError(f"the store of torch.distributed did not answer in {self._limit_s:g} s")

    def set(self, key: str, value: str) -> None:
        self.call(lambda store: store.set(key, value))

    def set_if_absent(self, key: str, value: str) -> None:
        self.call(lambda store: store.compare_set(key, "", value))

    def append(self, key: str, value: str) -> None:
        self.call(lambda store: store.append(key, value))

    def next_number(self, key: str) -> int:
        """Return how often this was called with the key, by anyone."""
        return self.call(lambda store: store.add(key, 1))

    def read(self, key: str) -> str | None:
        """Return the value of a key; None if there is none."""
        return self.call(lambda store: read(store, key))


def read(store: Any, key: str) -> str | None:
    """Return the value of a key; None if there is none. One request, which does not wait."""
    absent = "no value"  # returned for a key without value; no value here is equal to it
    value = store.compare_set(key, absent, absent).decode()
    return None if value == absent else value
