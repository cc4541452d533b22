"""Infers the placements of tensors that are made from sizes alone.

The sizes are passed as plain numbers, which may be the local sizes of split dims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from flex_model.distributed.placement import Placement, Shard
from flex_model.layouts.propagation.operation import REPLICATED, Operation, differ

_FILLS = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor"}
_BLANKS = {"empty", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_DRAWS = {"rand", "randn", "randint", "normal"}
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
    """Whether all elements of the result are one number."""
    return name in _FILLS


def makes_zeros(operation: Operation) -> bool:
    """Whether all elements of the result are 0."""
    return operation.name in ("zeros", "new_zeros", "zeros_like")


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
    operation: Operation, split_sizes: Collection[int], shards: Mapping[int, Shard]
) -> list[Placement | None]:
    """Return the placements of a factory's outputs.

    Args:
        shards: By dim of the result: how the tensor is split whose size was passed for the dim.
    """
    unknown: list[Placement | None] = [None] * len(operation.outputs)
    if operation.name == "lift_fresh":
        sizes = operation.outputs[0].shapes
        alike = all(shape == sizes[0] for shape in sizes)
        return [REPLICATED] if alike and not set(sizes[0]) & set(split_sizes) else unknown
    if "size" in operation.arguments[0]:
        return [_of_sizes(operation, split_sizes, shards)] * len(operation.outputs)
    for name in operation.arguments[0]:
        numbers = operation.by_rank(name)
        if differ(numbers):
            return unknown
        if name in _SIZES and not _is_full(numbers[0], split_sizes, operation, name, 0):
            return unknown
    return [REPLICATED] * len(operation.outputs)


def _of_sizes(
    operation: Operation, split_sizes: Collection[int], shards: Mapping[int, Shard]
) -> Placement | None:
    for name in operation.arguments[0]:
        numbers = operation.by_rank(name)
        if name not in ("size", "stride", "physical_layout", "self") and differ(numbers):
            return None
    by_rank = operation.by_rank("size")
    if any(len(sizes) != len(by_rank[0]) for sizes in by_rank):
        return None
    columns = list(enumerate(zip(*by_rank)))
    split = [dim for dim, own in columns if _known(operation, "size", dim) not in (None, own[0])]
    if split:  # only one dim is split: the one whose source shows it, if any
        split += [dim for dim, own in columns if dim not in split and differ(own)]
    else:
        split = [
            dim
            for dim, own in columns
            if differ(own) or not _is_full(own[0], split_sizes, operation, "size", dim)
        ]
    if operation.name in _BLANKS:
        return None
    if not split:
        return REPLICATED
    if len(split) > 1 or not is_fill(operation.name):
        return None
    shard = replace(shards.get(split[0], Shard(split[0])), dim=split[0])
    made = replace(operation.outputs[0], placement=shard)
    try:
        full_size = made.full_shape[shard.dim]
    except ValueError:
        return None
    return shard if full_size == _known(operation, "size", shard.dim) else None


def _known(operation: Operation, name: str, place: int) -> Any:
    known = operation.full_sizes.get(name, ())
    return known[place] if place < len(known) else None


def _is_full(
    number: Any, split_sizes: Collection[int], operation: Operation, name: str, place: int
) -> bool:
    """Whether the unsharded program passes this number, too: its expression shows it, or the number
    can't be the local size of a split dim.
    """
    if place < len(operation.full_sizes.get(name, ())):
        return bool(_known(operation, name, place) == number)
    return number not in split_sizes
