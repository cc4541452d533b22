"""Measures how far the sites of two runs are apart, and tells own errors from inherited ones."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.fingerprints.summary import ROUTING, Summary, positions

#: How much larger than those of its inputs a module's relative differences may be. A matrix keeps
#: the relative size of a random difference; normalisation, softmax and sums that cancel do not: up
#: to 3.4 was measured, at attention with large scores.
GROWTH = 6.0
_ROUNDINGS = 4.0  # of the results on the way
_WORST = 5  # the positions that are listed


@dataclass(frozen=True)
class Difference:
    """How one site of run A differs in run B.

    Attributes:
        name: The module's name in A, or a parameter's.
        call: The call of the module, counted from 0.
        kind: As of hooks: ``"forward"`` for an output, ``"forward_pre"`` for an input,
            ``"full_backward_pre"`` and ``"full_backward"`` for their gradients, ``"tensor"`` for a
            parameter's. ``"routing"``: tokens go to other experts. ``"shape"`` and ``"dtype"``: of
            the tensor, whose values are not compared.
        ulps: The root of the mean square of the difference, in units of the rounding of the coarser
            dtype (its ``eps``) at the root of the mean square of A, without what masks fill in; of
            the gradient of a bias or another small parameter, at least at that of sums of as many
            gradients of the module's output, of random sign. Of a routing: the
            largest margin, in such units of float32 scores, by which a token's experts changed.
        inherited: The largest difference of the tensors that it was computed from, in the units of
            ``ulps``, also where these have another dtype.
        bound: The ``ulps`` that another order of sums may cause, rounded to the coarsest dtype up
            to there.
        module: The name of the module whose code computed it: of an input, the calling one; also
            of an output whose module's input was not compared.
        text: What differs, in words.
        positions: The most different of the kept values: index, A's and B's value, rank in A and B.
        layouts: Those of A and of B.
    """

    name: str
    call: int
    kind: str
    ulps: float
    inherited: float
    bound: float
    module: str
    text: str = ""
    positions: tuple[Any, ...] = ()
    layouts: tuple[str, str] = ("", "")

    @property
    def differs(self) -> bool:
        """Whether the difference is larger than that of sums in another order."""
        return self.ulps > self.bound or bool(self.text)

    @property
    def is_own(self) -> bool:
        """Whether the difference is more than what was inherited can grow to."""
        return self.ulps > self.bound + GROWTH * self.inherited

    @staticmethod
    def of_json(row: dict[str, Any]) -> Difference:
        """Return one from its fields, in which tuples may be lists."""
        tuples = {name: tuple(row[name]) for name in ("positions", "layouts")}
        return Difference(**{**row, **tuples})


def judged(
    pairs: Sequence[tuple[Summary, Summary]], replaced: Collection[tuple[str, int]]
) -> Iterator[Difference]:
    """Yield the differences of pairs of sites, in A's order of execution.

    What a site is computed from: an input of a module, from the inputs of the module that calls it
    and the outputs of those called before; an output, from its input and from the outputs of the
    modules inside; gradients alike, in the backward's order, and from the activations.

    Args:
        replaced: The inputs of B, by name and call, that were A's: nothing is inherited from them.
    """
    names = {a.name for a, _ in pairs if a.kind != "tensor"}
    is_of_one_dtype = _main_dtype(a for a, _ in pairs) == _main_dtype(b for _, b in pairs)
    begun = {(a.name, a.call) for a, _ in pairs if a.kind == "forward_pre"}
    forward: dict[str, _Source] = {}
    backward: dict[str, _Source] = {}
    squares: dict[str, tuple[float, int]] = {}  # by module, of its outputs' gradients; their rows
    for a, b in pairs:
        is_backward = a.kind in ("full_backward_pre", "full_backward", "tensor")
        begins = a.kind in ("forward_pre", "full_backward_pre")
        frames = backward if is_backward else forward
        caller, outer = [*(one for one in a.callers if one in names), "", ""][:2]
        is_of_caller = begins or a.kind in ("tensor", ROUTING)
        place, outside = (caller, outer) if is_of_caller else (a.name, caller)
        is_begun = a.kind != "forward" or (a.name, a.call) in begun
        source = frames.get(place, _Source())
        if place not in frames or not is_begun:  # what it was called with was not compared
            source = source.joined(frames.get(outside, _Source()))
        if is_backward:
            for name in (place, a.name):
                source = source.joined(forward.get(name, _Source()))
        width = max([*a.shape, math.prod(a.shape[:-1]) if is_backward else 1])
        own = _Source(0.0, width, _eps(a.dtype, b.dtype))
        module = place if is_begun else caller
        source = source.joined(_Source(eps=own.eps))
        if a.kind == "full_backward_pre":
            of_call = a.moments[1].item() ** 2 * math.prod(a.shape)
            squares[a.name] = squares.get(a.name, (0.0, 0))[0] + of_call, math.prod(a.shape[-1:])
        # A bias's gradient is a sum over rows, whose roundings stay where the terms cancel: a
        # key's is zero, since softmax is blind to it.
        numel = max(1, math.prod(a.shape))
        total, row = squares.get(caller, (0.0, 0)) if a.kind == "tensor" else (0.0, 0)
        floor = math.sqrt(total / numel) if len(a.shape) == 1 or numel <= row else 0.0
        difference = _difference(a, b, source, module, is_of_one_dtype, floor)
        yield difference
        # Experts that get other tokens have other results, however small the cause was.
        ulps = math.inf if difference.text and a.kind == ROUTING else difference.ulps
        found = _Source(ulps * _unit(a.dtype, b.dtype), width, source.eps)
        if begins:
            is_replaced = a.kind == "forward_pre" and (b.name, b.call) in replaced
            frames[a.name] = own if is_replaced else found
        else:
            frames[place] = source.joined(found)
        if a.kind in ("forward", "full_backward") and a.name:
            frames[caller] = frames.get(caller, _Source()).joined(found)


@dataclass(frozen=True)
class _Source:
    """The inputs of a site: their largest relative difference, the most terms of a sum, and the
    ``eps`` of the coarsest dtype up to them.
    """

    difference: float = 0.0
    width: int = 1
    eps: float = 0.0

    def joined(self, other: _Source) -> _Source:
        return _Source(
            max(self.difference, other.difference),
            max(self.width, other.width),
            max(self.eps, other.eps),
        )


def _main_dtype(sites: Iterable[Summary]) -> torch.dtype | None:
    """Return the dtype of most floating-point sites."""
    counts = Counter(one.dtype for one in sites if one.dtype.is_floating_point)
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def _difference(
    a: Summary, b: Summary, source: _Source, module: str, is_of_one_dtype: bool, floor: float
) -> Difference:
    """Compare two sites, at the scale of A or ``floor``, the larger one."""
    eps = _unit(a.dtype, b.dtype)
    found = Difference(a.name, a.call, a.kind, 0.0, source.difference / eps, 0.0, module)
    found = replace(found, layouts=(a.layout, b.layout))
    if a.shape != b.shape:
        text = f"{a.shape} in A, {b.shape} in B"
        return replace(found, kind="shape", ulps=math.inf, text=text)
    if a.kind == ROUTING:
        return _of_routing(a, b, replace(found, bound=_bound(source) / eps))
    if a.dtype != b.dtype and (is_of_one_dtype or not _is_inexact(a.dtype, b.dtype)):
        text = f"{a.dtype} in A, {b.dtype} in B"
        return replace(found, kind="dtype", ulps=math.inf, text=text)
    ours, theirs, index = b.values, a.values, positions(a.shape, torch.device("cpu"))
    if a.read_full is not None and b.read_full is not None:
        ours, theirs = b.read_full().reshape(-1), a.read_full().reshape(-1)
        index = torch.arange(len(ours), device="cpu")
    apart = values.apart(ours, theirs)
    # The mean and the root of the mean square are apart by no more than the tensors are, and the
    # rounding of their own sums.
    rounding = torch.finfo(torch.float64).eps * math.sqrt(math.prod(a.shape)) * a.moments.abs()
    sizes = ((b.moments - a.moments).abs() - rounding)[:2].clamp(min=0).nan_to_num(nan=0.0).tolist()
    if not _is_inexact(a.dtype):
        is_equal = not apart.any() and not any(sizes) and a.moments[2] == b.moments[2]
        return replace(found, ulps=0.0 if is_equal else math.inf)
    sizes += [_root(apart)]
    size = max(sizes) if a.moments[3] == b.moments[3] else math.inf
    scale, own = a.moments[1].item(), values.without_fills(ours, theirs)
    if not math.isfinite(scale) or not torch.equal(own, theirs.to(own.dtype)):
        scale = _root(own)
    unit = max(scale, floor) * eps
    ulps = size / unit if unit and math.isfinite(size + unit) else size and math.inf
    found = replace(found, ulps=ulps, bound=_bound(source) / eps)
    if not found.differs:
        return found
    listed = []
    for i in apart.topk(min(_WORST, len(apart))).indices.tolist():
        place = [int(one) for one in torch.unravel_index(index[i], a.shape)]
        ranks = [_rank(place, one.splits) for one in (a, b)]
        listed.append([place, str(theirs[i].item()), str(ours[i].item()), *ranks])
    return replace(found, positions=tuple(listed))


def _root(of: Tensor) -> float:
    """Return the root of the mean square."""
    return of.abs().square().mean().sqrt().item() if of.numel() else 0.0


def _of_routing(a: Summary, b: Summary, found: Difference) -> Difference:
    ours, theirs = b.values, a.values
    differ = (ours != theirs).any(-1).nonzero().flatten()
    if not len(differ):
        return found
    assert a.margins is not None
    listed = [[[i], theirs[i].tolist(), ours[i].tolist(), "", ""] for i in differ.tolist()]
    text = f"{len(differ)} of {len(ours)} tokens go to other experts"
    ulps = a.margins[differ].max().item()
    return replace(found, ulps=ulps, text=text, positions=tuple(listed[:_WORST]))


def _bound(source: _Source) -> float:
    """Return how far two results may be apart, relatively, whose sums have up to ``width`` terms.

    Rounding the partial sums of n terms of random sign, one after another, leaves an error whose
    root of the mean square is ``eps * sqrt(n / 24)`` of the sum's; two orders, ``sqrt(2)`` times as
    much. This is three and a half times that, and a few roundings on the way. Sums of half
    precision are taken in float32.

    Source: Higham and Mary 2019, "A new approach to probabilistic rounding error analysis": errors
    of sums grow as ``sqrt(n)``; Higham 2002, "Accuracy and stability of numerical algorithms", 4.2.
    """
    of_sums = min(torch.finfo(torch.float32).eps, source.eps)
    return _ROUNDINGS * source.eps + math.sqrt(source.width) * of_sums


def _eps(*dtypes: torch.dtype) -> float:
    """Return the ``eps`` of the coarsest; 0 for integers."""
    return max((torch.finfo(one).eps for one in dtypes if _is_inexact(one)), default=0.0)


def _unit(*dtypes: torch.dtype) -> float:
    """Return what ``ulps`` are units of; of integers, such as a routing, as of float32."""
    return _eps(*dtypes) or torch.finfo(torch.float32).eps


def _is_inexact(*dtypes: torch.dtype) -> bool:
    return all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def _rank(place: Sequence[int], splits: dict[str, Any]) -> str:
    """Return which rank along each axis holds a position: ``tp 1``."""
    found = []
    for axis, (dim, sizes) in splits.items():
        ends = list(itertools.accumulate(sizes))
        found.append(f"{axis} {next(rank for rank, end in enumerate(ends) if place[dim] < end)}")
    return ", ".join(found)
