"""Which rule an operation has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from flex_model.distributed.propagation import arithmetic, experiment, reshaping, slicing
from flex_model.distributed.propagation.operands import REPLICATED, AxisPlace, PlaceOf, Split

_FACTORIES = {"lift_fresh", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}
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
_POINTWISE = {
    "complex",
    "masked_fill",
    "masked_fill_",
    "polar",
    "_prelu_kernel",
    "where",
    "_weight_norm_interface",
}
_RULES: dict[str, Callable[..., list[Split]]] = {
    "view": reshaping.view,
    "_unsafe_view": reshaping.view,
    "reshape": reshaping.view,
    "_reshape_alias": reshaping.view,
    "transpose": reshaping.transpose,
    "transpose_": reshaping.transpose,
    "permute": reshaping.transpose,
    "t": reshaping.transpose,
    "unsqueeze": reshaping.unsqueeze,
    "squeeze": reshaping.squeeze,
    "expand": reshaping.expand,
    "repeat": reshaping.repeat,
    "roll": reshaping.roll,
    "cat": reshaping.cat,
    "stack": reshaping.stack,
    "sum": arithmetic.sum_of,
    "count_nonzero": arithmetic.count_of,
    "copy_": arithmetic.written,
    "index_add": arithmetic.put,
    "index_add_": arithmetic.put,
    "index_copy": arithmetic.put,
    "index_copy_": arithmetic.put,
    "scatter_add": arithmetic.put,
    "scatter_add_": arithmetic.put,
    "scatter": arithmetic.put,
    "scatter_": arithmetic.put,
}


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
    try:
        if name in slicing.CUTS:
            return slicing.cut(name, func, args, kwargs, outputs, places[0], axis)
        if all(place == REPLICATED for place in places):
            return [REPLICATED] * len(outputs)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(func, args, kwargs, outputs, place_of)
        if name in _UNARY:
            return [arithmetic.same(places[0], tensors[0], output) for output in outputs]
        if name in arithmetic.CONTRACTIONS:
            return [arithmetic.contraction(name, args, outputs[0], place_of)]
        if torch.Tag.pointwise in func.tags or name in _POINTWISE:
            return [arithmetic.pointwise(name, tensors, places, output) for output in outputs]
        if name in experiment.BY_EXPERIMENT or name.startswith("_scaled_dot_product"):
            return experiment.by_experiment(func, args, kwargs, outputs, place_of)
        return [None] * len(outputs)
    except Exception:  # an operation that a rule was not made for: the model must run all the same
        return [None] * len(outputs)
