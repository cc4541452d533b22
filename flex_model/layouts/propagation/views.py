"""Rules for operations that keep the elements and change the shape, or repeat them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation, rule
from flex_model.layouts.propagation.reshaping import Sizes, reshaped
from flex_model.layouts.propagation.text_forms import Placements, form, operand_of, sizes_along

# ---- Shapes --------------------------------------------------------------------------------------


def _flexible(operation: Operation, name: str) -> int | None:
    """Return the index of the size that was passed as -1."""
    found = {sizes.index(-1) if -1 in sizes else None for sizes in operation.by_rank(name)}
    (dim,) = found
    return dim


def _resolved(sizes: Sizes, numel: int) -> Sizes:
    """Return sizes without -1: the rest of the elements, or None."""
    if -1 not in sizes:
        return sizes
    rest = [size for size in sizes if size != -1]
    if any(size is None for size in rest) or not math.prod(rest):  # type: ignore[arg-type]
        return tuple(None if size == -1 else size for size in sizes)
    left = numel // math.prod(rest)  # type: ignore[arg-type]
    return tuple(left if size == -1 else size for size in sizes)


@rule("view reshape _unsafe_view _reshape_alias", "size shape stride")
def view(operation: Operation) -> Placements:
    """Reshape (``view``, ``reshape`` and the like) to given sizes."""
    operand, made = operation["self"], operation.outputs[0]
    if "dtype" in operation.arguments[0]:
        return _reinterpreted(operand, made)
    name = "size" if "size" in operation.arguments[0] else "shape"
    sizes = _resolved(operation.full_sizes.get(name, ()), math.prod(operand.full_shape))
    return [reshaped(operand, made, sizes, _flexible(operation, name))]


def _reinterpreted(operand: Operand, made: Operand) -> Placements:
    """Return the placement of ``view(dtype)``: elements of another size change the last dim."""
    shard = operand.shard
    is_kept = operand.shapes == made.shapes or (shard and shard.dim != operand.ndim - 1)
    is_split_or_whole = shard or isinstance(operand.placement, Replicate)
    return [operand.placement if is_kept and is_split_or_whole else None]


@rule("unflatten", "sizes")
def unflatten(operation: Operation) -> Placements:
    """Divide one dim; the others keep their sizes."""
    operand, made = operand_of(operation), operation.outputs[0]
    dim, full = operation["dim"] % operand.ndim, operand.full_shape
    count = len(operation.arguments[0]["sizes"])
    shard = operand.shard
    if shard is not None and shard.dim != dim:
        return [replace(shard, dim=shard.dim + (count - 1) * (shard.dim > dim))]
    sizes = operation.full_sizes.get("sizes", ()) or (None,) * count
    flexible = _flexible(operation, "sizes")
    if flexible is not None:
        sizes = (*sizes[:flexible], -1, *sizes[flexible + 1 :])
    sizes = _resolved(sizes, full[dim])
    flexible = None if flexible is None else dim + flexible
    sizes = (*full[:dim], *sizes, *full[dim + 1 :])
    are_stated = "sizes" in operation.full_sizes
    return [reshaped(operand, made, sizes, flexible, are_stated)]


@rule("flatten")
def flatten(operation: Operation) -> Placements:
    """Join the dims from ``start_dim`` to ``end_dim``, of which the call gives no sizes."""
    operand, full = operation["self"], operation["self"].full_shape
    first, last = (operation[name] % max(operand.ndim, 1) for name in ("start_dim", "end_dim"))
    joined = (*full[:first], math.prod(full[first : last + 1]), *full[last + 1 :])
    return [reshaped(operand, operation.outputs[0], joined)]


# ---- Dims that are moved -------------------------------------------------------------------------


@rule("permute")
def permute(operation: Operation) -> Placements:
    before = ascii_lowercase[: operation["self"].ndim]
    after = "".join(before[dim] for dim in operation["dims"])
    return form(f"self:{before} -> {after} = self")(operation)


# ---- Expanding and repeating ---------------------------------------------------------------------


@rule("expand", "size")
def expand(operation: Operation) -> Placements:
    """Expand dims of size 1, and add dims in front."""
    operand, made = operation["self"], operation.outputs[0]
    return [_expanded(operand, made, operation.full_sizes.get("size", ()))]


def _expanded(operand: Operand, made: Operand, full: Sizes) -> Placement | None:
    """Return the placement: along an expanded dim all indices are equal, so any may be the rank's
    own: the output is split there if the ranks' sizes add up to the full one.
    """
    front = made.ndim - operand.ndim
    shard = operand.shard
    split: list[int] = []
    for dim in range(made.ndim):
        sizes = sizes_along(made, dim)
        own = sizes_along(operand, dim - front) if dim >= front else None
        stated = full[dim] if full else -2
        if shard is not None and dim - front == shard.dim:
            # An expanded split dim of one index has no counterpart in the full tensor.
            if own != sizes or stated not in (-2, -1, None, operand.full_shape[shard.dim]):
                return None
        elif own == sizes and set(sizes) != {1}:
            if stated not in (-2, -1, None, sizes[0]):
                return None
        elif stated == -1 or (len(set(sizes)) == 1 and stated in (-2, sizes[0])):
            continue
        elif stated is not None and stated == sum(sizes):
            split.append(dim)
        else:
            return None
    if shard is not None:
        return None if split else replace(shard, dim=shard.dim + front)
    if not split:
        return operand.placement
    is_split_once = len(split) == 1 and isinstance(operand.placement, Replicate)
    return Shard(split[0]) if is_split_once else None


@rule("repeat", "repeats")
def repeat(operation: Operation) -> Placements:
    """Repeat along dims. Along a split dim each copy is a part, split as the operand. Of a whole
    tensor each rank may make some of the copies.
    """
    operand, made = operation["self"], operation.outputs[0]
    name = "repeats"
    stated, placement = operation.full_sizes.get(name, ()), operand.placement
    of_ranks = operation.by_rank(name)
    repeats: Sequence[int | None] = stated or operation[name]
    split = [dim for dim, times in enumerate(repeats) if any(o[dim] != times for o in of_ranks)]
    if any(repeats[dim] != sum(own[dim] for own in of_ranks) for dim in split):
        return [None]
    if split:
        return [Shard(split[0]) if len(split) == 1 and placement == REPLICATED else None]
    if isinstance(placement, Shard):
        front = made.ndim - operand.ndim
        times = repeats[placement.dim + front]
        if not times or (times > 1 and placement.part_sizes is not None):
            return [None]
        return [replace(placement, dim=placement.dim + front, parts=placement.parts * times)]
    return [placement]


@rule("repeat_interleave", "repeats")
def repeat_interleave(operation: Operation) -> Placements:
    """Repeat each index along ``dim``; without ``dim``, of the flattened tensor. Of a whole tensor
    each rank may make some of the copies.
    """
    operand, of_ranks, dim = operation["self"], operation.by_rank("repeats"), operation["dim"]
    times = of_ranks[0]
    if isinstance(times, Operand) and dim is not None:
        return form("self:...[dim] repeats:_ -> ...[dim] = self*!repeats")(operation)
    full = next(iter(operation.full_sizes.get("repeats", ())), None)
    full = times if full is None else full
    if any(own != full for own in of_ranks):
        if full != sum(of_ranks) or operand.placement != REPLICATED or dim is None:
            return [None]
        return [Shard(dim % operand.ndim, parts=operand.shapes[0][dim])]
    shard = operand.shard
    is_moved = shard is not None and (dim is None or shard.dim == dim % operand.ndim)
    if isinstance(times, Operand) or (is_moved and (dim is None or shard.part_sizes is not None)):
        return [None]
    return [operand.placement]


#: Operations that keep the elements in their order, and are passed the new sizes.
TO_SIZES = ("view", "reshape", "_unsafe_view")
