"""The numbers that are passed to a call of torch, with their expressions, encoded for the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flex_model.layouts.expressions import Expression
from flex_model.layouts.sizes import encoded, expression_of, plain

#: Arguments of ATen operations that are sizes, or positions along a dim. (Their schemas have types
#: for these, which Python does not show.)
SIZE_ARGUMENTS = frozenset(
    {
        "size", "shape", "sizes", "length", "start", "end", "step", "steps", "repeats", "n", "m",
        "split_size", "split_sizes", "indices_or_sections", "sections", "row", "col", "index",
        "output_size", "num_classes", "new_shape",
    }
)  # fmt: skip


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
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._in_order.append((plain(value), expression_of(value, self._recorder)))
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
        name = plain_name(operation)
        is_called = name == self.name or (self.is_subscript and name in _OF_SUBSCRIPTS)
        return self.has_any and is_called

    def by_place(self, arguments: Sequence[Any]) -> list[Expression | None] | None:
        """Return the expressions of an operation's numbers, in order, if the call was passed these
        numbers in this order; else None. (The numbers of a subscript go to several operations.)
        """
        if self.is_subscript or not self._are_positional:
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
