"""Infers the placements of tensors that are made from sizes alone.

A dim whose plain size is the ranks' size of a split dim may be that dim: what the tensor meets
decides (`constants`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flex_model.distributed.placement import Placement, Shard
from flex_model.layouts.propagation.operation import REPLICATED, Operation, differ

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

_FILLS = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor"}
#: Its elements are at places of their own, so no shard of it is known.
SPARSE = "_sparse_coo_tensor_with_dims_and_tensors"
#: Those that also take tensors.
BY_SIZES = {"new_zeros", "new_ones", "new_full", SPARSE}
#: All elements of their results are 0.
ZEROS = ("zeros", "new_zeros", "zeros_like")
_BLANKS = {"empty", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_OVERWRITES = {
    "bernoulli", "uniform", "normal", "random", "exponential", "cauchy", "log_normal", "geometric",
    "fill", "zero",
}  # fmt: skip
_SIZES = ("size", "n", "m", "row", "col", "steps", "end", "start", "step")


def is_factory(operation: Operation) -> bool:
    """Whether the result depends on no tensor's elements."""
    name = operation.name
    return name in _FILLS or name in _BLANKS or name == "lift_fresh" or not operation.operands


def is_fill(name: str) -> bool:
    """Whether all elements of the result are one number, or may be."""
    return name in _FILLS or name in _BLANKS


def is_draw(operation: Operation) -> bool:
    """Whether it overwrites all of its only tensor with random numbers, or with one number."""
    numbers = (operation.by_rank(name) for name in operation.arguments[0] if name != "self")
    return (
        operation.name in _OVERWRITES
        and len(operation.operands) == 1
        and not any(map(differ, numbers))
    )


def makes_blank(name: str) -> bool:
    """Whether the result is uninitialized."""
    return name in _BLANKS or name == "empty_like"


def infer(
    operation: Operation, proofs: AxisProofs, shards: Mapping[int, Shard]
) -> list[Placement | None]:
    """Return the placements of a factory's outputs.

    Args:
        shards: By dim of the result: how the tensor is split whose size was passed for the dim.
    """
    unknown: list[Placement | None] = [None] * len(operation.outputs)
    if operation.name in _BLANKS or any(map(differ, _values(operation))):
        return unknown
    open_dims = unsettled_dims(operation, proofs)
    if open_dims is None:
        return unknown
    if not open_dims:
        return [REPLICATED] * len(operation.outputs)
    by_rank = operation.by_rank("size") if "size" in operation.arguments[0] else ()
    full = operation.full_sizes.get("size", ())
    split = [dim for dim in sorted(open_dims) if dim < len(full) and _differs(by_rank, full, dim)]
    if len(split) != 1 or (proofs.axis == "tp" and not is_fill(operation.name)):
        return unknown
    shard = replace(shards.get(split[0], Shard(split[0])), dim=split[0])
    try:
        full_shape = replace(operation.outputs[0], placement=shard).full_shape
    except ValueError:
        return unknown
    is_all = full_shape[shard.dim] == full[shard.dim]
    return [shard if is_all else None] * len(operation.outputs)


def _differs(by_rank: Sequence[Any], full: Sequence[Any], dim: int) -> bool:
    """Whether the unsharded program is known to pass another size than the ranks."""
    return full[dim] is not None and any(sizes[dim] != full[dim] for sizes in by_rank)


def _values(operation: Operation) -> Iterator[list[Any]]:
    """Yield the arguments that are no sizes, by rank."""
    for name in operation.arguments[0]:
        if name not in (*_SIZES, "stride", "physical_layout", "self"):
            yield operation.by_rank(name)


def unsettled_dims(operation: Operation, proofs: AxisProofs) -> frozenset[int] | None:
    """Return the dims of a factory's result that may be split dims: the unsharded program passes
    another size for them, or ranks pass a plain number that may count a rank's rows. None where
    ranks pass different numbers in another place.

    Along tp a plain number makes the same tensor on all ranks; only where its elements are equal,
    too, may it be a part of a larger one.
    """
    ndim = operation.outputs[0].ndim
    if operation.name == "lift_fresh":
        sizes = list(zip(*(made for made in operation.outputs[0].shapes)))
        if any(map(differ, sizes)):
            return None
        dims = range(ndim if proofs.axis == "dp" else 0)
        return frozenset(
            dim for dim in dims if proofs.may_count(sizes[dim][0], 0 < dim == ndim - 1)
        )
    if "size" in operation.arguments[0]:
        by_rank = operation.by_rank("size")
        if any(len(sizes) != len(by_rank[0]) for sizes in by_rank):
            return None
        columns = list(enumerate(zip(*by_rank)))
        differing = {
            dim for dim, own in columns if _known(operation, "size", dim) not in (None, own[0])
        }
        if differing:  # only one dim is split: the one whose source shows it
            return frozenset(differing | {dim for dim, own in columns if differ(own)})
        return frozenset(
            dim
            for dim, own in columns
            if differ(own) or not _is_settled(own[0], operation, "size", dim)
        )
    numbers = [name for name in operation.arguments[0] if name in _SIZES]
    if any(differ(operation.by_rank(name)) for name in numbers):
        return None
    if all(_is_settled(operation[name], operation, name, 0) for name in numbers):
        return frozenset()
    return frozenset(range(ndim))


def _known(operation: Operation, name: str, place: int) -> Any:
    known = operation.full_sizes.get(name, ())
    return known[place] if place < len(known) else None


def _is_settled(number: Any, operation: Operation, name: str, place: int) -> bool:
    """Whether the unsharded program is known to pass this number, too."""
    return place >= len(operation.full_sizes.get(name, ())) or bool(
        _known(operation, name, place) == number
    )
