"""Private process groups: ours alone, so that the user's are never mixed with, aborted or
destroyed.

Wraps over the same ranks share a group; the last ``release`` frees it. The groups are made without
torch's registry: only their members take part, and a name is never used twice, so a freed group
leaves nothing behind to collide with.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flex_model import _C
from flex_model.distributed import page_locks
from flex_model.distributed.hosts import Hosts, Settings, connect
from flex_model.distributed.page_locks import PageLocks
from flex_model.distributed.polling import sleeps
from flex_model.distributed.processes import Processes
from flex_model.errors import HookError, see

# We poll with our own deadline. The backend's comes after it and ends what an abandoned wait left
# behind, which otherwise the destructor would join for ever.
_BACKEND_SLACK_S = 5.0
_LOOK_AROUND_S = 0.1  # between looks at whether those that are waited for live

_broken: list[Any] = []  # backends that have work under way: never destroyed while we run
_groups: dict[tuple[tuple[int, ...], int], PrivateGroup] = {}
_acquired: Counter[tuple[int, ...]] = Counter()  # how often, by ranks: the same on all members


@dataclass
class PrivateGroup:
    """The ranks (global) that a wrap's transfers are among.

    Attributes:
        rank: This process's place.
        backend: A ProcessGroupGloo, whose methods torch's stubs leave out.
        store: Shared by the members.
        hosts: Which of them share memory.
        leaders: With several hosts, on the first rank of each: a group of these.
        number: Of groups with these ranks, by which the members tell them apart.
        notices: What this rank put up: of each wrap (its number among those of these ranks), and of
            the run that goes on.
        watcher: Who is asked by the shared memory in a long wait of this rank.
        told: What it was told last of this rank's waits: where the rank is, and for how long it
            waits.
        locks: Of the memory of others that is mapped with the group.
    """

    ranks: tuple[int, ...]
    rank: int
    backend: Any
    store: dist.Store
    hosts: Hosts
    leaders: PrivateGroup | None
    number: int
    timeout_s: float
    world: dist.ProcessGroup | None  # torch.distributed may be destroyed and initialised again
    num_users: int = 0
    broken: str | None = None  # why it can't be used any more
    notices: dict[str, Any] = field(default_factory=dict)
    watcher: Any = None
    told: tuple[str, float] | None = None
    locks: PageLocks = field(default_factory=PageLocks)
    pid: int = field(default_factory=os.getpid)  # of the process that made it

    @property
    def size(self) -> int:
        return len(self.ranks)

    def publish(self, what: str, notice: Any) -> None:
        """Put up a notice of this rank's, which JSON can hold, for others to read while they wait.
        Local. A short one: there is room for about 500 bytes.
        """
        self.notices[what] = notice
        board = json.dumps(self.notices)
        if self.hosts.here is not None and self.hosts.is_one:
            self.hosts.here.publish(board)
        else:
            self.store.set(f"notices/{self.rank}", board)

    def published(self, what: str, rank: int) -> Any:
        """What a rank put up; None if that can't be told. Local."""
        if self.hosts.here is not None and self.hosts.is_one:
            board = self.hosts.here.published(rank)
        else:
            place = f"notices/{rank}"
            board = self.store.get(place).decode() if self.store.check([place]) else ""
        try:
            notices = json.loads(board or "{}")
        except ValueError:  # read while it was written, or too long
            return None
        return notices.get(what, "")


def acquire(
    ranks: tuple[int, ...], timeout_s: float, device: str = "cpu"
) -> tuple[PrivateGroup, int]:
    """The shared private group of these global ranks, and the number of this request for it, the
    same on all of them. ``device`` is the kind of this rank's. Collective over them.

    Raises:
        HookError: some of the ranks did not come within ``timeout_s`` seconds; the message names
            them.
    """
    _acquired[ranks] += 1
    number = _acquired[ranks]
    path = ("flex_model/" + hashlib.sha1(repr(ranks).encode()).hexdigest()[:16],)
    me = ranks.index(dist.get_rank())
    settings = Settings.now()
    # Wrappers are collected at different times on different ranks, so what one rank still has
    # another may have freed.
    kept = max(
        (
            group
            for group in list(_groups.values())
            if group.ranks == ranks
            and group.broken is None
            and group.timeout_s >= timeout_s
            and group.world is dist.group.WORLD
            and group.hosts.settings == settings
            and group.hosts.devices[me] == device
        ),
        key=lambda group: group.number,
        default=None,
    )
    held = 0
    if kept is not None and (ranks, kept.number) in _groups:
        kept.num_users += 1  # wrappers may be collected while the ranks meet, too
        held = kept.number
    with Processes(dist.distributed_c10d._get_default_store(), ranks) as processes:
        rendezvous = _Rendezvous(path, ranks, me, timeout_s, processes)
        try:
            offers = rendezvous.held_by_all(number, held)
        except HookError:
            _acquired[ranks] -= 1  # as on the ranks that did not come: the next try meets them
            if held:
                release(_groups[ranks, held])
            raise
        if held and set(offers) == {held}:
            return _groups[ranks, held], number
        if held:
            release(_groups[ranks, held])
        group = _make(rendezvous.of(str(number)), number, settings, device)
        _groups[ranks, number] = group
    group.num_users += 1
    return group, number


class _Connection:
    """To the store by which ranks meet, beside torch's own: a call that waits keeps the others of
    its connection waiting. One is kept for the next group, since a new one may take seconds: torch
    asks for the names of both ends, and a name server may be slow to say that it knows none.
    """

    _spare: _Connection | None = None

    def __init__(self) -> None:
        self._world = dist.group.WORLD
        self.store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    @staticmethod
    def take() -> _Connection:
        spare, _Connection._spare = _Connection._spare, None
        return _Connection() if spare is None or spare._world is not dist.group.WORLD else spare

    def give_back(self) -> None:
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0":  # else gloo goes on to use it
            _Connection._spare = self


def leave_to_parent(owned: object) -> None:
    """In a forked child: what is its parent's is never destroyed here, where the threads that
    destructors wait for are not; not even by the interpreter at its end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def _forked() -> None:
    leave_to_parent([*_groups.values(), *_broken, _Connection._spare])
    _groups.clear()
    _Connection._spare = None


os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True)
class _Rendezvous:
    """Ranks that connect: by a store, each waiting for the words of all.

    Attributes:
        path: Their place in the store.
    """

    path: tuple[str, ...]
    ranks: tuple[int, ...]
    me: int
    timeout_s: float
    processes: Processes

    def of(self, place: str) -> _Rendezvous:
        """The same ranks at another place of the store."""
        return replace(self, path=(*self.path, place))

    @functools.cached_property
    def store(self) -> dist.Store:
        return self._place_in(dist.distributed_c10d._get_default_store())

    def _place_in(self, store: dist.Store) -> dist.Store:
        for part in self.path:
            store = dist.PrefixStore(part, store)
        return store

    def held_by_all(self, number: int, held: int) -> list[int]:
        """What each member offers to share (0: nothing). Gloo alone would wait in silence for who
        does not come.
        """
        texts = self.all_gather_strings(f"meeting/{number}", str(held))
        # All have left the meeting before, since they are at this one.
        self.store.delete_key(f"meeting/{number - 1}/{self.me}")
        return [int(text) for text in texts]

    def all_gather_strings(self, place: str, text: str) -> list[str]:
        """The word of every rank, when all have said theirs at this place of the store."""
        texts = {self.me: text}
        start = time.monotonic()
        look_at, pause_s = start + _LOOK_AROUND_S, 0.001
        try:
            self.store.set(f"{place}/{self.me}", text)
            while True:
                now = time.monotonic()
                ended = self.processes.ended(self._missing(texts)) if now > look_at else []
                look_at = now + _LOOK_AROUND_S if now > look_at else look_at
                for rank in range(len(self.ranks)):  # who has ended may have said his word before
                    if rank not in texts and self.store.check([f"{place}/{rank}"]):
                        texts[rank] = self.store.get(f"{place}/{rank}").decode()
                missing = self._missing(texts)
                if not missing:
                    return [texts[rank] for rank in range(len(self.ranks))]
                self.check_alive(set(ended) & set(missing))
                if now > start + self.timeout_s:
                    self.store.delete_key(f"{place}/{self.me}")
                    raise self.failure(
                        f"global ranks {missing} did not come within {self.timeout_s:g} s; every "
                        "rank of the model must wrap it, and make the same calls in the same order"
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.05)
        except HookError:
            raise
        except RuntimeError as error:
            self.check_alive(self.processes.ended())
            raise self.failure(f"the store by which they meet is lost: {error}") from error

    def backend(self) -> Any:
        """A ProcessGroupGloo of the ranks. Its constructor waits for them, deaf to everything, so
        another thread waits there, with a connection to the store of its own.
        """
        self.processes.ended()  # watches them all
        connection, made = _Connection.take(), Future[Any]()
        store = self._place_in(connection.store)
        limit = timedelta(seconds=self.timeout_s + _BACKEND_SLACK_S)

        def make() -> None:
            try:
                made.set_result(dist.ProcessGroupGloo(store, self.me, len(self.ranks), limit))
                connection.give_back()
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, name="flex_model connects", daemon=True).start()
        look_at = time.monotonic() + _LOOK_AROUND_S
        for _ in sleeps(made.done, 5e-5, 0.002):
            if time.monotonic() > look_at:
                self.check_alive(self.processes.ended())
                look_at = time.monotonic() + _LOOK_AROUND_S
        try:
            return made.result()
        except RuntimeError as error:
            self.check_alive(self.processes.ended())
            raise self.failure(f"{error}") from error

    def check_alive(self, ended: Iterable[int]) -> None:
        if ended:
            raise self.failure(f"global ranks {sorted(ended)} ended or died")

    def failure(self, what: str) -> HookError:
        return HookError(
            f"connecting the ranks {list(self.ranks)} of a model: {what} "
            f"({see('a-rank-is-missing')})"
        )

    def _missing(self, texts: dict[int, str]) -> list[int]:
        return [self.ranks[rank] for rank in range(len(self.ranks)) if rank not in texts]


def _make(rendezvous: _Rendezvous, number: int, settings: Settings, device: str) -> PrivateGroup:
    """A new group. Collective over its ranks."""
    ranks, me, timeout_s = rendezvous.ranks, rendezvous.me, rendezvous.timeout_s
    store, world = rendezvous.store, dist.group.WORLD
    backend = rendezvous.backend()
    hosts = connect(me, settings, device, rendezvous.all_gather_strings)
    leaders = None
    if me in hosts.leaders and not hosts.is_one:
        place, globals_ = hosts.leaders.index(me), tuple(ranks[r] for r in hosts.leaders)
        leaders_rendezvous = replace(rendezvous.of("leaders"), ranks=globals_, me=place)
        leaders = PrivateGroup(
            globals_,
            place,
            leaders_rendezvous.backend(),
            leaders_rendezvous.store,
            Hosts([hosts.names[r] for r in hosts.leaders], None, settings, []),
            None,
            number,
            timeout_s,
            world,
        )
    # Whose backend is made may drop it at once, while others still connect to it.
    rendezvous.all_gather_strings("made", "")
    return PrivateGroup(ranks, me, backend, store, hosts, leaders, number, timeout_s, world)


def release(group: PrivateGroup) -> None:
    """Give the group back; freed when nobody uses it. Local. Nothing in a forked child."""
    if group.pid != os.getpid():
        return
    group.num_users -= 1
    if group.num_users <= 0:
        group.locks.release()
        _groups.pop((group.ranks, group.number), None)
    if not _groups:
        page_locks.of_arena.release()
        _C.close_arena()


def abort(group: PrivateGroup, reason: str) -> None:
    """Mark a group as unusable for good, and stop its work as far as gloo can be stopped."""
    if group.broken is not None:
        return
    group.broken = reason
    if group.hosts.here is not None:
        group.hosts.here.abort(reason)
    _broken.append(group.backend)
    group.backend.abort()
    if group.leaders is not None:
        abort(group.leaders, reason)


def num_groups() -> int:
    """How many private groups this process holds."""
    return len(_groups)
