"""What ranks hold after a collective."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flex_model.distributed.layout import Placement, Replicate, Shard

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

_ALL_REDUCE = {
    "allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced",
    "all_reduce_coalesced_",
}  # fmt: skip
_BROADCAST = {"broadcast_", "broadcast"}
_ALL_GATHER = {"_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out"}
_ALL_GATHER_LISTS = {"allgather_", "allgather_coalesced_"}
#: Operations whose results tell how a reduce-scatter cuts what it sums.
CUTS = {"cat", "split", "split_with_sizes", "chunk", "tensor_split"}
_REDUCE_SCATTER = {"_reduce_scatter_base_", "reduce_scatter_tensor", "reduce_scatter_tensor_out"}


def placement(
    proofs: AxisProofs, name: str, axes: tuple[str, ...] | None, arguments: Any, output: int
) -> Placement | None:
    """The placement of an output along the axis of ``proofs``.

    Args:
        name: Of the operation, with namespace.
        axes: That the group runs along; None if it is no axis of the mesh.
        arguments: ``values`` and ``operands``: the tensors that it was passed.
    """
    if axes is None:
        return None
    base = name.partition("::")[2]
    into = base in ("_allgather_base_", "_reduce_scatter_base_")
    source = 1 if into else output if base in _ALL_REDUCE | _BROADCAST else 0
    if base in _ALL_GATHER_LISTS:
        source = len(arguments.operands) - 1
    if source >= len(arguments.operands):
        return None
    operand, value = arguments.operands[source], arguments.values[source]
    if proofs.axis in axes:
        return _along(proofs, base, operand, value, len(axes) == 1)
    return _beside(base, operand.placement, proofs, value)


def _along(
    proofs: AxisProofs, base: str, operand: Any, value: Any, alone: bool
) -> Placement | None:
    """Along the axis of the group, all have the same after a reduction to all or a gather."""
    if base in _ALL_REDUCE | _BROADCAST | _ALL_GATHER | _ALL_GATHER_LISTS:
        return Replicate()
    if base in _REDUCE_SCATTER and alone:
        cut = _cut_dim(proofs, value)
        return None if cut is None else Shard(cut)
    return None


def _cut_dim(proofs: AxisProofs, value: Any) -> int | None:
    """Along which dim a reduce-scatter cuts what it sums: the first, but for a tensor that was cut
    along another dim into as many pieces, which were joined along the first, as functional
    collectives do. None for other lists of parts.
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
    is_split = first[0].name in CUTS - {"cat"}
    in_order = all(
        maker is not None and maker[0] is first[0] and maker[1] == i
        for i, maker in enumerate(makers)
    )
    whole = len(first[0].outputs) == len(pieces) == proofs.num_ranks
    if not (is_split and in_order and whole):
        return None
    dim = first[0].get("dim", 0)
    return int(dim % first[0].operands[0].ndim)


def _beside(
    base: str, placement: Placement | None, proofs: AxisProofs, value: Any
) -> Placement | None:
    """Along another axis, the ranks of each group do the same to their own parts."""
    if placement is None or base in _ALL_REDUCE | _BROADCAST | _ALL_GATHER_LISTS:
        return placement
    if not isinstance(placement, Shard):
        return placement if base in _ALL_GATHER | _REDUCE_SCATTER else None
    if base in _ALL_GATHER:
        # One part of the other group's ranks after another, each of them split as it was.
        if placement.dim == 0:
            return replace(placement, parts=proofs.other_size) if placement.parts == 1 else None
        return placement
    if base in _REDUCE_SCATTER:
        cut = _cut_dim(proofs, value)
        if placement.dim != 0:
            return placement if cut is not None and cut != placement.dim else None
        was_joined = cut not in (None, 0) and placement.parts == proofs.other_size
        return replace(placement, parts=1) if was_joined else None
    return None
