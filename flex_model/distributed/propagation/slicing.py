"""Operations that take slices: of a replicated tensor, maybe each rank its own."""

from __future__ import annotations

from flex_model.distributed.layout import Shard
from flex_model.distributed.propagation.operands import (
    REPLICATED,
    AxisPlace,
    Cut,
    Split,
    argument,
    moved,
    replace_parts,
    shard_of,
)

CUTS = {"slice", "select", "split", "split_with_sizes", "unbind", "unsafe_split", "chunk"}


def cut(name, func, args, kwargs, outputs, place: Split, axis: AxisPlace) -> list[Split]:
    tensor = args[0]
    dim = argument(func, args, kwargs, "dim") % tensor.dim()
    keeps_dim = name not in ("select", "unbind")
    starts: list[int | None] = []
    if name == "slice":
        first, step = argument(func, args, kwargs, "start"), argument(func, args, kwargs, "step")
        if step != 1:
            starts = [None]
        else:
            first = 0 if first is None else first
            starts = [max(0, min(first + tensor.shape[dim] * (first < 0), tensor.shape[dim]))]
    elif name == "select":
        starts = [None]
    else:
        done = 0
        for output in outputs:
            starts.append(done)
            done += output.shape[dim] if keeps_dim else 1
    shard = shard_of(place)
    found: list[Split] = []
    for output, start in zip(outputs, starts):
        length = output.shape[dim] if keeps_dim else 1
        if not keeps_dim and shard is not None:
            found.append(None if shard.dim == dim else moved(place, shard.dim - (shard.dim > dim)))
        elif not keeps_dim:
            found.append(place)
        elif place == REPLICATED:
            found.append(_own_part(tensor.shape[dim], start, length, dim, axis))
        elif shard is None or shard.dim != dim or length == tensor.shape[dim]:
            found.append(place)
        else:
            width = tensor.shape[dim] // shard.parts
            whole = shard.parts > 1 and start is not None
            whole = whole and start % width == 0 and length % width == 0 and length > 0
            found.append(replace_parts(place, length // width) if whole else None)
    return found


def _own_part(size: int, start: int | None, length: int, dim: int, axis: AxisPlace) -> Split:
    """A slice of a replicated tensor: maybe this rank's part of a split one."""
    if start is None or length in (0, size) or axis.size == 1 or start % length or size % length:
        return REPLICATED
    pieces = size // length
    if axis.size % pieces:
        return REPLICATED
    stride = axis.size // pieces
    if axis.index // stride != start // length:
        return REPLICATED
    return Cut(Shard(dim) if stride == 1 else Shard(dim, pieces=pieces, stride=stride))
