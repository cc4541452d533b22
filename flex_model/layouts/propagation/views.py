"""Rules for operations that keep the elements and change the shape, or repeat them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Output,
    Placements,
    Term,
    all_but,
    as_dims,
    form,
    operand_of,
    resolve,
    sizes_along,
    unary,
    words,
)
from flex_model.layouts.propagation.operation import PARTIAL, REPLICATED, Operand, Operation
from flex_model.layouts.propagation.reshaping import Sizes, reshaped

# ---- Shapes --------------------------------------------------------------------------------------


def full_sizes_of(operation: Operation, name: str) -> Sizes:
    """Return the sizes that the unsharded program passes; empty if none of them is known."""
    sizes = operation.full_sizes.get(name)
    return () if sizes is None else tuple(sizes)


def _flexible(operation: Operation, name: str) -> int | None:
    """Return the index of the size that was passed as -1."""
    found = {
        next((dim for dim, size in enumerate(sizes) if size == -1), None)
        for sizes in operation.by_rank(name)
    }
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


def view(operation: Operation) -> Placements:
    """Reshape (``view``, ``reshape`` and the like) to given sizes."""
    operand, made = operation["self"], operation.outputs[0]
    if "dtype" in operation.arguments[0]:
        return _reinterpreted(operand, made)
    name = "size" if "size" in operation.arguments[0] else "shape"
    sizes = _resolved(full_sizes_of(operation, name), math.prod(operand.full_shape))
    return [reshaped(operand, made, sizes, _flexible(operation, name))]


def _reinterpreted(operand: Operand, made: Operand) -> Placements:
    """Return the placement of ``view(dtype)``: elements of another size change the last dim."""
    shard = operand.shard
    is_kept = operand.shapes == made.shapes or (shard and shard.dim != operand.ndim - 1)
    is_split_or_whole = shard or isinstance(operand.placement, Replicate)
    return [operand.placement if is_kept and is_split_or_whole else None]


def flatten(operation: Operation) -> Placements:
    """Join dims: the full output has the shape of the flattened full operand."""
    operand, made = operand_of(operation), operation.outputs[0]
    full = operand.full_shape
    if not full:
        return [reshaped(operand, made)]
    start = operation["start_dim"] % len(full)
    end = operation["end_dim"] % len(full)
    sizes = (*full[:start], math.prod(full[start : end + 1]), *full[end + 1 :])
    return [reshaped(operand, made, sizes)]


def ravel(operation: Operation) -> Placements:
    operand = operand_of(operation)
    return [reshaped(operand, operation.outputs[0], (math.prod(operand.full_shape),))]


def unflatten(operation: Operation) -> Placements:
    """Divide one dim; the others keep their sizes."""
    operand, made = operand_of(operation), operation.outputs[0]
    dim, full = operation["dim"] % operand.ndim, operand.full_shape
    count = len(operation.arguments[0]["sizes"])
    sizes = full_sizes_of(operation, "sizes") or (None,) * count
    flexible = _flexible(operation, "sizes")
    if flexible is not None:
        sizes = (*sizes[:flexible], -1, *sizes[flexible + 1 :])
    sizes = _resolved(sizes, full[dim])
    flexible = None if flexible is None else dim + flexible
    sizes = (*full[:dim], *sizes, *full[dim + 1 :])
    are_stated = "sizes" in operation.full_sizes
    return [reshaped(operand, made, sizes, flexible, are_stated)]


def like_other(operation: Operation) -> Placements:
    """Reshape (``view_as``, ``reshape_as``): the other tensor's placement determines the full
    sizes.
    """
    operand, other = operation["self"], operation["other"]
    known = other.placement is not None
    sizes = other.full_shape if known else (None,) * other.ndim
    return [reshaped(operand, operation.outputs[0], sizes)]


# ---- Dims that are moved, added and removed ------------------------------------------------------


def permute(operation: Operation) -> Placements:
    operand = operand_of(operation)
    labels = tuple(range(operand.ndim))
    after = tuple(labels[dim] for dim in operation["dims"])
    return unary(operation, labels, after, linear=True)


def transpose(operation: Operation) -> Placements:
    operand = operand_of(operation)
    names = ("dim0", "dim1") if "dim0" in operation.arguments[0] else ("axis0", "axis1")
    labels: list[Label] = list(range(operand.ndim))
    if labels:
        a, b = (operation[name] % operand.ndim for name in names)
        labels[a], labels[b] = labels[b], labels[a]
    return unary(operation, tuple(range(operand.ndim)), tuple(labels), linear=True)


def reversed_dims(operation: Operation) -> Placements:
    """Reverse the dims: ``t`` of a matrix, ``numpy_T`` of any tensor."""
    labels = tuple(range(operand_of(operation).ndim))
    return unary(operation, labels, labels[::-1], linear=True)


def last_two(operation: Operation) -> Placements:
    """Transpose the last two dims: ``mT`` and ``mH``."""
    labels = tuple(range(operand_of(operation).ndim))
    return unary(operation, labels, (*labels[:-2], *labels[-2:][::-1]), linear=True)


def movedim(operation: Operation) -> Placements:
    operand = operand_of(operation)
    sources = as_dims(operation["source"], operand.ndim)
    targets = as_dims(operation["destination"], operand.ndim)
    rest = [dim for dim in range(operand.ndim) if dim not in sources]
    after: list[Label] = [None] * operand.ndim
    for source, target in zip(sources, targets):
        after[target] = source
    for target in range(operand.ndim):
        if target not in targets:
            after[target] = rest.pop(0)
    return unary(operation, tuple(range(operand.ndim)), tuple(after), linear=True)


def unsqueeze(operation: Operation) -> Placements:
    operand = operand_of(operation)
    labels: tuple[Label, ...] = tuple(range(operand.ndim))
    dim = operation["dim"] % (operand.ndim + 1)
    return unary(operation, labels, (*labels[:dim], None, *labels[dim:]), linear=True)


def squeeze(operation: Operation) -> Placements:
    """Remove dims of size 1: a split one has this size only on the ranks, so then nothing is
    known.
    """
    operand = operand_of(operation)
    dims = as_dims(operation.get("dim"), operand.ndim)
    if operation.get("dim") == []:
        dims = ()
    gone = [dim for dim in dims if operand.ndim and 1 in sizes_along(operand, dim)]
    labels = all_but(operand.ndim, gone)
    after = tuple(dim for dim in range(operand.ndim) if dim not in gone)
    return unary(operation, labels, after, linear=True)


def diagonal(operation: Operation) -> Placements:
    """Replace two dims by one, the last."""
    operand = operand_of(operation)
    labels = all_but(operand.ndim, (operation["dim1"], operation["dim2"]))
    after = (*(label for label in labels if label is not None), None)
    return unary(operation, labels, after, linear=True)


def diag_embed(operation: Operation) -> Placements:
    """Replace the last dim by two."""
    operand, made = operand_of(operation), operation.outputs[0]
    new = {operation["dim1"] % made.ndim, operation["dim2"] % made.ndim}
    labels = all_but(operand.ndim, -1)
    rest = iter(labels)
    after = tuple(None if dim in new else next(rest) for dim in range(made.ndim))
    return unary(operation, labels, after, linear=True)


def unfold(operation: Operation) -> Placements:
    """Read windows along a dim, which must be whole, into a new last dim."""
    operand = operand_of(operation)
    if not operand.ndim:
        return [None]
    labels = all_but(operand.ndim, operation["dimension"])
    return unary(operation, labels, (*labels, None), linear=True)


# ---- Expanding and repeating ---------------------------------------------------------------------


def expand(operation: Operation) -> Placements:
    """Expand dims of size 1, and add dims in front."""
    operand, made = operation["self"], operation.outputs[0]
    return [_expanded(operand, made, full_sizes_of(operation, "size"))]


def expand_as(operation: Operation) -> Placements:
    operand, other = operation["self"], operation["other"]
    known = other.placement is not None
    sizes = other.full_shape if known else (None,) * other.ndim
    return [_expanded(operand, operation.outputs[0], sizes)]


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


def repeat(operation: Operation) -> Placements:
    """Repeat along dims. Along a split dim each copy is a part, split as the operand. Of a whole
    tensor each rank may make some of the copies.
    """
    operand, made = operation["self"], operation.outputs[0]
    name = "repeats" if operation.name == "repeat" else "dims"
    stated, placement = full_sizes_of(operation, name), operand.placement
    missing = made.ndim - len(operation.by_rank(name)[0])
    repeats: Sequence[int | None] = (*(1,) * max(missing, 0), *(stated or operation[name]))
    split = []
    for dim, times in enumerate(repeats):
        by_rank = [
            of_rank[dim - missing] if dim >= missing else 1 for of_rank in operation.by_rank(name)
        ]
        if all(one == times for one in by_rank):
            continue
        if times != sum(by_rank):
            return [None]
        split.append(dim)
    if split:
        return [Shard(split[0]) if len(split) == 1 and placement == REPLICATED else None]
    if isinstance(placement, Shard):
        front = made.ndim - operand.ndim
        times = repeats[placement.dim + front]
        if not times or (times > 1 and getattr(placement, "part_sizes", None) is not None):
            return [None]
        return [replace(placement, dim=placement.dim + front, parts=placement.parts * times)]
    return [placement]


def repeat_interleave(operation: Operation) -> Placements:
    """Repeat each index along ``dim``; without ``dim``, of the flattened tensor."""
    if "self" not in operation.arguments[0]:
        return [None]
    operand, times, dim = operation["self"], operation["repeats"], operation["dim"]
    if dim is None:
        return [operand.placement if operand.placement in (REPLICATED, PARTIAL) else None]
    labels: tuple[Label, ...] = tuple(range(operand.ndim))
    dim %= operand.ndim
    inputs: tuple[Input, ...] = ()
    if isinstance(times, Operand):
        labels = all_but(operand.ndim, dim)
        inputs = (Input(times, (None,) * times.ndim),)
        scale = 1
    else:
        scale = times
    terms = (Term((Input(operand, labels),), inputs),)
    return resolve(operation, [Output(labels, terms=terms, scale={dim: scale})])


def flip(operation: Operation) -> Placements:
    operand = operand_of(operation)
    dims = operation["dims"]
    labels = all_but(operand.ndim, as_dims(dims, operand.ndim) if dims else ())
    return unary(operation, labels, labels, linear=True)


def roll(operation: Operation) -> Placements:
    """Rotate the elements; without dims, of the flattened tensor."""
    operand = operand_of(operation)
    labels = all_but(operand.ndim, as_dims(operation["dims"], operand.ndim))
    return unary(operation, labels, labels, linear=True)


def pad(operation: Operation) -> Placements:
    """Pad dims, which must be whole."""
    operand = operand_of(operation)
    widths = operation["pad"]
    padded = [operand.ndim - 1 - i // 2 for i, width in enumerate(widths) if width != 0]
    labels = all_but(operand.ndim, padded)
    is_zero = operation.get("mode", "constant") != "constant" or not operation.get("value", 0)
    return unary(operation, labels, labels, linear=is_zero)


#: Operations that keep the elements in their order, and are passed the new sizes.
TO_SIZES = ("view", "reshape", "_unsafe_view")

RULES_OF_SIZES = {
    **dict.fromkeys((*TO_SIZES, "_reshape_alias"), view),
    "view_as": like_other,
    "reshape_as": like_other,
    "unflatten": unflatten,
    "expand": expand,
    "expand_as": expand_as,
    "repeat": repeat,
    "tile": repeat,
}

RULES = {
    "flatten": flatten,
    "ravel": ravel,
    "permute": permute,
    **dict.fromkeys(words("transpose swapaxes swapdims"), transpose),
    "t": reversed_dims,
    "numpy_T": reversed_dims,
    **dict.fromkeys(words("mT mH adjoint"), last_two),
    "movedim": movedim,
    "moveaxis": movedim,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "diagonal": diagonal,
    "diag_embed": diag_embed,
    "unfold": unfold,
    "repeat_interleave": repeat_interleave,
    "flip": flip,
    "roll": roll,
    "constant_pad_nd": pad,
    "pad": pad,
    "tril": form("self:...** -> ...** = self"),
    "triu": form("self:...** -> ...** = self"),
}
