"""The table of rules, which infer the placements of an operation's outputs from its operands'.

The docstring of a rule describes the operation: what it computes, and so which dims may be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flex_model.distributed.placement import Placement, Shard
from flex_model.integrations.torch_private import OpOverload, OpOverloadPacket, backward_of
from flex_model.layouts.propagation import (  # noqa: F401  # each adds rules
    decomposition,
    kernel_rules,
    pointwise,
    slicing,
    text_cases,
    text_rules,
    views,
)
from flex_model.layouts.propagation.operation import (
    REPLICATED,
    RULES,
    Operand,
    Operation,
    Rule,
    RuleFunction,
    full_size,
)
from flex_model.layouts.propagation.text_forms import form

_POINTWISE = Rule(pointwise.pointwise)


def has_rule(name: str) -> bool:
    """Whether there is a rule for the operation, other than the one for replicated operands."""
    return _rule(_key(name)) is not None


def _rule(name: str) -> Rule | None:
    """Return the rule of an operation; torch states which operations are pointwise."""
    is_pointwise = "::" not in name and name not in RULES and pointwise.is_pointwise(name)
    return _POINTWISE if is_pointwise else RULES.get(name)


def register_rule(
    op: Any,
    fn: RuleFunction | str,
    *,
    per_rank: Sequence[str] = (),
    gradient: str | None = None,
    replace: bool = False,
) -> None:
    """Add the rule of an operation: how its outputs are split if its operands are.

    Example::

        # A norm over the last dim, which must be whole; the others are parallel.
        register_rule("mylib::norm", "x:...* weight:* -> ...*", gradient="local")

    Args:
        op: An operation of ``torch.ops``, or its name, ``"namespace::name"``.
        fn: A text as in `propagation.text_forms`; or a function that receives an `Operation` and
            returns the placement of its output, or a list for all outputs; None is "not known".
            An exception counts as not known.
        per_rank: Arguments that may differ between the ranks. If any other does, the rule is not
            called, and nothing is known.
        gradient: ``"local"``: the operation's own backward, given to ``register_autograd``,
            communicates nothing. Without it the gradient of an input that is the same on all
            tensor-parallel ranks is not known where the output is split.
        replace: Whether to replace an existing rule.
    """
    if gradient not in (None, "local"):
        raise ValueError(f"register_rule: gradient must be 'local' or None, got {gradient!r}")
    fn = form(fn) if isinstance(fn, str) else fn
    key = _key(op if isinstance(op, str) else _qualified(op))
    if has_rule(key) and not replace:
        raise ValueError(
            f"register_rule: {key} has a rule; pass replace=True to use this one in its place"
        )
    if not callable(fn):
        raise TypeError(
            f"register_rule: the rule of {key} must be a function of an Operation, or a text, got "
            f"{type(fn).__name__}"
        )
    RULES[key] = Rule(fn, frozenset(per_rank), gradient == "local")


def passes_gradients(backward: str) -> bool:
    """Whether a rule states that this ``autograd.Function``, which torch made for the backward of
    an operation, communicates nothing.
    """
    return any(
        rule.is_local and backward == backward_of(*name.split("::"))
        for name, rule in RULES.items()
        if "::" in name
    )


def _qualified(op: Any) -> str:
    if isinstance(op, OpOverload):
        return op._schema.name
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    raise TypeError(
        "register_rule: op must be an operation of torch.ops or its name, got "
        f'{type(op).__name__}; example: register_rule("mylib::scale", rule)'
    )


def _key(name: str) -> str:
    name = name.removeprefix("aten::")
    bare = name.rpartition("::")[2]
    return name if bare.startswith("__") else name.rstrip("_")


def propagate(operation: Operation) -> list[Placement | None]:
    """Return the placements of the operation's outputs along the axis; None where they are not
    known.

    A rule is exact: if the operands are as their placements state, each rank's output is its shard,
    its summand or a copy of what the unsharded program computes, which passes the same arguments
    except for sizes. It never raises.
    """
    try:
        found = _propagated(operation)
        shards = [o.shard for o in operation.operands if o.shard is not None]
        if not any(shard.part_sizes for shard in shards):
            # The split of joined parts of unequal sizes is not known.
            found = [None if getattr(one, "part_sizes", None) else one for one in found]
        if len(found) == len(operation.outputs):
            return [
                placement if fits(placement, made) else None
                for placement, made in zip(found, operation.outputs)
            ]
    except Exception:  # a rule that can't read its arguments proves nothing
        pass
    return [None] * len(operation.outputs)


def _propagated(operation: Operation) -> list[Placement | None]:
    unknown: list[Placement | None] = [None] * len(operation.outputs)
    operands = operation.operands
    is_aten = "::" not in operation.name
    rule = _rule(operation.name)
    if not operands or not all(fits(o.placement, o) for o in operands):
        return unknown
    if rule is None and (not is_aten or operation.name.startswith("new_")):
        return unknown
    varying = _varying(operation)
    if is_aten and not varying and all(o.placement == REPLICATED for o in operands):
        return [REPLICATED] * len(operation.outputs)
    if rule is None:
        overload = getattr(getattr(torch.ops.aten, operation.name), operation.overload or "default")
        return decomposition.follow(operation, overload, propagate)
    if not varying <= rule.per_rank:
        return unknown
    found = rule.function(operation)
    if found is None or isinstance(found, Placement):
        return [found] * len(operation.outputs)
    return list(found)


def fits(placement: Placement | None, operand: Operand) -> bool:
    """Whether the ranks' shapes may be those of a tensor that is placed like this."""
    if not isinstance(placement, Shard):
        return placement is None or len(set(operand.shapes)) == 1
    is_dim = 0 <= placement.dim < operand.ndim
    return is_dim and full_size(placement, operand.shapes) is not None


def _varying(operation: Operation) -> set[str]:
    """Return the arguments that differ, or may differ, between the ranks or from the unsharded
    program's.
    """
    first, *others = operation.arguments
    varying = {
        name
        for name, value in first.items()
        if any(not _is_same(value, other[name]) for other in others)
    }
    for name, sizes in operation.full_sizes.items():
        if name in first and not _are_stated(first[name], sizes):
            varying.add(name)
    return varying


def _are_stated(local: Any, sizes: Sequence[int | None]) -> bool:
    local = list(local) if isinstance(local, (list, tuple)) else [local]
    return local == list(sizes)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two ranks passed the same. Devices and generators may differ."""
    if isinstance(a, torch.Generator) or isinstance(b, torch.Generator):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.device):
        return a.type == b.type
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)
