"""Private process groups, so that the user's groups are never used, aborted or destroyed.

FlexModels over the same ranks share a group; the last ``PrivateGroup.release`` frees it. The groups
are made without torch's registry: only their members take part, and a name is never used twice, so
a freed group can't collide with a later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch.distributed as dist

from flex_model import _C
from flex_model.distributed import processes, rendezvous
from flex_model.distributed.hosts import Hosts, Offer, Settings, hosts_of, share
from flex_model.distributed.messages import Messages
from flex_model.distributed.notices import Board
from flex_model.distributed.rendezvous import Rendezvous
from flex_model.distributed.roll_call import RollCall
from flex_model.distributed.transports import host_copies
from flex_model.errors import HookError, see

NOT_SEEN = "not seen at any exchange that had to wait"
_LEADERS_SLACK_S = 3.0  # for the first rank of a host to tell the others why it waited in vain

_groups: dict[tuple[tuple[int, ...], int], PrivateGroup] = {}
_released: list[PrivateGroup] = []  # whose memory a GPU may still write to
_num_users = 0  # of the pool, besides groups: wrapped models without peers, groups in the making
_acquired: Counter[tuple[int, ...]] = Counter()  # requests by ranks: the same on all members


class Watcher(Protocol):
    """Looks after the long waits of a group."""

    def compare(self, waited_s: float) -> None:
        """Raise if a rank may never arrive."""


class PrivateGroup:
    """A private group: the global ranks of transfers, their connections, store and hosts.

    Attributes:
        rank: This process's index.
        messages: Their messages by gloo; None where the ranks of a host share memory: then they
            have no connections.
        store: Shared by the members.
        bounded_store: The same one, for calls that end.
        hosts: The hosts of the ranks, and the memory that they share.
        leaders: With several hosts, on the first rank of each: the group of these ranks.
        number: Distinguishes groups of the same ranks; the same on all members.
        locks: The page locks of other ranks' memory that is mapped with the group.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        number: int,
        hosts: Hosts,
        messages: Messages | None = None,
        leaders: PrivateGroup | None = None,
    ) -> None:
        self.ranks, self.rank, self.timeout_s = meeting.ranks, meeting.me, meeting.timeout_s
        self.store, self.bounded_store = meeting.store, meeting.bounded_store
        self.number, self.hosts, self.messages, self.leaders = number, hosts, messages, leaders
        self.world = dist.group.WORLD  # torch.distributed may be destroyed and initialised again
        self.num_users = 1
        self.broken: str | None = None  # why it can't be used any more
        self.locks = host_copies.PageLocks()
        self.pid = os.getpid()  # the process that made the group
        self._watcher: Watcher | None = None  # as shared memory has it
        self._wait: tuple[str, float] | None = None  # the position and the deadline, likewise

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def board(self) -> Board:
        """The notices of its ranks."""
        return Board(self.rank, self.size, self.hosts, self.bounded_store)

    @cached_property
    def roll_call(self) -> RollCall:
        """Finds the ranks that are gone."""
        return RollCall(self.bounded_store, self.rank, self.size)

    @property
    def connected_ranks(self) -> list[int]:
        """The ranks that gloo connects: the first ones of the hosts, or all."""
        return list(range(self.size)) if self.hosts.here is None else self.hosts.leaders

    @property
    def awaited_ranks(self) -> list[int]:
        """The ranks whose absence would explain a wait of this one by gloo: the first ranks of the
        other hosts, which wait for those of their hosts, and who is behind on this one.
        """
        here = self.hosts.here
        if here is None:
            return [rank for rank in range(self.size) if rank != self.rank]
        ranks_here = self.hosts.by_name[self.hosts.names[self.rank]]
        behind = [rank for place, rank in enumerate(ranks_here) if here.is_behind(place)]
        leaders = [rank for rank in self.hosts.leaders if rank not in ranks_here]
        return sorted({*behind, *leaders} - {self.rank})

    def name_of(self, rank: int, position: str = "") -> str:
        """Return the name of a rank for messages, with the position at which it waits."""
        last = f"; last seen waiting at: {position}" if position else ""
        return f"rank {rank} (global rank {self.ranks[rank]}{last})"

    def prepare_wait(self, watcher: Watcher, where: str, timeout_s: float) -> None:
        """Set what shared memory needs for a wait of this rank: whose ``compare`` it calls in a
        long one, the rank's position, and the deadline. Local.
        """
        here = self.hosts.here
        if here is None:
            return
        if self.leaders is None and not self.hosts.is_one:
            # The first rank of the host waits for other hosts, and reports why in vain.
            timeout_s += min(_LEADERS_SLACK_S, timeout_s / 2)
        if self._watcher is not watcher:
            self._watcher = watcher
            here.set_watch(watcher.compare)
        wait = where, timeout_s
        if self._wait != wait:
            self._wait = wait
            here.set_position(where)
            here.set_timeout(timeout_s)

    def forget(self, watcher: Watcher) -> None:
        """Don't call the watcher in long waits any more. Local."""
        if self._watcher is watcher and self.hosts.here is not None:
            self._watcher = None
            self.hosts.here.set_watch(None)

    def explained(self, failure: _C.WaitError, where: str, timeout_s: float) -> str:
        """Return the message of a wait in shared memory, at ``where``, that failed."""
        reason, places, text = failure.args
        assert self.hosts.here is not None
        if reason == "broken":
            return text or "another rank aborted, and died before it could report why."
        if reason == "out of step":
            threads = f"Do two threads run models of these ranks? ({see('two-threads')})"
            return f"{text}, at {where}. {threads}"
        ranks_here = self.hosts.by_name[self.hosts.names[self.rank]]
        missing = [ranks_here[place] for place in places]
        if reason == "dead":
            names = ", ".join(map(self.name_of, missing))
            return f"{names} ended or died; rank {self.rank} waited for it at {where}."
        listed = ", ".join(
            self.name_of(rank, self.hosts.here.position_of(place) or NOT_SEEN)
            for rank, place in zip(missing, places)
        )
        return f"rank {self.rank} waited {timeout_s:g} s at {where}; missing: {listed}."

    def retain(self) -> None:
        """Count a user more. Local."""
        self.num_users += 1

    def release(self) -> None:
        """Release the group, which is freed with its last user. Local; does nothing in a forked
        child.

        Memory that this process's GPUs may still write to, after an interrupted wait, stays locked
        and mapped until a later release, or until the process ends.
        """
        if self.pid != os.getpid():
            return
        self.num_users -= 1
        if self.num_users <= 0:
            _groups.pop((self.ranks, self.number), None)
            _released.append(self)
        _free_unused()

    def abort(self, reason: str) -> None:
        """Mark the group as unusable, and end all waits in it."""
        if self.broken is not None:
            return
        self.broken = reason
        if self.hosts.here is not None:
            self.hosts.here.abort(reason)
        if self.messages is not None:
            self.messages.abort()
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
    use_pool()  # the last group may be collected meanwhile
    try:
        return _acquire(ranks, timeout_s, device)
    finally:
        release_pool()


def _acquire(ranks: tuple[int, ...], timeout_s: float, device: str) -> tuple[PrivateGroup, int]:
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
    connecting = Rendezvous(path, ranks, me, timeout_s)
    offer = Offer.of_this_process(settings, device)
    text = json.dumps([held, processes.identity(), offer])
    try:
        stale = [f"meeting/{number - 1}"] if number > 1 else []
        texts = connecting.all_gather(f"meeting/{number}", text, stale)
    except BaseException:
        _acquired[ranks] -= 1  # as on the ranks that did not arrive: the next try matches theirs
        if held:
            _groups[ranks, held].release()
        raise
    rows = json.loads(f"[{','.join(texts)}]")
    processes.note({rank: row[1] for rank, row in zip(ranks, rows)})
    if held and {row[0] for row in rows} == {held}:
        return _groups[ranks, held], number
    if held:
        _groups[ranks, held].release()
    offers = [Offer(*row[2]) for row in rows]
    made = connecting.of_group(number)
    try:
        group = _make(made, number, settings, offers)
    except BaseException as error:  # such as Ctrl-C: the others must not wait for this rank
        made.tell(error)
        raise
    _groups[ranks, number] = group
    return group, number


def use_pool() -> None:
    """Keep this process's pool open, if it is, and its connection to the store. Local."""
    global _num_users
    _num_users += 1


def open_pool() -> None:
    """Open the pool for a wrapped model without peers, whose GPU copies to page-locked memory, and
    ``use_pool``. Local.

    ValueError if a setting of the pool is invalid.
    """
    _C.set_arena_limit(Settings.now().limit_bytes())
    use_pool()
    with contextlib.suppress(RuntimeError):  # a forked process has none
        _C.arena_table()


def release_pool() -> None:
    """Undo ``use_pool``. Local."""
    global _num_users
    _num_users -= 1
    _free_unused()


def _free_unused() -> None:
    """Close what groups share if nothing uses it any more: the connection to the store, and the
    pool; and unlock the memory of released groups, unless a GPU may still write there.
    """
    if not _groups and not _num_users:
        rendezvous.close_connection()
    if host_copies.of_process.may_run():
        return
    while _released:
        _released.pop().locks.release()
    if not _groups and not _num_users:
        host_copies.of_arena.release()
        _C.close_arena()


def leave_to_parent(owned: object) -> None:
    """In a forked child, keep its parent's objects alive for good, even past the interpreter's end:
    their destructors wait for threads that the child does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


def _forked() -> None:
    kept = [*_groups.values(), *_released, *rendezvous.kept_connections()]
    leave_to_parent(kept)
    _groups.clear()
    _released.clear()
    rendezvous.close_connection()


os.register_at_fork(after_in_child=_forked)


def _make(
    meeting: Rendezvous, number: int, settings: Settings, offers: list[Offer]
) -> PrivateGroup:
    """Make a new group. Collective over its ranks."""
    hosts = hosts_of(settings, offers)
    messages = leaders = None
    if not hosts.why_not_shared:
        here, why_not = share(meeting, hosts, offers)
        if not hosts.is_one:
            leaders, here = _across_hosts(meeting, hosts, here, number)
        if here is None:  # on all ranks
            texts = meeting.all_gather("not shared", why_not)
            why_not = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(texts) if why)
        hosts = hosts.apart(why_not) if here is None else replace(hosts, here=here)
    if hosts.here is None:
        messages, leaders = Messages(meeting.backend(), meeting.ranks, meeting.me), None
        # A rank may drop them as soon as they are made, while others still connect to it.
        meeting.all_gather("made", "")
    return PrivateGroup(meeting, number, hosts, messages, leaders)


def _across_hosts(
    meeting: Rendezvous, hosts: Hosts, here: _C.HostGroup | None, number: int
) -> tuple[PrivateGroup | None, _C.HostGroup | None]:
    """Connect the first ranks of the hosts. Return their group, on those, and ``here``, the ranks
    that share memory: None on all hosts if those of any host share none. Collective.
    """
    leaders, are_shared = None, True
    try:
        if meeting.me in hosts.leaders:
            leaders, are_shared = _leaders(meeting, hosts, here is not None, number)
    except HookError as error:
        if here is not None:
            here.abort(str(error))  # the others of this host wait for this rank
        raise
    if here is None:
        return leaders, None
    # While the first rank waits for the other hosts, those of this host wait for it.
    timeout_s = meeting.timeout_s + _LEADERS_SLACK_S
    here.set_timeout(timeout_s)
    try:
        rows = here.exchange_bytes(bytes([are_shared]))
    except _C.WaitError as error:
        reason, _, text = error.args
        if reason == "broken" and text:  # the first rank of this host has failed
            raise HookError(text) from None
        group = PrivateGroup(meeting, number, replace(hosts, here=here))
        why = group.explained(error, "the connection of the hosts", timeout_s)
        failure = meeting.failure(why.removesuffix("."))
        here.abort(str(failure))
        raise failure from None
    return leaders, here if rows[0][0] else None


def _leaders(
    meeting: Rendezvous, hosts: Hosts, is_shared: bool, number: int
) -> tuple[PrivateGroup, bool]:
    """Connect the first ranks of the hosts by gloo; return whether all hosts share memory.
    Collective over them.
    """
    ranks = tuple(meeting.ranks[rank] for rank in hosts.leaders)
    place = hosts.leaders.index(meeting.me)
    of_leaders = replace(meeting.of("leaders"), ranks=ranks, me=place)
    start = time.monotonic()
    messages = Messages(of_leaders.backend(), ranks, place)
    # One deadline for both: the others of the host wait no longer.
    left_s = max(start + meeting.timeout_s - time.monotonic(), min(1.0, meeting.timeout_s))
    left_s = round(left_s, 1) or left_s
    made = replace(of_leaders, timeout_s=left_s)
    shared = made.all_gather("made", json.dumps(is_shared))
    names = [hosts.names[rank] for rank in hosts.leaders]
    of_hosts = Hosts(names, None, hosts.settings, [])
    return PrivateGroup(of_leaders, number, of_hosts, messages), all(map(json.loads, shared))
