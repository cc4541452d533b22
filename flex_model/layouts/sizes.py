"""Sizes that remember of which tensor's dim they are, so that a proof knows what the unsharded
program passes in their place.

``b, s, _ = h.shape; q.view(b, s, -1, 64)`` passes plain numbers to ``view``, and with one row a
rank the local ``b`` is 1: nothing in the number tells whether the unsharded program passes 1 or the
whole batch. In a followed forward ``h.shape`` gives these numbers instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

# ("dim", value id or 0, dim), ("number", n), or an operation's name and its operands' expressions.
Expression = tuple[Any, ...]

#: Arguments of ATen operations that are sizes, or positions along a dim. (Their schemas say so, in
#: types that Python does not show.)
SIZE_ARGUMENTS = frozenset(
    {
        "size", "shape", "sizes", "length", "start", "end", "step", "steps", "repeats", "n", "m",
        "split_size", "split_sizes", "indices_or_sections", "sections", "row", "col", "index",
        "output_size", "num_classes", "new_shape",
    }
)  # fmt: skip

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": operator.pow,
}


class _Tagged:
    """What `Size` and `SizeRatio` share: the expression, and arithmetic that keeps it."""

    expression: Expression


class Size(_Tagged, int):
    """An int that knows its expression in sizes of tensors. It compares, hashes and pickles as the
    int that it is.
    """

    def __new__(cls, value: int, expression: Expression) -> Size:
        size = int.__new__(cls, value)
        size.expression = expression
        return size

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


class SizeRatio(_Tagged, float):
    """A float made of sizes, such as ``1 / h.shape[0]``."""

    def __new__(cls, value: float, expression: Expression) -> SizeRatio:
        ratio = float.__new__(cls, value)
        ratio.expression = expression
        return ratio

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __deepcopy__(self, memo: Any) -> float:
        return float(self)


def expression_of(value: Any) -> Expression | None:
    """The expression of a tagged number; None of all else."""
    return value.expression if isinstance(value, _Tagged) else None


def _operand(value: Any) -> Expression:
    return value.expression if isinstance(value, _Tagged) else ("number", value)


def _method(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = _OPERATIONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)) or isinstance(other, bool):
            return NotImplemented
        number = int if isinstance(self, int) else float
        plain = number(self), (int if isinstance(other, int) else float)(other)
        left, right = reversed(plain) if reflected else plain
        first, second = (other, self) if reflected else (self, other)
        expression = (name, _operand(first), _operand(second))
        value = compute(left, right)
        if isinstance(value, int):
            return Size(value, expression)
        return SizeRatio(value, expression) if isinstance(value, float) else value

    return method


for _name in _OPERATIONS:
    for _kind in (Size, SizeRatio):
        setattr(_kind, f"__{_name}__", _method(_name, reflected=False))
        setattr(_kind, f"__r{_name}__", _method(_name, reflected=True))


def evaluate(expression: Expression, size_of: Callable[[int, int], int | None]) -> Any:
    """The number that the expression has where ``size_of(value id, dim)`` gives the sizes; None
    where one of them is not known.
    """
    kind = expression[0]
    if kind == "number":
        return expression[1]
    if kind == "dim":
        return size_of(expression[1], expression[2])
    left, right = (evaluate(operand, size_of) for operand in expression[1:])
    if left is None or right is None:
        return None
    try:
        return _OPERATIONS[kind](left, right)
    except (ZeroDivisionError, OverflowError):
        return None


def divides_by(expression: Expression, number: int) -> bool:
    """Whether a size is divided by this plain number somewhere in the expression."""
    if expression[0] in ("number", "dim"):
        return False
    is_division = expression[0] in ("floordiv", "truediv", "mod")
    if is_division and expression[2] == ("number", number):
        return True
    return any(divides_by(operand, number) for operand in expression[1:])


def factors(expression: Expression) -> set[int]:
    """The plain numbers that sizes are multiplied by, each and all of them together; empty where
    there are none.
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


def is_of_no_value(expression: Expression) -> bool:
    """Whether it has a size of a tensor of which nothing is known."""
    if expression[0] in ("number", "dim"):
        return expression[0] == "dim" and expression[1] == 0
    return any(is_of_no_value(operand) for operand in expression[1:])


class CallSizes:
    """The numbers among the arguments of a call of torch, with their expressions.

    They are those of the operation that the call is by name: others inside of it may have the same
    numbers for other reasons.
    """

    def __init__(self, name: str = "", args: Any = (), kwargs: Any = None) -> None:
        self._name = _plain_name(name)
        self._in_order: list[tuple[Any, Any]] = []
        self._by_number: dict[Any, Any] = {}
        self._visit((args, tuple((kwargs or {}).values())))
        self._has_any = any(expression is not None for _, expression in self._in_order)
        for number, expression in self._in_order:
            known = self._by_number.get(number, expression)
            self._by_number[number] = expression if known == expression else None

    def _visit(self, value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._in_order.append((value, expression_of(value)))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._visit(item)
        elif isinstance(value, slice):
            self._visit((value.start, value.stop, value.step))

    def are_of(self, operation: str) -> bool:
        """Whether the operation is what was called, so that its numbers are these."""
        if not self._has_any:
            return False
        name = _plain_name(operation)
        return name == self._name or (self._name in _SUBSCRIPTS and name in _OF_SUBSCRIPTS)

    def of_list(self, numbers: Sequence[Any]) -> list[Any] | None:
        """The numbers of a list as logs have them, if the call was passed just this list."""
        passed = self._in_order[: len(numbers)]
        if len(passed) < len(numbers) or any(n != m for n, (m, _) in zip(numbers, passed)):
            return None
        return [encoded(number, expression) for number, expression in passed]

    def encoded(self, number: Any) -> Any:
        """The number with its expression; without one where the call has it with several, or beside
        a plain one of the same value.
        """
        return encoded(number, self._by_number.get(number))


_SUBSCRIPTS = {"getitem", "setitem"}
_OF_SUBSCRIPTS = {"slice", "select"}


def _plain_name(name: str) -> str:
    """``__radd__``, ``add_`` and ``aten::add`` are one operation."""
    name = name.rpartition("::")[2]
    if name.startswith("__"):
        name = name.strip("_")
        for prefix in ("r", "i"):
            if name.removeprefix(prefix) in _ARITHMETIC:
                name = name.removeprefix(prefix)
        return {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}.get(name, name)
    return {"true_divide": "div"}.get(name.rstrip("_"), name.rstrip("_"))


_ARITHMETIC = {"add", "sub", "mul", "truediv", "floordiv", "pow", "mod"}


def encoded(number: Any, expression: Expression | None = None) -> Any:
    """A number as logs have it."""
    plain = int(number) if isinstance(number, int) else float(number)
    return plain if expression is None else ("n", plain, expression)
