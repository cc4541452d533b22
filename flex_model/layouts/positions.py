"""Tracks positions along a split dim: ``torch.arange(rows)``, which each rank makes for its own
rows.

The numbers differ from those of the unsharded program's rows, so the tensor is not a shard of its
positions. As an index into a tensor that is split along a dim of these rows it selects the same
rows, though. ``torch.arange(rows) + rank * rows`` is a shard, like the ranks' own consecutive
slices of a whole tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from typing import Any

import torch

from flex_model.distributed.placement import Shard
from flex_model.layouts.constants import with_placements
from flex_model.layouts.contracts.collectives import SAME_ELEMENTS
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation

#: By rank: the first number and the count.
Ranges = tuple[tuple[int, int], ...]

# Operations that keep the elements, and how often each occurs.
_MOVES = {
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "_to_copy", "to", "clone",
    "alias", "contiguous", "permute", "transpose", "unflatten", "flatten", "lift_fresh",
}  # fmt: skip


def infer(operation: Operation, known: Mapping[Any, Shard], split_sizes: Set[int]) -> Shard | None:
    """Return the split of the result's positions, if it has any; ``known``: of other values.

    Args:
        split_sizes: The ranks' sizes of split dims so far: a plain number may be one.
    """
    if operation.name == "arange":
        counts = [shape[0] for shape in operation.outputs[0].shapes]
        full = list(operation.full_sizes.get("end", ()))
        starts, steps = _starts_and_steps(operation)
        is_plain = set(starts) == {0} and set(steps) == {1}
        is_count = full == [sum(counts)] or (full == [None] and set(counts) <= split_sizes)
        return Shard(0) if is_plain and is_count else None
    if operation.name not in _MOVES or len(operation.operands) != 1:
        return None
    (operand,) = operation.operands
    if operand.value not in known:
        return None
    placed = {id(operand): known[operand.value]}
    (moved, *_) = rules.propagate(with_placements(operation, placed)) or [None]
    return moved if isinstance(moved, Shard) and moved.parts == 1 else None


def _starts_and_steps(operation: Operation) -> list[list[Any]]:
    """Return the starts and the steps of ``torch.arange``, by rank."""
    return [
        operation.by_rank(name)
        if name in operation.arguments[0]
        else [default] * operation.num_ranks
        for name, default in (("start", 0), ("step", 1))
    ]


def infer_ranges(operation: Operation, known: Mapping[Any, Ranges]) -> Ranges | None:
    """Return the ranges of a result that has consecutive integers on each rank; ``known``: of other
    values.
    """
    if operation.name == "arange":
        starts, steps = _starts_and_steps(operation)
        is_counted = set(steps) == {1} and all(isinstance(start, int) for start in starts)
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


def _is_long_beside(index: Operand, back: int) -> bool:
    """Whether the index has more than one element along the dim that is ``back`` from its end."""
    return index.ndim >= back and any(shape[-back] != 1 for shape in index.shapes)


def _is_of_rows(index: Operand, back: int) -> bool:
    """Whether the index is split along the dim that is ``back`` from its end: one for each row."""
    return index.placement == Shard(index.ndim - back) and index.dtype != torch.bool


def infer_selected(operation: Operation, known: Mapping[Any, Shard]) -> Shard | None:
    """Return the split of a tensor that such positions select; None if they select none."""
    if operation.name == "index_select":
        self, index = operation.operands[:2]
        at: list[Any] = [None] * self.ndim
        at[operation["dim"]] = index
    elif operation.name in ("index", "_unsafe_index"):
        self, at = operation.operands[0], list(operation["indices"])
    else:
        return None
    shard = self.shard
    given = [i for i, index in enumerate(at) if index is not None]
    if shard is None or shard != Shard(shard.dim) or shard.dim not in given:
        return None
    rows: Operand = at[shard.dim]
    split = known.get(rows.value)
    if split is None or any(
        shape[shard.dim] != of_rows[split.dim] for shape, of_rows in zip(self.shapes, rows.shapes)
    ):
        return None
    others, back = [at[i] for i in given if i != shard.dim], rows.ndim - split.dim
    others = [one for one in others if not _is_of_rows(one, back)]
    if any(other.placement != REPLICATED or other.dtype == torch.bool for other in others):
        return None
    if any(_is_long_beside(other, back) for other in others):
        return None  # the rows are repeated, or there is one row per rank
    if operation.name == "index_select":
        return Shard(shard.dim)
    ndim = max(at[i].ndim for i in given)
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    return Shard(first + ndim - rows.ndim + split.dim)
