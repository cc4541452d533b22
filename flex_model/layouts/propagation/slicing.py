"""Rules for slices along one dim: by each rank's own range, and into all parts at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.layouts.propagation.operation import Operand, Operation, rule
from flex_model.layouts.propagation.text_forms import (
    Placements,
    form,
    operand_of,
    sizes_along,
    words,
)

#: Operations that make consecutive slices.
SPLITS = words(
    "split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk"
)

Range = tuple[int, int]  # start and end, within one rank's local tensor
Widths = list[tuple[int, ...]]  # by rank: its width of each part, in their order

# ---- Split dims that consist of several parts, each of them split over the ranks -----------------


def part_widths(operand: Operand) -> Widths | None:
    """Return each rank's width of each part of its split dim. None if the sizes don't fit."""
    shard = operand.shard
    if shard is None:
        return None
    held = [shape[shard.dim] for shape in operand.shapes]
    of_pieces = by_piece(shard, held)
    widths = None if of_pieces is None else shard.part_widths(of_pieces)
    if widths is None:
        return None
    return [tuple(widths[shard.piece(rank)]) for rank in range(len(held))]


def by_piece(shard: Shard, of_ranks: Sequence[Any]) -> list[Any] | None:
    """Return the ranks' items by piece. None if replicas of a piece differ."""
    found: dict[int, Any] = {}
    for rank, own in enumerate(of_ranks):
        if found.setdefault(shard.piece(rank), own) != own:
            return None
    return [found[piece] for piece in sorted(found)]


def shard_of_parts(like: Shard, widths: Widths) -> Shard | None:
    """Return the placement of a dim of such parts, split over the ranks as ``like``. None if there
    is none: parts of unequal sizes must be split evenly.
    """
    count = len(widths[0])
    if count == 0:
        return None
    plain = replace(like, parts=1, part_sizes=None)
    if all(len(set(own)) == 1 for own in widths):
        return replace(plain, parts=count)
    of_pieces = by_piece(like, widths)
    if of_pieces is None:
        return None
    stated = replace(plain, part_sizes=tuple(sum(of_part) for of_part in zip(*of_pieces)))
    found = stated.part_widths([sum(own) for own in of_pieces])
    return stated if found == [list(own) for own in of_pieces] else None


# ---- Slices --------------------------------------------------------------------------------------


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
    for pieces, stride in itertools.product(range(2, count), range(1, count)):
        shard = Shard(dim, pieces=pieces, stride=stride)
        held = None if count % (pieces * stride) else by_piece(shard, ranges)
        if held is not None and len(held) == pieces and follow_to_end(held, size):
            return shard
    return None


def follow_to_end(ranges: Sequence[Range], size: int) -> bool:
    """Whether the ranges follow one another and cover the dim."""
    ends = [0, *(end for _, end in ranges)]
    return ends == sorted(ends) and ends == [*(start for start, _ in ranges), size]


def slice_ranges(
    starts: Sequence[int | None], ends: Sequence[int | None], sizes: Sequence[int]
) -> list[Range]:
    """Return the ranges of Python slices of this many indices."""
    ranges = []
    for start, end, size in zip(starts, ends, sizes):
        first, last, _ = slice(start, end).indices(size)
        ranges.append((first, max(first, last)))
    return ranges


def range_taken(operation: Operation, output: int, dim: int) -> Range | None:
    """Return the range along ``dim`` that an output of a slice, ``select``, ``unbind`` or of one of
    ``SPLITS`` has in its operand; None if the ranks took different ones, or not all indices of it.
    """
    size, name = operation.operands[0].shapes[0][dim], operation.name
    if name in SPLITS:
        sizes = [made.shapes[0][dim] for made in operation.outputs]
        return sum(sizes[:output]), sum(sizes[: output + 1])
    if name == "unbind":
        return output, output + 1
    starts = operation.by_rank("index" if name == "select" else "start")
    if name in ("select", "narrow"):
        starts = [start + size * (start < 0) for start in starts]
        lengths = operation.by_rank("length") if name == "narrow" else [1] * len(starts)
        ends = [start + length for start, length in zip(starts, lengths)]
    elif set(operation.by_rank("step")) == {1}:
        ends = operation.by_rank("end")
    else:
        return None
    found = set(slice_ranges(starts, ends, [size] * len(starts)))
    return found.pop() if len(found) == 1 else None


@rule("slice", "start end")
def slice_(operation: Operation) -> Placements:
    """Read ``x[..., start:end:step, ...]`` along one dim."""
    dim, step = operation["dim"] % operand_of(operation).ndim, operation["step"]
    sizes, bounds = sizes_along(operand_of(operation), dim), _stated(operation, "start", "end")
    ranges = slice_ranges(operation.by_rank("start"), operation.by_rank("end"), sizes)
    of_full = None
    if bounds is not None:
        first, last = bounds
        (of_full,) = slice_ranges([first], [last], [operand_of(operation).full_shape[dim]])
    return [_taken(operation, dim, ranges, of_full, step)]


@rule("narrow", "start length")
def narrow(operation: Operation) -> Placements:
    """Read from ``start`` for ``length`` along one dim."""
    dim = operation["dim"] % operand_of(operation).ndim
    sizes = sizes_along(operand_of(operation), dim)
    starts = [slice(n, None).indices(size)[0] for n, size in zip(operation.by_rank("start"), sizes)]
    ranges = [(start, start + length) for start, length in zip(starts, operation.by_rank("length"))]
    bounds = _stated(operation, "start", "length")
    of_full = None if bounds is None else (bounds[0], sum(bounds))
    return [_taken(operation, dim, ranges, of_full)]


def _taken(
    operation: Operation, dim: int, ranges: Sequence[Range], of_full: Range | None, step: int = 1
) -> Placement | None:
    """Return the placement of ranges; ``of_full``: of the unsharded program, if it is known."""
    operand = operand_of(operation)
    if operand.shard is not None and operand.shard.dim == dim:
        return _along_split_dim(operation, operand, ranges, of_full) if step == 1 else None
    if len(set(ranges)) == 1:
        return operand.placement if of_full == ranges[0] else None
    return sliced(operand, dim, ranges) if step == 1 else None


def _along_split_dim(
    operation: Operation, operand: Operand, ranges: Sequence[Range], of_full: Range | None
) -> Placement | None:
    """Return the placement of a slice of the split dim: all of it, if the bounds prove that the
    unsharded program takes all of it, too; or whole parts, whose bounds are sizes.
    """
    shard = operand.shard
    assert shard is not None
    sizes, pieces = sizes_along(operand, shard.dim), by_piece(shard, ranges)
    is_all = all(r == (0, size) for r, size in zip(ranges, sizes))
    found = shard if is_all else _of_parts(operand, ranges)
    if found is None or pieces is None:
        return None
    is_proven = of_full == tuple(map(sum, zip(*pieces)))
    return found if is_proven or not (is_all or operation.full_sizes) else None


def _stated(operation: Operation, *names: str) -> list[Any] | None:
    """Return the numbers that the unsharded program passes: those stated, else the same. None if
    only the rank's own number is known of one.
    """
    stated = operation.full_sizes
    if any(name in stated and stated[name][0] is None for name in names):
        return None
    return [stated[name][0] if name in stated else operation.by_rank(name)[0] for name in names]


@rule(SPLITS, "split_size split_sizes chunks")
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
            of_full.append(replace(made, placement=found[-1]).full_shape[dim])
    expected = _full_split_sizes(operation, operand.full_shape[dim])
    if len(of_full) == len(found) and expected in (None, of_full):
        return found
    return [None] * len(found)


def _full_split_sizes(operation: Operation, full: int) -> list[int] | None:
    """Return the sizes of the unsharded program's slices; None if only the local ones determine
    them.
    """
    stated = operation.full_sizes
    is_chunk = operation.name.endswith("chunk")
    if is_chunk or len(stated.get("split_size", ())) == 1:
        (width,) = [-(-full // operation["chunks"])] if is_chunk else stated["split_size"]
        if width is None:
            raise ValueError("the width is not known")
        return [min(width, full - start) for start in range(0, full, width)] or [0]
    if "sections" in operation.arguments[0]:
        sections = operation["sections"]
        return [full // sections + (i < full % sections) for i in range(sections)]
    if operation.name == "tensor_split":
        raise ValueError("slices at indices: whether those are sizes is not known")
    sizes = stated.get("split_size", stated.get("split_sizes"))
    if sizes is None:
        return None
    if list(sizes).count(None) > 1:
        raise ValueError("the widths are not known")
    rest = full - sum(size for size in sizes if size is not None)
    return [rest if size is None else size for size in sizes]


@rule("cat")
def cat(operation: Operation) -> Placements:
    """Concatenate: along a split dim each tensor's parts stay parts, however many it has."""
    operands = list(operation["tensors"])
    made = operation.outputs[0]
    if made.ndim > 1:
        # Empty vectors are ignored, whatever the other tensors' dims.
        operands = [o for o in operands if any(shape != (0,) for shape in o.shapes)]
    dim = operation["dim"] % made.ndim
    if all(o.shard is not None and o.shard.dim == dim for o in operands):
        return [_along_joined_dim(operands)]
    joined = form("tensors:...[dim] -> ...[dim] = tensors")
    return joined(operation.with_arguments(tensors=operands))


def _along_joined_dim(operands: list[Operand]) -> Placement | None:
    """Return the placement of the parts of all tensors, in order."""
    shards = [operand.shard for operand in operands]
    first, widths = shards[0], [part_widths(operand) for operand in operands]
    split = {replace(s, parts=1, part_sizes=None) for s in shards if s is not None}
    if first is None or len(split) != 1 or any(own is None for own in widths):
        return None
    of_ranks = zip(*(own for own in widths if own is not None))
    return shard_of_parts(first, [tuple(itertools.chain(*own)) for own in of_ranks])
