"""gloo, simulated: connections between all ranks of a group, and the algorithms of its collectives.

Source: gloo's allgather.cc (a ring, in two halves), broadcast.cc (a binomial tree), alltoallv.cc
(each rank to each), gather.cc; ProcessGroupGloo.cpp for the rendezvous by the store.
"""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from simulation.cluster import Process
from simulation.scheduler import Signal, Steps, current_owner
from simulation.store import Store

_CLOSED_S = 1e-4  # until the other end sees that a connection is closed


class Work:
    """See ``dist.Work``."""

    def __init__(self) -> None:
        self.is_done, self.error = False, ""
        self.done = Signal()

    def until_done(self) -> Steps[None]:
        while not self.is_done:
            yield self.done, None

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class Gloo:
    """A ProcessGroupGloo of a process."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.process: Process = current_owner()
        self._cluster = self.process.cluster
        self._rank, self._size = rank, size
        self._peers: list[Gloo] = []
        self._num_collectives = 0
        self._boxes: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._arrived: defaultdict[tuple[int, int], Signal] = defaultdict(Signal)
        self._lost: set[int] = set()  # ranks whose connection is closed
        connected = Work()
        self._follow(self._connect(store, timeout), connected)
        self._cluster.scheduler.complete(connected.until_done())
        if connected.error:
            raise RuntimeError(f"Gloo connectFullMesh failed with {connected.error}")

    def _connect(self, store: Store, timeout: timedelta) -> Steps[None]:
        cluster, address = self._cluster, f"{self.process.rank} {len(self._cluster.addresses)}"
        cluster.addresses[address] = self
        until = cluster.scheduler.now + timeout.total_seconds()
        yield from store.set_steps(f"rank_{self._rank}", address)
        for peer in range(self._size):
            yield from store.wait_steps([f"rank_{peer}"], timeout)
            found = yield from store.get_steps(f"rank_{peer}")
            self._peers.append(cluster.addresses[found.decode()])
        cluster.step("gloo: connect", self.process)
        yield None, 2 * cluster.speeds.latency_s
        here = self.process.host
        for peer, other in enumerate(self._peers):
            if not cluster.can_reach(here, other.process.host):
                yield None, max(until - cluster.scheduler.now, 0)
                raise RuntimeError("connect timeout")
            if other.process.is_dead:
                raise RuntimeError("Connection refused")
            other.process.on_end.append(lambda peer=peer: self._lose_soon(peer))

    def _lose_soon(self, peer: int) -> None:
        self._cluster.scheduler.after(_CLOSED_S, lambda: self._lose(peer))

    def _lose(self, peer: int) -> None:
        if not self._cluster.can_reach(self.process.host, self._peers[peer].process.host):
            return
        self._lost.add(peer)
        for (other, _), arrived in list(self._arrived.items()):
            if other == peer:
                arrived.notify()

    def abort(self) -> None:
        """As torch's, which stops what this rank does; the connections stay."""
        self._cluster.scheduler.check_lives(self.process)

    # ---- Collectives -----------------------------------------------------------------------------

    def _allgather_base(self, gathered: Tensor, data: Tensor) -> Work:
        rows = gathered.view(-1).view(torch.uint8).view(self._size, -1)
        rows[self._rank].copy_(data.view(-1).view(torch.uint8))

        def steps(number: int) -> Steps[None]:
            half = (rows.shape[1] + 1) // 2
            right, left = (self._rank + 1) % self._size, (self._rank - 1) % self._size
            for i in range(self._size - 1):
                row = rows[(self._rank - i) % self._size]
                self._send(right, number, row[:half])
                self._send(right, number, row[half:])
                row = rows[(self._rank - i - 1) % self._size]
                yield from self._receive(left, number, row[:half])
                yield from self._receive(left, number, row[half:])

        return self._start("all-gather", steps)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        data, root = tensors[0].view(-1).view(torch.uint8), options.rootRank
        place = (self._rank - root) % self._size

        def steps(number: int) -> Steps[None]:
            first = place.bit_length()
            if place:
                parent = place - (1 << first - 1)
                yield from self._receive((parent + root) % self._size, number, data)
            for i in range(first, self._size.bit_length() + 1):
                child = place + (1 << i)
                if child < self._size:
                    self._send((child + root) % self._size, number, data)

        return self._start("broadcast", steps)

    def alltoall_base(
        self, received: Tensor, data: Tensor, receive: list[int], send: list[int]
    ) -> Work:
        to, into = data.split(send), received.split(receive)
        into[self._rank].copy_(to[self._rank])

        def steps(number: int) -> Steps[None]:
            others = [(self._rank + i) % self._size for i in range(1, self._size)]
            for peer in others:
                self._send(peer, number, to[peer])
            for peer in reversed(others):
                yield from self._receive(peer, number, into[peer])

        return self._start("all-to-all", steps)

    def _start(self, what: str, steps: Any) -> Work:
        self._cluster.step(f"gloo: {what}")
        self._num_collectives += 1
        work = Work()
        self._follow(steps(self._num_collectives), work)
        return work

    def _follow(self, steps: Steps[None], work: Work) -> None:
        def run() -> Steps[None]:
            try:
                yield from steps
            except (ConnectionError, RuntimeError) as error:
                work.error = str(error)
            work.is_done = True
            work.done.notify()
            self.process.changed.notify()

        self._cluster.scheduler.follow(self.process, run())

    # ---- Messages --------------------------------------------------------------------------------

    def _send(self, peer: int, number: int, data: Tensor) -> None:
        self._check_connected(peer)
        other, copy = self._peers[peer], data.clone()
        key = self._rank, number

        def arrive() -> None:
            if not other.process.is_dead:
                other._boxes[key].append(copy)
                other._arrived[key].notify()

        self._cluster.send(self.process, other.process.host, data.nbytes, arrive)

    def _receive(self, peer: int, number: int, into: Tensor) -> Steps[None]:
        box = self._boxes[peer, number]
        while not box:
            self._check_connected(peer)
            yield self._arrived[peer, number], None
        into.copy_(box.popleft())

    def _check_connected(self, peer: int) -> None:
        if peer in self._lost:
            raise ConnectionError("Connection closed by peer")
