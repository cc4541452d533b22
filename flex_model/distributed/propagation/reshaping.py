"""Operations that change shapes and keep values."""

from __future__ import annotations

import math
from dataclasses import replace

from flex_model.distributed.layout import Partial, Shard
from flex_model.distributed.propagation.operands import (
    REPLICATED,
    Cut,
    Split,
    agreeing,
    argument,
    moved,
    replace_parts,
    shard_of,
)


def view(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    if shard_of(place) is None:
        return [place]
    sizes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    flexible = next((dim for dim, size in enumerate(sizes) if size == -1), None)
    return [reshaped(tuple(args[0].shape), tuple(outputs[0].shape), place, flexible)]


def reshaped(
    before: tuple[int, ...], after: tuple[int, ...], place: Split, flexible: int | None = None
) -> Split:
    """The placement of a reshaped tensor, from the local shapes.

    A split dim that becomes several leaves the split to the outermost of them; several that become
    one, of which an inner one was split, leave as many interleaved parts as the outer ones have
    places. ``flexible`` is the dim that was given as -1.
    """
    shard = shard_of(place)
    if shard is None:
        return place
    if before == after:
        return place
    if 0 in before:
        if before.count(0) != after.count(0):
            return None
        before, after = (tuple(size or 7 for size in shape) for shape in (before, after))
    # Elements before one step of the split dim's outermost index: how many contiguous runs there
    # are, of which each rank has its part.
    runs = math.prod(before[: shard.dim]) * shard.parts
    if before[shard.dim] % shard.parts:
        return None
    if before[shard.dim] == 1 and 0 < shard.dim < len(before) - 2 and len(after) < len(before):
        # One head a rank, and heads join the batch: (b, 1, s, d) -> (b, s, d), as matmul does.
        outer = before[: shard.dim]
        return _joined_outer(place, math.prod(outer), before[shard.dim + 1 :], after)
    done = 1
    candidates = []
    for dim, size in enumerate(after):
        if done == runs:
            candidates.append(dim)  # followed by others only while the sizes are 1
        elif done < runs < done * size and runs % done == 0:
            return moved(replace_parts(place, runs // done), dim)
        elif done > runs:
            break
        done *= size
    if not candidates:
        return None
    if len(candidates) == 1:
        return moved(replace_parts(place, 1), candidates[0])
    return moved(replace_parts(place, 1), _among_ones(before, after, shard, candidates, flexible))


def _joined_outer(
    place: Split, outer: int, following: tuple[int, ...], after: tuple[int, ...]
) -> Split:
    if len(after) != 1 + len(following) or after != (outer, *following):
        return None
    return moved(replace_parts(place, outer), 0)


def _among_ones(
    before: tuple[int, ...],
    after: tuple[int, ...],
    shard: Shard,
    candidates: list[int],
    flexible: int | None,
) -> int | None:
    """Which of the dims of size 1, and the first after them, is the split one."""
    if flexible in candidates:
        return flexible
    if shard.dim in candidates and after[: shard.dim + 1] == before[: shard.dim + 1]:
        return shard.dim
    if len(after) <= len(before):
        return candidates[-1] if before[shard.dim] != 1 or shard.dim == len(before) - 2 else None
    if shard.parts > 1 and after[candidates[0]] == 1 and before[shard.dim] == shard.parts:
        return candidates[0]  # (b, s, s) -> (b, 1, s, s): one head a rank leaves the batch
    # (b, s, 8) -> (b, s, 1, 8) may be one head a rank, or a new dim: no telling, but by the -1.
    return None


def transpose(func, args, kwargs, outputs, place_of) -> list[Split]:
    place, ndim = place_of(args[0]), args[0].dim()
    shard = shard_of(place)
    if shard is None:
        return [place]
    order = list(range(ndim))
    if func._schema.name == "aten::permute":
        order = [dim % ndim for dim in args[1]]
    elif func._schema.name == "aten::t":
        order = order[::-1]
    else:
        a, b = args[1] % ndim, args[2] % ndim
        order[a], order[b] = order[b], order[a]
    return [moved(place, order.index(shard.dim))]


def unsqueeze(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = shard_of(place)
    if shard is None:
        return [place]
    dim = args[1] % (args[0].dim() + 1)
    return [moved(place, shard.dim + (shard.dim >= dim))]


def squeeze(func, args, kwargs, outputs, place_of) -> list[Split]:
    tensor, place = args[0], place_of(args[0])
    shard = shard_of(place)
    if shard is None:
        return [place]
    ndim = tensor.dim()
    dims = range(ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = [dim % ndim for dim in dims if tensor.shape[dim % ndim] == 1]
    if shard.dim in gone:
        return [None]
    return [moved(place, shard.dim - sum(dim < shard.dim for dim in gone))]


def expand(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = shard_of(place)
    if shard is None:
        return [place]
    dim = shard.dim + outputs[0].dim() - args[0].dim()
    return [moved(place, dim if outputs[0].shape[dim] == args[0].shape[shard.dim] else None)]


def repeat(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = shard_of(place)
    if shard is None:
        return [place]
    dim = shard.dim + outputs[0].dim() - args[0].dim()
    return [moved(place, dim if args[1][dim] == 1 else None)]


def roll(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = shard_of(place)
    if shard is None:
        return [place]
    dims = [dim % args[0].dim() for dim in argument(func, args, kwargs, "dims")]
    return [place if dims and shard.dim not in dims else None]


def cat(func, args, kwargs, outputs, place_of) -> list[Split]:
    operands = [tensor for tensor in args[0] if tensor.dim() == outputs[0].dim()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % outputs[0].dim()
    places = [place_of(tensor) for tensor in operands]
    shards = [place for place in places if isinstance(place, Shard)]
    if any(isinstance(place, Cut) for place in places) and not shards:
        # The ranks' own parts, if they all are; beside what is replicated, a slice of that.
        cut_or_whole = all(place == REPLICATED or isinstance(place, Cut) for place in places)
        return [agreeing(places) or (REPLICATED if cut_or_whole else None)]
    if any(place is None or isinstance(place, (Partial, Cut)) for place in places):
        return [agreeing(places)]
    if not shards or any(shard != shards[0] for shard in shards):
        return [None]
    if shards[0].dim != dim:
        return [shards[0]]
    same_size = len({tensor.shape[dim] for tensor in operands}) == 1
    if len(shards) < len(places) or not same_size or shards[0].parts > 1:
        return [None]
    return [replace(shards[0], parts=len(shards))]


def stack(func, args, kwargs, outputs, place_of) -> list[Split]:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % outputs[0].dim()
    place = agreeing([place_of(tensor) for tensor in args[0]])
    shard = shard_of(place)
    return [place if shard is None else moved(place, shard.dim + (shard.dim >= dim))]
