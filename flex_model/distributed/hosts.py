"""The hosts of a group's ranks, and the memory that the ranks of a host share.

Determined once per group, by all its ranks together, when the group is made.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from flex_model import _C
from flex_model.distributed.processes import boot_id
from flex_model.distributed.rendezvous import Rendezvous
from flex_model.errors import HookError

TRANSPORTS = ("auto", "shared_memory", "gloo", "nccl", "peer_memory")


@dataclass(frozen=True)
class Settings:
    """The environment variables of transports, read when a group is made.

    Attributes:
        transport: ``FLEX_MODEL_TRANSPORT``: one of ``TRANSPORTS``.
        memory_limit: ``FLEX_MODEL_SHARED_MEMORY_LIMIT``: the size limit of the pool, as ``"512M"``.
        host: ``FLEX_MODEL_HOST``: the name of this rank's host, to test several hosts on one; by
            default the boot id of the kernel.
    """

    transport: str
    memory_limit: str
    host: str

    @staticmethod
    def now() -> Settings:
        read = os.environ.get
        return Settings(
            read("FLEX_MODEL_TRANSPORT", "auto"),
            read("FLEX_MODEL_SHARED_MEMORY_LIMIT", ""),
            read("FLEX_MODEL_HOST") or boot_id(),
        )

    def limit_bytes(self) -> int:
        """Parse the limit of the pool, -1 if there is none. ValueError if a setting is invalid."""
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"FLEX_MODEL_TRANSPORT must be one of {', '.join(TRANSPORTS)}; "
                f"got {self.transport!r}"
            )
        text = self.memory_limit.strip().upper()
        if not text:
            return -1
        found = re.fullmatch(r"(\d+)([KMGT]?)", text)
        if not found:
            raise ValueError(
                "FLEX_MODEL_SHARED_MEMORY_LIMIT must be a number of bytes, with K, M, G or T for "
                f"powers of 1024; got {self.memory_limit!r}"
            )
        return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


@dataclass
class Hosts:
    """The hosts of a group.

    Attributes:
        names: The host name of each rank.
        here: The ranks of this host that share memory; None where they don't.
        settings: This rank's environment when the group was made.
        devices: The type of each rank's device: ``"cpu"``, ``"cuda"``.
        why_not_shared: Why ``here`` is None; empty if it is not.
        viewed_bytes: The size in bytes above which read-only tensors are shared; -1: they can't be.
    """

    names: list[str]
    here: _C.HostGroup | None
    settings: Settings
    devices: list[str]
    why_not_shared: str = ""
    viewed_bytes: int = -1

    @cached_property
    def is_one(self) -> bool:
        """Whether all ranks are on one host."""
        return len(set(self.names)) == 1

    def apart(self, reason: str) -> Hosts:
        """Return the same hosts without shared memory. HookError if it was requested."""
        if self.settings.transport == "shared_memory":
            raise HookError(f"FLEX_MODEL_TRANSPORT=shared_memory is not available: {reason}")
        return replace(self, here=None, why_not_shared=reason, viewed_bytes=-1)

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """The ranks of each host, in the order of the first ones."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(self.names):
            ranks.setdefault(name, []).append(rank)
        return ranks

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each host, in order."""
        return [ranks[0] for ranks in self.by_name.values()]


class Offer(NamedTuple):
    """What a rank sends to the others before they connect.

    Attributes:
        table: The table of its arena, as JSON has it; None if it has none.
        why_no_table: Why not.
        mistake: An error in its settings, to be raised on all ranks.
        device: The type of its device.
        viewed_bytes: As in ``Hosts``.
    """

    host: str
    transport: str
    table: _C.Address | None
    why_no_table: str
    mistake: str
    device: str
    viewed_bytes: int

    @staticmethod
    def of_this_process(settings: Settings, device: str) -> Offer:
        mistake = why_no_table = ""
        table: _C.Address | None = None
        try:
            _C.set_arena_limit(settings.limit_bytes())
        except ValueError as error:
            mistake = str(error)
        try:
            table = _C.arena_table()
        except RuntimeError as error:
            why_no_table = str(error)
        least = _C.worthwhile_view_bytes()
        return Offer(settings.host, settings.transport, table, why_no_table, mistake, device, least)


def hosts_of(settings: Settings, offers: list[Offer]) -> Hosts:
    """Determine the ranks' hosts, and whether they could share memory. The same on every rank.

    Raises:
        HookError: ranks request different transports, or shared memory that is not available.
    """
    mistakes = [f"rank {r}: {offer.mistake}" for r, offer in enumerate(offers) if offer.mistake]
    if mistakes:
        raise HookError("; ".join(mistakes))
    if len({offer.transport for offer in offers}) > 1:
        listed = ", ".join(f"rank {r}: {offer.transport}" for r, offer in enumerate(offers))
        raise HookError(f"FLEX_MODEL_TRANSPORT differs ({listed}); set it alike on all ranks")
    failures = [
        f"rank {r}: {offer.why_no_table}" for r, offer in enumerate(offers) if offer.why_no_table
    ]
    of_views = [offer.viewed_bytes for offer in offers]
    hosts = Hosts(
        [offer.host for offer in offers],
        None,
        settings,
        [offer.device for offer in offers],
        viewed_bytes=-1 if -1 in of_views else max(of_views),
    )
    if settings.transport == "gloo" or failures:
        return hosts.apart("; ".join(failures) or "FLEX_MODEL_TRANSPORT=gloo")
    if settings.transport == "shared_memory" and not hosts.is_one:
        return hosts.apart(f"the ranks are on {len(hosts.leaders)} hosts")
    return hosts


def share(
    meeting: Rendezvous, hosts: Hosts, offers: list[Offer]
) -> tuple[_C.HostGroup | None, str]:
    """Share memory with the ranks of this host; or return why they can't, where that is clear.
    Collective over them.
    """
    here = hosts.by_name[hosts.names[meeting.me]]
    place, number = here.index(meeting.me), meeting.number
    tables: list[Any] = [offers[rank].table for rank in here]  # each has one: see `hosts_of`
    control: _C.Address | None = None
    opened: list[int] = []

    def without_control() -> list[int]:
        nonlocal control
        control = _C.offered_control(tables[0], number)
        return [] if control is not None else [here[0]]

    def not_opened() -> list[int]:
        opened[:] = group.who_opened(number)
        return [] if -1 in opened else [rank for rank, is_open in zip(here, opened) if not is_open]

    try:
        if place == 0:
            block = _C.ControlBlock(len(here))
            _C.offer_control(number, block)
            group = _C.HostGroup.made(block, tables, 0)
        else:
            meeting.poll(without_control, "memory")
            assert control is not None
            group = _C.HostGroup.open(control, tables, place)
    except HookError:
        raise
    except RuntimeError as error:
        _C.refuse_group(number)
        return None, str(error)
    meeting.poll(not_opened, "memory")
    return (None, "") if -1 in opened else (group, "")
