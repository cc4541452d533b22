"""Defines sizes that carry the tensor and the dim that they are from, so that a proof can compute
the number that the unsharded program passes instead.

``b, s, _ = h.shape; q.view(b, s, -1, 64)`` passes plain numbers to ``view``, and with one row a
rank the local ``b`` is 1: the number does not show whether the unsharded program passes 1 or the
whole batch. In a followed forward ``h.shape`` has these numbers instead.

Several recorders may follow one forward, each with values of its own, so a number has an expression
for each of them. For any other recorder, such as one of a later forward, it is a plain number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

# ("dim", value id or 0, dim), ("number", n), or an operation's name and its operands' expressions;
# ("same", ...): expressions of one number, of which any may be the right one.
Expression = tuple[Any, ...]

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, f"__{name}__")
    for name in (
        "add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "lshift", "rshift", "and", "or",
        "xor",
    )
}  # fmt: skip
ROUNDINGS: dict[str, Callable[[Any], int]] = {
    "round": round, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip

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
    numbers = [evaluate(operand, leaf) for operand in expression[1:]]
    if None in numbers:
        return None
    if kind == "same":
        return numbers[0] if numbers[0] == numbers[1] else None
    try:
        return ROUNDINGS[kind](*numbers) if kind in ROUNDINGS else OPERATIONS[kind](*numbers)
    except (ArithmeticError, ValueError):
        return None


def divides_by(expression: Expression, number: int) -> bool:
    """Whether the expression divides a size by this plain number."""
    if expression[0] in _LEAVES:
        return False
    is_division = expression[0] in ("floordiv", "truediv", "mod")
    if is_division and expression[2] == ("number", number):
        return True
    return any(divides_by(operand, number) for operand in expression[1:])


def is_quotient(expression: Expression) -> bool:
    """Whether it is a size, divided by plain numbers: it grows where one of them is less."""
    if expression[0] in ROUNDINGS:
        return is_quotient(expression[1])
    if expression[0] in ("floordiv", "truediv"):
        return expression[2][0] == "number" and is_quotient(expression[1])
    return expression[0] == "dim"


def has_factors(expression: Expression) -> bool:
    """Whether it is a product of sizes and plain numbers."""
    if expression[0] in ROUNDINGS:
        return has_factors(expression[1])
    if expression[0] != "mul":
        return False
    return any(operand[0] == "number" or has_factors(operand) for operand in expression[1:])


def leaves(expression: Expression, kind: str = "dim") -> set[Expression]:
    """Return the sizes in it, or with ``kind="number"`` the plain numbers."""
    if expression[0] in _LEAVES:
        return {expression} if expression[0] == kind else set()
    return set().union(*(leaves(operand, kind) for operand in expression[1:]))


def is_of_no_value(expression: Expression) -> bool:
    """Whether it has a size of a tensor of which nothing is known."""
    return any(leaf[1] == 0 for leaf in leaves(expression))


_OF_INTEGERS = {"lshift", "rshift", "and", "or", "xor"}


#: By recorder.
Expressions = dict[Any, Expression]


class _Tagged:
    """The common part of `Size` and `SizeRatio`: expressions, and arithmetic that keeps them."""

    expressions: Expressions

    def __new__(cls, value: Any, expressions: Expressions) -> Any:
        number = super().__new__(cls, value)  # type: ignore[call-arg]
        number.expressions = expressions
        return number

    def __reduce__(self) -> Any:
        number = plain(self)
        return type(number), (number,)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __neg__(self) -> Any:
        return 0 - self  # type: ignore[operator]

    def __bool__(self) -> bool:
        return self != 0

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self if plain(self) >= 0 else -self

    def __invert__(self) -> Any:
        return -1 - self  # type: ignore[operator]

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __hash__(self) -> int:
        return hash(plain(self))


#: Called with the name of a comparison and both numbers.
on_comparison: list[Callable[[str, Any, Any], None]] = []

#: Called with a size that Python turns into a plain number.
on_plain: list[Callable[[Any], None]] = []

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


class Size(_Tagged, int):
    """An int with its expressions in sizes and elements of tensors. It pickles as a plain int.

    C code turns it into a plain number: ``int(size)``, ``range(size)``, ``math.log(size)``.
    """

    def __int__(self) -> int:
        for note in on_plain:
            note(self)
        return plain(self)


class SizeRatio(_Tagged, float):
    """A float computed from sizes, such as ``1 / h.shape[0]``."""


def expression_of(value: Any, recorder: Any) -> Expression | None:
    """Return the recorder's expression of a tagged number; None where it has none."""
    return expressions_of(value).get(recorder)


def operand_of(value: Any, recorder: Any) -> Expression:
    """Return the recorder's expression of a number, tagged or not."""
    expression = expression_of(value, recorder)
    return ("number", plain(value)) if expression is None else expression


def expressions_of(value: Any) -> Expressions:
    """Return the expressions of a number, by recorder."""
    return value.expressions if isinstance(value, _Tagged) else {}


def _method(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = OPERATIONS[name]

    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:
            return pow(int(self), other, *modulus)
        if not isinstance(other, (int, float)):
            return NotImplemented
        if name in _OF_INTEGERS and isinstance(other, float):
            return NotImplemented
        numbers = plain(self), plain(other)
        left, right = reversed(numbers) if reflected else numbers
        first, second = (other, self) if reflected else (self, other)
        expressions = {
            recorder: (name, operand_of(first, recorder), operand_of(second, recorder))
            for recorder in self.expressions | expressions_of(other)
        }
        return tagged(compute(left, right), expressions)

    return method


def _rounding(name: str) -> Callable[..., Any]:
    compute = ROUNDINGS[name]

    def method(self: Any, *digits: Any) -> Any:
        if digits:
            return round(plain(self), *digits)
        expressions = {key: (name, expression) for key, expression in self.expressions.items()}
        return tagged(compute(plain(self)), expressions)

    return method


def _comparison(name: str) -> Any:
    compare = COMPARISONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        for note in on_comparison:
            note(name, self, other)
        return compare(plain(self), plain(other))

    return method


for _kind in (Size, SizeRatio):
    for _name in OPERATIONS:
        if _kind is Size or _name not in _OF_INTEGERS:
            setattr(_kind, f"__{_name}__", _method(_name, reflected=False))
            setattr(_kind, f"__r{_name}__", _method(_name, reflected=True))
    for _name in ROUNDINGS:
        setattr(_kind, f"__{_name}__", _rounding(_name))
    for _name in COMPARISONS:
        setattr(_kind, f"__{_name}__", _comparison(_name))


def tagged(number: Any, expressions: Expressions) -> Any:
    """Return the number with its expressions; a bool has none."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return Size(number, expressions) if isinstance(number, int) else SizeRatio(number, expressions)


def plain(number: Any) -> Any:
    """Return the number without its expression, for logs."""
    return int.__int__(number) if isinstance(number, int) else float.__float__(number)


def from_numpy(value: Any) -> Any:
    """Return a number of numpy's, ``np.prod(x.shape[1:])``, as Python's; all else as it is."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_number else value


def encoded(number: Any, expression: Expression | None = None) -> Any:
    """Encode a number for the log."""
    return plain(number) if expression is None else ("n", plain(number), expression)


#: Arguments of ATen operations that are sizes, or positions along a dim. (Their schemas have types
#: for these, which Python does not show.)
SIZE_ARGUMENTS = frozenset(
    {
        "size", "shape", "sizes", "length", "start", "end", "step", "steps", "repeats", "n", "m",
        "split_size", "split_sizes", "indices_or_sections", "sections", "row", "col", "index",
        "output_size", "num_classes", "new_shape", "chunks",
    }
)  # fmt: skip

#: Arguments by which ATen operations scale, where these are numbers.
FACTOR_ARGUMENTS = frozenset({"other", "alpha", "beta", "value", "weight"})


class CallSizes:
    """The numbers among the arguments of a call of torch, with their expressions.

    They belong to the operation of the call's name: others inside the call may have equal numbers
    for other reasons.

    Args:
        recorder: The key of the recorder whose expressions these are.
    """

    def __init__(self, recorder: int, name: str = "", args: Any = (), kwargs: Any = None) -> None:
        self._recorder, self.name = recorder, plain_name(name)
        self._in_order: list[tuple[Any, Expression | None]] = []
        self._visit(args)
        num_positional = len(self._in_order)
        self._visit(tuple((kwargs or {}).values()))
        self._are_positional = num_positional == len(self._in_order)
        self.has_any = any(expression is not None for _, expression in self._in_order)

    def _visit(self, value: Any) -> None:
        value = from_numpy(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._in_order.append((plain(value), expression_of(value, self._recorder)))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._visit(item)
        elif isinstance(value, slice):
            self._visit((value.start, value.stop, value.step))

    def are_of(self, operation: str) -> bool:
        """Whether the operation is the one that was called, so that its numbers are these."""
        name = plain_name(operation)
        is_part = self.name in _SUBSCRIPTS and name in _OF_SUBSCRIPTS
        return self.has_any and (name == self.name or is_part)

    def by_place(self, arguments: Sequence[Any]) -> list[Expression | None] | None:
        """Return the expressions of an operation's numbers, in order, if the call was passed these
        numbers in this order; else None. (The numbers of a subscript go to several operations.)
        """
        if self.name in _SUBSCRIPTS or not self._are_positional:
            return None
        numbers = CallSizes(self._recorder, args=arguments)._in_order
        if not _are_same([n for n, _ in numbers], [n for n, _ in self._in_order]):
            return None
        return [expression for _, expression in self._in_order]

    def of_list(self, numbers: Sequence[Any]) -> list[Any] | None:
        """Encode the numbers of a list for the log, if the call was passed exactly this list."""
        length, expected = len(numbers), [plain(number) for number in numbers]
        windows = (self._in_order[i : i + length] for i in range(len(self._in_order) - length + 1))
        found = [passed for passed in windows if _are_same([n for n, _ in passed], expected)]
        if not found:
            return None
        return [
            encoded(number, _common([passed[place] for passed in found]))
            for place, number in enumerate(expected)
        ]

    def encoded(self, number: Any) -> Any:
        """Encode the number with its expression: that of all numbers of the call that equal it."""
        number = plain(number)
        passed = [one for one in self._in_order if one[0] == number]
        alike = [one for one in passed if isinstance(one[0], float) == isinstance(number, float)]
        if not alike and isinstance(number, float):
            alike = passed  # an int, where a float is expected
        return encoded(number, _common(alike))


def _are_same(numbers: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(numbers) == len(expected) and all(
        n == m and type(n) is type(m) for n, m in zip(numbers, expected)
    )


def _common(passed: Sequence[tuple[Any, Expression | None]]) -> Expression | None:
    """Return the expression of a number that may be any of these; None if all are plain."""
    if all(expression is None for _, expression in passed):
        return None
    meant: Expression | None = None
    for number, expression in passed:
        one = ("number", number) if expression is None else expression
        meant = one if meant in (None, one) else ("same", meant, one)
    return meant


_SUBSCRIPTS = {"getitem", "setitem"}
_OF_SUBSCRIPTS = {"slice", "select"}


def plain_name(name: str) -> str:
    """Return the common name of ``__radd__``, ``add_`` and ``aten::add``: one operation. Torch's
    ``tile`` is ``repeat``.
    """
    name = name.rpartition("::")[2]
    if name.startswith("__"):
        name = name.strip("_")
        for prefix in ("r", "i"):
            if name.removeprefix(prefix) in _ARITHMETIC:
                name = name.removeprefix(prefix)
        return {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}.get(name, name)
    return {"true_divide": "div", "tile": "repeat"}.get(name.rstrip("_"), name.rstrip("_"))


_ARITHMETIC = {"add", "sub", "mul", "truediv", "floordiv", "pow", "mod"}
