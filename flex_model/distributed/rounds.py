"""Collectives as rounds of messages: who sends which bytes of a buffer to whom, and when.

The rounds of an all-gather and a broadcast double, so that their number grows with the logarithm of
the ranks. Empty messages are left out.

Source of the all-gather: Bruck et al., "Efficient Algorithms for All-to-All Communications in
Multiport Message-Passing Systems", 1997, section 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

_LARGEST_ELEMENT_BYTES = 16
_MIN_PART_BYTES = 4096  # of a tensor that hosts share out


class Part(NamedTuple):
    """The bytes of a buffer from ``start`` to ``stop``, which go to a rank or come from it."""

    rank: int
    start: int
    stop: int


class Round(NamedTuple):
    """The messages of a rank that may travel at the same time, after those of the rounds before."""

    sends: list[Part]
    receives: list[Part]


def all_gather(rank: int, sizes: Sequence[int]) -> tuple[list[int], list[Round]]:
    """Return where each rank's bytes begin, and the rounds. The buffer of ``rank`` begins with its
    own bytes, which those of the ranks after it follow.

    A round sends what the rank has to one before it, and doubles what it has.
    """
    num_ranks = len(sizes)
    order = [(rank + i) % num_ranks for i in range(num_ranks)]
    ends = list(itertools.accumulate((sizes[r] for r in order), initial=0))
    rounds, held = [], 1
    while held < num_ranks:
        more = min(held, num_ranks - held)
        sent = Part(order[-held], 0, ends[more])
        received = Part(order[held], ends[held], ends[held + more])
        rounds.append(_round([sent], [received]))
        held += more
    return [ends[(r - rank) % num_ranks] for r in range(num_ranks)], rounds


def broadcast(rank: int, num_ranks: int, num_bytes: int) -> list[Round]:
    """The rounds that send the first rank's buffer to all. In each round, all ranks that have it
    send it to one more.
    """
    rounds, held = [], 1
    while held < num_ranks:
        other = rank ^ held if rank < 2 * held else num_ranks
        part = [Part(other, 0, num_bytes)] if other < num_ranks else []
        rounds.append(_round(part, []) if rank < held else _round([], part))
        held *= 2
    return rounds


def gather_to_first(rank: int, sizes: Sequence[int]) -> list[Round]:
    """The round that sends all ranks' bytes to the first one, whose buffer has them in order of
    ranks; those of the others have their own bytes.
    """
    if rank > 0:
        return [_round([Part(0, 0, sizes[rank])], [])]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [_round([], [Part(r, ends[r], ends[r + 1]) for r in range(1, len(sizes))])]


def scatter_from_first(rank: int, sizes: Sequence[int]) -> list[Round]:
    """The round that is the reverse of ``gather_to_first``, with the same buffers."""
    return [Round(receives, sends) for sends, receives in gather_to_first(rank, sizes)]


def all_to_all(rank: int, sent: Sequence[int], received: Sequence[int]) -> list[Round]:
    """The round that sends ``sent[r]`` bytes to each rank r. The buffer has the bytes for all ranks
    in their order, then those from all ranks; what a rank has for itself stays where it is.
    """
    others = [(rank + step) % len(sent) for step in range(1, len(sent))]
    out = list(itertools.accumulate(sent, initial=0))
    back = list(itertools.accumulate(received, initial=out[-1]))
    sends = [Part(r, out[r], out[r + 1]) for r in others]
    return [_round(sends, [Part(r, back[r], back[r + 1]) for r in others])]


def is_in_parts(num_hosts: int, num_ranks: int, num_bytes: int) -> bool:
    """Whether each host takes a part of a tensor that is summed or broadcast, and the parts are
    gathered then: it takes fewer bytes than to send the whole, and more messages.
    """
    return num_ranks > 2 and num_bytes >= num_hosts * _MIN_PART_BYTES


def even_parts(num_bytes: int, num_ranks: int) -> list[int]:
    """The sizes of equal parts of a tensor, a part of each rank, whose elements they don't cut."""
    units = -(-num_bytes // _LARGEST_ELEMENT_BYTES)
    cuts = [units * rank // num_ranks * _LARGEST_ELEMENT_BYTES for rank in range(num_ranks)]
    return [min(stop, num_bytes) - start for start, stop in zip(cuts, [*cuts[1:], num_bytes])]


def _round(sends: list[Part], receives: list[Part]) -> Round:
    return Round(
        *([part for part in parts if part.start < part.stop] for parts in (sends, receives))
    )
