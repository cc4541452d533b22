"""Recognizes chunks of a replicated tensor: ``x.chunk(tp, -1)[rank]`` makes every chunk on every
rank, and each rank continues with a different one. Together they are shards of ``x``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flex_model.distributed.placement import Placement
from flex_model.layouts.propagation.operation import REPLICATED, Operation, differ
from flex_model.layouts.propagation.slicing import SPLITS, own_part, range_taken

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
        ranges.append(range_taken(operation, output, dim))
        of.add((sources[0], dim, operand.shapes[0][dim]))
    if len(of) > 1 or any(found is None for found in ranges):
        return None
    ((_, dim, size),) = of
    return own_part(dim, [found for found in ranges if found is not None], size)
