"""Lets the product run on a simulated cluster: what it asks the operating system, torch and the
engine for is answered by the cluster.

The product's modules are used as they are. Only the names by which they reach the clock, threads,
the store, gloo, processes and shared memory are bound to simulated ones, and the few values that
each process has of its own are kept by process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch.distributed as dist

from flex_model import _C
from flex_model.distributed import (
    bounded_store,
    hosts,
    polling,
    process_groups,
    processes,
    rendezvous,
)
from flex_model.integrations import torch_private
from simulation.cluster import Cluster, Process
from simulation.gloo import Gloo
from simulation.memory import Engine
from simulation.scheduler import Signal, current_owner
from simulation.store import Server, Store


class _Instead:
    """A module in which some names are others."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _OfProcess:
    """A value that each process has of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def _value(self) -> Any:
        values = current_owner().values
        if self not in values:
            values[self] = self._make()
        return values[self]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._value()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._value()[key] = value

    def __contains__(self, key: Any) -> bool:
        return key in self._value()

    def __len__(self) -> int:
        return len(self._value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value())


@contextlib.contextmanager
def simulated(cluster: Cluster, server: Server) -> Iterator[None]:
    """Inside, the product's functions run on the cluster, when its threads call them."""
    scheduler = cluster.scheduler

    def in_thread(function: Callable[[], Any]) -> Future[Any]:
        process: Process = current_owner()
        cluster.step("start a thread")
        done: Future[Any] = Future()
        over = cluster.addresses[done] = Signal()

        def run() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)
            over.notify()

        scheduler.spawn(process, run, is_awaited=False)  # as daemons
        return done

    def is_done(future: Future[Any], within_s: float) -> bool:
        until = scheduler.now + within_s
        while not future.done() and scheduler.now < until:
            scheduler.wait(cluster.addresses[future], until - scheduler.now)
        return future.done()

    def sleeps(done: Callable[[], bool], *_: float) -> Iterator[None]:
        while not done():
            scheduler.wait(current_owner().changed, cluster.speeds.poll_s)
            yield

    def get_rank() -> int:
        return int(current_owner().rank)

    class Thread:
        """See ``threading.Thread``."""

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...], **_: Any) -> None:
            self._run = functools.partial(target, *args)

        def start(self) -> None:
            cluster.step("start a thread")
            scheduler.spawn(current_owner(), self._run, is_awaited=False)  # as daemons

    class Event:
        """See ``threading.Event``; whoever polls for it in its process looks at once."""

        def __init__(self) -> None:
            self._process: Process = current_owner()
            self._is_set = False

        def is_set(self) -> bool:
            return self._is_set

        def set(self) -> None:
            self._is_set = True
            self._process.changed.notify()

        def wait(self) -> None:
            while not self._is_set:
                scheduler.wait(self._process.changed)

    class SimpleQueue:
        """See ``queue.SimpleQueue``."""

        def __init__(self) -> None:
            self._items: deque[Any] = deque()
            self._filled = Signal()

        def put(self, item: Any) -> None:
            self._items.append(item)
            self._filled.notify()

        def get(self) -> Any:
            while not self._items:
                scheduler.wait(self._filled)
            return self._items.popleft()

    clock = _Instead(time, monotonic=lambda: scheduler.now, sleep=scheduler.sleep)
    engine = Engine(cluster)
    names = {name: getattr(engine, name) for name in dir(engine) if not name.startswith("_")}
    of_torch = _Instead(
        dist,
        get_rank=get_rank,
        get_world_size=lambda: len(cluster.processes),
        is_initialized=lambda: True,
        PrefixStore=lambda prefix, store: store.under(prefix),
        ProcessGroupGloo=Gloo,
    )
    of_system = _Instead(
        hosts.os,
        getpid=lambda: current_owner().pid,
        environ=_OfProcess(dict),
        readlink=lambda path: "namespace",
    )
    known = _OfProcess(dict)
    instead = [
        (time, clock),
        # All ranks parse the same long texts: they do so at the same time, but these one by one.
        (json, _Instead(json, loads=functools.lru_cache(maxsize=64)(json.loads))),
        (threading, _Instead(threading, Thread=Thread, Event=Event)),
        (queue, _Instead(queue, SimpleQueue=SimpleQueue)),
        (_C, _Instead(_C, **names)),
        (dist, of_torch),
        (hosts.os, of_system),
        (bounded_store.in_thread, in_thread),
        (bounded_store.is_done, is_done),
        (polling.sleeps, sleeps),
        (processes.boot_id, lambda: current_owner().host.name),
        (torch_private.default_store, lambda: Store(server)),
        (rendezvous._spares, _OfProcess(list)),
        (process_groups._groups, _OfProcess(dict)),
        (process_groups._released, _OfProcess(list)),
        (process_groups._acquired, _OfProcess(Counter)),
        (processes._known, lambda world: known),
    ]
    by_id = {id(real): (real, other) for real, other in instead}
    with contextlib.ExitStack() as bound:
        for module in [
            module for name, module in sys.modules.items() if name.startswith("flex_model.")
        ]:
            for name, value in list(vars(module).items()):
                if id(value) in by_id and by_id[id(value)][0] is value:
                    bound.enter_context(mock.patch.object(module, name, by_id[id(value)][1]))
        bound.enter_context(mock.patch("time.sleep", _sleep))
        yield


def _sleep(seconds: float, really: Callable[[float], None] = time.sleep) -> None:
    if current_owner() is not None:
        raise AssertionError("a wait that is not simulated: see simulation/product.py")
    really(seconds)
