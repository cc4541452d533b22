"""Detects at once that the process of a rank on this host has ended.

Gloo and the store do not report that; shared memory and an open connection do, but exist only after
the rendezvous of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Iterable

import torch.distributed as dist

from flex_model.distributed.hosts import boot_id


class Processes:
    """The processes of some global ranks, as a context. ``store`` is shared by all ranks."""

    def __init__(self, store: dist.Store, ranks: Iterable[int]) -> None:
        self._store = store
        self._ranks = set(ranks) - {dist.get_rank()}
        self._watches: dict[int, int | None] = {}  # a pidfd; None where the end can't be detected
        self._ended: set[int] = set()
        store.set(_place(dist.get_rank()), json.dumps([_host(), os.getpid(), _start(os.getpid())]))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for watch in self._watches.values():
            if watch is not None:
                os.close(watch)
        self._watches.clear()

    def ended(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Return those of ``ranks`` whose process has ended, as far as they have published it."""
        watched = self._ranks if ranks is None else self._ranks.intersection(ranks)
        for rank in watched - self._ended:
            if rank not in self._watches:
                with contextlib.suppress(RuntimeError):  # the store may have ended with its process
                    if self._store.check([_place(rank)]):
                        self._watch(rank, *json.loads(self._store.get(_place(rank))))
            watch = self._watches.get(rank)
            if watch is not None and _is_readable(watch):
                self._ended.add(rank)
        return sorted(watched & self._ended)

    def _watch(self, rank: int, host: str, pid: int, start: str) -> None:
        self._watches[rank] = None
        if host != _host() or not hasattr(os, "pidfd_open"):
            return
        try:
            self._watches[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(rank)
        except OSError:
            return
        if _start(pid) != start:  # gone, or another process by now
            self._ended.add(rank)


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _place(rank: int) -> str:
    return f"flex_model/process/{rank}"


def _host() -> str:
    """Identifies a kernel and a PID namespace, inside which PIDs are comparable."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def _start(pid: int) -> str:
    """The start time of a process in ticks; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
