"""The rendezvous of ranks by torch's store, before they have connections of their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch.distributed as dist

from flex_model.distributed import processes
from flex_model.distributed.bounded_store import AnswerLimit, BoundedStore, in_thread, is_done, read
from flex_model.distributed.polling import Looks, sleeps
from flex_model.distributed.roll_call import RollCall
from flex_model.errors import HookError, see, text_of
from flex_model.integrations.torch_private import default_store

# We wait with our own deadline. The backend's and the store's are later: they end what an abandoned
# wait left behind, which otherwise would be joined without end.
_SLACK_S = 5.0
_CHECK_S = 0.1  # between checks whether the awaited processes live
_READ_S = 1.0  # until a look at which ranks have come so far; the next ones are rarer
_LOOK_S = 1.0  # between looks whether another rank has failed, or asks
_POLL_S = 5e-4  # between looks at memory that another rank is about to make

T = TypeVar("T")

_spares: list[tuple[Any, Any]] = []  # at most one; see `_take_connection`


def _take_connection() -> tuple[Any, Any]:
    """Return the world, and a connection to its store beside torch's own, because a call that waits
    blocks the others of its connection. One is kept for the next wait, since a new one may take
    seconds: torch looks up the names of both ends, and a name server may be slow to fail.
    """
    with contextlib.suppress(IndexError):  # another thread may have taken it a moment ago
        world, store = _spares.pop()
        if world is dist.group.WORLD:
            return world, store
    return dist.group.WORLD, default_store().clone()


def close_connection() -> None:
    """Close the connection that is kept for the next wait. Local."""
    _spares.clear()


def kept_connections() -> list[Any]:
    """The connections that this process keeps."""
    return list(_spares)


@dataclass(frozen=True)
class Rendezvous:
    """A rendezvous of ranks by a store, in which each waits for the texts of all.

    Each rank appends its text to a log, and the log's order decides: the ranks have met as soon as
    all are in it. However many ranks there are, each makes four requests to the store: it appends,
    counts itself, waits until the last one has come, and reads; the last one ends the wait instead.

    Attributes:
        path: The prefix of its keys in the store.
        failures: The store in which a rank that fails reports why; None: none does. One
            for all that belongs to a group.
        answer_limit: With the store, of all rendezvous of the group together.
    """

    path: tuple[str, ...]
    ranks: tuple[int, ...]
    me: int
    timeout_s: float
    failures: BoundedStore | None = None
    answer_limit: AnswerLimit = field(default_factory=AnswerLimit)

    def of(self, place: str) -> Rendezvous:
        """Return a rendezvous of the same ranks at a sub-prefix of the store."""
        return replace(self, path=(*self.path, place))

    def of_group(self, number: int) -> Rendezvous:
        """Return the rendezvous by which the ranks make a group; a rank that fails reports it."""
        made = self.of(str(number))
        return replace(made, failures=made.bounded_store)

    @cached_property
    def store(self) -> dist.Store:
        return _place_in(default_store(), self.path)

    @cached_property
    def bounded_store(self) -> BoundedStore:
        """The store, for calls that end."""
        return BoundedStore(self.store, self.timeout_s, self.answer_limit)

    @cached_property
    def _roll_call(self) -> RollCall:
        return RollCall(self.bounded_store, self.me, len(self.ranks))

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks, which wait for this one, why it fails. Local."""
        what = str(error) if isinstance(error, HookError) else text_of(error)
        if self.failures is not None:
            self.failures.tell("broken", f"global rank {self.ranks[self.me]}: {what}")

    def _reported(self) -> str | None:
        return None if self.failures is None else self.failures.read("broken")

    def all_gather(self, place: str, text: str, stale: Sequence[str] = ()) -> list[str]:
        """Gather a text of every rank; returns when all have come, and forgets the ``stale``
        places, which all have left. Collective.

        Raises:
            HookError: some of the ranks did not come within ``timeout_s`` seconds, or ended; the
                message names them. Or the store is lost.
        """
        try:
            with self.answer_limit.within(self.timeout_s):
                texts = self._meet(place, text, stale)
        except HookError:
            raise
        except RuntimeError as error:
            self.check_alive(processes.ended(self.ranks))
            raise self._lost_store(error) from error
        return [texts[rank] or "" for rank in range(len(self.ranks))]

    def _meet(self, place: str, text: str, stale: Sequence[str]) -> dict[int, str | None]:
        limit = timedelta(seconds=self.timeout_s + _SLACK_S)

        has_come = threading.Event()

        def meet(store: Any) -> dict[int, str | None]:
            store.append(f"{place}/log", self._line(text))
            has_come.set()
            texts: dict[int, str | None] = {}
            # Who left and comes again counts twice, so the log decides.
            if store.add(f"{place}/count", 1) >= len(self.ranks):
                texts = self._parsed(read(store, f"{place}/log"))
            if self._are_all(texts):
                store.set(f"{place}/met", "")
            else:
                store.wait([f"{place}/met"], limit)
                texts = self._parsed(read(store, f"{place}/log"))
            if self._are_all(texts):
                keys = [f"{left}/{key}" for left in stale for key in ("log", "count", "met")]
                for key in keys[self.me :: len(self.ranks)]:
                    store.delete_key(key)
            return texts

        start = time.monotonic()
        read_at = start + _READ_S
        looks = Looks(_LOOK_S, _LOOK_S)
        met = self._in_thread(meet, keeps=True)
        try:
            while not is_done(met, _CHECK_S):
                now = time.monotonic()
                if looks.are_due(now - start, self.timeout_s):
                    self.look()
                if processes.ended(self.ranks) or now > min(read_at, start + self.timeout_s):
                    read_at = now + max(_READ_S, now - start)  # all read what all have written
                    texts = self._texts(place)
                    if self._are_all(texts):
                        return texts  # the last one may have ended before it set the key
                    if not has_come.is_set() and now > start + self.timeout_s:
                        raise self.bounded_store.unanswered(self.timeout_s)
                    self._check_absent(place, texts, start)
            texts = met.result()
            while not self._are_all(texts):  # one that left has set the key
                self._check_absent(place, texts, start)
                time.sleep(_CHECK_S)
                texts = self._texts(place)
            return texts
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(RuntimeError):  # the store is lost: nobody reads it
                self.bounded_store.append(f"{place}/log", self._line(None))
            raise
        finally:
            if not met.done():  # ends the thread, and makes the others look
                self.bounded_store.tell(f"{place}/met", "")

    def _line(self, text: str | None) -> str:
        """This rank's line of the log; None: it does not wait any more."""
        return json.dumps([self.me, text]) + "\n"

    def _texts(self, place: str) -> dict[int, str | None]:
        return self._parsed(self.bounded_store.read(f"{place}/log"))

    def _parsed(self, log: str | None) -> dict[int, str | None]:
        """Return the texts of the ranks that have come so far, None of those that have left again;
        all of them once all have come.
        """
        texts: dict[int, str | None] = {}
        for rank, text in self._lines(log):
            texts[rank] = text
            if self._are_all(texts):
                break  # whoever leaves after that has not seen it yet
        return texts

    @staticmethod
    def _lines(log: str | None) -> list[tuple[int, str | None]]:
        lines: list[tuple[int, str | None]] = json.loads(f"[{','.join((log or '').splitlines())}]")
        return lines

    def _are_all(self, texts: dict[int, str | None]) -> bool:
        return len(texts) == len(self.ranks) and None not in texts.values()

    def _check_absent(self, place: str, texts: dict[int, str | None], start: float) -> None:
        """Raise if a rank that has not come has ended, or it is too late; then leave the log."""
        others = set(range(len(self.ranks))) - {self.me}
        absent = [rank for rank in sorted(others) if texts.get(rank) is None]
        ended = processes.ended(self.ranks[rank] for rank in absent)
        if not ended and time.monotonic() < start + self.timeout_s:
            return
        self.bounded_store.append(f"{place}/log", self._line(None))
        log = self.bounded_store.read(f"{place}/log")
        if not self._are_all(self._parsed(log)):
            self.check_alive(ended)
            left = [rank for rank in absent if rank in texts]
            raise self._nobody_comes(absent, left, self._waited_for(log))

    def _waited_for(self, log: str | None) -> set[int]:
        """Return the ranks that had not come when the first one left."""
        awaited = set(range(len(self.ranks)))
        for rank, text in self._lines(log):
            if text is None:
                break
            awaited.discard(rank)
        return awaited

    def _nobody_comes(self, absent: list[int], left: list[int], awaited: set[int]) -> HookError:
        missing = [self.ranks[rank] for rank in absent if rank not in left]
        whole = f"global ranks {missing} did not arrive within {self.timeout_s:g} s"
        if left:
            have_left = f"global ranks {[self.ranks[rank] for rank in left]} have waited, and left"
            late = [self.ranks[rank] for rank in sorted(awaited.difference(absent))]
            have_left += f" before global ranks {late} came" if late else ""
            whole = f"{whole} ({have_left})" if missing else have_left
        return self.failure(
            f"{whole}; every rank of the model must wrap it, and make the same calls in the same "
            "order"
        )

    def _in_thread(self, function: Callable[[dist.Store], T], keeps: bool) -> Future[T]:
        """Call a function that may wait long in another thread, with a connection to the store of
        its own, which is kept afterwards or belongs to what the function made.
        """

        def run() -> T:
            world, store = _take_connection()
            result = function(_place_in(store, self.path))
            if keeps:
                _spares[:] = [(world, store)]
            return result

        return in_thread(run)

    @cached_property
    def number(self) -> int:
        """Identifies the rendezvous on the host of its ranks: a hash of 63 bits."""
        digest = hashlib.sha1("/".join(self.path).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def poll(self, awaited: Callable[[], list[int]], what: str) -> None:
        """Poll until ``awaited()`` is empty: the ranks that have not shared ``what`` yet."""
        start = time.monotonic()
        check_at = start + _CHECK_S
        looks = Looks(_LOOK_S, _LOOK_S)
        with self.answer_limit.within(self.timeout_s):
            for _ in sleeps(lambda: not awaited(), _POLL_S, 10 * _POLL_S):
                now = time.monotonic()
                if now < check_at:
                    continue
                check_at = now + _CHECK_S
                self.check_alive(processes.ended(self.ranks))
                if looks.are_due(now - start, self.timeout_s):
                    self.look()
                if now > start + self.timeout_s:
                    missing = [self.ranks[rank] for rank in awaited()]
                    raise self.failure(
                        f"global ranks {missing} did not share {what} within {self.timeout_s:g} s"
                    )

    def backend(self) -> Any:
        """Make a ProcessGroupGloo of the ranks, whose constructor waits for all of them."""
        limit = timedelta(seconds=self.timeout_s + _SLACK_S)

        def make(store: dist.Store) -> Any:
            return dist.ProcessGroupGloo(store, self.me, len(self.ranks), limit)

        is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0"  # gloo continues to use it
        with self.answer_limit.within(self.timeout_s):
            start, looks = time.monotonic(), Looks(_LOOK_S, _LOOK_S)
            made = self._in_thread(make, keeps=not is_lazy)
            try:
                while not is_done(made, _CHECK_S):
                    self.check_alive(processes.ended(self.ranks))
                    waited_s = time.monotonic() - start
                    if looks.are_due(waited_s, self.timeout_s):
                        self.look()
                    if waited_s > self.timeout_s:
                        why = f"gloo did not connect the ranks within {self.timeout_s:g} s"
                        raise RuntimeError(why)
                return made.result()
            except HookError:
                raise
            except RuntimeError as error:
                self.check_alive(processes.ended(self.ranks))
                raise self._explained(f"{error}") from error

    def _explained(self, why: str) -> HookError:
        """Return why gloo has failed, with the ranks that are gone, or another rank's report."""
        try:
            found = self._roll_call.ask(self._reported)
        except RuntimeError as error:
            return self._lost_store(error)
        if isinstance(found, str):
            return HookError(found)
        ranks = [self.ranks[rank] for rank in found]
        return self.failure(
            f"global ranks {ranks} ended, or can't be reached: {why}" if ranks else why
        )

    def look(self) -> None:
        """Raise if another rank has reported why it failed; answer one that asks who lives."""
        reported = self._reported()
        if reported is not None:
            raise HookError(reported)
        self._roll_call.answer()

    def check_alive(self, ended: Iterable[int]) -> None:
        if ended:
            raise self.failure(f"global ranks {sorted(ended)} ended or died")

    def _lost_store(self, error: RuntimeError) -> HookError:
        lost = self.bounded_store.lost(error)
        return self.failure(f"global rank {self.ranks[self.me]} found that {lost}")

    def failure(self, what: str) -> HookError:
        return HookError(
            f"connecting the ranks {list(self.ranks)} of a model: {what} "
            f"({see('a-rank-is-missing')})"
        )


def _place_in(store: dist.Store, path: Sequence[str]) -> dist.Store:
    for part in path:
        store = dist.PrefixStore(part, store)
    return store
