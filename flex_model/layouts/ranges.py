"""Tracks consecutive integers on each rank: ``torch.arange(rows) + rank * rows`` is a shard, like
the ranks' own consecutive slices of a whole tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from flex_model.layouts.contracts.collectives import SAME_ELEMENTS
from flex_model.layouts.propagation.operation import Operation

#: By rank: the first number and the count.
Ranges = tuple[tuple[int, int], ...]


def infer(operation: Operation, known: Mapping[Any, Ranges]) -> Ranges | None:
    """Return the ranges of a result that has consecutive integers on each rank; ``known``: of other
    values.
    """
    if operation.name == "arange":
        starts = [arguments.get("start", 0) for arguments in operation.arguments]
        is_counted = all(arguments.get("step", 1) == 1 for arguments in operation.arguments)
        is_counted &= all(isinstance(start, int) for start in starts)
        sizes = (size for (size,) in operation.outputs[0].shapes)
        return tuple(zip(starts, sizes)) if is_counted else None
    before = known.get(operation.values[0]) if len(operation.operands) == 1 else None
    if before is None or operation.name in SAME_ELEMENTS:
        return before
    if operation.name != "add" or set(operation.by_rank("alpha")) != {1}:
        return None
    numbers = operation.by_rank("other")
    if not all(isinstance(number, int) for number in numbers):
        return None
    return tuple((start + number, size) for (start, size), number in zip(before, numbers))


def follow_each_other(found: Ranges) -> bool:
    """Whether each rank's range starts where that of the rank before it ends. (Single numbers may
    be each rank's own by chance.)
    """
    pairs = itertools.pairwise(found)
    return found[0][1] > 1 and all(start + size == then for (start, size), (then, _) in pairs)
