"""Which dim of the output a dim of an input becomes, found by running the operation on shapes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flex_model.distributed.layout import Partial, Shard
from flex_model.distributed.propagation.operands import Cut, Split, shard_of

_DIM_NAMES = ("dim", "dims", "axis")


def by_experiment(func, args, kwargs, outputs, place_of) -> list[Split]:
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
        shard = shard_of(place)
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
BY_EXPERIMENT = _WINDOWS | {
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
