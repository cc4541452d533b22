"""The contracts of collectives: where their results are, along the axes of their group and others.

A gather, a reduction over all ranks or a broadcast leaves the same tensor on all ranks of the
group, whatever they passed. A reduce-scatter leaves each rank its part of one tensor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flex_model.distributed.placement import Partial, Placement, Shard
from flex_model.layouts import logged
from flex_model.layouts.argument_reader import ArgumentReader
from flex_model.layouts.chunks import CHUNKS
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation
from flex_model.layouts.propagation.pointwise import LINEAR
from flex_model.layouts.propagation.views import TO_SIZES
from flex_model.layouts.writes import follow_writes

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

_ALL_REDUCE = {
    "allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced",
    "all_reduce_coalesced_",
}  # fmt: skip
_BROADCAST = {"broadcast_", "broadcast"}
_ALL_GATHER = {"_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out"}
_ALL_GATHER_LISTS = {"allgather_", "allgather_coalesced_"}
_REDUCE_SCATTER = {"_reduce_scatter_base_", "reduce_scatter_tensor", "reduce_scatter_tensor_out"}
#: Operations by which functional collectives prepare the input of a reduce-scatter.
_SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split"}
#: Operations whose result has the same elements.
SAME_ELEMENTS = {"clone", "contiguous", "alias", "detach", "_to_copy", "to"}


def follow_collective(proofs: AxisProofs, entries: tuple[logged.Collective, ...]) -> None:
    """Note the placements of the results of a collective that all ranks called."""
    name, reduction, axes, args, _, outputs, _ = entries[0]
    reader = ArgumentReader(proofs)
    for i in range(len(args)):
        reader.read([entry.args[i] for entry in entries], "")
    inputs = tuple(one.value for one in reader.operands if isinstance(one.value, int))
    base = name.partition("::")[2]
    for i, output in enumerate(outputs):
        value = output.value
        proofs.shapes[value] = tuple(entry.outputs[i].local_shape for entry in entries)
        of = f"{name}, {reduction}," if reduction else name
        proofs.note_step(value, f"{of} along {axes}", inputs)
        place = _source_index(base, len(reader.operands), i)
        found = None
        if axes is not None and place < len(reader.operands):
            found = infer_placement(proofs, base, reduction, axes, reader.operands[place])
            if proofs.axis not in axes and base in _ALL_GATHER:
                proofs.gathered_elsewhere.add(value)
        if base in _REDUCE_SCATTER and found is not None:  # not of parts that are stacked
            given = reader.operands[place].shapes[0][1:]
            found = found if given == proofs.shapes[value][0][1:] else None
        if not rules.fits(found, Operand(proofs.shapes[value], torch.float32)):
            found = None
        proofs.set_placement(value, found)
        proofs.received.add(value)
    follow_writes(proofs, outputs, [entry.writes for entry in entries])


def _source_index(base: str, num_operands: int, output: int) -> int:
    """Return the index of the operand from which an output is made."""
    if base in _ALL_GATHER_LISTS:
        return num_operands - 1
    if base in ("_allgather_base_", "_reduce_scatter_base_"):
        return 1
    return output if base in _ALL_REDUCE | _BROADCAST else 0


def infer_placement(
    proofs: AxisProofs, base: str, reduction: str, axes: tuple[str, ...], operand: Operand
) -> Placement | None:
    """Return the placement of a collective's result along the axis of ``proofs``.

    Args:
        base: Name of the operation, without namespace.
        reduction: The reduction in lower case; "" where it is not known, or there is none.
        axes: The axes along which the group runs.
    """
    placement, value = operand.placement, operand.value
    if proofs.axis not in axes:
        return _along_other_axis(proofs, base, reduction, placement, value)
    if base in _ALL_REDUCE | _BROADCAST | _ALL_GATHER | _ALL_GATHER_LISTS:
        return REPLICATED
    is_sum = base in _REDUCE_SCATTER and reduction == "sum" and not isinstance(placement, Shard)
    split_dim = _split_dim(proofs, value) if is_sum and len(axes) == 1 else None
    return None if split_dim is None else Shard(split_dim)


def joins_elsewhere(operation: Operation, known: set[Any], num_parts: int) -> bool:
    """Whether the operation is a view of what was gathered along the other axis, by which
    ``all_gather_tensor`` joins the parts of ``num_parts`` ranks where there is one row. With more
    rows, as along this axis the unsharded program has, it concatenates: so the view shows nothing
    about this axis.
    """
    if operation.name not in TO_SIZES or known.isdisjoint(operation.values):
        return False
    shapes = zip(operation.operands[0].shapes, operation.outputs[0].shapes)
    return any(given[:1] == (num_parts,) and made[:1] == (1,) for given, made in shapes)


def _split_dim(
    proofs: AxisProofs, value: Any, dim: int = 0, is_moved: bool = False, is_view: bool = False
) -> int | None:
    """Return the dim along which a reduce-scatter splits the sum: the first, unless, as in
    functional collectives, a tensor was split along another dim into one piece per rank, and these
    were joined along the first. None for other lists of parts.

    Operations are followed back to those that made the summands, since others bring ranks' parts to
    the front, too: ``x.unflatten(1, (tp, -1)).transpose(0, 1)``. ``dim`` is the first one there.
    """
    made = proofs.makers.get(value)
    if made is None:
        step = proofs.steps.get(value)
        given = [proofs.placements.get(one) for one in step.inputs] if step else []
        # Parts may have been written anywhere.
        return None if any(isinstance(one, Partial) for one in given) else 0
    operation, name = made[0], made[0].name
    sums = [one for one in operation.operands if isinstance(one.placement, Partial)]
    if name == "cat" and operation.get("dim", 0) % operation.outputs[0].ndim == dim:
        return None if is_moved or is_view else _dim_of_pieces(proofs, operation)
    if not sums:
        return 0
    before, after = sums[0].shapes[0], operation.outputs[0].shapes[0]
    if name in ("transpose", "permute", "t"):
        order = _order(operation)
        dim, is_moved = order[dim], is_moved or order != sorted(order)
    elif name in (*TO_SIZES, "unsqueeze", "squeeze"):
        size, start, is_view = after[dim], math.prod(after[:dim]), True
        dim = max(i for i in range(len(before)) if math.prod(before[:i]) <= start)
        is_part = size < before[dim] or math.prod(before[:dim]) < start
        if is_part and size == proofs.num_ranks and (is_moved or dim):
            return None  # one part of each rank, from a dim behind others
    elif name not in (*CHUNKS, "cat") and (name not in LINEAR or before != after):
        return None
    found = {_split_dim(proofs, one, dim, is_moved, is_view) for one in {s.value for s in sums}}
    return found.pop() if len(found) == 1 else None


def _order(operation: Operation) -> list[int]:
    """Return the operand's dims in the order in which a permutation's result has them."""
    order = list(range(operation.operands[0].ndim))
    if operation.name == "permute":
        return [order[dim] for dim in operation["dims"]]
    first, second = operation.get("dim0", 0), operation.get("dim1", -1)
    order[first], order[second] = order[second], order[first]
    return order


def _dim_of_pieces(proofs: AxisProofs, operation: Operation) -> int | None:
    """Return the dim along which joined pieces, one per rank in their order, were split off."""
    pieces = operation.values
    makers = [proofs.makers.get(piece) for piece in pieces]
    first = makers[0]
    if first is None or first[0].name not in _SPLITS or len(pieces) != proofs.num_ranks:
        return None
    is_in_order = len(first[0].outputs) == len(pieces) and all(
        maker is not None and maker[0] is first[0] and maker[1] == i
        for i, maker in enumerate(makers)
    )
    dim = first[0].get("dim", 0)
    return int(dim % first[0].operands[0].ndim) if is_in_order else None


def _along_other_axis(
    proofs: AxisProofs, base: str, reduction: str, placement: Placement | None, value: Any
) -> Placement | None:
    """Return the placement along another axis, where the ranks of each group do the same with their
    parts.
    """
    if placement is None or base in _BROADCAST | _ALL_GATHER_LISTS:
        return placement
    if base in _ALL_REDUCE:
        is_linear = reduction in ("sum", "avg", "")
        return placement if is_linear or not isinstance(placement, Partial) else None
    if not isinstance(placement, Shard):
        return placement if base in _ALL_GATHER | _REDUCE_SCATTER else None
    if base in _ALL_GATHER:
        # The parts of the group's ranks follow one another, each split as it was.
        if placement.dim == 0:
            return replace(placement, parts=proofs.other_size) if placement.parts == 1 else None
        return placement
    if base in _REDUCE_SCATTER:
        split_dim = _split_dim(proofs, value)
        if placement.dim != 0:
            return placement if split_dim is not None and split_dim != placement.dim else None
        was_joined = split_dim not in (None, 0) and placement.parts == proofs.other_size
        return replace(placement, parts=1) if was_joined else None
    return None
