"""Detects at once that the process of a rank on this host has ended.

Gloo and the store do not report that; shared memory and an open connection do, but exist only after
the rendezvous of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from flex_model import _C

Identity = list[Any]  # as JSON has it: host, PID, start time


class _Known:
    """The processes of global ranks of one world, as far as they have wrapped a model with this
    one.
    """

    def __init__(self) -> None:
        self.world: Any = None
        self.of_ranks: dict[int, Identity] = {}

    def now(self) -> dict[int, Identity]:
        """Those of the current world: a later one may number other processes."""
        if self.world is not dist.group.WORLD:
            self.world, self.of_ranks = dist.group.WORLD, {}
        return self.of_ranks


_known = _Known()


def note(rank: int, identity: Identity) -> None:
    """Record which process a global rank is."""
    _known.now()[rank] = identity


def ended(ranks: Iterable[int]) -> list[int]:
    """Return those of the global ranks whose process has ended, as far as it is known and was on
    this host.
    """
    known, this_host = _known.now(), _host()
    found = []
    for rank in ranks:
        host, pid, start = known.get(rank, (None, 0, 0))
        if host == this_host and _C.process_start(pid) != start:
            found.append(rank)
    return found


def identity() -> Identity:
    """Identify this process for ``note`` on other ranks."""
    return [_host(), os.getpid(), _C.process_start(os.getpid())]


def boot_id() -> str:
    """Identifies a running kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _host() -> str:
    """Identifies a kernel and a PID namespace, inside which PIDs are comparable."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
