"""Private process groups: ours alone, so that the user's are never mixed with, aborted or
destroyed.

Wraps over the same ranks share a group; the last ``release`` frees it. The groups are made without
torch's registry: only their members take part, and a name is never used twice, so a freed group
leaves nothing behind to collide with.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flex_model import _C
from flex_model.distributed import page_locks
from flex_model.distributed.hosts import Hosts, Settings, connect
from flex_model.distributed.page_locks import PageLocks
from flex_model.errors import HookError

# We poll with our own deadline. The backend's comes after it and ends what an abandoned wait left
# behind, which otherwise the destructor would join for ever.
_BACKEND_SLACK_S = 5.0

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
        notices: What this rank put up, by the wrap (its number among those of these ranks).
        told: What the shared memory was told last of this rank's waits: where it is, for how long
            it waits, and whether it compares hooks meanwhile.
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
    notices: dict[int, str] = field(default_factory=dict)
    told: tuple[str, float, bool] | None = None
    locks: PageLocks = field(default_factory=PageLocks)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def publish(self, wrap: int, notice: str) -> None:
        """Put up a notice of this rank's about a wrap, for others to read while they wait. Local.
        A short one: there is room for about 500 bytes.
        """
        self.notices[wrap] = notice
        board = json.dumps(self.notices)
        if self.hosts.here is not None and self.hosts.is_one:
            self.hosts.here.publish(board)
        else:
            self.store.set(f"notices/{self.rank}", board)

    def published(self, wrap: int, rank: int) -> str | None:
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
        return notices.get(str(wrap), "")


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
    name = hashlib.sha1(repr(ranks).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"flex_model/{name}", dist.distributed_c10d._get_default_store())
    me = ranks.index(dist.get_rank())
    settings = Settings.now()
    # Wrappers are collected at different times on different ranks, so what one rank still has
    # another may have freed.
    held = max(
        (
            group.number
            for group in _groups.values()
            if group.ranks == ranks
            and group.broken is None
            and group.timeout_s >= timeout_s
            and group.world is dist.group.WORLD
            and group.hosts.settings == settings
            and group.hosts.devices[me] == device
        ),
        default=0,
    )
    try:
        offers = _meet(store, ranks, me, number, held, timeout_s)
    except HookError:
        _acquired[ranks] -= 1  # as on the ranks that did not come: the next try meets them
        raise
    if held and set(offers) == {held}:
        group = _groups[ranks, held]
    else:
        store = dist.PrefixStore(str(number), store)
        group = _make(store, ranks, me, number, settings, device, timeout_s)
        _groups[ranks, number] = group
    group.num_users += 1
    return group, number


def _make(
    store: dist.Store,
    ranks: tuple[int, ...],
    me: int,
    number: int,
    settings: Settings,
    device: str,
    timeout_s: float,
) -> PrivateGroup:
    """A new group. Collective over its ranks."""

    def ask(place: str, word: str) -> list[str]:
        return _gather_words(store, place, word, ranks, me, timeout_s)

    backend = _backend(store, me, len(ranks), timeout_s)
    hosts = connect(me, settings, device, ask)
    leaders = None
    if me in hosts.leaders and not hosts.is_one:
        of_leaders = dist.PrefixStore("leaders", store)
        place, globals_ = hosts.leaders.index(me), tuple(ranks[r] for r in hosts.leaders)
        leaders = PrivateGroup(
            globals_,
            place,
            _backend(of_leaders, place, len(globals_), timeout_s),
            of_leaders,
            Hosts([hosts.names[r] for r in hosts.leaders], None, settings, []),
            None,
            number,
            timeout_s,
            dist.group.WORLD,
        )
    # Whose backend is made may drop it at once, while others still connect to it.
    ask("made", "")
    return PrivateGroup(
        ranks, me, backend, store, hosts, leaders, number, timeout_s, dist.group.WORLD
    )


def _backend(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s + _BACKEND_SLACK_S))


def _meet(
    store: dist.Store, ranks: tuple[int, ...], me: int, number: int, held: int, timeout_s: float
) -> list[int]:
    """What each member offers to share (0: nothing). Gloo alone would wait in silence for who does
    not come.
    """

    words = _gather_words(store, f"meeting/{number}", str(held), ranks, me, timeout_s)
    # All have left the meeting before, since they are at this one.
    store.delete_key(f"meeting/{number - 1}/{me}")
    return [int(word) for word in words]


def _gather_words(
    store: dist.Store, place: str, word: str, ranks: tuple[int, ...], me: int, timeout_s: float
) -> list[str]:
    """The word of every rank, when all have said theirs at this place of the store."""
    store.set(f"{place}/{me}", word)
    words = {me: word}
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while len(words) < len(ranks):
        for rank in range(len(ranks)):
            if rank not in words and store.check([f"{place}/{rank}"]):
                words[rank] = store.get(f"{place}/{rank}").decode()
        missing = [ranks[rank] for rank in range(len(ranks)) if rank not in words]
        if missing and time.monotonic() > deadline:
            store.delete_key(f"{place}/{me}")
            raise HookError(
                f"connecting the ranks {list(ranks)} of a model: global ranks {missing} did not "
                f"come within {timeout_s:g} s; every rank of the model must wrap it, and make the "
                "same calls in the same order"
            )
        if missing:
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
    return [words[rank] for rank in range(len(ranks))]


def release(group: PrivateGroup) -> None:
    """Give the group back; freed when nobody uses it. Local."""
    group.num_users -= 1
    if group.num_users <= 0:
        group.locks.release()
        _groups.pop((group.ranks, group.number), None)
    if not _groups:
        page_locks.of_arena.release()
        _C.close_arena()


def give_up(group: PrivateGroup, reason: str) -> None:
    """Mark a group as unusable for good, and stop its work as far as gloo can be stopped."""
    if group.broken is not None:
        return
    group.broken = reason
    if group.hosts.here is not None:
        group.hosts.here.give_up(reason)
    _broken.append(group.backend)
    group.backend.abort()
    if group.leaders is not None:
        give_up(group.leaders, reason)


def num_groups() -> int:
    """How many private groups this process holds."""
    return len(_groups)
