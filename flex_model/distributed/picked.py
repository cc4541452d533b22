"""The part of a shard that a hook selected: taken out before the gather, put back after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pick:
    """Which indices of a tensor, by dim, and as which dtype.

    Attributes:
        indices: By dim, in the order in which they are taken.
        dtype: None: the tensor's own.
        casts_last: Whether the cast waits for the full tensor: a sum is due before it.
    """

    indices: Mapping[int, Sequence[int]]
    dtype: torch.dtype | None = None
    casts_last: bool = False
    _at: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def take(self, shard: Tensor) -> Tensor:
        """The part, in the graph: a view where indices are a range."""
        for dim, indices in self.indices.items():
            span = _span(indices)
            if span is None:
                shard = shard.index_select(dim, self._indices_at(dim, shard.device))
            else:
                shard = shard[(slice(None),) * dim + (slice(*span),)]
        return shard if self.casts_last else self.cast(shard)

    def put(self, shard: Tensor, part: Tensor) -> Tensor:
        """The shard with the part in its place, in the graph of both."""
        return self._put(shard, part.to(shard.dtype), list(self.indices))

    def _put(self, into: Tensor, part: Tensor, dims: list[int]) -> Tensor:
        if not dims:
            return part
        dim, *inner = dims
        span = _span(self.indices[dim])
        if span is not None:
            start, end = span
            if inner:
                part = self._put(into.narrow(dim, start, end - start), part, inner)
            return torch.slice_scatter(into, part, dim, start, end)
        at = self._indices_at(dim, into.device)
        if inner:
            part = self._put(into.index_select(dim, at), part, inner)
        return into.index_copy(dim, at, part)

    def cast(self, part: Tensor) -> Tensor:
        """In the dtype that the hook wants."""
        return part if self.dtype is None else part.to(self.dtype)

    def _indices_at(self, dim: int, device: torch.device) -> Tensor:
        found = self._at.get((dim, device))
        if found is None:
            with torch.inference_mode(False):
                found = torch.tensor(list(self.indices[dim]), dtype=torch.int64, device=device)
            self._at[dim, device] = found
        return found


def _span(indices: Sequence[int]) -> tuple[int, int] | None:
    """From the first to after the last, if there is none missing between."""
    if not indices:
        return 0, 0
    start, end = indices[0], indices[-1] + 1
    return (start, end) if list(indices) == list(range(start, end)) else None
