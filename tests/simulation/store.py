"""torch's TCPStore, simulated: one server, and connections of the processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from simulation.cluster import Cluster, Host, Process
from simulation.scheduler import Signal, Steps, current_owner

T = TypeVar("T")

_DEFAULT_S = 300.0  # the deadline of a store's waits


class Server:
    """The store's server.

    Args:
        owner: The process that it runs in; None: one that no fault ends, as torchrun's agent.
    """

    def __init__(self, cluster: Cluster, host: Host, owner: Process | None) -> None:
        self.cluster, self.host, self.owner = cluster, host, owner
        self.values: dict[str, bytes] = {}
        self.changed: defaultdict[str, Signal] = defaultdict(Signal)
        if owner is not None:
            owner.on_end.append(self._end)

    def _end(self) -> None:
        for changed in self.changed.values():
            changed.notify()

    @property
    def is_dead(self) -> bool:
        return self.owner is not None and self.owner.is_dead

    def write(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.changed[key].notify()


class Store:
    """A connection to the store, as a process has it. Methods are torch's."""

    def __init__(self, server: Server, prefix: str = "") -> None:
        self.server, self._prefix = server, prefix
        self.host, self.port = server.host.name, 29500
        self._process: Process = current_owner()

    def under(self, prefix: str) -> Store:
        """The same connection, for keys with a prefix."""
        return Store(self.server, f"{self._prefix}{prefix}/")

    def clone(self) -> Store:
        for name in ("validate", "ping"):
            self._do(self._request(name, "", lambda: None))
        return Store(self.server, self._prefix)

    def set(self, key: str, value: str) -> None:
        self._do(self.set_steps(key, value))

    def append(self, key: str, value: str) -> None:
        data, at, values = value.encode(), self._at(key), self.server.values

        def append() -> None:
            self.server.write(at, values.get(at, b"") + data)

        self._do(self._request("append", key, append, len(data)))

    def add(self, key: str, number: int) -> int:
        at, values = self._at(key), self.server.values

        def add() -> int:
            self.server.write(at, b"%d" % (int(values.get(at, b"0")) + number))
            return int(values[at])

        return self._do(self._request("add", key, add))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        at, values = self._at(key), self.server.values

        def compare_and_set() -> bytes:
            if at not in values and expected:
                return expected.encode()
            if values.get(at, b"") == expected.encode():
                self.server.write(at, desired.encode())
            return values[at]

        return self._do(self._request("compare_set", key, compare_and_set))

    def get(self, key: str) -> bytes:
        return self._do(self.get_steps(key))

    def delete_key(self, key: str) -> bool:
        at, values = self._at(key), self.server.values
        return self._do(self._request("delete_key", key, lambda: values.pop(at, None) is not None))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_DEFAULT_S)) -> None:
        self._do(self.wait_steps(keys, timeout))

    def _do(self, steps: Steps[T]) -> T:
        return self.server.cluster.scheduler.complete(steps)

    # ---- The same as steps -----------------------------------------------------------------------

    def set_steps(self, key: str, value: str) -> Steps[None]:
        data, at = value.encode(), self._at(key)
        yield from self._request("set", key, lambda: self.server.write(at, data), len(data))

    def get_steps(self, key: str) -> Steps[bytes]:
        yield from self.wait_steps([key])
        return (yield from self._request("get", key, lambda: self.server.values[self._at(key)]))

    def wait_steps(
        self, keys: list[str], timeout: timedelta = timedelta(seconds=_DEFAULT_S)
    ) -> Steps[None]:
        cluster = self.server.cluster
        until = cluster.scheduler.now + timeout.total_seconds()
        yield from self._request("wait", ", ".join(keys), lambda: None)
        for key in keys:
            at = self._at(key)
            while at not in self.server.values:
                left = until - cluster.scheduler.now
                if left <= 0:
                    raise RuntimeError(f"wait timeout after {timeout.total_seconds():g} s: {key}")
                yield self.server.changed[at], left
                yield from self._check()

    def _at(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def _check(self) -> Steps[None]:
        """Raise if the server has ended; wait forever where no answer comes."""
        while not self.server.cluster.can_reach(self._process.host, self.server.host):
            yield None, None
        if self.server.is_dead:
            raise RuntimeError("failed to recv, got 0 bytes: Connection was likely closed")

    def _request(self, name: str, key: str, act: Callable[[], T], sent_bytes: int = 0) -> Steps[T]:
        """Make a request: it arrives, has its effect, and the answer arrives."""
        cluster, process = self.server.cluster, self._process
        cluster.step(f"store {name} {key}", process)
        counted = cluster.counted[process.phase]
        counted.requests[process.rank] += 1
        there = cluster.latency(process.host, self.server.host)
        answer: list[T] = []

        def arrive() -> None:
            if not self.server.is_dead and cluster.can_reach(process.host, self.server.host):
                answer.append(act())

        cluster.scheduler.after(there, arrive)
        yield None, there + cluster.latency(process.host, self.server.host)
        yield from self._check()
        if not answer:
            raise RuntimeError("failed to recv, got 0 bytes: Connection was likely closed")
        got: Any = answer[0]
        counted.store_bytes += sent_bytes + (len(got) if isinstance(got, bytes) else 0)
        return answer[0]
