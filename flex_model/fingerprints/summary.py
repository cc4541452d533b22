"""A fingerprint keeps moments of each full tensor, and its values at a few positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.placement import Shape
from flex_model.distributed.transports.buffer_layout import as_bytes

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
        sample: The bytes of the values at ``positions``; of a routing, of all.
        margins: Of a routing: by token, how far the last chosen expert is ahead of the next one, in
            units of float32's rounding at the scale of the scores.
        read_full: Reads the tensor, where it is kept.
        callers: The modules that called it, the innermost first; of a gradient of kind ``"tensor"``
            and a routing, the modules above by name.
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
    callers: Sequence[str] = ()
    layout: str = ""
    splits: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """The name, kind and call, which no other summary of a run has."""
        return self.name, self.kind, self.call

    @property
    def values(self) -> Tensor:
        """The values of the sample; of a routing, in the tensor's shape."""
        aligned = self.sample.clone().view(self.dtype)
        return aligned.view(self.shape) if self.kind == ROUTING else aligned


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
    places = torch.arange(NUM_SAMPLES, device="cpu")
    mixed = places * _MIXER % 2**32
    mixed = (mixed ^ mixed >> 15) * _MIXER % 2**32
    return ((places + (mixed ^ mixed >> 13) / 2**32) * (numel / NUM_SAMPLES)).long().to(device)


def summed(full: Tensor, name: str, kind: str, call: int, margins: Tensor | None = None) -> Summary:
    """Return the summary of a full tensor, not `finished`: nothing waits for its device."""
    full, shape = full.detach().resolve_conj().resolve_neg(), tuple(full.shape)
    flat = full.contiguous().view(-1)
    sample = full if kind == ROUTING else flat.index_select(0, positions(shape, full.device))
    return Summary(name, kind, call, full.dtype, shape, sums_of(flat), as_bytes(sample), margins)


def finished(found: Sequence[Summary]) -> list[Summary]:
    """Return summaries that have ``sums_of`` of their tensors in place of the moments, with these;
    the host waits for their devices.
    """
    if not found:
        return []
    total, squares, largest = torch.stack([one.moments.cpu() for one in found]).unbind(1)
    num_reals = [math.prod(one.shape) * (1 + one.dtype.is_complex) for one in found]
    counts = torch.tensor(num_reals, device="cpu").clamp(min=1)
    is_infinite = 1 - largest.isfinite().double()
    moments = torch.stack([total / counts, (squares / counts).sqrt(), largest, is_infinite], 1)
    return [replace(one, moments=row) for one, row in zip(found, moments)]


def sums_of(flat: Tensor) -> Tensor:
    """Return three float64 of a part of a tensor, on its device: the sum, that of the squares, and
    the largest magnitude.
    """
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if not flat.numel():
        return torch.zeros(3, dtype=torch.float64, device=flat.device)
    is_summed = flat.dtype in (torch.float32, torch.float64, torch.bfloat16)
    wide = flat if is_summed else flat.float() if flat.is_floating_point() else flat.double()
    if flat.is_cpu:
        return torch.ops.flex_model.moments(wide)
    total = wide.sum(dtype=torch.float64)
    norm = torch.linalg.vector_norm(wide, dtype=torch.float64)
    return torch.stack([total, norm.square(), torch.stack(wide.aminmax()).abs().max().double()])
