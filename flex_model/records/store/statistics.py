"""Mean, variance and norm of the rows of records, computed while they are written.

Each rank adds the moments of its shards to its file of a group of batches; readers merge them. A
row is a record's last dim, and all dims before it count rows.

Source of the merging: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flex_model.records.store.manifest import RecordLayout, RecordShard

_CHUNK_ELEMENTS = 2**16  # that are widened to float64 at once: they stay in the cache


class Statistics(NamedTuple):
    """Statistics of all rows of one name, float64.

    Attributes:
        rows: Their number.
        mean, variance: By channel; the variance is the mean squared deviation.
        norm: The root of the mean squared norm of a row.
    """

    rows: int
    mean: Tensor
    variance: Tensor
    norm: float


def statistics_key(name: str) -> str:
    """Return the key of a name's moments in the files."""
    return f"statistics/{name}"


def width_of(layouts: Iterable[RecordLayout]) -> int | None:
    """Return the width of the rows of these records; None if they have no common one, or hold other
    numbers than real floating-point ones.
    """
    layouts = list(layouts)
    widths = {layout.shape[-1:] for layout in layouts}
    is_real = all(layout.dtype.is_floating_point for layout in layouts)
    width = widths.pop() if len(widths) == 1 and is_real else ()
    return width[0] if width else None


def moments_of(parts: Sequence[RecordShard], rank: int) -> Tensor:
    """Return the moments of what a rank holds of records with one width: per channel, the number of
    rows, their mean, and the sum of squared deviations from it; zeros for what it does not hold.
    """
    total = torch.zeros(3, parts[0].layout.shape[-1], dtype=torch.float64, device="cpu")
    for part in parts:
        for shard, start, shard_start, sizes in part.layout.boxes:
            if part.tensor is None or part.layout.shards[shard][0] != rank or 0 in sizes:
                continue
            held = part.tensor[tuple(slice(a, a + n) for a, n in zip(shard_start, sizes))]
            channels = slice(start[-1], start[-1] + sizes[-1])
            rows = held.reshape(-1, sizes[-1])
            for chunk in rows.split(max(1, _CHUNK_ELEMENTS // sizes[-1])):
                total[:, channels] = merged(total[:, channels], _moments(chunk.double()))
    return total


def _moments(rows: Tensor) -> Tensor:
    mean = rows.mean(0)
    return torch.stack([torch.full_like(mean, len(rows)), mean, (rows - mean).square_().sum(0)])


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Return the moments of the rows of both."""
    count = one[0] + other[0]
    share = other[0] / count.clamp(min=1)
    apart = other[1] - one[1]
    deviations = one[2] + other[2] + apart.square() * one[0] * share
    return torch.stack([count, one[1] + apart * share, deviations])


def statistics_from(moments: Tensor) -> Statistics:
    """Return the statistics of rows with these moments."""
    count, mean, deviations = moments
    variance = deviations / count.clamp(min=1)
    norm = (variance + mean.square()).sum().sqrt()
    return Statistics(int(count[0]), mean, variance, float(norm))
