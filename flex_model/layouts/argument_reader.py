"""Encodes the arguments of operations for the log, and reads those of one operation from the
entries of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.distributed.placement import Shard
from flex_model.layouts import logged, memory_map
from flex_model.layouts.factories import BY_SIZES
from flex_model.layouts.logged import Value
from flex_model.layouts.operation_log import dtype_of
from flex_model.layouts.propagation.operation import Operand, Shape, differ, full_size
from flex_model.layouts.propagation.slicing import SPLITS
from flex_model.layouts.propagation.views import TO_SIZES
from flex_model.layouts.sizes import (
    FACTOR_ARGUMENTS,
    SIZE_ARGUMENTS,
    Expression,
    divides_by,
    encoded,
    evaluate,
    from_numpy,
    has_factors,
    is_of_no_value,
    is_quotient,
    leaves,
)

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs
    from flex_model.layouts.recorder import Recorder


_SLICES = {f"aten::{name}" for name in (*SPLITS, "slice", "narrow", "select", "unbind")}
_VIEWS = {f"aten::{name}" for name in (*TO_SIZES, "_reshape_alias", "unflatten")}
_FACTORIES = {f"aten::{name}" for name in BY_SIZES}
_OF_RANGE = {"start", "end", "step", "steps"}
_WITH_EXPRESSION = SIZE_ARGUMENTS | FACTOR_ARGUMENTS


class ArgumentReader:
    """The arguments of one operation, from the entries of all ranks.

    Attributes:
        operands: Its tensors, in order.
        full_sizes: See `Operation`.
        shards_passed: By position in the argument "size" or "repeats": how the tensor is split
            whose split dim has the size that was passed.
        differs: Whether ranks passed what no rule can compare: another kind of argument, other
            elements.
        are_others: Whether a tensor is not the same one of the program on all ranks.
        unrecorded: The local shapes of tensors of which nothing is known on any rank.
        sized_by: The values whose sizes are among its numbers.
        are_plain: Whether no size is known to be another one in the unsharded program, or may be.
        scales_by_size: Whether the unsharded program scales by another number, or may.
    """

    def __init__(self, proofs: AxisProofs, operation: str = "") -> None:
        self._proofs, self._operation = proofs, operation
        self._is_view = operation in _VIEWS
        self._makes_anew = operation in _FACTORIES
        self.operands: list[Operand] = []
        self.full_sizes: dict[str, list[int | None]] = {}
        self.differs = self.are_others = False
        self.unrecorded: list[Shape] = []
        self.shards_passed: dict[int, Shard] = {}
        self.sized_by: list[Value] = []
        self._plain: list[tuple[str, int, Any]] = []  # sizes without an expression
        self._with_expression: set[str] = set()  # arguments with an expression
        self._at_least: dict[tuple[str, int], int] = {}  # sizes that may be larger, or the same
        self.are_plain, self.scales_by_size = True, False
        self._shows_split = False  # whether the unsharded program passes another size somewhere

    def arguments(self, schema: Any, entries: tuple[logged.Op, ...]) -> tuple[dict[str, Any], ...]:
        by_rank: list[dict[str, Any]] = [{} for _ in entries]
        # A call leaves out an argument that equals its default, which may hold on some ranks only.
        names = [argument.name for argument in schema.arguments]
        passed_by_rank = [{**dict(zip(names, one.args)), **dict(one.kwargs)} for one in entries]
        for argument in schema.arguments:
            name, default = argument.name, argument.default_value
            if any(name in passed for passed in passed_by_rank):
                default = ("l", *default) if isinstance(default, (list, tuple)) else default
                values = self.read([passed.get(name, default) for passed in passed_by_rank], name)
            else:
                values = [default] * len(entries)
            for arguments, value in zip(by_rank, values):
                arguments[name] = value
        self.differs |= len({passed.get("content") for passed in passed_by_rank}) > 1
        return tuple(by_rank)

    def read(self, items: Sequence[Any], name: str) -> list[Any]:
        """Return one argument, by rank."""
        kinds = {_kind(item) for item in items}
        if len(kinds) > 1:
            self.differs = True
            return [_number_of(item) for item in items]
        (kind,) = kinds
        if kind == "t":
            return [self._operand(items)] * len(items)
        if kind == "c":
            return [complex(*item[1:]) for item in items]
        if kind == "n":
            numbers = [_number_of(item) for item in items]
            expressions = [item[2] if isinstance(item, tuple) else None for item in items]
            if name in SIZE_ARGUMENTS:
                self._size(numbers, name, expressions)
            elif name in FACTOR_ARGUMENTS:
                self.scales_by_size |= self._may_be_size(numbers, expressions)
            return numbers
        if kind != "l":
            return list(items)
        first = items[0]
        if len({len(item) for item in items}) > 1:  # lists of different lengths, of numbers only
            self.full_sizes[name] = [None] * (len(first) - 1)
            return [[_number_of(one) for one in item[1:]] for item in items]
        lists: list[list[Any]] = [[] for _ in items]
        for i in range(1, len(first)):
            for of_rank, value in zip(lists, self.read([it[i] for it in items], name)):
                of_rank.append(value)
        return lists

    def _operand(self, items: Sequence[Any]) -> Operand:
        values = [item[1] for item in items]
        value, placement = self._proofs.value_of_ranks(values)
        self.are_others |= placement is None and any(one != values[0] for one in values)
        shapes = tuple(tuple(item[2]) for item in items)
        if all(item[1] is None for item in items):
            self.unrecorded.append(shapes[0])
        operand = Operand(shapes, dtype_of(items[0][3]), placement, value)
        self.operands.append(operand)
        return operand

    def _size(self, numbers: Sequence[Any], name: str, expressions: Sequence[Any]) -> None:
        sources = {leaf[1] for e in expressions if e is not None for leaf in leaves(e)}
        self.sized_by += sorted(sources - {0})
        if self.operands and any(e is not None and is_of_no_value(e) for e in expressions):
            expressions = [None] * len(expressions)  # treated as plain numbers
        first, known = expressions[0], None
        sizes = self.full_sizes.setdefault(name, [])
        if first is None:
            if len(set(numbers)) == 1:
                self._plain.append((name, len(sizes), numbers[0]))
            sizes.append(None)
            return
        if all(e == first for e in expressions):
            known = evaluate(first, self._proofs.number)
        is_split = any(operand.shard is not None for operand in self.operands)
        if is_split and self._proofs.axis == "tp" and has_factors(first):
            known = None  # ``x.shape[0] * heads``, where the heads may be this rank's share
        is_share = self._is_view and known == numbers[0] and self._proofs.axis == "tp"
        if (is_share or not self.operands) and divides_by(first, self._proofs.num_ranks):
            # A size of a whole dim, divided by the number of ranks, may be a rank's share. (Slices
            # and the like are along a dim whose placement their operand shows.)
            if is_share and is_quotient(first):
                self._at_least[name, len(sizes)] = numbers[0]
            known = None
        self._with_expression.add(name)
        shard = self._proofs.shard_of_dim(first) if name in ("size", "repeats") else None
        if shard is not None:
            self.shards_passed[len(sizes)] = shard
        sizes.append(known)
        is_same = all(own == known for own in numbers)
        self.are_plain &= is_same
        self._shows_split |= known is not None and not is_same

    def _may_be_size(self, factors: Sequence[Any], expressions: Sequence[Any]) -> bool:
        """Whether the unsharded program passes another factor, or may: a size that is not known to
        be whole, or along dp a plain number that may count rows, ``len(h)``, ``1 / h.numel()``.
        """
        first, is_tp = expressions[0] or ("number", factors[0]), self._proofs.axis == "tp"
        if differ(factors):
            return False  # rules compare them
        if differ(expressions):
            return True
        if is_tp and divides_by(first, self._proofs.num_ranks):
            return True  # by a rank's share
        plain = () if is_tp else (number for _, number in leaves(first, "number"))
        known = evaluate(first, self._proofs.number)
        return known != factors[0] or any(map(self._may_count_elements, plain))

    def _may_count_elements(self, number: float) -> bool:
        """Whether the number, or its reciprocal, may be that of all elements of a rank's rows."""
        finite = [n for n in (number, 1 / (number or math.inf)) if math.isfinite(n)]
        counts = {round(n) for n in finite if math.isclose(n, round(n))} - {0}
        is_one = 1 in self._proofs.split_sizes  # of which any number is a multiple
        return any(is_one or self._may_count_rows(count) for count in counts)

    def conclude_sizes(self, unsettled: set[int]) -> None:
        """Infer the sizes that the unsharded program passes where ranks pass plain numbers.

        They matter at the split dim only, so if no tensor is split it passes the same. Of a view
        or a slice of a split tensor, the rule decides which of them are at the split dim. Along dp,
        rows that stand first are at the -1 that a view begins with, or at a size that is computed
        of them. A range has its plain numbers if the full size of its end is known. A whole tensor
        has as many elements as in the unsharded program, so the sizes of a view of it that are not
        smaller there are the same.

        Args:
            unsettled: Sizes of the result that may be a rank's own: of a factory, those of split
                dims. If another size shows which dim is split, none is.
        """
        unsettled = set() if self._shows_split else unsettled
        shards = [operand for operand in self.operands if operand.shard is not None]
        if self._makes_anew:  # ``x.new_zeros(2, 6)``: of x it has neither dims nor elements
            shards = []
        rule_decides = self._is_view or self._operation in _SLICES
        kept = set(self._with_expression)
        split = shards[0].shard if shards else None
        num_same = 0  # dims that a view keeps
        rows_dim = -1 if split is None else split.dim
        hides_row = bool(shards) and self._hides_row(shards[0].shapes[0], rows_dim)
        is_elsewhere = rows_dim == 0 and any(one[1:] == (0, -1) for one in self._plain)
        is_elsewhere |= self._shows_split
        for name, place, number in self._plain:
            is_range = name in _OF_RANGE and bool(self._with_expression)
            may_be_own = bool(unsettled) and not is_range
            if name in ("size", "repeats"):
                is_last = 0 < place == len(self.full_sizes[name]) - 1
                is_last &= [one for *_, one in self._plain].count(number) == 1  # no square
                may_be_own = number in unsettled and self._proofs.may_count(number, is_last)
            if not shards and may_be_own:
                continue
            if not shards or (self._is_view and number == -1):
                self.full_sizes[name][place] = number
            elif self._operation == "aten::expand":
                self.full_sizes[name][place] = self._expanded(shards[0], name, place, number)
            elif not rule_decides:
                self.full_sizes[name][place] = number
            elif self._is_view and self._proofs.axis == "dp":
                is_kept = place == num_same <= rows_dim
                is_same_dim = is_kept and number == shards[0].shapes[0][place]
                is_same_dim &= not (hides_row and number == 1) and not self._shows_split
                if place == rows_dim and split is not None and number == split.parts > 1:
                    is_same_dim = False  # blocks of one row: ``torch.cat([a, b]).view(2, -1)``
                num_same += is_same_dim
                if is_same_dim and split is not None and place == rows_dim:  # x.view(len(x), -1)
                    self.full_sizes[name][place] = full_size(split, shards[0].shapes)
                    kept.add(name)
                elif is_same_dim or is_elsewhere or not self._may_count_rows(number):
                    self.full_sizes[name][place] = number
                    kept.add(name)
        for name, sizes in self.full_sizes.items() if self._is_view and not shards else ():
            own = [self._at_least.get((name, i), size) for i, size in enumerate(sizes)]
            if all(size is not None and size > 0 for size in own):
                self.full_sizes[name] = own
        if rule_decides or shards:
            self.full_sizes = {
                name: sizes for name, sizes in self.full_sizes.items() if name in kept
            }

    def _hides_row(self, shape: Shape, rows_dim: int) -> bool:
        """Whether a 1 passed to a view may be no rank's one row: it drops or adds dims of size 1,
        of which the row may be any, or has a -1, where all rows may be.
        """
        plain = [number for _, _, number in self._plain]
        if shape[rows_dim] != 1 or -1 in plain:
            return shape[rows_dim] == 1
        ones = plain.count(1)
        return ones != shape.count(1) and (ones > 1 or 1 in shape[:rows_dim])

    def _may_count_rows(self, number: int) -> bool:
        """Whether the number may be a rank's size of a split dim, or that joined with others."""
        sizes = self._proofs.split_sizes
        return number in sizes or any(number % size == 0 for size in sizes if size > 1)

    @property
    def sizes_passed(self) -> dict[int, int]:
        """The sizes that the unsharded program passes to a factory, by position: those that are
        known, and plain numbers that are the same on all ranks and count no rows.
        """
        sizes = self.full_sizes.get("size", [])
        plain = {
            place: number
            for name, place, number in self._plain
            if name == "size" and not self._proofs.may_count(number, 0 < place == len(sizes) - 1)
        }
        known = enumerate(sizes)
        return plain | {place: size for place, size in known if size is not None}

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


Encoded = tuple[Any, Any, tuple[Any, ...]]


class ArgumentEncoder:
    """Encodes the arguments of one operation."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._sizes = recorder, recorder.sizes
        self._carriers: list[Any] = []

    def encode(self, schema: Any, args: Any, kwargs: Any) -> Encoded:
        """Return positional and keyword arguments, and the values of those that carry gradients."""
        arguments = schema.arguments if schema is not None else ()
        is_called = schema is not None and self._sizes.are_of(schema.name)
        by_place = self._sizes.by_place(args) if is_called else None
        passed = None if by_place is None else iter(by_place)
        names = [argument.name for argument in arguments] + [""] * len(args)
        positional = tuple(
            self._encoded(value, is_called and name in _WITH_EXPRESSION, passed)
            for name, value in zip(names, args)
        )
        if schema is not None and self._recorder.owner.stated_sizes and schema.name in _VIEWS:
            shape, kept = memory_map.shape_of(args[0]), 0
            if schema.name == "aten::unflatten":
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                kept = len(shape) - 1 if dim in (-1, len(shape) - 1) else len(shape)
            positional = tuple(self._with_stated(value, shape, kept) for value in positional)
        keyword = tuple(
            (name, self._encoded(value, is_called and name in _WITH_EXPRESSION))
            for name, value in sorted(kwargs.items())
        )
        if schema is not None and schema.name == "aten::lift_fresh":
            keyword += (("content", _content(args[0])),)
        return positional, keyword, tuple(self._carriers)

    def _with_stated(self, value: Any, shape: tuple[int, ...], num_kept: int) -> Any:
        """Return the encoded sizes of a view, after ``num_kept`` dims that stay. Where the last two
        divide the last dim into heads, ``(..., -1, size)``, ``(..., heads, size)`` or ``(...,
        heads, -1)``, the last one gets an expression if the module states it.
        """
        if not isinstance(value, tuple) or value[:1] != ("l",) or len(value) < 3:
            return value
        (heads, size), stated = value[-2:], self._recorder.owner.stated_sizes
        if size == -1 and type(heads) is int and heads > 0 and shape[-1] % heads == 0:
            size = shape[-1] // heads
        if type(heads) is not int or type(size) is not int or size not in stated:
            return value
        is_new_dim = num_kept + len(value) - 1 == len(shape) + 1 > 3
        if heads != -1 and not (is_new_dim and heads * size == shape[-1]):
            return value  # other dims are joined or added
        return (*value[:-1], ("n", size, ("number", size)))

    def _encoded(
        self, value: Any, is_size: bool = False, passed: Iterator[Expression | None] | None = None
    ) -> Any:
        """Encode one argument for the log.

        Args:
            is_size: Whether its numbers are sizes that the running call was passed.
            passed: The expressions of this and the following numbers, if they are known by
                position.
        """
        if isinstance(value, Tensor):
            known = self._recorder.value(value)
            carries = value.requires_grad and torch.is_grad_enabled()
            if carries or (self._recorder.is_recomputed and value.is_floating_point()):
                self._carriers.append(known)
            return "t", known, memory_map.shape_of(value), str(value.dtype)
        value = from_numpy(value)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            if passed is not None:
                expression = next(passed)
                return encoded(value, expression if is_size else None)
            return self._sizes.encoded(value) if is_size else encoded(value)
        if isinstance(value, (list, tuple)):
            numbers = self._sizes.of_list(value) if passed is None and is_size else None
            if numbers is not None:
                return "l", *numbers
            return "l", *(self._encoded(item, is_size, passed) for item in value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, complex):
            return "c", value.real, value.imag
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        return type(value).__name__


def _content(constant: Tensor) -> str:
    """Return a hash of the elements of a tensor that was made of Python numbers."""
    data = memory_map.bytes_of(constant)
    return "" if data is None else blake2b(data, digest_size=8).hexdigest()
