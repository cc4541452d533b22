"""Expressions of numbers that a forward computes from the sizes of tensors, and their numbers in
the unsharded program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

# ("dim", value id or 0, dim), ("number", n), or an operation's name and its operands' expressions;
# ("same", ...): expressions of one number, of which any may be the right one.
Expression = tuple[Any, ...]

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": operator.pow,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}

_LEAVES = ("dim", "number")


def evaluate(expression: Expression, leaf: Callable[[Expression], Any]) -> Any:
    """Return the expression's number in the unsharded program, with ``leaf`` for sizes; None if one
    of them is not known.
    """
    kind = expression[0]
    if kind == "number":
        return expression[1]
    if kind == "dim":
        return leaf(expression)
    left, right = (evaluate(operand, leaf) for operand in expression[1:])
    if left is None or right is None:
        return None
    if kind == "same":
        return left if left == right else None
    try:
        return OPERATIONS[kind](left, right)
    except (ZeroDivisionError, OverflowError):
        return None


def divides_by(expression: Expression, number: int) -> bool:
    """Whether the expression divides a size by this plain number."""
    if expression[0] in _LEAVES:
        return False
    is_division = expression[0] in ("floordiv", "truediv", "mod")
    if is_division and expression[2] == ("number", number):
        return True
    return any(divides_by(operand, number) for operand in expression[1:])


def has_factors(expression: Expression) -> bool:
    """Whether it is a product of sizes and plain numbers."""
    if expression[0] != "mul":
        return False
    return any(operand[0] == "number" or has_factors(operand) for operand in expression[1:])


def _leaves(expression: Expression) -> Iterator[Expression]:
    """Yield the leaves of the expression, in order."""
    if expression[0] in _LEAVES:
        yield expression
        return
    for operand in expression[1:]:
        yield from _leaves(operand)


def leaves(expression: Expression) -> set[Expression]:
    """Return the sizes in it."""
    return {leaf for leaf in _leaves(expression) if leaf[0] == "dim"}


def is_of_no_value(expression: Expression) -> bool:
    """Whether it has a size of a tensor of which nothing is known."""
    return any(leaf[1] == 0 for leaf in leaves(expression))
