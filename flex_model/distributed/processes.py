"""Detects at once that the process of a rank on this host has ended.

Gloo and the store do not report that; shared memory and an open connection do, but exist only after
the rendezvous of all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from flex_model import _C

Identity = list[Any]  # as JSON has it: host, PID, start time


@functools.lru_cache(maxsize=1)  # a later world may number other processes
def _known(world: Any) -> dict[int, tuple[int, int]]:
    """Return the processes (PID, start time) on this host, by their global ranks in a world, that
    have wrapped a model with this one.
    """
    return {}


def note(identities: Mapping[int, Identity]) -> None:
    """Record which processes global ranks are."""
    known, this_host = _known(dist.group.WORLD), _host()
    for rank, (host, pid, start) in identities.items():
        known.pop(rank, None)
        if host == this_host:
            known[rank] = pid, start


def ended(ranks: Iterable[int]) -> list[int]:
    """Return those of the global ranks whose process has ended, as far as it is known and was on
    this host.
    """
    known = _known(dist.group.WORLD).items()
    found = {rank for rank, (pid, start) in known if _C.process_start(pid) != start}
    return [rank for rank in ranks if rank in found] if found else []


def identity() -> Identity:
    """Identify this process for ``note`` on other ranks."""
    return [_host(), os.getpid(), _C.process_start(os.getpid())]


def boot_id() -> str:
    """Identifies a running kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _host() -> str:
    """Identifies a kernel and a PID namespace, inside which PIDs are comparable; with
    FLEX_MODEL_HOST, a part of them that stands for a host.
    """
    return f"{os.environ.get('FLEX_MODEL_HOST') or boot_id()} {os.readlink('/proc/self/ns/pid')}"
