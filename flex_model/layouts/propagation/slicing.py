"""Rules for slices along one dim: by each rank's own range, and into all parts at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.layouts.propagation.labels import (
    Placements,
    all_but,
    operand_of,
    sizes_along,
    unary,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation
from flex_model.layouts.propagation.parts import Widths, by_piece, part_widths, shard_of_parts

Range = tuple[int, int]  # start and end, within one rank's local tensor


def sliced(operand: Operand, dim: int, ranges: Sequence[Range]) -> Placement | None:
    """Return the placement of a slice with step 1, by the ranks' ranges along ``dim``."""
    placement = operand.placement
    if isinstance(placement, Shard) and placement.dim == dim:
        return _of_parts(operand, ranges)
    if len(set(ranges)) == 1:
        return placement
    if isinstance(placement, Replicate):
        return own_part(dim, ranges, operand.shapes[0][dim])
    return None


def _of_parts(operand: Operand, ranges: Sequence[Range]) -> Shard | None:
    """Return the placement of some whole parts, which are whole parts of the full tensor."""
    shard, widths = operand.shard, part_widths(operand)
    taken = _parts_of(widths, ranges)
    if shard is None or widths is None or taken is None:
        return None
    (first, last) = taken
    if not 0 < last - first < shard.parts:
        return None
    return shard_of_parts(shard, [own[first:last] for own in widths])


def _parts_of(widths: Widths | None, ranges: Sequence[Range]) -> tuple[int, int] | None:
    """Return which parts the ranges are, if these are the same on all ranks."""
    taken = set()
    for own, (start, end) in zip(widths or (), ranges):
        bounds = list(itertools.accumulate(own, initial=0))
        if len(set(bounds)) < len(bounds) or start not in bounds or end not in bounds:
            return None
        taken.add((bounds.index(start), bounds.index(end)))
    return taken.pop() if len(taken) == 1 else None


def own_part(dim: int, ranges: Sequence[Range], size: int) -> Placement | None:
    """Return the shard that ranges make up, if they follow one another and cover the dim; several
    ranks may share one.
    """
    count = len(ranges)
    if follow_to_end(ranges, size):
        return Shard(dim)
    for pieces in range(2, count):
        for stride in range(1, count):
            if count % (pieces * stride):
                continue
            shard = Shard(dim, pieces=pieces, stride=stride)
            by_piece: dict[int, Range] = {}
            if any(by_piece.setdefault(shard.piece(i), r) != r for i, r in enumerate(ranges)):
                continue
            if len(by_piece) == pieces and follow_to_end(
                [by_piece[i] for i in range(pieces)], size
            ):
                return shard
    return None


def follow_to_end(ranges: Sequence[Range], size: int) -> bool:
    """Whether the ranges follow one another and cover the dim."""
    end = 0
    for start, stop in ranges:
        if start != end or stop < start:
            return False
        end = stop
    return end == size


def _clamped(index: int | None, size: int, default: int) -> int:
    if index is None:
        return default
    return min(max(index + size if index < 0 else index, 0), size)


def slice_ranges(
    starts: Sequence[int | None], ends: Sequence[int | None], sizes: Sequence[int]
) -> list[Range]:
    """Return the ranges of Python slices of this many indices."""
    ranges = []
    for start, end, size in zip(starts, ends, sizes):
        first = _clamped(start, size, 0)
        ranges.append((first, max(first, _clamped(end, size, size))))
    return ranges


def slice_(operation: Operation) -> Placements:
    """Read ``x[..., start:end:step, ...]`` along one dim."""
    operand = operand_of(operation)
    dim, step = operation["dim"] % operand.ndim, operation["step"]
    starts, ends = operation.by_rank("start"), operation.by_rank("end")
    sizes = sizes_along(operand, dim)
    ranges = slice_ranges(starts, ends, sizes)
    first = _stated(operation, "start", starts[0])
    last = _stated(operation, "end", ends[0])
    full = operand.full_shape[dim]
    if first is not _UNKNOWN and last is not _UNKNOWN:
        (of_full,) = slice_ranges([first], [last], [full])
    else:
        of_full = None
    if operand.shard is not None and operand.shard.dim == dim:
        return [_along_split_dim(operation, operand, ranges, of_full) if step == 1 else None]
    if len(set(ranges)) == 1:
        return [operand.placement if of_full == ranges[0] else None]
    return [sliced(operand, dim, ranges) if step == 1 else None]


def _along_split_dim(
    operation: Operation, operand: Operand, ranges: Sequence[Range], of_full: Range | None
) -> Placement | None:
    """Return the placement of a slice of the split dim: all of it, if the bounds prove that the
    unsharded program takes all of it, too; or whole parts, whose bounds are sizes.
    """
    shard = operand.shard
    assert shard is not None
    full, sizes = operand.full_shape[shard.dim], sizes_along(operand, shard.dim)
    if all(r == (0, size) for r, size in zip(ranges, sizes)):
        return shard if of_full == (0, full) else None
    found = _of_parts(operand, ranges)
    if found is not None and ("start" in operation.full_sizes or "end" in operation.full_sizes):
        made = replace(operation.outputs[0], placement=found)
        taken = _parts_of(part_widths(operand), ranges)
        start = _full_start(operand, taken[0] if taken else 0)
        return found if of_full == (start, start + made.full_shape[shard.dim]) else None
    return found


def _full_start(operand: Operand, part: int) -> int:
    """Return where a part begins in the full tensor."""
    widths, shard = part_widths(operand), operand.shard
    assert widths is not None and shard is not None
    of_pieces = by_piece(shard, [sum(own[:part]) for own in widths])
    assert of_pieces is not None
    return sum(of_pieces)


class _Unknown:
    """A bound of which only the rank's own number is known."""


_UNKNOWN = _Unknown()


def _stated(operation: Operation, name: str, local: int | None) -> Any:
    """Return the number that the unsharded program passes: the stated one, else the same."""
    stated = operation.full_sizes.get(name)
    if stated is None:
        return local
    return _UNKNOWN if stated[0] is None else stated[0]


def narrow(operation: Operation) -> Placements:
    """Read from ``start`` for ``length`` along one dim."""
    operand = operand_of(operation)
    dim = operation["dim"] % operand.ndim
    sizes = sizes_along(operand, dim)
    starts = [_clamped(start, size, 0) for start, size in zip(operation.by_rank("start"), sizes)]
    lengths = operation.by_rank("length")
    ranges = [(start, start + length) for start, length in zip(starts, lengths)]
    first = _stated(operation, "start", starts[0])
    length = _stated(operation, "length", lengths[0])
    is_known = first is not _UNKNOWN and length is not _UNKNOWN
    of_full = (first, first + length) if is_known else None
    shard = operand.shard
    if shard is not None and shard.dim == dim:
        is_whole = of_full == (0, operand.full_shape[dim])
        is_whole = is_whole and all(r == (0, size) for r, size in zip(ranges, sizes))
        is_stated = bool(operation.full_sizes)
        return [shard if is_whole else None if is_stated else _of_parts(operand, ranges)]
    if len(set(ranges)) == 1:
        return [operand.placement if of_full == ranges[0] else None]
    return [sliced(operand, dim, ranges)]


def select(operation: Operation) -> Placements:
    """Read one index along a dim, which is removed: a split dim must be another one."""
    operand = operand_of(operation)
    labels = all_but(operand.ndim, operation["dim"])
    operation["index"]
    return unary(operation, labels, tuple(x for x in labels if x is not None), linear=True)


def unbind(operation: Operation) -> Placements:
    operand = operand_of(operation)
    labels = all_but(operand.ndim, operation["dim"])
    after = tuple(label for label in labels if label is not None)
    return unary(operation, labels, *[after] * len(operation.outputs), linear=True)


def split(operation: Operation) -> Placements:
    """Return consecutive slices, whose sizes may be each rank's own.

    Along a split dim the slices must be whole parts: as all slices together are the whole dim,
    their local sizes can't be the unsharded program's.
    """
    operand = operand_of(operation)
    dim = operation["dim"] % operand.ndim
    found: Placements = []
    starts, of_full = [0] * operation.num_ranks, []
    for made in operation.outputs:
        sizes = sizes_along(made, dim)
        ranges = [(start, start + size) for start, size in zip(starts, sizes)]
        found.append(sliced(operand, dim, ranges))
        starts = [end for _, end in ranges]
        if found[-1] is not None:
            of_full.append(replace_placement(made, found[-1]).full_shape[dim])
    expected = _full_split_sizes(operation, operand, dim)
    if len(of_full) == len(found) and expected in (None, of_full):
        return found
    return [None] * len(found)


def replace_placement(operand: Operand, placement: Placement | None) -> Operand:
    return Operand(operand.shapes, operand.dtype, placement)


def _full_split_sizes(operation: Operation, operand: Operand, dim: int) -> list[int] | None:
    """Return the sizes of the unsharded program's slices; None if only the local ones determine
    them.
    """
    full, name = operand.full_shape[dim], operation.name
    if name.endswith("chunk"):
        width = -(-full // operation["chunks"])
        return _of_width(full, width)
    if "sections" in operation.arguments[0]:
        sections = operation["sections"]
        return [full // sections + (i < full % sections) for i in range(sections)]
    if "split_size" in operation.arguments[0]:
        sizes = operation.full_sizes.get("split_size")
        sizes = [sizes] if isinstance(sizes, int) else sizes
        if sizes is None:
            return None
        if sizes[0] is None:
            raise ValueError("the width is not known")
        return _of_width(full, sizes[0]) if len(sizes) == 1 else list(sizes)  # type: ignore[arg-type]
    if "split_sizes" in operation.arguments[0]:
        stated = operation.full_sizes.get("split_sizes")
        if stated is None:
            return None
        if list(stated).count(None) > 1:
            raise ValueError("the widths are not known")
        rest = full - sum(size for size in stated if size is not None)
        return [rest if size is None else size for size in stated]
    if operand.shard is not None and operand.shard.dim == dim:
        raise ValueError("slices at indices: whether those are sizes is not known")
    return None


def _of_width(full: int, width: int) -> list[int]:
    return [min(width, full - start) for start in range(0, full, width)] or [0]


def into_zeros(operation: Operation) -> Placements:
    """Put the gradient of a part of a tensor into zeros: the dims that the part was taken along
    must be whole.
    """
    (made,), name = operation.outputs, operation.name
    dims = [operation[dim] for dim in ("dim", "dim1", "dim2") if dim in operation.arguments[0]]
    labels = all_but(made.ndim, dims)
    stated = operation.full_sizes.get("input_sizes", made.shapes[0])
    if any(label is None and a != b for label, a, b in zip(labels, stated, made.shapes[0])):
        return [None]
    kept = tuple(label for label in labels if label is not None)
    before = labels if name in ("slice_backward", "unfold_backward") else kept
    if name in ("unfold_backward", "diagonal_backward"):
        before = (*before, None)
    return unary(operation, before, labels, linear=True)


RULES_OF_BOUNDS = {"slice": slice_, "narrow": narrow}

RULES_OF_SPLITS = dict.fromkeys(
    words(
        "split split_with_sizes chunk tensor_split "
        "unsafe_split unsafe_split_with_sizes unsafe_chunk"
    ),
    split,
)

# Their ``input_sizes`` are those of the rank's own part of a tensor.
RULES_OF_GRADIENTS = dict.fromkeys(
    words("slice_backward select_backward unfold_backward diagonal_backward"), into_zeros
)

RULES = {"select": select, "unbind": unbind}
