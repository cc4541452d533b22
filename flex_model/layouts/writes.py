"""Infers the effect of writes on other values in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard
from flex_model.layouts import chunks, constants, factories, logged
from flex_model.layouts.logged import Value
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, differ

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs


def follow_writes(
    proofs: AxisProofs, outputs: Sequence[logged.Made], writes: Sequence[Sequence[logged.Write]]
) -> None:
    """Note the placements of values whose memory an operation has written to.

    Args:
        writes: By rank, for each written output.
    """
    for i, output in enumerate(outputs[: len(writes[0])]):
        _follow_write(proofs, output.value, [of_rank[i] for of_rank in writes])


def _follow_write(proofs: AxisProofs, written: Value, writes: Sequence[logged.Write]) -> None:
    before = writes[0].before
    same = before is not None and all(write.before == before for write in writes)
    new, step = proofs.placements.get(written), proofs.steps[written]
    was = proofs.placements.get(before) if same else None
    gradients, is_complete = proofs.gradients, all(write.is_complete for write in writes)
    own = proofs.own_rows.get(written)  # `out[i] = f(x[i])`: what belongs to a row stays there
    keeps_rows = same and own is not None and own == proofs.own_rows.get(before)
    if same and before in proofs.blank:
        _fill(proofs, before, written, new, None, is_complete)
    for (old, value), dims in _other_values(writes).items():
        proofs.shapes[value] = proofs.shapes.get(old, ())
        text = f"{step.text} (written through a view)"
        proofs.note_step(value, text, (old, written), step.cause)
        gradients.note_made([old, written], [value])
        of_old = proofs.placements.get(old)
        is_own_slice = isinstance(new, Shard) and new == Shard(new.dim)  # and no other rank's
        if same and is_own_slice and new == _own_slice_of_zeros(proofs, before, old):
            proofs.set_placement(value, Partial())  # a shard at its place, and zeros elsewhere
        elif keeps_rows and isinstance(of_old, Shard):
            proofs.set_placement(value, of_old)
        elif same and new is not None and new == was:
            is_own = isinstance(new, Shard) and of_old == REPLICATED
            if of_old is not None and not is_own:  # else each rank wrote its own part
                proofs.set_placement(value, of_old)
        elif same and old in proofs.blank:
            piece = _dims_of_piece(proofs, before, old)
            gradients.note_filled(before, written)
            _fill(proofs, old, value, new, piece or dims, is_complete)
            placed = proofs.blank.get(value)
            if isinstance(placed, Shard) and piece and _is_at_one_place(proofs, before, old):
                proofs.set_placement(value, placed)  # the rest holds anything on one process, too
        elif same and new is None and {old, written} <= proofs.open.keys():
            proofs.open[value] = proofs.open[old]  # all ranks wrote the same
            if {old, written} <= proofs.plain:
                proofs.plain.add(value)
        elif same and old in proofs.open and isinstance(new, (Shard, Replicate)):
            # The rest holds one number: `cache[:, i] = h[:, -1]` shows the extent of all of it.
            dims = _dims_of_piece(proofs, before, old) or dims
            moved = _moved(new, dims) if isinstance(new, Shard) else new
            gradients.note_filled(before, written)
            is_split = isinstance(moved, Shard) and moved.dim in proofs.open[old]
            if is_split or (moved == REPLICATED and (proofs.axis == "tp" or old in proofs.plain)):
                proofs.set_placement(value, moved)


def _other_values(
    writes: Sequence[logged.Write],
) -> dict[tuple[Value, Value], tuple[int | None, ...]]:
    """Return the other values that a write has changed, old and new, with those dims that are the
    same ones on all ranks.
    """
    found: dict[tuple[Value, Value], list[tuple[int | None, ...]]] = {}
    for write in writes:
        for old, value, dims in write.others:
            found.setdefault((old, value), []).append(dims)
    return {
        values: tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*of_ranks))
        for values, of_ranks in found.items()
    }


def _own_slice_of_zeros(proofs: AxisProofs, piece: Value, whole: Value) -> Placement | None:
    """Return how the ranks' pieces split a tensor of zeros, if each has sliced its own from it."""
    maker = proofs.makers.get(piece)
    if maker is None or maker[0].name != "slice" or not proofs.is_made_by(whole, *factories.ZEROS):
        return None
    operation, _ = maker
    as_whole = constants.with_placements(operation, {id(operation.operands[0]): REPLICATED})
    return rules.propagate(as_whole)[0] if operation.values == (whole,) else None


def _dims_of_piece(proofs: AxisProofs, piece: Value, whole: Value) -> tuple[int | None, ...] | None:
    """Return, for each dim of a slice, the same dim of the sliced tensor, if the slice has all of
    it, which memory alone does not show for dims of size 1. None if it is not a slice of it.
    """
    shapes = proofs.shapes.get(piece, ()), proofs.shapes.get(whole, ())
    while piece != whole:
        maker = proofs.makers.get(piece)
        if maker is None or maker[0].name not in chunks.CHUNKS or maker[0].values[0] is None:
            return None
        piece = maker[0].values[0]
    sizes = zip(*(zip(*of_ranks) for of_ranks in shapes))
    return tuple(dim if own == full else None for dim, (own, full) in enumerate(sizes))


def _is_at_one_place(proofs: AxisProofs, piece: Value, whole: Value) -> bool:
    """Whether all ranks have sliced the piece by the same numbers."""
    while piece != whole:
        operation, _ = proofs.makers[piece]
        if any(map(differ, map(operation.by_rank, operation.arguments[0]))):
            return False
        piece = operation.values[0]
    return True


def _fill(
    proofs: AxisProofs,
    old: Value,
    value: Value,
    new: Placement | None,
    dims: Sequence[int | None] | None,
    is_complete: bool,
) -> None:
    """Note a write to a part of a blank tensor: all parts must be placed alike."""
    proofs.gradients.note_filled(old, value)
    so_far = proofs.blank[old]
    moved = new if dims is None or not isinstance(new, Shard) else _moved(new, dims)
    if moved is None or isinstance(moved, Partial) or so_far not in (None, moved):
        proofs.blank[value] = "differs"
    else:
        proofs.blank[value] = moved
    if dims is None:
        return  # the written tensor: its own rule places it
    if is_complete and isinstance(proofs.blank[value], (Shard, Replicate)):
        proofs.set_placement(value, proofs.blank.pop(value))  # type: ignore[arg-type]


def _moved(shard: Shard, dims: Sequence[int | None]) -> Shard | None:
    """Return the same split of another tensor, whose dims are ``dims``."""
    dim = dims[shard.dim] if shard.dim < len(dims) else None
    return None if dim is None else replace(shard, dim=dim)
