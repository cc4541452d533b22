"""Rules for joining tensors along a dim or along a new one."""

from __future__ import annotations

import itertools

from flex_model.distributed.placement import Placement
from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Output,
    Placements,
    Term,
    all_but,
    resolve,
)
from flex_model.layouts.propagation.operation import Operand, Operation
from flex_model.layouts.propagation.parts import part_widths, shard_of_parts


def cat(operation: Operation) -> Placements:
    """Concatenate: along a split dim each tensor's parts stay parts, if all are split alike."""
    operands = list(operation["tensors"])
    made = operation.outputs[0]
    parts = {o.shard.parts for o in operands if o.shard is not None}
    if len(parts) > 1:  # equal parts may be split otherwise than parts of stated sizes
        return [None]
    if made.ndim > 1:
        # Empty vectors are ignored, whatever the other tensors' dims.
        operands = [o for o in operands if any(shape != (0,) for shape in o.shapes)]
    dim = operation["dim"] % made.ndim
    if all(o.shard is not None and o.shard.dim == dim for o in operands):
        return [_along_split_dim(operands)]
    return resolve(operation, [_joined(operands, all_but(made.ndim, dim))])


def _joined(operands: list[Operand], labels: tuple[Label, ...]) -> Output:
    inputs = tuple(Input(operand, labels) for operand in operands)
    return Output(labels, terms=tuple(Term((i,)) for i in inputs))


def _along_split_dim(operands: list[Operand]) -> Placement | None:
    """Return the placement of the parts of all tensors, in order."""
    shards = [operand.shard for operand in operands]
    first, widths = shards[0], [part_widths(operand) for operand in operands]
    split = {(s.dim, s.pieces, s.stride) for s in shards if s is not None}
    if first is None or len(split) != 1 or any(own is None for own in widths):
        return None
    of_ranks = zip(*(own for own in widths if own is not None))
    return shard_of_parts(first, [tuple(itertools.chain(*own)) for own in of_ranks])


def stack(operation: Operation) -> Placements:
    """Join along a new dim, which is whole."""
    operands = list(operation["tensors"])
    made = operation.outputs[0]
    dim = operation["dim"] % made.ndim
    labels: tuple[Label, ...] = tuple(range(made.ndim - 1))
    inputs = tuple(Input(operand, labels) for operand in operands)
    after = (*labels[:dim], None, *labels[dim:])
    return resolve(operation, [Output(after, terms=tuple(Term((i,)) for i in inputs))])


RULES = {"cat": cat, "concat": cat, "concatenate": cat, "stack": stack}
