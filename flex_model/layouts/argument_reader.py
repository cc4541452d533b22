"""Reads the arguments of one operation from the log entries of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flex_model.distributed.placement import Shard
from flex_model.layouts import chunks
from flex_model.layouts.call_sizes import meaning
from flex_model.layouts.expressions import (
    divides_by,
    evaluate,
    factors,
    is_of_no_value,
    leaves,
    plain_numbers,
    without_source,
)
from flex_model.layouts.operation_log import Entry, Value, dtype_of
from flex_model.layouts.propagation.labels import words
from flex_model.layouts.propagation.operation import REPLICATED, Operand, full_size

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

_SPLITS = {
    f"aten::{name}"
    for name in words(
        "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk select unbind"
    )
}


class ArgumentReader:
    """The arguments of one operation, from the entries of all ranks.

    Attributes:
        values: The values of its tensors, in order.
        full_sizes: See `Operation`.
        shards_passed: By position in the argument "size": how the tensor is split whose split dim
            has the size that was passed.
        is_local: Whether a number among them differs from the unsharded program's, and no rule
            handles it.
        ambiguous: Plain numbers that may differ from the unsharded program's.
        sized_by: The values whose sizes are among its numbers.
    """

    def __init__(self, proofs: AxisProofs, num_ranks: int, is_view: bool = False) -> None:
        self._proofs, self._num_ranks, self._is_view = proofs, num_ranks, is_view
        self._numbers = proofs.numbers
        self.values: list[Any] = []
        self.operands: list[Operand] = []
        self.full_sizes: dict[str, list[int | None]] = {}
        self.is_local = False
        self.shards_passed: dict[int, Shard] = {}
        self.ambiguous: list[Any] = []
        self.sized_by: list[Value] = []
        self._plain: list[tuple[str, int, Any]] = []  # sizes without an expression
        self._with_expression: set[str] = set()  # arguments with an expression
        self._literals: list[tuple[str, int, Any]] = []  # sizes that the source shows

    def arguments(self, schema: Any, entries: tuple[Entry, ...]) -> tuple[dict[str, Any], ...]:
        by_rank: list[dict[str, Any]] = [{} for _ in entries]
        # A call leaves out an argument that equals its default, which may hold on some ranks only.
        names = [argument.name for argument in schema.arguments]
        passed_by_rank = [{**dict(zip(names, entry[2])), **dict(entry[3])} for entry in entries]
        for argument in schema.arguments:
            name, default = argument.name, argument.default_value
            if any(name in passed for passed in passed_by_rank):
                default = ("l", *default) if isinstance(default, (list, tuple)) else default
                items = [passed.get(name, default) for passed in passed_by_rank]
                values = self.read(items, name, meaning(argument))
            else:
                values = [default] * len(entries)
            for arguments, value in zip(by_rank, values):
                arguments[name] = value
        self.is_local |= len({passed.get("content") for passed in passed_by_rank}) > 1
        numbers = [passed["numbers"] for passed in passed_by_rank if "numbers" in passed]
        if numbers:  # of a tensor that was made of them
            self.is_local |= len(numbers) < len(passed_by_rank)
            self.read(numbers, "numbers", "value")
        return tuple(by_rank)

    def read(self, items: Sequence[Any], name: str, meant: str = "") -> list[Any]:
        """Return one argument, by rank."""
        kinds = {_kind(item) for item in items}
        if len(kinds) > 1:
            self.is_local = True
            return [_number_of(item) for item in items]
        (kind,) = kinds
        if kind == "t":
            return [self._operand(items)] * len(items)
        if kind == "s":
            return [item[1] for item in items]
        if kind == "c":
            parts = (part for item in items for part in item[1:])
            self.is_local |= any(map(self._numbers.may_be_made_of_size, parts))
            return [complex(*item[1:]) for item in items]
        if kind == "n":
            numbers = [_number_of(item) for item in items]
            expressions = [item[2] if isinstance(item, tuple) else None for item in items]
            if self._proofs.axis == "tp":  # a layer of one rank may have its share in its source
                expressions = [*map(without_source, expressions)]
            self._number(numbers, name, meant, expressions)
            return numbers
        if kind != "l":
            is_flag = meant == "value" and kind == "bool"
            self.is_local |= is_flag and any(map(self._numbers.may_be_made_of_size, items))
            return list(items)
        first = items[0]
        if len({len(item) for item in items}) > 1:  # lists of different lengths, of numbers only
            self.full_sizes[name] = [None] * (len(first) - 1)
            return [[_number_of(one) for one in item[1:]] for item in items]
        lists: list[list[Any]] = [[] for _ in items]
        for i in range(1, len(first)):
            for of_rank, value in zip(lists, self.read([it[i] for it in items], name, meant)):
                of_rank.append(value)
        return lists

    def _operand(self, items: Sequence[Any]) -> Operand:
        value = items[0][1]
        if any(item[1] != value for item in items):
            value = None
            placement = chunks.combine([item[1] for item in items], self._proofs.makers)
        else:
            placement = None if value is None else self._proofs.placement(value)
        shapes = tuple(tuple(item[2]) for item in items)
        self.values.append(value)
        operand = Operand(shapes, dtype_of(items[0][3]), placement)
        self.operands.append(operand)
        return operand

    def _number(
        self, numbers: Sequence[Any], name: str, meant: str, expressions: Sequence[Any]
    ) -> None:
        known, is_size = None, meant == "size"
        sources = {leaf[1] for e in expressions if e is not None for leaf in leaves(e)}
        self.sized_by += sorted(sources - {0})
        if any(
            expression is not None and expression[:2] == ("read", 0) for expression in expressions
        ):
            self.is_local = True  # from code that is not recorded
        if (
            is_size
            and self.operands
            and any(e is not None and is_of_no_value(e) for e in expressions)
        ):
            expressions = [None] * len(expressions)  # treated as plain numbers
        if expressions[0] is not None and all(e == expressions[0] for e in expressions):
            known = evaluate(expressions[0], self._proofs.number)
        if is_size and expressions[0] is not None and self._has_own_factor(expressions[0]):
            known = None  # ``x.shape[0] * heads``, where the heads may be this rank's share
        is_share = self._is_view and known == numbers[0]
        if expressions[0] is not None and (is_share or not self.operands):
            # A size of a whole dim, divided by the number of ranks, may be a rank's share. (Slices
            # and the like are along a dim whose placement their operand shows.)
            known = None if divides_by(expressions[0], self._proofs.num_ranks) else known
        if is_size:
            sizes = self.full_sizes.setdefault(name, [])
            sizes.append(known)
            if expressions[0] is not None and expressions[0][0] == "source":
                self._literals.append((name, len(sizes) - 1, numbers[0]))
            elif expressions[0] is not None:
                self._with_expression.add(name)
                shard = self._proofs.shard_of_dim(expressions[0]) if name == "size" else None
                if shard is not None:
                    self.shards_passed[len(sizes) - 1] = shard
            elif len(set(numbers)) == 1:
                self._plain.append((name, len(sizes) - 1, numbers[0]))
        for number, expression in zip(numbers, expressions) if meant else ():  # not dims
            plain = {number} if expression is None else plain_numbers(expression)
            self.is_local |= any(map(self._numbers.is_local, plain))
        if is_size:
            return
        if expressions[0] is not None:
            self.is_local |= known is None or any(known != number for number in numbers)
        elif meant == "value" and any(map(self._numbers.may_be_made_of_size, numbers)):
            self.is_local = True
            self.ambiguous.append(numbers[0])

    def _has_own_factor(self, expression: Any) -> bool:
        """Whether a plain number among the factors may be this rank's share of a larger one. Along
        tp ranks share heads and features; along dp only numbers that equal the size of a split dim.
        """
        found = factors(expression)
        is_split = any(operand.shard is not None for operand in self.operands)
        return (
            bool(found)
            if is_split and self._proofs.axis == "tp"
            else bool(found & self._numbers.possible_shard_sizes)
        )

    def conclude_sizes(self, operation: str, arguments: Mapping[str, Any]) -> None:
        """Infer which plain numbers, passed by all ranks, the unsharded program passes, too: those
        that can't be the local size of a split dim.

        If a tensor is split, they are sizes of its split dim or of other dims, since it is split
        along one; the operation's own rule decides which. Pieces of a whole tensor are the same on
        all ranks.
        """
        shards = [operand for operand in self.operands if operand.shard is not None]
        rule_decides = bool(shards) or self._is_view or operation in _SPLITS
        # Along dp ranks share rows, whose numbers are known; along tp also heads and features.
        is_of_rows = self._is_view and bool(shards) and self._proofs.axis == "dp"
        known_names = set(self._with_expression)
        beside_plain = {name for name, _, _ in self._plain} - known_names
        for name, place, number in self._literals:
            if name in beside_plain:  # the rule decides on all of them
                self.full_sizes[name][place] = None
                self._plain.append((name, place, number))
            else:
                known_names.add(name)
        for name, place, number in self._plain:
            is_literal = not rule_decides or (not shards and name in self._with_expression)
            is_literal &= number not in self._numbers.possible_shard_sizes
            is_literal &= number in (-1, 0, 1) or not self._numbers.may_be_made_of_size(number)
            if is_literal or (self._is_view and number == -1):
                self.full_sizes[name][place] = number
            elif operation == "aten::slice" and name == "end" and self._takes_all(arguments):
                self.full_sizes[name][place] = number  # so does a larger one
            elif operation == "aten::expand" and shards:
                self.full_sizes[name][place] = self._expanded(shards[0], name, place, number)
            elif is_of_rows and not self._numbers.may_count_rows(number):
                self.full_sizes[name][place] = number
                known_names.add(name)
            else:
                self.ambiguous.append(number)
        if rule_decides:
            self.full_sizes = {
                name: sizes for name, sizes in self.full_sizes.items() if name in known_names
            }

    @property
    def sizes_passed(self) -> dict[int, int]:
        """The sizes that the unsharded program passes to a factory, by position: those that are
        known, and plain numbers that are the same on all ranks.
        """
        plain = {place: number for name, place, number in self._plain if name == "size"}
        known = enumerate(self.full_sizes.get("size", []))
        return plain | {place: size for place, size in known if size is not None}

    def _takes_all(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a slice extends to the end of a dim that is whole."""
        operand, end = self.operands[0], arguments["end"]
        dim = arguments["dim"] % operand.ndim
        is_whole = operand.placement == REPLICATED and end is not None
        return is_whole and all(end >= shape[dim] for shape in operand.shapes)

    def _expanded(self, operand: Operand, name: str, place: int, number: int) -> int:
        """Return the full size for a plain size of an expanded tensor: along the split dim, the
        dim's full size.
        """
        dim = place - len(self.full_sizes[name]) + operand.ndim
        shard = operand.shard
        if shard is not None and shard.dim == dim and number == operand.shapes[0][dim]:
            return full_size(shard, operand.shapes) or number
        return number


def _kind(item: Any) -> str:
    """Return the mark of an encoded argument, "n" for numbers."""
    if isinstance(item, tuple):
        return str(item[0])
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
    return "n" if is_number else type(item).__name__


def _number_of(item: Any) -> Any:
    return item[1] if isinstance(item, tuple) else item
