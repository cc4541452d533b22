"""How one operation passes a split on: from the placements of its inputs along one mesh axis to
those of its outputs.

A rule never guesses. What it can't tell is None, "not known", which the ranks' values must settle,
or else the user. Shapes here are local ones (of DTensors: global ones, which their ``view`` sizes
are of); where a rule needs to know which dim of the output a dim of an input becomes, it runs the
operation on the meta device with that dim twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flex_model.distributed.layout import Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Cut:
    """A slice of a replicated tensor that is this rank's own part of it, if every rank took its own
    (``shard``), or a replicated tensor, if all took the same one. The values will tell.
    """

    shard: Shard

    def __str__(self) -> str:
        return f"{self.shard} or R"


Split = Placement | Cut | None
PlaceOf = Callable[[Tensor], Split]

REPLICATED = Replicate()


@dataclass(frozen=True)
class AxisPlace:
    """Where this rank stands on the axis."""

    index: int
    size: int


def after(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outputs: Sequence[Tensor],
    place_of: PlaceOf,
    axis: AxisPlace,
) -> list[Split]:
    """The placements of an operation's outputs.

    Args:
        func: The ``OpOverload`` that ran.
        outputs: Its tensors, in order; of an operation in place, what it changed.
        place_of: Of each tensor among the inputs.
    """
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    places = [place_of(tensor) for tensor in tensors]
    name = func._schema.name.partition("::")[2]
    if not tensors or name in _FACTORIES:
        return [REPLICATED] * len(outputs)
    if name in _CUTS:
        return _cut(name, func, args, kwargs, outputs, places[0], axis)
    if all(place == REPLICATED for place in places):
        return [REPLICATED] * len(outputs)
    try:
        rule = _RULES.get(name)
        if rule is not None:
            return rule(func, args, kwargs, outputs, place_of)
        if name in _UNARY:
            return [_same(places[0], tensors[0], output) for output in outputs]
        if name in _CONTRACTIONS:
            return [_contraction(name, args, outputs[0], place_of)]
        if torch.Tag.pointwise in func.tags or name in _POINTWISE:
            return [_pointwise(name, tensors, places, output) for output in outputs]
        if name in _BY_EXPERIMENT or name.startswith("_scaled_dot_product"):
            return _by_experiment(func, args, kwargs, outputs, place_of)
        return [None] * len(outputs)
    except Exception:  # an operation that a rule was not made for: the model must run all the same
        return [None] * len(outputs)


def _shard_of(place: Split) -> Shard | None:
    if isinstance(place, Cut):
        return place.shard
    return place if isinstance(place, Shard) else None


def _moved(place: Split, dim: int | None) -> Split:
    """The same split at another dim; not known where ``dim`` is None."""
    shard = _shard_of(place)
    assert shard is not None
    if dim is None:
        return None
    shard = replace(shard, dim=dim)
    return Cut(shard) if isinstance(place, Cut) else shard


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if i < len(args):
                return args[i]
            return kwargs.get(name, argument.default_value)
    raise KeyError(name)


# ---- Shapes change, values stay -----------------------------------------------------------------


def _view(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    if _shard_of(place) is None:
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
    shard = _shard_of(place)
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
            return _moved(replace_parts(place, runs // done), dim)
        elif done > runs:
            break
        done *= size
    if not candidates:
        return None
    if len(candidates) == 1:
        return _moved(replace_parts(place, 1), candidates[0])
    return _moved(replace_parts(place, 1), _among_ones(before, after, shard, candidates, flexible))


def _joined_outer(
    place: Split, outer: int, following: tuple[int, ...], after: tuple[int, ...]
) -> Split:
    if len(after) != 1 + len(following) or after != (outer, *following):
        return None
    return _moved(replace_parts(place, outer), 0)


def replace_parts(place: Split, parts: int) -> Split:
    """The same split, of so many interleaved parts."""
    if isinstance(place, Cut):
        return Cut(replace(place.shard, parts=parts))
    assert isinstance(place, Shard)
    return replace(place, parts=parts)


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


def _transpose(func, args, kwargs, outputs, place_of) -> list[Split]:
    place, ndim = place_of(args[0]), args[0].dim()
    shard = _shard_of(place)
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
    return [_moved(place, order.index(shard.dim))]


def _unsqueeze(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = _shard_of(place)
    if shard is None:
        return [place]
    dim = args[1] % (args[0].dim() + 1)
    return [_moved(place, shard.dim + (shard.dim >= dim))]


def _squeeze(func, args, kwargs, outputs, place_of) -> list[Split]:
    tensor, place = args[0], place_of(args[0])
    shard = _shard_of(place)
    if shard is None:
        return [place]
    ndim = tensor.dim()
    dims = range(ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = [dim % ndim for dim in dims if tensor.shape[dim % ndim] == 1]
    if shard.dim in gone:
        return [None]
    return [_moved(place, shard.dim - sum(dim < shard.dim for dim in gone))]


def _expand(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = _shard_of(place)
    if shard is None:
        return [place]
    dim = shard.dim + outputs[0].dim() - args[0].dim()
    return [_moved(place, dim if outputs[0].shape[dim] == args[0].shape[shard.dim] else None)]


def _repeat(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = _shard_of(place)
    if shard is None:
        return [place]
    dim = shard.dim + outputs[0].dim() - args[0].dim()
    return [_moved(place, dim if args[1][dim] == 1 else None)]


def _roll(func, args, kwargs, outputs, place_of) -> list[Split]:
    place = place_of(args[0])
    shard = _shard_of(place)
    if shard is None:
        return [place]
    dims = [dim % args[0].dim() for dim in _argument(func, args, kwargs, "dims")]
    return [place if dims and shard.dim not in dims else None]


def _cat(func, args, kwargs, outputs, place_of) -> list[Split]:
    operands = [tensor for tensor in args[0] if tensor.dim() == outputs[0].dim()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % outputs[0].dim()
    places = [place_of(tensor) for tensor in operands]
    shards = [place for place in places if isinstance(place, Shard)]
    if any(isinstance(place, Cut) for place in places) and not shards:
        # The ranks' own parts, if they all are; beside what is replicated, a slice of that.
        cut_or_whole = all(place == REPLICATED or isinstance(place, Cut) for place in places)
        return [_agreeing(places) or (REPLICATED if cut_or_whole else None)]
    if any(place is None or isinstance(place, (Partial, Cut)) for place in places):
        return [_agreeing(places)]
    if not shards or any(shard != shards[0] for shard in shards):
        return [None]
    if shards[0].dim != dim:
        return [shards[0]]
    same_size = len({tensor.shape[dim] for tensor in operands}) == 1
    if len(shards) < len(places) or not same_size or shards[0].parts > 1:
        return [None]
    return [replace(shards[0], parts=len(shards))]


def _stack(func, args, kwargs, outputs, place_of) -> list[Split]:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % outputs[0].dim()
    place = _agreeing([place_of(tensor) for tensor in args[0]])
    shard = _shard_of(place)
    return [place if shard is None else _moved(place, shard.dim + (shard.dim >= dim))]


def _agreeing(places: Sequence[Split]) -> Split:
    return places[0] if all(place == places[0] for place in places) else None


# ---- Slices --------------------------------------------------------------------------------------


def _cut(name, func, args, kwargs, outputs, place: Split, axis: AxisPlace) -> list[Split]:
    tensor = args[0]
    dim = _argument(func, args, kwargs, "dim") % tensor.dim()
    keeps_dim = name not in ("select", "unbind")
    starts: list[int | None] = []
    if name == "slice":
        first, step = _argument(func, args, kwargs, "start"), _argument(func, args, kwargs, "step")
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
    shard = _shard_of(place)
    found: list[Split] = []
    for output, start in zip(outputs, starts):
        length = output.shape[dim] if keeps_dim else 1
        if not keeps_dim and shard is not None:
            found.append(None if shard.dim == dim else _moved(place, shard.dim - (shard.dim > dim)))
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


# ---- Arithmetic ----------------------------------------------------------------------------------


def _same(place: Split, tensor: Tensor, output: Tensor) -> Split:
    if _shard_of(place) is None:
        return place
    return place if output.dim() == tensor.dim() else None


def _pointwise(
    name: str, tensors: Sequence[Tensor], places: Sequence[Split], output: Tensor
) -> Split:
    if any(isinstance(place, Partial) for place in places):
        return _of_sums(name, tensors, places)
    found: dict[Split, None] = {}
    unknown = False
    for tensor, place in zip(tensors, places):
        shard = _shard_of(place)
        if shard is not None:
            dim = shard.dim + output.dim() - tensor.dim()
            if tensor.shape[shard.dim] != output.shape[dim]:
                return None  # the split dim is broadcast
            found[_moved(place, dim)] = None
        elif place is None:
            unknown = True
    certain = [place for place in found if isinstance(place, Shard)]
    if certain:
        # What is cut from a replicated tensor, or not known, is split alike where it has the dim.
        return certain[0] if len(certain) == 1 else None
    if unknown or len(found) != 1:
        return None
    return next(iter(found))


_LINEAR = {"add", "add_", "sub", "sub_", "neg", "neg_"}


def _of_sums(name: str, tensors: Sequence[Tensor], places: Sequence[Split]) -> Split:
    """Sums and multiples of partial sums are partial sums."""
    sums = [isinstance(place, Partial) for place in places]
    if name in _LINEAR and all(sums):
        return Partial()
    if name in ("mul", "mul_") and sum(sums) == 1:
        others = (place for place, is_sum in zip(places, sums) if not is_sum)
        return Partial() if all(place == REPLICATED for place in others) else None
    if name in ("div", "div_") and sums[0] and not any(sums[1:]):
        return Partial() if all(place == REPLICATED for place in places[1:]) else None
    return None


# Per operation: which operands are multiplied, and the dim of each that is summed over.
_CONTRACTIONS = {
    "mm": ((0, -1), (1, -2)),
    "addmm": ((1, -1), (2, -2)),
    "bmm": ((0, -1), (1, -2)),
    "baddbmm": ((1, -1), (2, -2)),
    "matmul": ((0, -1), (1, -2)),
    "linear": ((0, -1), (1, -1)),
    "_grouped_mm": ((0, -1), (1, -2)),
}


def _contraction(name: str, args: Sequence[Any], output: Tensor, place_of: PlaceOf) -> Split:
    (i, dim_a), (j, dim_b) = _CONTRACTIONS[name]
    a, b = args[i], args[j]
    place_a, place_b = place_of(a), place_of(b)
    if isinstance(place_a, Cut) or isinstance(place_b, Cut):
        # As parts, and if those do not fit, as what is replicated.
        parts = {id(a): _shard_of(place_a) or place_a, id(b): _shard_of(place_b) or place_b}
        place = _contraction(name, args, output, lambda t: parts.get(id(t), place_of(t)))
        if place is not None:
            return Cut(place) if isinstance(place, Shard) else place
        whole = {
            id(a): REPLICATED if isinstance(place_a, Cut) else place_a,
            id(b): REPLICATED if isinstance(place_b, Cut) else place_b,
        }
        return _contraction(name, args, output, lambda t: whole.get(id(t), place_of(t)))
    added = args[0] if i else args[2] if name == "linear" and len(args) > 2 else None
    summed_a = isinstance(place_a, Shard) and place_a.dim == dim_a % a.dim()
    summed_b = isinstance(place_b, Shard) and place_b.dim == dim_b % b.dim()
    if summed_a or summed_b:
        both = summed_a and summed_b and _parts(place_a) == _parts(place_b)
        return Partial() if both and added is None else None
    if isinstance(place_a, Partial) or isinstance(place_b, Partial):
        linear = {place_a, place_b} == {Partial(), REPLICATED} and added is None
        return Partial() if linear else None
    if place_a is None or place_b is None:
        return None
    found: set[Shard] = set()
    offset = output.dim()
    if isinstance(place_a, Shard):
        found.add(replace(place_a, dim=place_a.dim + offset - a.dim()))
    if isinstance(place_b, Shard):
        if name == "linear" or place_b.dim == b.dim() - 1:
            found.add(replace(place_b, dim=offset - 1))
        elif name == "_grouped_mm":
            return None  # experts split over the ranks: which rows are whose, only the model knows
        else:
            found.add(replace(place_b, dim=place_b.dim + offset - b.dim()))
    return found.pop() if len(found) == 1 else None


def _parts(place: Split) -> int:
    shard = _shard_of(place)
    return 0 if shard is None else shard.parts


def _sum(func, args, kwargs, outputs, place_of) -> list[Split]:
    tensor, place = args[0], place_of(args[0])
    shard = _shard_of(place)
    if shard is None:
        return [place if place == Partial() else None]
    dims = args[1] if len(args) > 1 and args[1] is not None else list(range(tensor.dim()))
    dims = [dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)]
    if not dims or shard.dim in dims:
        return [Partial() if isinstance(place, Shard) and shard.pieces is None else None]
    return _by_experiment(func, args, kwargs, outputs, place_of)


def _written(func, args, kwargs, outputs, place_of) -> list[Split]:
    """``copy_``: what was written counts."""
    target, source = args[0], args[1]
    place = place_of(source)
    shard = _shard_of(place)
    if shard is None:
        return [place]
    dim = shard.dim + target.dim() - source.dim()
    return [_moved(place, dim if target.shape[dim] == source.shape[shard.dim] else None)]


def _put(func, args, kwargs, outputs, place_of) -> list[Split]:
    """``index_add``, ``index_copy``, ``scatter`` and the like: target and source are split alike,
    along another dim than the one that is indexed.
    """
    target = args[0]
    dim = args[1] % target.dim()
    source = next(x for x in reversed(args) if isinstance(x, Tensor))
    places = [place_of(target), place_of(source)]
    shards = {_shard_of(place) for place in places} - {None}
    if len(shards) != 1 or any(place is None or isinstance(place, Partial) for place in places):
        return [None]
    shard = shards.pop()
    if shard is None or shard.dim == dim:
        return [None]
    return [shard if shard in places else Cut(shard)]


# ---- Everything else -----------------------------------------------------------------------------

_DIM_NAMES = ("dim", "dims", "axis")


def _by_experiment(func, args, kwargs, outputs, place_of) -> list[Split]:
    """Run it on meta tensors whose split dims are twice as long: that output dim is split which
    gets twice as long too.
    """
    dims_given = set()
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in _DIM_NAMES:
            given = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            dims_given |= set(given if isinstance(given, (list, tuple)) else [given])
    shards: set[tuple[int, int]] = set()
    makes_cut = False

    def enlarged(tensor: Tensor) -> Tensor:
        nonlocal makes_cut
        place = place_of(tensor)
        shape = list(tensor.shape)
        if place is None or isinstance(place, Partial):
            raise ValueError("not known")
        shard = _shard_of(place)
        if shard is not None:
            if {shard.dim, shard.dim - tensor.dim()} & dims_given or shard.parts > 1:
                raise ValueError("works along the split dim")
            makes_cut |= isinstance(place, Cut)
            shards.add((shard.pieces or 0, shard.stride))
            shape[shard.dim] *= 2
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    if kwargs.get("out") is not None:
        return [None] * len(outputs)
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [enlarged(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if len(shards) != 1:
        return [None] * len(outputs)
    pieces, stride = shards.pop()
    meta_args, meta_kwargs = tree_unflatten(leaves, spec)
    meta_kwargs = tree_map_only(torch.Generator, lambda _: None, meta_kwargs)
    results = [
        leaf
        for leaf in tree_flatten(func(*meta_args, **meta_kwargs))[0]
        if isinstance(leaf, Tensor)
    ]
    if len(results) != len(outputs):
        return [None] * len(outputs)
    found: list[Split] = []
    name = func._schema.name.partition("::")[2]
    for result, output in zip(results, outputs):
        longer = [
            dim
            for dim in range(output.dim())
            if result.dim() == output.dim() and result.shape[dim] != output.shape[dim]
        ]
        if name in _WINDOWS and any(dim > 1 for dim in longer):
            found.append(None)  # windows reach over the edges of shards
        elif len(longer) == 1 and result.shape[longer[0]] == 2 * output.shape[longer[0]]:
            shard = Shard(longer[0], pieces=pieces or None, stride=stride)
            found.append(Cut(shard) if makes_cut else shard)
        else:
            found.append(None)
    return found


# Batch and channels first, positions after them.
_WINDOWS = {
    "convolution",
    "_convolution",
    "avg_pool1d",
    "avg_pool2d",
    "max_pool2d_with_indices",
    "_adaptive_avg_pool2d",
}
# Whatever is not here is not known: an operation may depend on positions along a dim that it keeps.
_BY_EXPERIMENT = _WINDOWS | {
    "_fused_rms_norm",
    "_log_softmax",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_softmax",
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "constant_pad_nd",
    "cumprod",
    "cumsum",
    "embedding",
    "flip",
    "gather",
    "glu",
    "index",
    "index_select",
    "linalg_vector_norm",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "native_batch_norm",
    "native_layer_norm",
    "outer",
    "prod",
    "scaled_dot_product_attention",
    "softmax",
    "sort",
    "std",
    "std_mean",
    "topk",
    "var",
    "var_mean",
    "view_as_complex",
    "view_as_real",
}
_FACTORIES = {"lift_fresh", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}
_CUTS = {"slice", "select", "split", "split_with_sizes", "unbind", "unsafe_split", "chunk"}
_UNARY = {
    "alias",
    "clone",
    "contiguous",
    "detach",
    "_to_copy",
    "native_dropout",
    "_conj",
    "_neg_view",
    "resolve_conj",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "zero_",
    "fill_",
    "bernoulli",
    "bernoulli_",
    "wait_tensor",
}
# Without torch's own tag.
_POINTWISE = {"masked_fill", "masked_fill_", "where", "_weight_norm_interface"}
_RULES: dict[str, Callable[..., list[Split]]] = {
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "_reshape_alias": _view,
    "transpose": _transpose,
    "transpose_": _transpose,
    "permute": _transpose,
    "t": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "repeat": _repeat,
    "roll": _roll,
    "cat": _cat,
    "stack": _stack,
    "sum": _sum,
    "copy_": _written,
    "index_add": _put,
    "index_add_": _put,
    "index_copy": _put,
    "index_copy_": _put,
    "scatter_add": _put,
    "scatter_add_": _put,
    "scatter": _put,
    "scatter_": _put,
}
