"""Rules for operations that compute each element from the elements at the same index."""

from __future__ import annotations

import math
from functools import cache

import torch

from flex_model.distributed.placement import Partial, Shard
from flex_model.layouts.propagation.operation import PARTIAL, REPLICATED, Operand, Operation, rule
from flex_model.layouts.propagation.text_forms import Placements, form, words

# The operands in which an output is linear: partial sums propagate there.
LINEAR = {
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
}

# Further pointwise operations that don't carry torch's tag.
_UNTAGGED = words(
    "__and__ __or__ _add_relu _prelu_kernel arctan2 bernoulli bitwise_and floor_divide "
    "hardswish isclose isreal leaky_relu log_sigmoid log_sigmoid_forward polar "
    "rrelu_with_noise rrelu_with_noise_functional"
)

# Each rank draws random numbers for its own elements.
_RANDOM = words(
    "rand_like randn_like randint_like empty_like uniform normal random exponential cauchy "
    "log_normal geometric bernoulli"
)


@cache
def is_pointwise(name: str) -> bool:
    """Whether torch states it of an operation of this name."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else (getattr(packet, one) for one in packet.overloads())
    return any(torch.Tag.pointwise in one.tags for one in overloads)


@rule([*LINEAR, *_UNTAGGED, *_RANDOM])
def pointwise(operation: Operation) -> Placements:
    """Compute an element of every output for each element of the operands, broadcast."""
    is_rounded = operation.get("rounding_mode") is not None
    terms = "" if is_rounded else LINEAR.get(operation.name, "")
    return form(f":~... -> ...+ = {terms}")(operation)


@rule("copy")
def copy(operation: Operation) -> Placements:
    """Copy (``copy_``): the values are the source's, the shape is that of the written tensor."""
    target, source = operation["self"], operation["src"]
    if isinstance(target.placement, Shard):
        return form("self:... src:~... -> ...")(operation)
    is_cast = target.placement == REPLICATED and isinstance(source.placement, Shard)
    if is_cast or source.shapes != operation.outputs[0].shapes:
        is_known = target.placement == source.placement == REPLICATED
        return [REPLICATED if is_known else None]
    return form("src:... -> ... = src")(operation.without("self"))


@rule("fill zero zeros_like ones_like full_like")
def like(operation: Operation) -> Placements:
    """Fill with one value, whatever the tensor held."""
    operand = operation.operands[0]
    value = operation.get("value")
    if isinstance(value, Operand) and value.placement != REPLICATED:
        return [None]
    if isinstance(operand.placement, Partial):
        return [REPLICATED]
    if operand.shapes != operation.outputs[0].shapes:
        return [None]
    return [operand.placement]


@rule("mul", "other")
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
