"""Rules for operations that compute each element from the elements at the same index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from flex_model.distributed.placement import Partial, Shard
from flex_model.integrations.torch_private import all_operation_names
from flex_model.layouts.propagation.labels import (
    Input,
    Output,
    Placements,
    Term,
    form,
    parse_terms,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import PARTIAL, REPLICATED, Operand, Operation

# The operands in which an output is linear: partial sums propagate there.
_LINEAR = {
    **dict.fromkeys(words("add sub rsub"), "self + other"),
    "mul": "self*other",
    "div": "self*!other",
    **dict.fromkeys(
        words(
            "neg deg2rad rad2deg positive clone conj _conj conj_physical _conj_physical "
            "_neg_view resolve_conj resolve_neg real imag alias detach lift lift_fresh "
            "lift_fresh_copy contiguous _to_copy"
        ),
        "self",
    ),
    "where": "self*!condition + other*!condition",
    "masked_fill": "self*!mask + value*!mask",
    "addcmul": "self + tensor1*tensor2",
    "addcdiv": "self + tensor1*!tensor2",
    "lerp": "self*!weight + end*!weight",
    "complex": "real + imag",
    **dict.fromkeys(
        words(
            "threshold_backward gelu_backward silu_backward mish_backward softplus_backward "
            "hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward "
            "logit_backward softshrink_backward"
        ),
        "grad_output*!self",
    ),
    "elu_backward": "grad_output*!self_or_result",
    "tanh_backward": "grad_output*!output",
    "sigmoid_backward": "grad_output*!output",
    "log_sigmoid_backward": "grad_output*!self*!buffer",
    "native_dropout_backward": "grad_output*!mask",
    "_masked_scale": "self*!mask",
    "rrelu_with_noise_backward": "grad_output*!self*!noise",
    "hardshrink_backward": "grad_out*!self",
}

# Further pointwise operations that don't carry torch's tag.
_UNTAGGED = words(
    "__and__ __or__ _add_relu _prelu_kernel arctan2 bernoulli bitwise_and floor_divide "
    "hardswish isclose isreal leaky_relu log_sigmoid log_sigmoid_forward polar "
    "rrelu_with_noise rrelu_with_noise_functional"
)

_ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
}

# Tagged, but without one result for each element.
_NOT_POINTWISE = {"equal", "max", "min"}


@cache
def names() -> frozenset[str]:
    """Return the names of ATen's pointwise operations."""
    found = set(_LINEAR) | set(_UNTAGGED)
    for qualified in all_operation_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten" or overload.endswith("out") or name.startswith("_foreach"):
            continue
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if op is not None and torch.Tag.pointwise in op.tags:
            found.add(name if name.startswith("__") else name.rstrip("_"))
    return frozenset(found - _NOT_POINTWISE)


def pointwise(operation: Operation) -> Placements:
    """Compute an element of every output for each element of the operands, broadcast."""
    (made, *more) = operation.outputs
    if any(other.shapes != made.shapes for other in more):
        return [None] * len(operation.outputs)
    inputs: dict[str, Input] = {}
    for name, value in operation.arguments[0].items():
        if isinstance(value, Operand):
            labels = tuple(range(made.ndim - value.ndim, made.ndim))
            inputs[name] = Input(value, labels, broadcasts=True)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
            return [None] * len(operation.outputs)
    if not _are_broadcast(operation.operands, made):
        return [None] * len(operation.outputs)  # ``where`` with only a condition returns indices
    output = Output(tuple(range(made.ndim)), tuple(inputs.values()), _terms(operation, inputs))
    return resolve(operation, [output, *[output] * len(more)])


def _are_broadcast(operands: Sequence[Operand], made: Operand) -> bool:
    """Whether the output has the shape to which the operands are broadcast: each of its sizes is
    one of theirs, beside which they have only ones.
    """
    # `torch.broadcast_shapes` would import sympy, 480 modules.
    if max(operand.ndim for operand in operands) != made.ndim:
        return False
    for rank, shape in enumerate(made.shapes):
        padded = [(1,) * (made.ndim - o.ndim) + o.shapes[rank] for o in operands]
        if not all(n in sizes and {1, n}.issuperset(sizes) for n, *sizes in zip(shape, *padded)):
            return False
    return True


def _terms(operation: Operation, inputs: dict[str, Input]) -> tuple[Term, ...]:
    name = _ALIASES.get(operation.name, operation.name)
    if name not in _LINEAR or operation.get("rounding_mode") is not None:
        return ()
    terms = []
    for factors in parse_terms(_LINEAR[name]):
        linear = [inputs.get(factor) for factor, is_linear in factors if is_linear]
        other = [
            inputs[factor] for factor, is_linear in factors if not is_linear and factor in inputs
        ]
        present = tuple(i for i in linear if i is not None)
        if not present:
            # A constant is not a partial sum, but zero is.
            if any(operation.get(factor) != 0 for factor, is_linear in factors if is_linear):
                return ()
            continue
        terms.append(Term(present, tuple(other)))
    return tuple(terms)


def of_self(operation: Operation) -> Placements:
    """Convert ``self``: other operands only determine the dtype or device."""
    operand = operation["self"]
    made = operation.outputs[0]
    x = Input(operand, tuple(range(operand.ndim)))
    return resolve(operation, [Output(tuple(range(made.ndim)), terms=(Term((x,)),))])


def copy(operation: Operation) -> Placements:
    """Copy (``copy_``): the values are the source's, the shape is that of the written tensor."""
    target, source = operation["self"], operation["src"]
    made = operation.outputs[0]
    labels = tuple(range(made.ndim - source.ndim, made.ndim))
    of_source = Input(source, labels, broadcasts=True)
    is_whole = source.shapes == made.shapes
    if isinstance(target.placement, Shard) or not (is_whole or target.placement is None):
        of_target = Input(target, tuple(range(made.ndim)), broadcasts=False)
        return resolve(operation, [Output(tuple(range(made.ndim)), (of_target, of_source))])
    if not is_whole or (target.placement == REPLICATED and isinstance(source.placement, Shard)):
        return [None]
    return resolve(operation, [Output(tuple(range(made.ndim)), terms=(Term((of_source,)),))])


def like(operation: Operation) -> Placements:
    """Fill with one value, whatever the tensor held; or at random."""
    operand = operation.operands[0]
    value = operation.get("value")
    if isinstance(value, Operand) and value.placement != REPLICATED:
        return [None]
    if isinstance(operand.placement, Partial):
        return [REPLICATED if operation.name in _FILLS else None]
    if operand.shapes != operation.outputs[0].shapes:
        return [None]
    return [operand.placement]


def scaled(operation: Operation) -> Placements:
    """Multiply a replicated tensor by numbers that add up to 1 over the ranks: a partial sum.

    Rank 0's is not 0, as it would be in the unsharded program, too: ``x * rank``.
    """
    numbers = operation.by_rank("other")
    if isinstance(numbers[0], Operand) or len(set(map(repr, numbers))) == 1:  # not 0.0 and -0.0
        return pointwise(operation)
    is_whole = operation["self"].placement == REPLICATED
    are_shares = numbers[0] != 0 and math.isclose(sum(numbers), 1, rel_tol=1e-12)
    return [PARTIAL if is_whole and are_shares else None]


_FILLS = {"fill", "zero", "zeros_like", "ones_like", "full_like"}
# Each rank draws random numbers for its own elements.
_RANDOM = words(
    "rand_like randn_like randint_like empty_like uniform normal random exponential cauchy "
    "log_normal geometric bernoulli"
)


def dropout(operation: Operation) -> Placements:
    """Drop elements: each rank those of its own shard; without training it is the identity."""
    train = operation.get("train", operation.get("training"))
    operand = operation.operands[0]
    x = Input(operand, tuple(range(operand.ndim)))
    outputs = [Output(x.labels, (x,)) for _ in operation.outputs]
    if train is False or operation.get("p") == 0:
        outputs[0] = Output(x.labels, terms=(Term((x,)),))
    return resolve(operation, outputs)


def feature_dropout(operation: Operation) -> Placements:
    """Drop whole channels: the dims after the channels must be whole."""
    operand = operation.operands[0]
    labels = (0, 1, *[None] * (operand.ndim - 2))
    return resolve(operation, [Output(labels, (Input(operand, labels),))])


def prelu(operation: Operation) -> Placements:
    """Apply ``prelu``, whose ``weight`` has one element, or one for each channel, dim 1."""
    operand, weight = operation["self"], operation["weight"]
    if weight.shapes[0] == (1,) or weight.ndim == 0 or operand.ndim < 2:
        labels: tuple = (None,) * weight.ndim
    else:
        labels = (1,)
    x = Input(operand, tuple(range(operand.ndim)))
    return resolve(operation, [Output(x.labels, (x, Input(weight, labels)))])


RULES_OF_NUMBERS = {"mul": scaled}

# Operations with the tag, `names`, have the rule `pointwise`, too.
RULES = {
    **dict.fromkeys((*_LINEAR, *_UNTAGGED), pointwise),
    **dict.fromkeys(_FILLS, like),
    **dict.fromkeys(_RANDOM, pointwise),
    "copy": copy,
    "to": of_self,
    "type_as": of_self,
    **dict.fromkeys(words("dropout native_dropout alpha_dropout"), dropout),
    "_fused_dropout": form("self:... -> ... ; ..."),
    "feature_dropout": feature_dropout,
    "feature_alpha_dropout": feature_dropout,
    "prelu": prelu,
    "view_as_real": form("self:... -> ...* = self"),
    "view_as_complex": form("self:...* -> ... = self"),
}
