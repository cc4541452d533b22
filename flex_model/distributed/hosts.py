"""The hosts of a group's ranks, and the memory that the ranks of a host share.

Determined once per group, by all its ranks together, when the group is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from flex_model import _C
from flex_model.errors import HookError

TRANSPORTS = ("auto", "shared_memory", "gloo", "nccl", "peer_memory")

# Gathers a text of every rank under a key of the group's store; waits for all of them.
AllGatherStrings = Callable[[str, str], list[str]]


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


def boot_id() -> str:
    """Identifies a running kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


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

    def ranks_of(self, name: str) -> list[int]:
        return [rank for rank, other in enumerate(self.names) if other == name]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each host, in order."""
        return [self.names.index(name) for name in dict.fromkeys(self.names)]


def connect(rank: int, settings: Settings, device: str, all_gather: AllGatherStrings) -> Hosts:
    """Determine the ranks' hosts, and share memory with the ranks of this one. Collective.

    Raises:
        HookError: ranks request different transports, or shared memory was requested and is not
            available; on every rank.
    """
    mistake = ""
    try:
        _C.set_arena_limit(settings.limit_bytes())
    except ValueError as error:  # raised on all ranks below
        mistake = str(error)
    table: _C.Address | None = None
    why_no_table = ""
    try:
        table = _C.arena_table()
    except RuntimeError as error:
        why_no_table = str(error)
    least = _C.worthwhile_view_bytes()
    local = [settings.host, settings.transport, table, why_no_table, mistake, device, least]
    gathered = [json.loads(text) for text in all_gather("host", json.dumps(local))]
    mistakes = [f"rank {r}: {row[4]}" for r, row in enumerate(gathered) if row[4]]
    if mistakes:
        raise HookError("; ".join(mistakes))
    failures = [f"rank {r}: {row[3]}" for r, row in enumerate(gathered) if row[3]]
    names, devices = [row[0] for row in gathered], [row[5] for row in gathered]
    if len({row[1] for row in gathered}) > 1:
        listed = ", ".join(f"rank {r}: {row[1]}" for r, row in enumerate(gathered))
        raise HookError(f"FLEX_MODEL_TRANSPORT differs ({listed}); set it alike on all ranks")
    if settings.transport == "gloo" or failures:
        reason = "; ".join(failures) or "FLEX_MODEL_TRANSPORT=gloo"
        return _checked(Hosts(names, None, settings, devices, reason))
    of_views = [row[6] for row in gathered]
    viewed_bytes = -1 if -1 in of_views else max(of_views)
    hosts = Hosts(names, None, settings, devices, viewed_bytes=viewed_bytes)
    hosts.here, hosts.why_not_shared = _share(
        rank, hosts, [tuple(row[2]) for row in gathered], all_gather
    )
    return _checked(hosts)


def _share(
    rank: int, hosts: Hosts, tables: list[_C.Address], all_gather: AllGatherStrings
) -> tuple[_C.HostGroup | None, str]:
    """The ranks of this host, or why they can't share memory; on all hosts or on none."""
    here = hosts.ranks_of(hosts.names[rank])
    tables_here = [tables[other] for other in here]
    block: _C.ControlBlock | None = None
    address: _C.Address | None = None
    failure = ""
    if rank == here[0]:
        try:
            block = _C.ControlBlock(len(here))
            address = block.address
        except RuntimeError as error:
            failure = str(error)
    blocks = [json.loads(text) for text in all_gather("block", json.dumps([address, failure]))]
    address, failure = blocks[here[0]]
    group = None
    if address is not None:
        try:
            if block is None:
                pid, fd, token, size = address
                group = _C.HostGroup.open((pid, fd, token, size), tables_here, here.index(rank))
            else:
                group = _C.HostGroup.made(block, tables_here, here.index(rank))
        except RuntimeError as error:
            failure = str(error)
    failures = [
        f"rank {other}: {text}" for other, text in enumerate(all_gather("opened", failure)) if text
    ]
    return (None, "; ".join(failures)) if failures else (group, "")


def _checked(hosts: Hosts) -> Hosts:
    if hosts.settings.transport == "shared_memory" and (hosts.here is None or not hosts.is_one):
        reason = hosts.why_not_shared or f"the ranks are on {len(hosts.leaders)} hosts"
        raise HookError(f"FLEX_MODEL_TRANSPORT=shared_memory is not available: {reason}")
    return hosts
