"""Whether the results of an operation are linear in the gradients of one rank's own loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flex_model.distributed.placement import Placement
from flex_model.layouts.gradient_kinds import PART, WHOLE
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import Operand, Operation


def linearity(operation: Operation, is_scaled: Sequence[bool]) -> list[Placement | None]:
    """Return, for each result: a partial sum if it is linear in the scaled operands, as one rank
    alone runs the operation; replicated if it does not depend on them; None if neither is known.
    """
    placed = {
        id(operand): Operand(operand.shapes[:1] * 2, operand.dtype, PART if scaled else WHOLE)
        for operand, scaled in zip(operation.operands, is_scaled)
    }

    def alone(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [alone(item) for item in value]
        return placed[id(value)] if isinstance(value, Operand) else value

    arguments = {name: alone(value) for name, value in operation.arguments[0].items()}
    sizes = {
        name: list(arguments[name]) if isinstance(arguments[name], list) else [arguments[name]]
        for name in operation.full_sizes
        if name in arguments
    }
    outputs = tuple(Operand(made.shapes[:1] * 2, made.dtype) for made in operation.outputs)
    return rules.propagate(
        replace(operation, arguments=(arguments, arguments), outputs=outputs, full_sizes=sizes)
    )
