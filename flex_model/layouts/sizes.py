"""Defines sizes that carry the tensor and the dim that they are from, so that a proof can compute
the number that the unsharded program passes instead.

``b, s, _ = h.shape; q.view(b, s, -1, 64)`` passes plain numbers to ``view``, and with one row a
rank the local ``b`` is 1: the number does not show whether the unsharded program passes 1 or the
whole batch. In a followed forward ``h.shape`` has these numbers instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flex_model.layouts.callers import MASKS, is_called_by_model

# ("dim", value id or 0, dim), ("number", n), or an operation's name and its operands' expressions;
# ("same", ...): expressions of one number, of which any may be the right one; ("literal", n): a
# number that can't be a rank's own; ("read", value id or 0, n): a number read from a tensor.
Expression = tuple[Any, ...]

#: Arguments of ATen operations that are sizes, or positions along a dim. (Their schemas have types
#: for these, which Python does not show.)
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
    """The common part of `Size` and `SizeRatio`: the expression, and arithmetic that keeps it."""

    expression: Expression

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
        """Return the hash, and note a conversion: the unsharded program may use another number as a
        key.
        """
        _note(plain(self), self.expression, "__int__")
        return hash(plain(self))


#: Called with the plain number to which a size is converted, its expression, and the conversion's
#: name.
on_conversion: list[Callable[[Any, Expression, str], None]] = []

#: Called with the name of a comparison, both numbers, and the result.
on_comparison: list[Callable[[str, Any, Any, bool], None]] = []

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

#: Conversions to numbers without an expression (``math.sqrt`` converts to float).
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
    """An int with its expression in sizes and elements of tensors. It pickles as a plain int.

    C code turns it into a plain number without a call of these methods: ``1.0 / size``,
    ``range(size)``, ``math.log(size)``.
    """

    def __new__(cls, value: int, expression: Expression) -> Size:
        size = int.__new__(cls, value)
        size.expression = expression
        return size

    def __reduce__(self) -> Any:
        return int, (plain(self),)

    def __copy__(self) -> Size:
        return self

    def __deepcopy__(self, memo: Any) -> Size:
        return self


class SizeRatio(_Tagged, float):
    """A float computed from sizes, such as ``1 / h.shape[0]``."""

    def __new__(cls, value: float, expression: Expression) -> SizeRatio:
        ratio = float.__new__(cls, value)
        ratio.expression = expression
        return ratio

    def __reduce__(self) -> Any:
        return float, (plain(self),)

    def __copy__(self) -> SizeRatio:
        return self

    def __deepcopy__(self, memo: Any) -> SizeRatio:
        return self


def expression_of(value: Any) -> Expression | None:
    """Return the expression of a tagged number; None for all else."""
    return value.expression if isinstance(value, _Tagged) else None


def operand_of(value: Any) -> Expression:
    """Return the expression of a number, tagged or not."""
    return value.expression if isinstance(value, _Tagged) else ("number", value)


def _method(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = _OPERATIONS[name]

    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus:
            return pow(int(self), other, *modulus)
        if not isinstance(other, (int, float)):
            if isinstance(other, (list, tuple, str)):  # a sequence repeated by the size
                _note(plain(self), self.expression, "__int__")
            return NotImplemented
        if name in _OF_INTEGERS and isinstance(other, float):
            return NotImplemented
        numbers = plain(self), plain(other)
        left, right = reversed(numbers) if reflected else numbers
        first, second = (other, self) if reflected else (self, other)
        expression = (name, operand_of(first), operand_of(second))
        return tagged(compute(left, right), expression)

    return method


def _note(number: Any, expression: Expression, conversion: str) -> None:
    if is_called_by_model():
        for note in on_conversion:
            note(number, expression, conversion)


def _conversion(kind: type, name: str) -> Any:
    convert = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        number = convert(self, *args)
        _note(number, self.expression, name)
        return number

    return method


def _comparison(name: str) -> Any:
    compare = COMPARISONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        answer = compare(plain(self), plain(other))
        if on_comparison and is_called_by_model(but_for=MASKS):
            for note in on_comparison:
                note(name, self, other, answer)
        return answer

    return method


for _kind, _type in ((Size, int), (SizeRatio, float)):
    for _name in _OPERATIONS:
        if _kind is Size or _name not in _OF_INTEGERS:
            setattr(_kind, f"__{_name}__", _method(_name, reflected=False))
            setattr(_kind, f"__r{_name}__", _method(_name, reflected=True))
    for _name in COMPARISONS:
        setattr(_kind, f"__{_name}__", _comparison(_name))
    for _name in CONVERSIONS:
        if hasattr(_type, _name):
            setattr(_kind, _name, _conversion(_type, _name))


_LEAVES = ("dim", "number", "literal", "read")


def literal(number: int) -> Size:
    """Tag a number that the unsharded program has, too, whichever size equals it."""
    return Size(number, ("literal", number))


def tagged(number: Any, expression: Expression) -> Any:
    """Return the number with its expression; a bool has none."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return number
    return Size(number, expression) if isinstance(number, int) else SizeRatio(number, expression)


def evaluate(expression: Expression, leaf: Callable[[Expression], Any]) -> Any:
    """Return the expression's number in the unsharded program, with ``leaf`` for sizes and numbers
    read from tensors; None if one of them is not known.
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


def meaning(argument: Any) -> str:
    """Return the meaning of a number that is passed for an argument of an ATen operation: a "size";
    a "value" from which the result's elements are computed; a "count"; or "", a dim.
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

    They belong to the operation of the call's name: others inside the call may have equal numbers
    for other reasons.
    """

    def __init__(self, name: str = "", args: Any = (), kwargs: Any = None) -> None:
        self.name = _plain_name(name)
        self._in_order: list[tuple[Any, Expression | None]] = []
        self._visit(args)
        num_positional = len(self._in_order)
        self._visit(tuple((kwargs or {}).values()))
        self._are_positional = num_positional == len(self._in_order)
        self.has_any = any(expression is not None for _, expression in self._in_order)

    def _visit(self, value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._in_order.append((plain(value), expression_of(value)))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._visit(item)
        elif isinstance(value, slice):
            self._visit((value.start, value.stop, value.step))

    @property
    def is_subscript(self) -> bool:
        """Whether the call is a subscript: its numbers go to several slices and selects, one by
        one.
        """
        return self.name in _SUBSCRIPTS

    def are_of(self, operation: str) -> bool:
        """Whether the operation is the one that was called, so that its numbers are these."""
        name = _plain_name(operation)
        is_called = name == self.name or (self.is_subscript and name in _OF_SUBSCRIPTS)
        return self.has_any and is_called

    def by_place(self, arguments: Sequence[Any]) -> list[Expression | None] | None:
        """Return the expressions of an operation's numbers, in order, if the call was passed these
        numbers in this order; else None. (The numbers of a subscript go to several operations.)
        """
        if self.is_subscript or not self._are_positional:
            return None
        numbers = CallSizes(args=arguments)._in_order
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

    def encoded_value(self, number: Any) -> Any:
        """Encode a number from which the result's elements are computed. One that the call was not
        passed is torch's own; without a call (TorchScript) its source is not known.
        """
        number = plain(number)
        if not self.name:
            return encoded(number, ("read", 0, number))
        is_own = number == number and all(number != other for other, _ in self._in_order)
        if is_own and not self.has_any:
            return encoded(number, ("literal", number))
        return self.encoded(number)

    def in_order(self, all_of_them: bool) -> tuple[Any, ...]:
        """Encode the numbers for the log; or only those that have an expression."""
        return tuple(
            encoded(number, expression)
            for number, expression in self._in_order
            if all_of_them or expression is not None
        )


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


def _plain_name(name: str) -> str:
    """Return the common name of ``__radd__``, ``add_`` and ``aten::add``: one operation."""
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
    """Return the number without its expression, for logs."""
    return int.__int__(number) if isinstance(number, int) else float.__float__(number)


def encoded(number: Any, expression: Expression | None = None) -> Any:
    """Encode a number for the log."""
    return plain(number) if expression is None else ("n", plain(number), expression)
