"""The costs of transfers, counted as they happen.

Bytes of a rank are those that it sends of its own data and receives of others', each once: the
minimum of any transport. Headers, of 64 bytes, are counted separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from flex_model._C import GatherPlan

SUMMED_BYTES = 8 << 20  # of each rank, that are summed at a time


def of_gather_to_first(plan: GatherPlan, ranks: Sequence[int], rank: int) -> int:
    """The bytes of a gather to the first rank, or of a scatter from it, on ``rank``; ``ranks`` hold
    the plan's shards.
    """
    own = plan.shard_bytes[ranks.index(rank)] if rank in ranks else 0
    return plan.full_bytes - own if rank == 0 else own


def added(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Add numbers of each rank; empty: those of nothing."""
    return tuple(a + b for a, b in zip(some, others)) if some and others else some or others


@dataclass(frozen=True)
class Cost:
    """What the calls of one hook add to a run whose layouts are known.

    Attributes:
        headers: Exchanges of 64 bytes, each with all ranks.
        payloads: Collectives that move tensors.
        bytes_by_rank: What each rank of the grid sends of its own and receives of others'; a
            transport may send more.
        record_bytes: What rank 0 keeps as records.
    """

    headers: int = 0
    payloads: int = 0
    bytes_by_rank: tuple[int, ...] = ()
    record_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.headers + other.headers,
            self.payloads + other.payloads,
            added(self.bytes_by_rank, other.bytes_by_rank),
            self.record_bytes + other.record_bytes,
        )

    @property
    def is_nothing(self) -> bool:
        """Whether ranks neither wait for others nor move anything."""
        return not (self.headers or self.payloads or any(self.bytes_by_rank))


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

    def add(self, headers: int, payloads: int, num_bytes: int, *transports: str) -> None:
        self.headers += headers
        self.payloads += payloads
        self.num_bytes += num_bytes
        self.transports.update(transports)


class Meter:
    """Counts the costs of a communicator's transfers, by the site of the last header before them.

    Attributes:
        site: The site for which transfers are counted now.
        spent: The costs of each site.
    """

    def __init__(self) -> None:
        self.site = 0
        self.spent: defaultdict[int, Spent] = defaultdict(Spent)

    def header(self, site: int) -> None:
        """Count a header of ``site``, and count what follows for it."""
        self.site = site
        self.spent[site].add(1, 0, 0)

    def turn_to(self, site: int) -> None:
        """Count what follows for ``site``."""
        self.site = site

    def payload(self, num_bytes: int, transport: str, site: int = 0, payloads: int = 1) -> None:
        """Count bytes of ``site`` (0: the last header's) in so many payloads; in none: its part of
        a collective that is shared with other sites.
        """
        self.spent[site or self.site].add(0, payloads, num_bytes, transport)
