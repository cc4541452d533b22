"""The costs of transfers: counted as they happen, and predicted by the same formulas.

Bytes of a rank are those that it sends of its own data and receives of others', each once: the
minimum of any transport. Headers, of 64 bytes, are counted separately. ``BetweenHosts`` predicts
what the transport of CPU tensors moves between hosts, headers included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from flex_model._C import GatherPlan
from flex_model.distributed import rounds
from flex_model.distributed.mesh import GRID, Axis, Mesh
from flex_model.distributed.rounds import Round

HEADER_BYTES = 64
SUMMED_BYTES = 8 << 20  # of each rank, that are summed at a time
_MIN_PART_BYTES = 4096  # of a tensor that hosts share out


def of_gather_to_first(plan: GatherPlan, ranks: Sequence[int], rank: int) -> int:
    """The bytes of a gather to the first rank, or of a scatter from it, on ``rank``; ``ranks`` hold
    the plan's shards.
    """
    own = plan.shard_bytes[ranks.index(rank)] if rank in ranks else 0
    return plan.full_bytes - own if rank == 0 else own


# ---- Between hosts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What transfers move between hosts.

    Attributes:
        sent, received: The bytes of each host, without those of protocols.
        messages: The messages that each host sends.
        steps: How many messages wait for one another.
        waited_bytes: The bytes on the busiest link of each transfer, added up. A link connects one
            host to all others, and carries as much in each direction.
    """

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()
    steps: int = 0
    waited_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            added(self.sent, other.sent),
            added(self.received, other.received),
            added(self.messages, other.messages),
            self.steps + other.steps,
            self.waited_bytes + other.waited_bytes,
        )

    @property
    def most_bytes(self) -> int:
        """The bytes on the busiest link, in its busier direction."""
        return max(*self.sent, *self.received, 0, 0)

    @property
    def most_messages(self) -> int:
        """The messages of the host that sends the most."""
        return max(self.messages, default=0)

    @property
    def of_shared(self) -> Traffic:
        """The part of these bytes in a transfer that is shared, whose messages count once."""
        return replace(self, messages=(), steps=0)

    @property
    def without_bytes(self) -> Traffic:
        """The messages of a transfer whose bytes are counted apart."""
        return Traffic(messages=self.messages, steps=self.steps)

    def seconds(self, bytes_per_s: float, latency_s: float) -> float:
        """The time that it takes by links of this speed, if nothing else uses them."""
        return self.waited_bytes / bytes_per_s + self.steps * latency_s


def added(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Add numbers of each host or rank; empty: those of nothing."""
    return tuple(a + b for a, b in zip(some, others)) if some and others else some or others


@dataclass(frozen=True)
class BetweenHosts:
    """Predicts the traffic of transfers by ``AcrossHosts``.

    Example::

        mesh = Mesh(tuple(range(4)), 0, dp_size=2, tp_size=2)
        BetweenHosts(mesh, ("a", "a", "b", "b")).exchange(64).sent  # (128, 128)

    Args:
        hosts: The name of each rank's host, in the order of ``Mesh.stage_ranks``. Of ranks that
            share no memory each has a name of its own.
    """

    mesh: Mesh
    hosts: tuple[str, ...]

    def exchange(self, num_bytes: int) -> Traffic:
        """Of an exchange of ``num_bytes`` of each rank, such as a header."""
        return self.all_gather(GRID, [num_bytes] * len(self.hosts))

    def all_gather(self, axes: tuple[Axis, ...], held: Sequence[int]) -> Traffic:
        """Of an all-gather in each group along ``axes``; ``held``: the bytes of each rank."""
        moves = _Moves(self._names)
        for members in _groups(self.mesh, axes):
            names, sizes = self._by_host(members, held)
            moves.add(names, _of_all_gather(tuple(sizes)))
        return moves.traffic()

    def all_reduce(self, axes: tuple[Axis, ...], held: Sequence[int]) -> Traffic:
        """Of a sum over each group along ``axes``."""
        total = Traffic()
        for at in range(0, max(held), SUMMED_BYTES):
            moves = _Moves(self._names)
            for members in _groups(self.mesh, axes):
                num_bytes = min(max(held[members[0]] - at, 0), SUMMED_BYTES)
                names, ranks = self._by_host(members, [1] * len(held))
                moves.add(names, _of_sum(tuple(ranks), num_bytes))
            total += moves.traffic()
        return total

    def to_first(self, axes: tuple[Axis, ...], held: Sequence[int]) -> Traffic:
        """Of a gather on the first rank, in its group along ``axes``."""
        moves = _Moves(self._names)
        names, sizes = self._by_host(self.mesh.ranks_along(axes, place=0), held)
        moves.add(names, [rounds.gather_to_first(place, sizes) for place in range(len(names))])
        return moves.traffic()

    def from_first(self, axes: tuple[Axis, ...], held: Sequence[int]) -> Traffic:
        """Of a scatter from the first rank, in its group along ``axes``."""
        moves = _Moves(self._names)
        names, sizes = self._by_host(self.mesh.ranks_along(axes, place=0), held)
        moves.add(names, [rounds.scatter_from_first(place, sizes) for place in range(len(names))])
        return moves.traffic()

    def broadcast(self, num_bytes: int) -> Traffic:
        """Of a broadcast from the first rank to all."""
        moves, names = _Moves(self._names), self._names
        moves.add(names, _of_broadcast(len(names), num_bytes))
        return moves.traffic()

    @property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(self.hosts))

    def _by_host(self, members: Sequence[int], held: Sequence[int]) -> tuple[list[str], list[int]]:
        """The hosts of a group, its leaders' order, and the bytes of their ranks together."""
        totals: dict[str, int] = {}
        for place in members:
            totals[self.hosts[place]] = totals.get(self.hosts[place], 0) + held[place]
        return list(totals), list(totals.values())


def is_in_parts(num_hosts: int, num_ranks: int, num_bytes: int) -> bool:
    """Whether each host takes a part of a tensor that is summed or broadcast, and the parts are
    gathered then: it takes fewer bytes than to send the whole, and more messages.
    """
    return num_ranks > 2 and num_bytes >= num_hosts * _MIN_PART_BYTES


def _of_sum(ranks: tuple[int, ...], num_bytes: int) -> list[list[Round]]:
    """The rounds of each host, whose numbers of ranks are given."""
    if not is_in_parts(len(ranks), sum(ranks), num_bytes):
        return _of_all_gather(tuple(count * num_bytes for count in ranks))
    parts = rounds.even_parts(num_bytes, len(ranks))
    gathered = _of_all_gather(tuple(parts))
    return [
        rounds.all_to_all(i, [count * n for n in parts], [parts[i] * n for n in ranks])
        + gathered[i]
        for i, count in enumerate(ranks)
    ]


def _of_broadcast(num_hosts: int, num_bytes: int) -> list[list[Round]]:
    if not is_in_parts(num_hosts, num_hosts, num_bytes):
        return [rounds.broadcast(i, num_hosts, num_bytes) for i in range(num_hosts)]
    parts = rounds.even_parts(num_bytes, num_hosts)
    gathered = _of_all_gather(tuple(parts))
    return [rounds.scatter_from_first(i, parts) + gathered[i] for i in range(num_hosts)]


@lru_cache(maxsize=64)  # groups have equal sizes, mostly
def _of_all_gather(sizes: tuple[int, ...]) -> list[list[Round]]:
    return [rounds.all_gather(place, sizes)[1] for place in range(len(sizes))]


@lru_cache(maxsize=16)
def _groups(mesh: Mesh, axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
    places = range(len(mesh.stage_ranks))
    return list(dict.fromkeys(tuple(mesh.ranks_along(axes, place)) for place in places))


class _Moves:
    """The messages of collectives of several groups that run at the same time."""

    def __init__(self, names: list[str]) -> None:
        self._sent = dict.fromkeys(names, 0)
        self._received = dict.fromkeys(names, 0)
        self._messages = dict.fromkeys(names, 0)
        self._steps = 0

    def traffic(self) -> Traffic:
        sent, received = tuple(self._sent.values()), tuple(self._received.values())
        if len(sent) == 1:
            return Traffic()
        most = max(*sent, *received)
        return Traffic(sent, received, tuple(self._messages.values()), self._steps, most)

    def add(self, names: list[str], rounds_of: list[list[Round]]) -> None:
        """A collective of these hosts, by the rounds of each."""
        for name, of_host in zip(names, rounds_of):
            for sends, _ in of_host:
                for place, start, stop in sends:
                    self._sent[name] += stop - start
                    self._received[names[place]] += stop - start
                    self._messages[name] += 1
        steps = sum(any(sends for sends, _ in at_once) for at_once in zip(*rounds_of))
        self._steps = max(self._steps, steps)


@dataclass(frozen=True, order=True)
class Connected:
    """What ``FlexModel(...)`` takes of one rank, whose hosts share memory.

    Attributes:
        requests: To torch's store, torch's own included. In later rendezvous of the same ranks
            three ranks make one more each (one of two ranks two), to forget the one before.
        sockets: Those that it holds until ``restore()``.
    """

    requests: int
    sockets: int

    @staticmethod
    def of(num_hosts: int, is_first_of_host: bool) -> Connected:
        """That of a rank. The first ranks of several hosts meet, and connect by gloo."""
        rendezvous, second_connection = 4, 2
        if num_hosts == 1 or not is_first_of_host:
            return Connected(rendezvous + second_connection, 1)
        by_gloo = 3 * num_hosts + 1
        return Connected(2 * rendezvous + second_connection + by_gloo, num_hosts + 1)

    @staticmethod
    def of_groups(groups: Sequence[tuple[int, bool]]) -> Connected:
        """That of a rank of several groups, by the arguments of ``of`` for each: it makes the
        second connection to the store once.
        """
        of_each = [Connected.of(*group) for group in groups]
        again = len(of_each) - 1
        requests = sum(one.requests for one in of_each) - 2 * again
        return Connected(requests, sum(one.sockets for one in of_each) - again)


# ---- Counted -------------------------------------------------------------------------------------


@dataclass
class Spent:
    """The costs of one site on this rank.

    Attributes:
        headers: Exchanges of 64 bytes.
        payloads: Collectives that move tensors, without those shared with other sites.
        num_bytes: The bytes that this rank moved.
        transports: The names of the transports that moved them.
    """

    headers: int = 0
    payloads: int = 0
    num_bytes: int = 0
    transports: set[str] = field(default_factory=set)

    def add(self, num_bytes: int, transport: str, payloads: int = 0) -> None:
        self.payloads += payloads
        self.num_bytes += num_bytes
        self.transports.add(transport)


class Meter:
    """Counts the costs of a communicator's transfers, by the site of the last header before them.

    Attributes:
        site: The site for which transfers are counted now.
    """

    def __init__(self) -> None:
        self.site = 0
        self._headers: dict[int, int] = {}
        self._payloads: dict[int, Spent] = {}

    @property
    def spent(self) -> dict[int, Spent]:
        """The costs of each site."""
        payloads, sites = self._payloads, {**self._headers, **self._payloads}
        return {
            site: replace(payloads.get(site, Spent()), headers=self._headers.get(site, 0))
            for site in sites
        }

    def clear(self) -> None:
        self._headers.clear()
        self._payloads.clear()

    def header(self, site: int) -> None:
        """Count a header of ``site``, and count what follows for it."""
        self.site = site
        self._headers[site] = self._headers.get(site, 0) + 1

    def turn_to(self, site: int) -> None:
        """Count what follows for ``site``."""
        self.site = site

    def payload(self, num_bytes: int, transport: str) -> None:
        self._of(self.site).add(num_bytes, transport, payloads=1)

    def part_of_payload(self, site: int, num_bytes: int, transport: str) -> None:
        """Count bytes of ``site`` (0: the last header's) in a collective shared with other
        sites.
        """
        self._of(site or self.site).add(num_bytes, transport)

    def _of(self, site: int) -> Spent:
        spent = self._payloads.get(site)
        if spent is None:
            spent = self._payloads[site] = Spent()
        return spent
