"""Defines sizes that carry the tensor and the dim that they are from, so that a proof can compute
the number that the unsharded program passes instead.

``b, s, _ = h.shape; q.view(b, s, -1, 64)`` passes plain numbers to ``view``, and with one row a
rank the local ``b`` is 1: the number does not show whether the unsharded program passes 1 or the
whole batch. In a followed forward ``h.shape`` has these numbers instead.

Several recorders may follow one forward, each with values of its own, so a number has an expression
for each of them. For any other recorder, such as one of a later forward, it is a plain number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from flex_model.layouts.expressions import OPERATIONS, Expression

_OF_INTEGERS = {"lshift", "rshift", "and", "or", "xor"}


#: By recorder.
Expressions = dict[Any, Expression]


class _Tagged:
    """The common part of `Size` and `SizeRatio`: expressions, and arithmetic that keeps them."""

    expressions: Expressions

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

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


class Size(_Tagged, int):
    """An int with its expressions in sizes and elements of tensors. It pickles as a plain int.

    C code turns it into a plain number: ``int(size)``, ``range(size)``, ``math.log(size)``.
    """

    def __new__(cls, value: int, expressions: Expressions) -> Size:
        size = int.__new__(cls, value)
        size.expressions = expressions
        return size

    def __reduce__(self) -> Any:
        return int, (plain(self),)

    def __copy__(self) -> Size:
        return self

    def __deepcopy__(self, memo: Any) -> Size:
        return self


class SizeRatio(_Tagged, float):
    """A float computed from sizes, such as ``1 / h.shape[0]``."""

    def __new__(cls, value: float, expressions: Expressions) -> SizeRatio:
        ratio = float.__new__(cls, value)
        ratio.expressions = expressions
        return ratio

    def __reduce__(self) -> Any:
        return float, (plain(self),)

    def __copy__(self) -> SizeRatio:
        return self

    def __deepcopy__(self, memo: Any) -> SizeRatio:
        return self


def expression_of(value: Any, recorder: Any) -> Expression | None:
    """Return the recorder's expression of a tagged number; None where it has none."""
    if not isinstance(value, _Tagged):
        return None
    return value.expressions.get(recorder)


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


def encoded(number: Any, expression: Expression | None = None) -> Any:
    """Encode a number for the log."""
    return plain(number) if expression is None else ("n", plain(number), expression)
