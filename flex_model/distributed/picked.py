"""The part of a shard that a hook selected: taken out before the gather, put back after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flex_model.selection.selectors import as_slice


@dataclass(frozen=True)
class Pick:
    """The selected indices of a tensor, by dim, and the selected dtype.

    Attributes:
        indices: The indices by dim, in the order in which they are taken.
        dtype: The dtype; None: the tensor's own.
        casts_last: Whether the full tensor is cast instead of the shards, after a pending sum.
    """

    indices: Mapping[int, Sequence[int]]
    dtype: torch.dtype | None = None
    casts_last: bool = False
    _at: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    def take(self, shard: Tensor) -> Tensor:
        """Return the selected part, in the graph: a view where the indices are a range."""
        for dim, indices in self.indices.items():
            chosen = as_slice(indices)
            if isinstance(chosen, slice):
                shard = shard[(slice(None),) * dim + (chosen,)]
            else:
                shard = shard.index_select(dim, self._indices_at(dim, shard.device))
        return shard if self.casts_last else self.cast(shard)

    def put(self, shard: Tensor, part: Tensor) -> Tensor:
        """Return the shard with the part written into it, in the graph of both."""
        return self._put(shard, part.to(shard.dtype), list(self.indices))

    def _put(self, into: Tensor, part: Tensor, dims: list[int]) -> Tensor:
        if not dims:
            return part
        dim, *inner = dims
        chosen = as_slice(self.indices[dim])
        if isinstance(chosen, slice):
            start, end = chosen.start, chosen.stop
            if inner:
                part = self._put(into.narrow(dim, start, end - start), part, inner)
            return torch.slice_scatter(into, part, dim, start, end)
        at = self._indices_at(dim, into.device)
        if inner:
            part = self._put(into.index_select(dim, at), part, inner)
        return into.index_copy(dim, at, part)

    def cast(self, part: Tensor) -> Tensor:
        """Cast to the dtype that the hook selected."""
        return part if self.dtype is None else part.to(self.dtype)

    def _indices_at(self, dim: int, device: torch.device) -> Tensor:
        found = self._at.get((dim, device))
        if found is None:
            with torch.inference_mode(False):
                found = torch.tensor(list(self.indices[dim]), dtype=torch.int64, device=device)
            self._at[dim, device] = found
        return found
