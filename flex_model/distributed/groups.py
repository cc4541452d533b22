"""Private process groups: ours alone, so that the user's are never mixed with, aborted or
destroyed.

Wraps over the same ranks share a group; the last ``release`` frees it. The groups are made without
torch's registry: only their members take part, and a name is never used twice, so a freed group
leaves nothing behind to collide with.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flex_model.errors import HookError

# We poll with our own deadline. The backend's comes after it and ends what an abandoned wait left
# behind, which otherwise the destructor would join for ever.
_BACKEND_SLACK_S = 5.0

_broken: list[Any] = []  # backends that have work under way: never destroyed while we run
_groups: dict[tuple[tuple[int, ...], int], PrivateGroup] = {}
_acquired: Counter[tuple[int, ...]] = Counter()  # how often, by ranks: the same on all members


@dataclass
class PrivateGroup:
    """A gloo group over ``ranks`` (global), and a store that its members share."""

    ranks: tuple[int, ...]
    rank: int
    backend: Any  # a ProcessGroupGloo, whose methods torch's stubs leave out
    store: dist.Store
    number: int
    timeout_s: float
    world: dist.ProcessGroup | None  # torch.distributed may be destroyed and initialised again
    num_users: int = 0
    broken: str | None = None  # why it can't be used any more

    @property
    def size(self) -> int:
        return len(self.ranks)


def acquire(ranks: tuple[int, ...], timeout_s: float) -> PrivateGroup:
    """The shared private group of these global ranks. Collective over them when it is made first.

    Raises:
        HookError: some of the ranks did not come within ``timeout_s`` seconds; the message names
            them.
    """
    _acquired[ranks] += 1
    number = _acquired[ranks]
    name = hashlib.sha1(repr(ranks).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"flex_model/{name}", dist.distributed_c10d._get_default_store())
    me = ranks.index(dist.get_rank())
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
        backend_timeout = timedelta(seconds=timeout_s + _BACKEND_SLACK_S)
        backend = dist.ProcessGroupGloo(store, me, len(ranks), backend_timeout)
        # Whose backend is made may drop it at once, while others still connect to it.
        _gather_words(store, "made", "", ranks, me, timeout_s)
        group = _groups[ranks, number] = PrivateGroup(
            ranks, me, backend, store, number, timeout_s, dist.group.WORLD
        )
    group.num_users += 1
    return group


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
        _groups.pop((group.ranks, group.number), None)


def give_up(group: PrivateGroup, reason: str) -> None:
    """Mark a group as unusable for good, and stop its work as far as gloo can be stopped."""
    if group.broken is None:
        group.broken = reason
        _broken.append(group.backend)
        group.backend.abort()


def num_groups() -> int:
    """How many private groups this process holds."""
    return len(_groups)
