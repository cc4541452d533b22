"""Tracks some of a rank's own rows: ``for row in x``, ``x.split(1)``, ``x[i]``.

A row has the place in the batch that it has on its rank, so a tensor of some rows is not a part
of one that the unsharded program has. What is computed of them and of what all rows share belongs
to the same rows; all of them joined in their order, ``torch.stack([f(row) for row in x])``, are
rows of the batch again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch

from flex_model.distributed.placement import Shard
from flex_model.layouts.constants import with_placements
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operation
from flex_model.layouts.propagation.slicing import SPLITS, follow_to_end, range_taken


class OwnRows(NamedTuple):
    """Some rows of a rank, of which it has ``total``."""

    start: int
    stop: int
    total: int


def infer(operation: Operation, output: int, known: Mapping[Any, OwnRows]) -> OwnRows | None:
    """Return which rows an output belongs to; None if it belongs to no such rows."""
    taken = _taken(operation, output)
    if taken is not None:
        return taken
    found = {known[value] for value in operation.values if value in known}
    others = [one for one in operation.operands if one.value not in known]
    is_of_rows = len(found) == 1 and all(one.placement == REPLICATED for one in others)
    return found.pop() if is_of_rows else None


def _taken(operation: Operation, output: int) -> OwnRows | None:
    """Return the rows that an operation takes of a tensor in rows."""
    name, operands = operation.name, operation.operands
    if name not in (*SPLITS, "unbind", "select", "slice") or len(operands) != 1:
        return None
    operand, dim = operands[0], operation.get("dim", 0) % max(operands[0].ndim, 1)
    if operand.placement != Shard(dim):
        return None
    found = range_taken(operation, output, dim)
    return None if found is None else OwnRows(*found, operand.shapes[0][dim])


def infer_joined(operation: Operation, known: Mapping[Any, OwnRows]) -> Shard | None:
    """Return the split of a tensor that joins all rows in their order; None for all else."""
    name, values = operation.name, operation.values
    is_joined = name in ("stack", "cat", "pad_sequence")
    if not is_joined or not all(value in known for value in values):
        return None
    rows = [known[value] for value in values]
    if name != "cat" and any(one.stop != one.start + 1 for one in rows):
        return None
    totals = {one.total for one in rows}
    if len(totals) != 1 or not follow_to_end([(one.start, one.stop) for one in rows], *totals):
        return None
    dim = 1 - operation["batch_first"] if name == "pad_sequence" else operation.get("dim", 0)
    return Shard(dim % operation.outputs[0].ndim)


def is_picked(operation: Operation, output: int, picked: Container[Any]) -> bool:
    """Whether an output is what a mask picks of rows, in their order, ``x[mask]``, or is computed
    of each of these, ``layer(x[mask])``.
    """
    own, indices = operation.operands, operation.get("indices", ())
    if operation.name == "index" and len(indices) == 1 and indices[0].dtype is torch.bool:
        return own[0].placement == own[1].placement == Shard(0)
    placed = {id(one): Shard(0) for one in own if one.value in picked}
    if not placed:
        return False
    return rules.propagate(with_placements(operation, placed))[output] == Shard(0)


def infer_filled(operation: Operation, picked: Container[Any]) -> Shard | None:
    """Return the split of rows in which a mask replaces elements by those of the rank's own rows,
    in their order: image features at the places of their tokens, ``x[mask] = layer(x[mask])``. None
    for all else.
    """
    arguments = operation.arguments[0]
    if operation.name == "masked_scatter":
        mask, values = arguments["mask"], arguments["source"]
        is_by_rows = mask.ndim == arguments["self"].ndim
    elif operation.name == "index_put" and len(arguments["indices"]) == 1:
        (mask,), values = arguments["indices"], arguments["values"]
        is_by_rows = mask.dtype is torch.bool and not arguments["accumulate"]
    else:
        return None
    is_in_rows = arguments["self"].placement == mask.placement == Shard(0)
    is_in_rows &= values.placement == Shard(0) or values.value in picked
    return Shard(0) if is_by_rows and is_in_rows else None
