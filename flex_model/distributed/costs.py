"""What transfers cost: counted as they are made, and foretold by the same formulas.

Bytes are those that a rank sends of its own and receives of others', each once: the least that any
transport could move. Headers, of 64 bytes, are counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flex_model._C import GatherPlan


def of_all_gather(plan: GatherPlan) -> int:
    """On any rank of the plan."""
    return plan.full_bytes


def of_gather_to_first(plan: GatherPlan, ranks: Sequence[int], rank: int) -> int:
    """On ``rank``, where ``ranks`` hold the plan's shards. A scatter from the first costs the
    same.
    """
    own = plan.shard_bytes[ranks.index(rank)] if rank in ranks else 0
    return plan.full_bytes - own if rank == 0 else own


def of_broadcast(num_bytes: int) -> int:
    """On any rank."""
    return num_bytes


def of_all_reduce(num_bytes: int) -> int:
    """On any rank: what it adds, and the sum."""
    return 2 * num_bytes


@dataclass
class Spent:
    """What one site has cost on this rank.

    Attributes:
        headers: Exchanges of 64 bytes.
        payloads: Collectives that move tensors, without those that it shares with other sites.
        num_bytes: Moved by this rank.
        transports: Names of those that moved them.
    """

    headers: int = 0
    payloads: int = 0
    num_bytes: int = 0
    transports: set[str] = field(default_factory=set)


class Meter:
    """Counts what a channel's transfers cost, by the site of the last header before them.

    Attributes:
        site: What follows is counted for it.
    """

    def __init__(self) -> None:
        self.spent: dict[int, Spent] = {}
        self.site = 0
        self._current = Spent()

    def clear(self) -> None:
        self.spent.clear()
        self._current = Spent()

    def header(self, site: int) -> None:
        """A header for ``site`` was exchanged: what follows is its own."""
        self.turn_to(site)
        self._current.headers += 1

    def turn_to(self, site: int) -> None:
        """What follows is of ``site``."""
        self.site = site
        self._current = self.of(site)

    def payload(self, num_bytes: int, transport: str) -> None:
        current = self._current
        current.payloads += 1
        current.num_bytes += num_bytes
        current.transports.add(transport)

    def part_of_payload(self, site: int, num_bytes: int, transport: str) -> None:
        """Bytes of ``site`` (0: of the last header's) that travelled in one collective with
        others'.
        """
        spent = self.of(site) if site else self._current
        spent.num_bytes += num_bytes
        spent.transports.add(transport)

    def of(self, site: int) -> Spent:
        spent = self.spent.get(site)
        if spent is None:
            spent = self.spent[site] = Spent()
        return spent
