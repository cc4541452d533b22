"""Calls of torch's store that end, also where its host can't be reached any more.

A call of a TCPStore waits for the answer without a deadline, and does not handle Ctrl-C. So it runs
in a thread of its own, for which the caller waits as long as it likes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_TELL_S = 2.0  # how long a rank that fails waits for the store, to ask or tell the others


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


class LostStoreError(RuntimeError):
    """The store is lost, or did not answer; the message names its host."""


class AnswerLimit:
    """Limits how long calls of a store are waited for.

    Attributes:
        is_silent: Whether the store has left a call without an answer: then none is made any more.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self._until = math.inf

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Inside, a wait of so many seconds, each call ends with it, or two seconds after it began:
        a store that is slow must not hold up the error of the wait.
        """
        before, self._until = self._until, time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = before

    def seconds(self, limit_s: float) -> float:
        """The most seconds for a call that begins now."""
        return min(limit_s, max(self._until - time.monotonic(), _TELL_S))

    def note_silence(self) -> None:
        """Note that a call was not answered."""
        self.is_silent = True


class BoundedStore:
    """A store that answers each call within ``limit_s`` seconds, or none from then on.

    Args:
        answer_limit: Shared by all that ask the same store for one purpose, so that they wait
            once for one that is silent. Default: its own.

    Raises:
        LostStoreError: the store is lost, or did not answer.
    """

    def __init__(
        self, store: dist.Store, limit_s: float, answer_limit: AnswerLimit | None = None
    ) -> None:
        self._store: Any = store  # torch's stubs leave `append` out
        self._limit_s = limit_s
        self.answer_limit = answer_limit or AnswerLimit()

    @property
    def is_silent(self) -> bool:
        """Whether it left a call without an answer."""
        return self.answer_limit.is_silent

    def call(self, function: Callable[[Any], T]) -> T:
        """Return ``function(store)``."""
        limit_s = self._limit_s
        if not self.is_silent:
            limit_s = self.answer_limit.seconds(limit_s)
            answer = in_thread(lambda: function(self._store))
            if is_done(answer, limit_s):
                try:
                    return answer.result()
                except RuntimeError as error:
                    raise self.lost(error) from error
            self.answer_limit.note_silence()
        raise self.unanswered(limit_s)

    def unanswered(self, seconds: float) -> LostStoreError:
        """Return the error of a call that was not answered in so many seconds."""
        return LostStoreError(f"{name_of(self._store)} did not answer in {round(seconds, 1):g} s")

    def lost(self, error: RuntimeError) -> LostStoreError:
        """Return what a call of the store means that has failed with this error."""
        if isinstance(error, LostStoreError):
            return error
        return LostStoreError(f"{name_of(self._store)} is lost: {error}")

    def tell(self, key: str, value: str) -> bool:
        """Set a key that has no value, for other ranks to see that this one fails; return whether
        the store has answered. It raises nothing: it must neither hide the error nor hold it up.
        """
        if self.is_silent:
            return False
        answer = in_thread(lambda: self._store.compare_set(key, "", value))
        return is_done(answer, min(self._limit_s, _TELL_S))

    def set(self, key: str, value: str) -> None:
        self.call(lambda store: store.set(key, value))

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


def name_of(store: Any) -> str:
    """Return what messages call a store, with the address of the host that has it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    at = f" at {host}:{port}" if isinstance(host, str) else ""  # other stores have no host
    return f"the store of torch.distributed{at}"
