"""The exact placement of a reshaped tensor: which dim of the output is split.

The data of a tensor that is split along ``dim`` consists of the same number of runs on every rank,
``prod(shape[:dim]) * parts``; the full data is, run by run, those of all ranks in their order. So
dim ``e`` of an output with ``q`` parts is a *valid reading* if ``prod(out[:e])`` runs of ``q``
parts are that number, and the other dims agree on all ranks. If several readings are valid, the
sizes that the unsharded program passes decide, if they are known; else the dims with which the
split one is grouped; if two are left (dims of size 1), the placement is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flex_model.distributed.placement import Placement, Shard
from flex_model.layouts.propagation.operation import Operand, Shape, full_size
from flex_model.layouts.propagation.slicing import part_widths, shard_of_parts
from flex_model.layouts.propagation.text_forms import sizes_along

Reading = tuple[int, int]  # the split dim and its parts
Sizes = Sequence[int | None]


def reshaped(
    operand: Operand,
    made: Operand,
    sizes: Sizes = (),
    flexible: int | None = None,
    are_stated: bool = True,
) -> Placement | None:
    """Return the placement of ``made``, which has the operand's elements in the same order.

    Args:
        sizes: Of the unsharded program's output, None where not known; empty if none is.
        flexible: The dim that was passed as -1.
        are_stated: Whether a size that is not known may differ from the ranks'.
    """
    placement = operand.placement
    pairs = zip(operand.shapes, made.shapes)
    if placement is None or any(math.prod(before) != math.prod(after) for before, after in pairs):
        return None
    known: list[int | None] = list(sizes) if len(sizes) == made.ndim else [None] * made.ndim
    if not isinstance(placement, Shard):
        return _of_whole(made, placement, known, are_stated and bool(sizes))
    is_same = operand.shapes == made.shapes and _fit(known, operand)
    if placement.part_sizes is not None:
        return placement if is_same else _of_unequal_parts(operand, made, placement, known)
    readings = [
        reading
        for reading in valid_readings(operand, made, placement)
        if _fit(known, made, replace(placement, dim=reading[0], parts=reading[1]))
    ]
    if len(readings) > 1 and any(e == flexible for e, _ in readings):
        return None  # the unsharded program's -1, or another number, is larger
    if is_same and _takes_all(placement.dim, known, flexible):
        return placement
    if any(0 in shape for shape in made.shapes) and not _differ(made):
        return None
    found = readings[0] if len(readings) == 1 else None
    if len(readings) > 1:
        found = _by_groups(operand, made, placement, readings)
    if found is None or not (_differ(made) or _takes_all(found[0], known, flexible)):
        return None
    if not _is_settled(found[0], operand, made, placement, known):
        return None
    return replace(placement, dim=found[0], parts=found[1])


def _differ(made: Operand) -> bool:
    return len(set(made.shapes)) > 1


def _of_whole(
    made: Operand, placement: Placement, known: list[int | None], stated: bool
) -> Placement | None:
    """Return the placement for a tensor that is not split: its elements determine at most one
    unknown size.
    """
    if _differ(made) or (stated and known.count(None) > 1):
        return None
    return placement if _fit(known, made) else None


def _fit(known: list[int | None], operand: Operand, placement: Shard | None = None) -> bool:
    """Whether the full tensor, with another placement if one is given, has the known sizes."""
    placed = operand if placement is None else replace(operand, placement=placement)
    return all(size in (None, full) for size, full in zip(known, placed.full_shape))


def valid_readings(operand: Operand, made: Operand, placement: Shard) -> list[Reading]:
    """Return every dim of the output that may be split, with its parts."""
    found = []
    runs = math.prod(operand.shapes[0][: placement.dim]) * placement.parts
    for e in range(made.ndim):
        before = math.prod(made.shapes[0][:e])
        q = 0 if not before or runs % before else runs // before
        if q and full_size(replace(placement, dim=e, parts=q), made.shapes) is not None:
            found.append((e, q))
    return found


def _of_unequal_parts(
    operand: Operand, made: Operand, placement: Shard, known: list[int | None]
) -> Placement | None:
    """Return the placement of parts of unequal sizes. It is known for a dim with the same number of
    runs before it, whose length is that of the split dim, or a multiple or fraction, as for heads
    and features.
    """
    runs, widths = math.prod(operand.shapes[0][: placement.dim]), part_widths(operand)
    found = []
    for e in range(made.ndim):
        if math.prod(made.shapes[0][:e]) != runs or widths is None:
            continue
        if len({(shape[:e], shape[e + 1 :]) for shape in made.shapes}) > 1:
            continue
        before, after = sizes_along(operand, placement.dim), sizes_along(made, e)
        scaled = [_scaled(own, a, b) for own, a, b in zip(widths, before, after)]
        if any(own is None for own in scaled):
            continue
        shard = shard_of_parts(
            replace(placement, dim=e), [own for own in scaled if own is not None]
        )
        if shard is not None and _fit(known, made, shard):
            found.append(shard)
    return found[0] if len(found) == 1 else None


def _scaled(widths: tuple[int, ...], before: int, after: int) -> tuple[int, ...] | None:
    """Return the widths in a dim of ``after`` indices instead of ``before``."""
    if not before or any(width * after % before for width in widths):
        return None
    return tuple(width * after // before for width in widths)


# ---- Where several readings are valid ------------------------------------------------------------


def _by_groups(
    operand: Operand, made: Operand, placement: Shard, readings: list[Reading]
) -> Reading | None:
    """Return the reading in the smallest group of dims in which the split dim is joined and
    divided.

    Every rank has the same sizes here, so the shapes of one suffice.
    """
    before, after = operand.shapes[0], made.shapes[0]
    dim, size = placement.dim, before[placement.dim]
    start = math.prod(before[:dim])
    ones_before = [i for i in _ones_at(before, start) if i != dim]
    ones_after = _ones_at(after, start)
    if size == 1:
        # A dim of size 1 is found by counting, if none was added or removed next to it.
        beside = _ones_at(before, start)  # itself, too
        if len(beside) != len(ones_after):
            return None
        e = ones_after[beside.index(dim)]
        return next((reading for reading in readings if reading[0] == e), None)
    low, high = _group(before, after, dim)
    in_group = [reading for reading in readings if reading[0] in _within(after, low, high)]
    if len(in_group) <= 1:
        return in_group[0] if in_group else None
    wide = [(e, q) for e, q in in_group if after[e] > 1]
    if len(wide) == 1 and placement.parts == 1 and len(ones_after) <= len(ones_before):
        return wide[0]  # the dims of size 1 next to it are not new
    if len(wide) == 1 and after[wide[0][0]] == size and wide[0][1] == placement.parts:
        return wide[0] if after.count(1) <= before.count(1) else None
    return None


def _takes_all(e: int, known: list[int | None], flexible: int | None) -> bool:
    """Whether dim ``e`` has the unsharded program's larger size: not if an unknown number is passed
    for it, which may be the same there, while the -1 stands for the larger size.
    """
    return flexible in (None, e) or known[e] is not None or known[flexible] is not None


def _is_settled(
    e: int, operand: Operand, made: Operand, placement: Shard, known: list[int | None]
) -> bool:
    """Whether dim ``e`` is larger in the unsharded program, and no other dim is.

    Its own or the other dims' known sizes show it; or the split dim is joined with whole dims, or
    is divided. If dims are joined and divided anew, any may be the larger one, and the ranks'
    results no shards.
    """
    others = [size for dim, size in enumerate(known) if dim != e]
    if known[e] is not None or None not in others or _differ(made):
        return True
    before, after = operand.shapes[0], made.shapes[0]
    low, high = _group(before, after, placement.dim)
    joined, divided = (
        [dim for dim in _within(shape, low, high) if shape[dim] > 1] for shape in (before, after)
    )
    return len(joined) <= 1 or len(divided) <= 1


def _within(shape: Shape, low: int, high: int) -> list[int]:
    """Return the dims that consist of the elements from ``low`` to ``high``."""
    return [
        i
        for i in range(len(shape))
        if low <= math.prod(shape[:i]) and math.prod(shape[: i + 1]) <= high
    ]


def dims_with(before: Shape, after: Shape, dim: int) -> list[int]:
    """Return the dims of a view, none of size 1, that have parts of this dim."""
    return [e for e in _within(after, *_group(before, after, dim)) if after[e] != 1]


def _ones_at(shape: Shape, start: int) -> list[int]:
    """Return the dims of size 1 with this number of elements in front of them."""
    return [i for i, size in enumerate(shape) if size == 1 and math.prod(shape[:i]) == start]


def _group(before: Shape, after: Shape, dim: int) -> tuple[int, int]:
    """Return the numbers of elements before and up to the end of the dims with which the dim is
    grouped.
    """
    start = math.prod(before[:dim])
    end = start * before[dim]
    common = {math.prod(before[:i]) for i in range(len(before) + 1)}
    common &= {math.prod(after[:i]) for i in range(len(after) + 1)}
    return max(n for n in common if n <= start), min(n for n in common if n >= end)
