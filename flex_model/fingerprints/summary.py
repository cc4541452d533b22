"""A fingerprint keeps moments of each full tensor, and its values at a few positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.placement import Shape

NUM_SAMPLES = 2048
_MIXER = 0x85EBCA6B  # odd, without a pattern

#: The kind of a site beside those of hooks: the experts that a gate chooses.
ROUTING = "routing"


@dataclass(eq=False)
class Summary:
    """One tensor at one call of a site.

    Attributes:
        name: The module's; of a gradient of kind ``"tensor"``, the parameter's.
        kind: As of hooks, or ``"routing"``.
        call: Counted from 0 for each name and kind.
        moments: Mean, root of the mean square, largest magnitude, and 1 if an element is not
            finite; float64.
        sample: The values at ``positions``; of a routing, all of them.
        margins: Of a routing: by token, how far the last chosen expert is ahead of the next one, in
            units of rounding at the scale of the scores.
        read_full: Reads the tensor, where it is kept.
        layout, splits: The layout in words; by axis, the dim and the sizes of the ranks' parts.
    """

    name: str
    kind: str
    call: int
    dtype: torch.dtype
    shape: Shape
    moments: Tensor
    sample: Tensor
    margins: Tensor | None = None
    read_full: Callable[[], Tensor] | None = None
    layout: str = ""
    splits: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """The name, kind and call, which no other summary of a run has."""
        return self.name, self.kind, self.call


@functools.lru_cache(maxsize=64)
def positions(shape: Shape, device: torch.device) -> Tensor:
    """Return the sorted flat positions of the values that are kept of a tensor of this full shape.

    They depend on the shape alone, not on the site's name: so they are the same on every sharding,
    and for sites that a map of names pairs.
    """
    numel = math.prod(shape)
    if numel <= NUM_SAMPLES:
        return torch.arange(numel, device=device)
    # One in each of equal intervals, so that no region is left out; where in it, is hashed.
    places = torch.arange(NUM_SAMPLES)
    mixed = places * _MIXER % 2**32
    mixed = (mixed ^ mixed >> 15) * _MIXER % 2**32
    return ((places + (mixed ^ mixed >> 13) / 2**32) * (numel / NUM_SAMPLES)).long().to(device)


def summarised(
    full: Tensor, name: str, kind: str, call: int, margins: Tensor | None = None
) -> Summary:
    """Return the summary of a full tensor, whose tensors stay on its device: nothing waits."""
    full, shape = full.detach(), tuple(full.shape)
    flat = full.contiguous().view(-1)
    sample = full if kind == ROUTING else flat[positions(shape, full.device)]
    found = Summary(name, kind, call, full.dtype, shape, sums_of(flat), sample, margins)
    return replace(found, moments=moments_of(found.moments, torch.tensor(num_reals(found))))


def num_reals(one: Summary) -> int:
    """Return how many real numbers the tensor has."""
    return math.prod(one.shape) * (1 + one.dtype.is_complex)


def sums_of(flat: Tensor) -> Tensor:
    """Return three float64 of a part of a tensor, on its device: the sum, that of the squares, and
    the largest magnitude. Those of integers are exact, in whatever order they are added.
    """
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if not flat.numel():
        return torch.zeros(3, dtype=torch.float64, device=flat.device)
    if not flat.is_floating_point():
        exact = flat.long()
        return torch.stack([exact.sum(), exact.square().sum(), exact.abs().max()]).double()
    if flat.is_cpu and flat.dtype in (torch.float32, torch.float64, torch.bfloat16):
        return torch.ops.flex_model.moments(flat)
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    total = wide.sum(dtype=torch.float64)
    norm = torch.linalg.vector_norm(wide, dtype=torch.float64)
    return torch.stack([total, norm.square(), torch.stack(wide.aminmax()).abs().max().double()])


def moments_of(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the moments of `Summary`, (..., 4), of sums, (..., 3), over so many real numbers."""
    total, squares, largest = sums.unbind(-1)
    counts = counts.clamp(min=1)
    is_finite = largest.isfinite().double()
    return torch.stack([total / counts, (squares / counts).sqrt(), largest, 1 - is_finite], -1)
