"""Recognizes chunks of a replicated tensor: ``x.chunk(tp, -1)[rank]`` makes every chunk on every
rank, and each rank continues with a different one. Together they are shards of ``x``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flex_model.distributed.placement import Placement
from flex_model.layouts.propagation.operation import REPLICATED, Operation, differ
from flex_model.layouts.propagation.slicing import SPLITS, own_part, slice_ranges

#: Operations that make chunks.
CHUNKS = frozenset(SPLITS) | {"slice", "narrow"}


def splits_or_joins(operation: Operation) -> bool:
    """Whether it splits off chunks, or joins some, along the same dim on all ranks."""
    if operation.name not in CHUNKS | {"cat"}:
        return False
    names = {"dim", "step"} & operation.arguments[0].keys()
    return not any(differ(operation.by_rank(name)) for name in names)


#: An operation, which of its outputs, and the values that it read.
Maker = tuple[Operation, int, tuple[Any, ...]]


def combine(values: Sequence[Any], makers: Mapping[Any, Maker]) -> Placement | None:
    """Return the placement of a tensor that has ``values[i]`` on rank ``i``; None if these are not
    chunks of one whole tensor that follow one another without gap or overlap.
    """
    made = [makers.get(value) for value in values]
    ranges, of = [], set()
    for maker in made:
        if maker is None or maker[0].name not in CHUNKS:
            return None
        operation, output, sources = maker
        operand = operation.operands[0]
        if len(sources) != 1 or sources[0] is None or operand.placement != REPLICATED:
            return None
        dim = operation.get("dim", 0) % operand.ndim
        ranges.append(_range(operation, output, dim))
        of.add((sources[0], dim, operand.shapes[0][dim]))
    if len(of) > 1 or any(found is None for found in ranges):
        return None
    ((_, dim, size),) = of
    return own_part(dim, [found for found in ranges if found is not None], size)


def _range(operation: Operation, output: int, dim: int) -> tuple[int, int] | None:
    """Return the range of an output in its operand; None if ranks took different ones."""
    size = operation.operands[0].shapes[0][dim]
    if operation.name in SPLITS:
        sizes = [made.shapes[0][dim] for made in operation.outputs]
        return sum(sizes[:output]), sum(sizes[: output + 1])
    if operation.name == "narrow":
        starts, lengths = operation.by_rank("start"), operation.by_rank("length")
        ends = [start + length for start, length in zip(starts, lengths)]
    else:
        starts, ends = operation.by_rank("start"), operation.by_rank("end")
        if operation["step"] != 1:
            return None
    found = set(slice_ranges(starts, ends, [size] * len(starts)))
    return found.pop() if len(found) == 1 else None
