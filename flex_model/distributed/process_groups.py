"""Private process groups, so that the user's groups are never used, aborted or destroyed.

FlexModels over the same ranks share a group; the last ``PrivateGroup.release`` frees it. The groups
are made without torch's registry: only their members take part, and a name is never used twice, so
a freed group can't collide with a later one.
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
from typing import Any, Protocol

import torch.distributed as dist

from flex_model import _C
from flex_model.distributed import page_locks
from flex_model.distributed.hosts import Hosts, Settings, connect
from flex_model.distributed.page_locks import PageLocks
from flex_model.distributed.polling import sleeps
from flex_model.distributed.processes import Processes
from flex_model.errors import HookError, see
from flex_model.integrations.torch_private import default_store

# We poll with our own deadline. The backend's is later and ends the work of an abandoned wait,
# which otherwise the destructor would join without end.
_BACKEND_SLACK_S = 5.0
_CHECK_S = 0.1  # between checks whether the awaited processes live

_broken: list[Any] = []  # backends with unfinished work: never destroyed while the process runs
_groups: dict[tuple[tuple[int, ...], int], PrivateGroup] = {}
_spares: list[_Connection] = []  # at most one
_acquired: Counter[tuple[int, ...]] = Counter()  # requests by ranks: the same on all members


class Watcher(Protocol):
    """Looks after the long waits of a group."""

    def compare(self, waited_s: float) -> None:
        """Raise if a rank may never arrive."""


@dataclass
class PrivateGroup:
    """A private group: the global ranks of transfers, their backend, store and hosts.

    Attributes:
        rank: This process's index.
        backend: A ProcessGroupGloo, whose methods torch's stubs leave out.
        store: Shared by the members.
        hosts: The hosts of the ranks, and the memory that they share.
        leaders: With several hosts, on the first rank of each: the group of these ranks.
        number: Distinguishes groups of the same ranks; the same on all members.
        notices: This rank's published notices: of each FlexModel (by its number among those of
            these ranks), and of the current run.
        locks: The page locks of other ranks' memory that is mapped with the group.
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
    notices: dict[str, str] = field(default_factory=dict)
    locks: PageLocks = field(default_factory=PageLocks)
    pid: int = field(default_factory=os.getpid)  # the process that made the group
    _watcher: Watcher | None = None  # as shared memory has it
    _position: str | None = None
    _timeout_s: float | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def name_of(self, rank: int, position: str = "") -> str:
        """Return the name of a rank for messages, with the position at which it waits."""
        last = f"; last seen waiting at: {position}" if position else ""
        return f"rank {rank} (global rank {self.ranks[rank]}{last})"

    def publish(self, what: str, notice: str) -> None:
        """Publish a notice of this rank, a JSON text, for others to read while they wait. Local.
        There is room for about 500 bytes.
        """
        self.notices[what] = notice
        board = ", ".join([f'"{name}": {text}' for name, text in self.notices.items()])
        board = f"{{{board}}}"
        if self.hosts.here is not None and self.hosts.is_one:
            self.hosts.here.publish(board)
        else:
            self.store.set(f"notices/{self.rank}", board)

    def published(self, what: str, rank: int) -> Any:
        """Read a rank's notice; empty if it has none, None if it can't be read. Local."""
        if self.hosts.here is not None and self.hosts.is_one:
            board = self.hosts.here.published(rank)
            if board is None:  # it is being written
                return None
        else:
            place = f"notices/{rank}"
            board = self.store.get(place).decode() if self.store.check([place]) else ""
        try:
            notices = json.loads(board or "{}")
        except ValueError:  # too long, so it was cut
            return None
        return notices.get(what, "")

    def prepare_wait(self, watcher: Watcher, where: str, timeout_s: float) -> None:
        """Set what shared memory needs for a wait of this rank: whose ``compare`` it calls in a
        long one, the rank's position, and the deadline. Local.
        """
        here = self.hosts.here
        if here is None:
            return
        if self._watcher is not watcher:
            self._watcher = watcher
            here.set_watch(watcher.compare)
        if self._position != where:
            self._position = where
            here.set_position(where)
        if self._timeout_s != timeout_s:
            self._timeout_s = timeout_s
            here.set_timeout(timeout_s)

    def forget(self, watcher: Watcher) -> None:
        """Don't call the watcher in long waits any more. Local."""
        if self._watcher is watcher and self.hosts.here is not None:
            self._watcher = None
            self.hosts.here.set_watch(None)

    def retain(self) -> None:
        """Count a user more. Local."""
        self.num_users += 1

    def release(self) -> None:
        """Release the group, which is freed with its last user. Local; does nothing in a forked
        child.
        """
        if self.pid != os.getpid():
            return
        self.num_users -= 1
        if self.num_users <= 0:
            self.locks.release()
            _groups.pop((self.ranks, self.number), None)
        if not _groups:
            page_locks.of_arena.release()
            _C.close_arena()

    def abort(self, reason: str) -> None:
        """Mark the group as unusable, and stop its work as far as gloo can be stopped."""
        if self.broken is not None:
            return
        self.broken = reason
        if self.hosts.here is not None:
            self.hosts.here.abort(reason)
        _broken.append(self.backend)
        self.backend.abort()
        if self.leaders is not None:
            self.leaders.abort(reason)


def acquire(
    ranks: tuple[int, ...], timeout_s: float, device: str = "cpu"
) -> tuple[PrivateGroup, int]:
    """Return the shared private group of these global ranks, and the number of this request, the
    same on all of them. ``device`` is the type of this rank's device. Collective over them.

    Raises:
        HookError: some of the ranks did not arrive within ``timeout_s`` seconds; the message names
            them.
    """
    _acquired[ranks] += 1
    number = _acquired[ranks]
    path = ("flex_model/" + hashlib.sha1(repr(ranks).encode()).hexdigest()[:16],)
    me = ranks.index(dist.get_rank())
    settings = Settings.now()
    # FlexModels are collected at different times on different ranks, so one rank may have freed a
    # group that another still has.
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
        kept.retain()  # FlexModels may be collected during the rendezvous
        held = kept.number
    with Processes(default_store(), ranks) as processes:
        rendezvous = _Rendezvous(path, ranks, me, timeout_s, processes)
        try:
            offers = rendezvous.held_by_all(number, held)
        except HookError:
            _acquired[ranks] -= (
                1  # as on the ranks that did not arrive: the next try matches theirs
            )
            if held:
                _groups[ranks, held].release()
            raise
        if held and set(offers) == {held}:
            return _groups[ranks, held], number
        if held:
            _groups[ranks, held].release()
        group = _make(rendezvous.of(str(number)), number, settings, device)
        _groups[ranks, number] = group
    group.retain()
    return group, number


class _Connection:
    """A connection to the store beside torch's own, because a call that waits blocks the others of
    its connection. One is kept for the next group, since a new one may take seconds: torch looks up
    the names of both ends, and a name server may be slow to fail.
    """

    def __init__(self) -> None:
        self._world = dist.group.WORLD
        self.store = default_store().clone()

    @staticmethod
    def take() -> _Connection:
        spare = _spares.pop() if _spares else None
        return _Connection() if spare is None or spare._world is not dist.group.WORLD else spare

    def give_back(self) -> None:
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0":  # else gloo continues to use it
            _spares[:] = [self]


def leave_to_parent(owned: object) -> None:
    """In a forked child, keep its parent's objects alive for good, even past the interpreter's end:
    their destructors wait for threads that the child does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def _forked() -> None:
    leave_to_parent([*_groups.values(), *_broken, *_spares])
    _groups.clear()
    _spares.clear()


os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True)
class _Rendezvous:
    """A rendezvous of ranks by a store, in which each waits for the texts of all.

    Attributes:
        path: The prefix of its keys in the store.
    """

    path: tuple[str, ...]
    ranks: tuple[int, ...]
    me: int
    timeout_s: float
    processes: Processes

    def of(self, place: str) -> _Rendezvous:
        """Return a rendezvous of the same ranks at a sub-prefix of the store."""
        return replace(self, path=(*self.path, place))

    @functools.cached_property
    def store(self) -> dist.Store:
        return self._place_in(default_store())

    def _place_in(self, store: dist.Store) -> dist.Store:
        for part in self.path:
            store = dist.PrefixStore(part, store)
        return store

    def held_by_all(self, number: int, held: int) -> list[int]:
        """Gather the number of the group that each member holds (0: none). Gloo alone would wait
        without a message for a rank that does not arrive.
        """
        texts = self.all_gather_strings(f"meeting/{number}", str(held))
        # All have left the rendezvous before, since they are at this one.
        self.store.delete_key(f"meeting/{number - 1}/{self.me}")
        return [int(text) for text in texts]

    def all_gather_strings(self, place: str, text: str) -> list[str]:
        """Gather a text of every rank by keys of the store; returns when all have set theirs."""
        texts = {self.me: text}
        start = time.monotonic()
        check_at, pause_s = start + _CHECK_S, 0.001
        try:
            self.store.set(f"{place}/{self.me}", text)
            while True:
                now = time.monotonic()
                ended = self.processes.ended(self._missing(texts)) if now > check_at else []
                check_at = now + _CHECK_S if now > check_at else check_at
                for rank in range(len(self.ranks)):  # an ended rank may have set its text before
                    if rank not in texts and self.store.check([f"{place}/{rank}"]):
                        texts[rank] = self.store.get(f"{place}/{rank}").decode()
                missing = self._missing(texts)
                if not missing:
                    return [texts[rank] for rank in range(len(self.ranks))]
                self.check_alive(set(ended) & set(missing))
                if now > start + self.timeout_s:
                    self.store.delete_key(f"{place}/{self.me}")
                    raise self.failure(
                        f"global ranks {missing} did not arrive within {self.timeout_s:g} s; every "
                        "rank of the model must wrap it, and make the same calls in the same order"
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.05)
        except HookError:
            raise
        except RuntimeError as error:
            self.check_alive(self.processes.ended())
            raise self.failure(f"the store by which they connect is lost: {error}") from error

    def backend(self) -> Any:
        """Make a ProcessGroupGloo of the ranks. Its constructor waits for them without
        interruption, so it runs in another thread, with its own connection to the store.
        """
        self.processes.ended()  # starts to watch all of them
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
        check_at = time.monotonic() + _CHECK_S
        for _ in sleeps(made.done, 5e-5, 0.002):
            if time.monotonic() > check_at:
                self.check_alive(self.processes.ended())
                check_at = time.monotonic() + _CHECK_S
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
    """Make a new group. Collective over its ranks."""
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
    # A rank may drop its backend as soon as it is made, while others still connect to it.
    rendezvous.all_gather_strings("made", "")
    return PrivateGroup(ranks, me, backend, store, hosts, leaders, number, timeout_s, world)


def num_groups() -> int:
    """The number of private groups that this process holds."""
    return len(_groups)
