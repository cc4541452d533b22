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


#: An operation, and which of its outputs.
Maker = tuple[Operation, int]


def combine(values: Sequence[Any], makers: Mapping[Any, Maker]) -> Placement | None:
    """Return the placement of a tensor that has ``values[i]`` on rank ``i``; None if these are not
    chunks of one whole tensor that follow one another without gap or overlap.
    """
    made = [makers.get(value) for value in values]
    ranges, of = [], set()
    for maker in made:
        if maker is None or maker[0].name not in CHUNKS:
            return None
        operation, output = maker
        operand, *others = operation.operands
        if others or operand.value is None or operand.placement != REPLICATED:
            return None
        dim = _dim(operation)
        ranges.append(range_taken(operation, output, dim))
        of.add((operand.value, dim, operand.shapes[0][dim]))
    if len(of) > 1 or any(found is None for found in ranges):
        return None
    ((_, dim, size),) = of
    return own_part(dim, [found for found in ranges if found is not None], size)


def taken_from(
    source: Any, joined: Any, readers: Sequence[Any], makers: Mapping[Any, Maker]
) -> list[Any] | None:
    """Return those of a joined tensor's readers that read a part of ``source``, one of the tensors
    that were joined: ``torch.cat([a, b], -1).split([len_a, len_b], -1)``. None if it was not joined
    of others, or something reads no chunk along that dim.
    """
    operation, _ = makers.get(joined, (None, 0))
    if operation is None or operation.name != "cat":
        return None
    dim, end, own = _dim(operation), 0, []
    for operand in operation.operands:
        if operand.ndim != operation.outputs[0].ndim:  # an empty one
            return None
        sizes = {shape[dim] for shape in operand.shapes}
        if len(sizes) > 1:
            return None
        start, end = end, end + sizes.pop()
        if operand.value == source:
            own.append(range(start, end))
    found = []
    for reader in readers:
        chunk, output = makers.get(reader, (operation, 0))
        if chunk.name not in CHUNKS or chunk.values != (joined,) or _dim(chunk) != dim:
            return None
        taken = range_taken(chunk, output, dim)
        if taken is None:
            return None
        if any(max(part.start, taken[0]) < min(part.stop, taken[1]) for part in own):
            found.append(reader)
    return found


def _dim(operation: Operation) -> int:
    return int(operation.get("dim", 0)) % operation.operands[0].ndim
