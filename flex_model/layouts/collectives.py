"""Infers the placements of collectives' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard
from flex_model.layouts.argument_reader import ArgumentReader
from flex_model.layouts.operation_log import Entry
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation
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
#: Operations by which functional collectives prepare the input of a reduce-scatter.
_SPLITS_OR_CAT = {"cat", "split", "split_with_sizes", "chunk", "tensor_split"}
_REDUCE_SCATTER = {"_reduce_scatter_base_", "reduce_scatter_tensor", "reduce_scatter_tensor_out"}


#: The result of an all-gather, by value: the gather, how its operand was split, and which rank's
#: part it is; None: all parts, joined along the first dim.
Gathered = tuple[Any, Shard, int | None]

# Reductions that leave a replicated tensor unchanged.
_KEEP_REPLICAS = {"avg", "max", "min"}
#: Operations whose result has the same elements.
SAME_ELEMENTS = {"clone", "contiguous", "alias", "detach", "_to_copy", "to"}


def follow_collective(proofs: AxisProofs, entries: tuple[Entry, ...]) -> None:
    """Note the placements of the results of a collective that all ranks called."""
    _, name, reduction, axes, args, _, outputs, _, by_plan = entries[0]
    reader = ArgumentReader(proofs, len(entries))
    for i in range(len(args)):
        reader.read([entry[4][i] for entry in entries], "")
    inputs = tuple(v for v in reader.values if isinstance(v, int))
    base = name.partition("::")[2]
    for i, output in enumerate(outputs):
        value = output[0]
        proofs.shapes[value] = tuple(tuple(entry[6][i][4]) for entry in entries)
        of = f"{name}, {reduction}," if reduction else name
        proofs.note_step(value, f"{of} along {axes}", inputs)
        place = source_index(base, len(reader.operands), i)
        found = None
        is_ignored = proofs.ignores_collectives and proofs.axis in (axes or ())
        if base in _BROADCAST and place < len(reader.operands):  # DDP's, of buffers
            is_ignored &= reader.operands[place].placement != REPLICATED
        if axes is not None and place < len(reader.operands) and not is_ignored:
            operand, read = reader.operands[place], reader.values[place]
            is_sum = reduction == "sum" and axes == (proofs.axis,)
            is_of_layer = proofs.is_layer(proofs.module) or proofs.is_layer(proofs.exited)
            if is_sum and (read in proofs.looked_up or (by_plan and is_of_layer)):
                # By the layer's contract, which rules don't know, one rank looks up each row, and
                # the others have 0 there; a plan states that experts' outputs are partial sums.
                operand = replace(operand, placement=Partial())
            found = infer_placement(proofs, base, reduction, axes, operand, read)
            if completes(proofs.reduced.get(read, ""), base, reduction, axes, proofs.axis):
                found = REPLICATED
            part = identify(base, proofs.axis, axes, operand, outputs[0][0], i)
            proofs.note_gathered(value, part)
            if proofs.axis not in axes and base in _ALL_GATHER:
                proofs.gathered_elsewhere.add(value)
        if not rules.fits(found, Operand(proofs.shapes[value], torch.float32)):
            found = None
        if any(map(proofs.gradients.is_scaled, inputs)):
            found = found if reduction in ("", "sum", "avg") else None
            proofs.gradients.note_scaled([value])
        proofs.set_placement(value, found)
        if found is None and any(one in proofs.mixed for one in inputs):
            proofs.mixed.add(value)
        proofs.received.add(value)
    follow_writes(proofs, outputs, [entry[7] for entry in entries], name)


def source_index(base: str, num_operands: int, output: int) -> int:
    """Return the index of the operand from which an output is made."""
    if base in _ALL_GATHER_LISTS:
        return num_operands - 1
    if base in ("_allgather_base_", "_reduce_scatter_base_"):
        return 1
    return output if base in _ALL_REDUCE | _BROADCAST else 0


def infer_placement(
    proofs: AxisProofs, base: str, reduction: str, axes: tuple[str, ...], operand: Any, value: Any
) -> Placement | None:
    """Return the placement of a collective's result along the axis of ``proofs``.

    Args:
        base: Name of the operation, without namespace.
        reduction: The reduction in lower case; "" where it is not known, or there is none.
        axes: The axes along which the group runs.
    """
    if proofs.axis in axes:
        return _along_group_axis(proofs, base, reduction, operand.placement, value, len(axes) == 1)
    return _along_other_axis(base, operand.placement, proofs, value)


def _along_group_axis(
    proofs: AxisProofs,
    base: str,
    reduction: str,
    placement: Placement | None,
    value: Any,
    alone: bool,
) -> Placement | None:
    """Return the placement along the axis of the group. The unsharded program has no collective
    there: so the result is the full tensor only if the collective makes that of the ranks' parts.
    That all ranks have the same result proves nothing: a sum of replicated tensors is a multiple of
    the full one.
    """
    is_sum = placement == Partial() and reduction == "sum"
    if base in _ALL_REDUCE:
        is_kept = placement == Replicate() and reduction in _KEEP_REPLICAS
        return Replicate() if is_sum or is_kept else None
    if base in _BROADCAST:
        return placement if placement == Replicate() else None
    if base in _ALL_GATHER:
        return Replicate() if alone and placement == Shard(0) else None
    if base in _REDUCE_SCATTER and alone and is_sum:
        split_dim = _split_dim(proofs, value)
        return None if split_dim is None else Shard(split_dim)
    return None


def completes(reduced: str, base: str, reduction: str, axes: tuple[str, ...], axis: str) -> bool:
    """Whether it reduces the ranks' reductions of their shards to that of the full tensor."""
    needed = {"max": "max", "min": "min", "mean": "avg"}.get(reduced)
    return base in _ALL_REDUCE and axes == (axis,) and needed is not None and reduction == needed


def identify(base: str, axis: str, axes: Any, operand: Any, first: Any, i: int) -> Gathered | None:
    """Identify an output of an all-gather along the axis alone; None if it is replicated.

    Args:
        first: The value of the first output.
    """
    shard = operand.placement
    if axes != (axis,) or not isinstance(shard, Shard) or shard != Shard(shard.dim):
        return None
    if base in _ALL_GATHER_LISTS:
        return first, shard, i
    return (first, shard, None) if base in _ALL_GATHER and shard.dim else None


def propagate_gathered(
    operation: Operation, values: Sequence[Any], known: Mapping[Any, Gathered], num_ranks: int
) -> list[Gathered | None]:
    """Return which outputs of an operation are such parts."""
    nothing: list[Gathered | None] = [None] * len(operation.outputs)
    part = known.get(values[0]) if len(values) == 1 else None
    if part is None:
        return nothing
    is_all = operation.name == "slice" and operation.outputs[0].shapes == operation["self"].shapes
    if is_all or operation.name in SAME_ELEMENTS:
        return [part]
    gather, shard, which = part
    sizes = {made.shapes for made in operation.outputs}
    is_split = operation.name in _SPLITS_OR_CAT - {"cat"} and operation.get("dim", 0) == 0
    if which is None and is_split and len(operation.outputs) == num_ranks and len(sizes) == 1:
        return [(gather, shard, i) for i in range(num_ranks)]
    return nothing


def joins_all(
    operation: Operation, values: Sequence[Any], known: Mapping[Any, Gathered], num_ranks: int
) -> bool:
    """Whether the operation joins the parts of all ranks, in their order, along the dim that was
    split.
    """
    parts = [known.get(value) for value in values]
    if len(parts) == 1 and parts[0] is not None and operation.name in TO_SIZES:
        return parts[0][2] is None and _is_join(operation, parts[0][1].dim, num_ranks)
    if operation.name != "cat" or len(parts) != num_ranks or parts[0] is None:
        return False
    gather, shard, _ = parts[0]
    if parts != [(gather, shard, i) for i in range(num_ranks)]:
        return False
    return bool(operation.get("dim", 0) % operation.outputs[0].ndim == shard.dim)


def joins_elsewhere(
    operation: Operation, values: Sequence[Any], known: set[Any], num_parts: int
) -> bool:
    """Whether the operation is a view of what was gathered along the other axis, by which
    ``all_gather_tensor`` joins the parts of ``num_parts`` ranks where there is one row. With more
    rows, as along this axis the unsharded program has, it concatenates: so the view shows nothing
    about this axis.
    """
    if operation.name not in TO_SIZES or known.isdisjoint(values):
        return False
    shapes = zip(operation.operands[0].shapes, operation.outputs[0].shapes)
    return any(given[:1] == (num_parts,) and made[:1] == (1,) for given, made in shapes)


def _is_join(operation: Operation, dim: int, num_ranks: int) -> bool:
    """Whether a view of parts along the first dim has them along ``dim``: if the dims before it
    have size 1, both have the same memory layout.
    """
    for given, made in zip(operation.operands[0].shapes, operation.outputs[0].shapes):
        part = (given[0] // num_ranks, *given[1:])
        joined = (*part[:dim], part[dim] * num_ranks, *part[dim + 1 :])
        if given[0] % num_ranks or made != joined or any(size != 1 for size in part[:dim]):
            return False
    return True


def _split_dim(proofs: AxisProofs, value: Any) -> int | None:
    """Return the dim along which a reduce-scatter splits the sum: the first, unless, as in
    functional collectives, a tensor was split along another dim into one piece per rank, and these
    were joined along the first. None for other lists of parts.
    """
    made = proofs.makers.get(value)
    if made is None or made[0].name != "cat":
        return 0
    operation, _, pieces = made
    if operation.get("dim", 0) not in (0, -operation.outputs[0].ndim):
        return 0
    makers = [proofs.makers.get(piece) for piece in pieces]
    if any(maker is None for maker in makers):
        return None
    first = makers[0]
    assert first is not None
    is_split = first[0].name in _SPLITS_OR_CAT - {"cat"}
    in_order = all(
        maker is not None and maker[0] is first[0] and maker[1] == i
        for i, maker in enumerate(makers)
    )
    whole = len(first[0].outputs) == len(pieces) == proofs.num_ranks
    if not (is_split and in_order and whole):
        return None
    dim = first[0].get("dim", 0)
    return int(dim % first[0].operands[0].ndim)


def _along_other_axis(
    base: str, placement: Placement | None, proofs: AxisProofs, value: Any
) -> Placement | None:
    """Return the placement along another axis, where the ranks of each group do the same with their
    parts.
    """
    if placement is None or base in _ALL_REDUCE | _BROADCAST | _ALL_GATHER_LISTS:
        return placement
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
