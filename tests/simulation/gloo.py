"""gloo, simulated: connections between all ranks of a group, and the messages on them.

Source: ProcessGroupGloo.cpp for the rendezvous by the store, send and recv; gloo's
transport/tcp/unbound_buffer.cc for a wait that is too late, which closes all connections.
"""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import timedelta

import torch
from torch import Tensor

from simulation.cluster import Process
from simulation.scheduler import Signal, Steps, current_owner
from simulation.store import Store

_CLOSED_S = 1e-4  # until the other end sees that a connection is closed
_CLOSED = "Connection closed by peer"


class Work:
    """See ``dist.Work``."""

    def __init__(self, gloo: Gloo) -> None:
        self._gloo = gloo
        self._is_done, self._error = False, ""
        self._done = Signal()

    def end(self, error: str = "") -> None:
        """Let it be done, or have failed."""
        if not self._is_done:
            self._is_done, self._error = True, error
            self._done.notify()

    def wait(self, timeout: timedelta | None = None) -> None:
        scheduler = self._gloo.cluster.scheduler
        until = scheduler.now + (timeout or self._gloo.timeout).total_seconds()
        while not self._is_done:
            if scheduler.now >= until:
                self._gloo.close()
                raise RuntimeError("Timed out waiting for an operation to complete")
            scheduler.wait(self._done, until - scheduler.now)
        if self._error:
            raise RuntimeError(self._error)


class Gloo:
    """A ProcessGroupGloo of a process.

    Attributes:
        timeout: Of waits that have none of their own.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.process: Process = current_owner()
        self.cluster, self.timeout = self.process.cluster, timeout
        self._rank, self._size = rank, size
        self._peers: list[Gloo] = []
        # Of each rank and tag: what has arrived, or the receives that wait for it.
        self._arrived: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._awaited: defaultdict[tuple[int, int], deque[tuple[Work, Tensor]]]
        self._awaited = defaultdict(deque)
        self._lost: set[int] = set()  # ranks whose connection is closed
        try:
            self.cluster.scheduler.complete(self._connect(store))
        except RuntimeError as error:
            raise RuntimeError(f"Gloo connectFullMesh failed with {error}") from None

    def _connect(self, store: Store) -> Steps[None]:
        cluster, address = self.cluster, f"{self.process.rank} {len(self.cluster.addresses)}"
        cluster.addresses[address] = self
        until = cluster.scheduler.now + self.timeout.total_seconds()
        yield from store.set_steps(f"rank_{self._rank}", address)
        for peer in range(self._size):
            yield from store.wait_steps([f"rank_{peer}"], self.timeout)
            found = yield from store.get_steps(f"rank_{peer}")
            self._peers.append(cluster.addresses[found.decode()])
        cluster.step("gloo: connect", self.process)
        here = self.process.host
        times = max(here.times, *(other.process.host.times for other in self._peers))
        yield None, 2 * cluster.speeds.latency_s * times
        for peer, other in enumerate(self._peers):
            if not cluster.can_reach(here, other.process.host):
                yield None, max(until - cluster.scheduler.now, 0)
                raise RuntimeError("connect timeout")
            if other.process.is_dead:
                raise RuntimeError("Connection refused")
            other.process.on_end.append(lambda peer=peer: self.lose_soon(peer))

    # ---- Connections that close ------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections to all other ranks."""
        for peer, other in enumerate(self._peers):
            if peer != self._rank:
                self._lose(peer)
                other.lose_soon(self._rank)

    def lose_soon(self, peer: int) -> None:
        """See, in a moment, that the connection to another rank is closed."""

        def lose() -> None:
            if self.cluster.can_reach(self.process.host, self._peers[peer].process.host):
                self._lose(peer)

        self.cluster.scheduler.after(_CLOSED_S, lose)

    def _lose(self, peer: int) -> None:
        self._lost.add(peer)
        for (other, _), awaited in self._awaited.items():
            while other == peer and awaited:
                awaited.popleft()[0].end(_CLOSED)

    # ---- Messages --------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Send a message, which the kernel takes at once."""
        self.cluster.step("gloo: send")
        work, other, copy = Work(self), self._peers[peer], _bytes_of(tensors).clone()
        if peer in self._lost:
            work.end(_CLOSED)
            return work

        def arrive() -> None:
            if not other.process.is_dead and self._rank not in other._lost:
                other._arrived[self._rank, tag].append(copy)
                other._match(self._rank, tag)

        self.cluster.send(self.process, other.process.host, copy.nbytes, arrive)
        work.end()
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Receive a message, in the order of the receives from a rank with a tag."""
        work = Work(self)
        self._awaited[peer, tag].append((work, _bytes_of(tensors)))
        self._match(peer, tag)
        if peer in self._lost:
            self._lose(peer)
        return work

    def _match(self, peer: int, tag: int) -> None:
        arrived, awaited = self._arrived[peer, tag], self._awaited[peer, tag]
        while arrived and awaited:
            work, into = awaited.popleft()
            into.copy_(arrived.popleft())
            work.end()


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor.view(-1).view(torch.uint8)
