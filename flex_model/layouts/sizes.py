"""Sizes that remember of which tensor's dim they are, so that a proof knows what the unsharded
program passes in their place.

``b, s, _ = h.shape; q.view(b, s, -1, 64)`` passes plain numbers to ``view``, and with one row a
rank the local ``b`` is 1: nothing in the number tells whether the unsharded program passes 1 or the
whole batch. In a followed forward ``h.shape`` gives these numbers instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

# ("dim", value id or 0, dim), ("number", n), or an operation's name and its operands' expressions;
# ("same", ...) of several that are meant to be one number; ("literal", n) of one that can't be a
# rank's own; ("read", value id or 0, n) of one that was read from a tensor.
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
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_OF_INTEGERS = {"lshift", "rshift", "and", "or", "xor"}


class _Tagged:
    """What `Size` and `SizeRatio` share: the expression, and arithmetic that keeps it."""

    expression: Expression

    def __neg__(self) -> Any:
        return 0 - self  # type: ignore[operator]

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self  # type: ignore[operator]

    def __invert__(self) -> Any:
        return -1 - self  # type: ignore[operator]

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other  # type: ignore[operator]

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


#: Called with a number that a size is converted to, its expression, and the conversion's name.
on_conversion: list[Callable[[Any, Expression, str], None]] = []

#: Into numbers of which nothing shows any more that they are sizes; ``math.sqrt`` asks for a float.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__int__": int,
    "__float__": float,
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
    "bit_length": int.bit_length,
}


class Size(_Tagged, int):
    """An int that knows its expression in sizes of tensors, and elements of them. It compares, hashes and pickles as the
    int that it is.
    """

    def __new__(cls, value: int, expression: Expression) -> Size:
        size = int.__new__(cls, value)
        size.expression = expression
        return size

    def __reduce__(self) -> Any:
        return int, (plain(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(plain(self))


class SizeRatio(_Tagged, float):
    """A float made of sizes, such as ``1 / h.shape[0]``."""

    def __new__(cls, value: float, expression: Expression) -> SizeRatio:
        ratio = float.__new__(cls, value)
        ratio.expression = expression
        return ratio

    def __reduce__(self) -> Any:
        return float, (plain(self),)

    def __deepcopy__(self, memo: Any) -> float:
        return float(plain(self))


def expression_of(value: Any) -> Expression | None:
    """The expression of a tagged number; None of all else."""
    return value.expression if isinstance(value, _Tagged) else None


def _operand(value: Any) -> Expression:
    return value.expression if isinstance(value, _Tagged) else ("number", value)


def _method(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = _OPERATIONS[name]

    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:
            return pow(int(self), other, *modulus)
        if not isinstance(other, (int, float)) or isinstance(other, bool):
            return NotImplemented
        if name in _OF_INTEGERS and isinstance(other, float):
            return NotImplemented
        numbers = plain(self), plain(other)
        left, right = reversed(numbers) if reflected else numbers
        first, second = (other, self) if reflected else (self, other)
        expression = (name, _operand(first), _operand(second))
        return tagged(compute(left, right), expression)

    return method


def _conversion(kind: type, name: str) -> Any:
    convert = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        number = convert(self, *args)
        for note in on_conversion:
            note(number, self.expression, name)
        return number

    return method


for _kind, _type in ((Size, int), (SizeRatio, float)):
    for _name in _OPERATIONS:
        if _kind is Size or _name not in _OF_INTEGERS:
            setattr(_kind, f"__{_name}__", _method(_name, reflected=False))
            setattr(_kind, f"__r{_name}__", _method(_name, reflected=True))
    for _name in CONVERSIONS:
        if hasattr(_type, _name):
            setattr(_kind, _name, _conversion(_type, _name))


_LEAVES = ("dim", "number", "literal", "read")


def literal(number: int) -> Size:
    """A number that the unsharded program has as well, whatever size it is equal to."""
    return Size(number, ("literal", number))


def tagged(number: Any, expression: Expression) -> Any:
    """The number with its expression; a bool has none."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return Size(number, expression) if isinstance(number, int) else SizeRatio(number, expression)


def evaluate(expression: Expression, leaf: Callable[[Expression], Any]) -> Any:
    """The number that the expression has in the unsharded program, where ``leaf`` gives those of
    sizes and of what was read; None where one of them is not known.
    """
    kind = expression[0]
    if kind in ("number", "literal"):
        return expression[1]
    if kind in _LEAVES:
        return leaf(expression)
    left, right = (evaluate(operand, leaf) for operand in expression[1:])
    if left is None or right is None:
        return None
    if kind == "same":
        return left if left == right else None
    try:
        return _OPERATIONS[kind](left, right)
    except (ZeroDivisionError, OverflowError):
        return None


def divides_by(expression: Expression, number: int) -> bool:
    """Whether a size is divided by this plain number somewhere in the expression."""
    if expression[0] in _LEAVES:
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
    if expression[0] in _LEAVES:
        return expression[0] in ("dim", "read") and expression[1] == 0
    return any(is_of_no_value(operand) for operand in expression[1:])


def meaning(argument: Any) -> str:
    """What a number means that an ATen operation is passed for the argument of its schema: a
    "size"; a "value" that the result's elements are made with; a "count"; or "", a dim.
    """
    if argument.name in SIZE_ARGUMENTS:
        return "size"
    if "dim" in argument.name:
        return ""
    kind = str(argument.type)
    if any(name in kind for name in ("number", "Tensor", "float")):
        return "value"
    return "count" if "int" in kind else ""


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
        self.has_any = any(expression is not None for _, expression in self._in_order)
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
        if not self.has_any:
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

    def encoded_value(self, number: Any) -> Any:
        """Likewise of one that the result's values are made with: with the expression of all that
        may be meant by it. One that the call was not passed torch has made itself.
        """
        if not self.has_any and number == number and number not in self._by_number:
            return encoded(number, ("literal", plain(number)))
        meant: Expression | None = None
        for other, expression in self._in_order:
            if (
                expression is None
                or isinstance(number, float) != isinstance(other, float)
                or number != other
            ):
                continue
            meant = expression if meant in (None, expression) else ("same", meant, expression)
        return encoded(number, meant)

    def in_order(self) -> tuple[Any, ...]:
        """All of them, as logs have them."""
        return tuple(encoded(number, expression) for number, expression in self._in_order)


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


def plain(number: Any) -> Any:
    """The number without its expression, for logs."""
    return int.__int__(number) if isinstance(number, int) else float.__float__(number)


def encoded(number: Any, expression: Expression | None = None) -> Any:
    """A number as logs have it."""
    return plain(number) if expression is None else ("n", plain(number), expression)
