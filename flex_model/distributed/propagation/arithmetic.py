"""Pointwise operations, products, sums, and writing into a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flex_model.distributed.layout import Partial, Shard
from flex_model.distributed.propagation.experiment import by_experiment
from flex_model.distributed.propagation.operands import (
    REPLICATED,
    Cut,
    PlaceOf,
    Split,
    moved,
    parts_of,
    shard_of,
)


def same(place: Split, tensor: Tensor, output: Tensor) -> Split:
    if shard_of(place) is None:
        return place
    return place if output.dim() == tensor.dim() else None


def pointwise(
    name: str, tensors: Sequence[Tensor], places: Sequence[Split], output: Tensor
) -> Split:
    if any(isinstance(place, Partial) for place in places):
        return _of_sums(name, tensors, places)
    found: dict[Split, None] = {}
    unknown = False
    for tensor, place in zip(tensors, places):
        shard = shard_of(place)
        if shard is not None:
            dim = shard.dim + output.dim() - tensor.dim()
            if tensor.shape[shard.dim] != output.shape[dim]:
                return None  # the split dim is broadcast
            found[moved(place, dim)] = None
        elif place is None:
            unknown = True
    certain = [place for place in found if isinstance(place, Shard)]
    if certain:
        # What is cut from a replicated tensor, or not known, is split alike where it has the dim.
        return certain[0] if len(certain) == 1 else None
    if unknown or len(found) != 1:
        return None
    return next(iter(found))


_LINEAR = {"add", "add_", "sub", "sub_", "neg", "neg_"}


def _of_sums(name: str, tensors: Sequence[Tensor], places: Sequence[Split]) -> Split:
    """Sums and multiples of partial sums are partial sums."""
    sums = [isinstance(place, Partial) for place in places]
    if name in _LINEAR and all(sums):
        return Partial()
    if name in ("mul", "mul_") and sum(sums) == 1:
        others = (place for place, is_sum in zip(places, sums) if not is_sum)
        return Partial() if all(place == REPLICATED for place in others) else None
    if name in ("div", "div_") and sums[0] and not any(sums[1:]):
        return Partial() if all(place == REPLICATED for place in places[1:]) else None
    return None


# Per operation: which operands are multiplied, and the dim of each that is summed over.
CONTRACTIONS = {
    "mm": ((0, -1), (1, -2)),
    "addmm": ((1, -1), (2, -2)),
    "bmm": ((0, -1), (1, -2)),
    "baddbmm": ((1, -1), (2, -2)),
    "matmul": ((0, -1), (1, -2)),
    "linear": ((0, -1), (1, -1)),
    "_grouped_mm": ((0, -1), (1, -2)),
}


def contraction(name: str, args: Sequence[Any], output: Tensor, place_of: PlaceOf) -> Split:
    (i, dim_a), (j, dim_b) = CONTRACTIONS[name]
    a, b = args[i], args[j]
    place_a, place_b = place_of(a), place_of(b)
    if isinstance(place_a, Cut) or isinstance(place_b, Cut):
        # As parts, and if those do not fit, as what is replicated.
        parts = {id(a): shard_of(place_a) or place_a, id(b): shard_of(place_b) or place_b}
        place = contraction(name, args, output, lambda t: parts.get(id(t), place_of(t)))
        if place is not None:
            return Cut(place) if isinstance(place, Shard) else place
        whole = {
            id(a): REPLICATED if isinstance(place_a, Cut) else place_a,
            id(b): REPLICATED if isinstance(place_b, Cut) else place_b,
        }
        return contraction(name, args, output, lambda t: whole.get(id(t), place_of(t)))
    added = args[0] if i else args[2] if name == "linear" and len(args) > 2 else None
    summed_a = isinstance(place_a, Shard) and place_a.dim == dim_a % a.dim()
    summed_b = isinstance(place_b, Shard) and place_b.dim == dim_b % b.dim()
    if summed_a or summed_b:
        both = summed_a and summed_b and parts_of(place_a) == parts_of(place_b)
        return Partial() if both and added is None else None
    if isinstance(place_a, Partial) or isinstance(place_b, Partial):
        linear = {place_a, place_b} == {Partial(), REPLICATED} and added is None
        return Partial() if linear else None
    if place_a is None or place_b is None:
        return None
    found: set[Shard] = set()
    offset = output.dim()
    if isinstance(place_a, Shard):
        found.add(replace(place_a, dim=place_a.dim + offset - a.dim()))
    if isinstance(place_b, Shard):
        if name == "linear" or place_b.dim == b.dim() - 1:
            found.add(replace(place_b, dim=offset - 1))
        elif name == "_grouped_mm":
            return None  # experts split over the ranks: which rows are whose, only the model knows
        else:
            found.add(replace(place_b, dim=place_b.dim + offset - b.dim()))
    return found.pop() if len(found) == 1 else None


def sum_of(func, args, kwargs, outputs, place_of) -> list[Split]:
    tensor, place = args[0], place_of(args[0])
    shard = shard_of(place)
    if shard is None:
        return [place if place == Partial() else None]
    dims = args[1] if len(args) > 1 and args[1] is not None else list(range(tensor.dim()))
    dims = [dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)]
    if not dims or shard.dim in dims:
        return [Partial() if isinstance(place, Shard) and shard.pieces is None else None]
    return by_experiment(func, args, kwargs, outputs, place_of)


def count_of(func, args, kwargs, outputs, place_of) -> list[Split]:
    is_split = shard_of(place_of(args[0])) is not None  # a partial sum's own counts tell nothing
    return sum_of(func, args, kwargs, outputs, place_of) if is_split else [None]


def written(func, args, kwargs, outputs, place_of) -> list[Split]:
    """``copy_``: what was written counts."""
    target, source = args[0], args[1]
    place = place_of(source)
    shard = shard_of(place)
    if shard is None:
        return [place]
    dim = shard.dim + target.dim() - source.dim()
    return [moved(place, dim if target.shape[dim] == source.shape[shard.dim] else None)]


def put(func, args, kwargs, outputs, place_of) -> list[Split]:
    """``index_add``, ``index_copy``, ``scatter`` and the like: target and source are split alike,
    along another dim than the one that is indexed.
    """
    target = args[0]
    dim = args[1] % target.dim()
    source = next(x for x in reversed(args) if isinstance(x, Tensor))
    places = [place_of(target), place_of(source)]
    shards = {shard_of(place) for place in places} - {None}
    if len(shards) != 1 or any(place is None or isinstance(place, Partial) for place in places):
        return [None]
    shard = shards.pop()
    if shard is None or shard.dim == dim:
        return [None]
    return [shard if shard in places else Cut(shard)]
