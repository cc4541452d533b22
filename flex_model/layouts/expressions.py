"""Expressions of numbers that a forward computes from the sizes and elements of tensors, and their
numbers in the unsharded program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

# ("dim", value id or 0, dim), ("number", n), or an operation's name and its operands' expressions;
# ("same", ...): expressions of one number, of which any may be the right one; ("literal", n): a
# number that can't be a rank's own; ("source", n): a literal in the source of the model; ("read",
# value id or 0, n): a number read from a tensor.
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

_LEAVES = ("dim", "number", "literal", "source", "read")


def without_source(expression: Expression | None) -> Expression | None:
    """Return the expression with plain numbers in place of literals in the source."""
    if expression is None or expression[0] == "source":
        return None
    if expression[0] in _LEAVES:
        return expression
    operands = (
        ("number", operand[1]) if operand[0] == "source" else without_source(operand)
        for operand in expression[1:]
    )
    return (expression[0], *operands)


def evaluate(expression: Expression, leaf: Callable[[Expression], Any]) -> Any:
    """Return the expression's number in the unsharded program, with ``leaf`` for sizes and numbers
    read from tensors; None if one of them is not known.
    """
    kind = expression[0]
    if kind in ("number", "literal", "source"):
        return expression[1]
    if kind in _LEAVES:
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


def factors(expression: Expression) -> set[int]:
    """Return the plain numbers that sizes are multiplied by, and their product; empty if there are
    none.
    """
    found: set[int] = set()
    product = 1
    pending = [expression] if expression[0] == "mul" else []
    while pending:
        for operand in pending.pop()[1:]:
            if operand[0] == "mul":
                pending.append(operand)
            elif operand[0] == "number":
                found.add(operand[1])
                product *= operand[1]
    return found | {product} if found else found


def _leaves(expression: Expression) -> Iterator[Expression]:
    """Yield the leaves of the expression, in order."""
    if expression[0] in _LEAVES:
        yield expression
        return
    for operand in expression[1:]:
        yield from _leaves(operand)


def plain_numbers(expression: Expression) -> set[Any]:
    """Return the numbers in it whose source is not known."""
    return {leaf[1] for leaf in _leaves(expression) if leaf[0] == "number"}


def leaves(expression: Expression) -> set[Expression]:
    """Return the sizes in it, and the numbers that were read from tensors."""
    return {leaf for leaf in _leaves(expression) if leaf[0] in ("dim", "read")}


def is_of_no_value(expression: Expression) -> bool:
    """Whether it has a size of a tensor of which nothing is known."""
    return any(leaf[1] == 0 for leaf in leaves(expression))
