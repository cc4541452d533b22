"""Encodes placements for logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard

Pair = tuple[Placement | None, Placement | None]  # along dp and tp; None where it is not known
UNKNOWN: Pair = (None, None)


def encode(placement: Placement | None) -> Any:
    """Encode a placement as a tuple of plain values; None stays None."""
    if placement is None:
        return None
    if isinstance(placement, Shard):
        fields = vars(placement)
        return "S", *(tuple(v) if isinstance(v, (list, tuple)) else v for v in fields.values())
    return ("R",) if isinstance(placement, Replicate) else ("P",)


def decode(encoded: Any) -> Placement | None:
    """Decode a placement: the inverse of ``encode``."""
    if encoded is None:
        return None
    kind, *fields = encoded
    if kind == "S":
        return Shard(*fields)
    return Replicate() if kind == "R" else Partial()


def common(pair: Pair, hashes: Sequence[Sequence[int]]) -> Pair:
    """Return the placements that all ranks have alike, None along the other axes.

    Args:
        hashes: Those of the ranks' encoded placements, along dp and tp.
    """
    dp, tp = (
        placement if all(row[i] == hashes[0][i] for row in hashes) else None
        for i, placement in enumerate(pair)
    )
    return dp, tp
