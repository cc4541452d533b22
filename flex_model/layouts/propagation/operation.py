"""Describes one operation as all ranks of a mesh axis ran it: the input of a propagation rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard, ShardLayout

Shape = tuple[int, ...]

REPLICATED = Replicate()
PARTIAL = Partial()


class ArgumentsDifferError(Exception):
    """Raised when a rule reads one value of an argument that differs between the ranks."""


def differ(values: Sequence[Any]) -> bool:
    """Whether the values are not all equal; NaN equals NaN."""
    first = values[0]
    return any(other != first and (other == other or first == first) for other in values)


@dataclass(frozen=True, eq=False)
class Operand:
    """One tensor that an operation reads or makes, on all ranks of the axis.

    Attributes:
        shapes: Local shapes, by rank.
        placement: Along the axis; None if it is not known, and for outputs.
        value: The tensor's value in the logs; None if it is not known, and for outputs.
    """

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    placement: Placement | None = None
    value: Any = None

    @property
    def ndim(self) -> int:
        return len(self.shapes[0])

    @property
    def shard(self) -> Shard | None:
        """The placement, if the tensor is known to be split."""
        return self.placement if isinstance(self.placement, Shard) else None

    @cached_property
    def full_shape(self) -> Shape:
        """The shape of the full tensor along this axis. ValueError if the shapes don't fit."""
        if not isinstance(self.placement, Shard):
            return self.shapes[0]
        return ShardLayout(tp=self.placement).full_shape(self.shapes, 1, len(self.shapes))


def full_size(placement: Shard, shapes: tuple[Shape, ...]) -> int | None:
    """Return the full size of the split dim; None if the shapes don't fit the placement."""
    try:
        return Operand(shapes, torch.float32, placement).full_shape[placement.dim]
    except ValueError:
        return None


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation, run by each rank of the axis on its local tensors.

    Attributes:
        name: The name of the ATen operation without namespace and overload, for in-place operations
            without the trailing underscore ("add" for ``aten::add_.Tensor``).
        overload: ``"Tensor"`` of ``aten::add_.Tensor``.
        arguments: By rank: every argument of the operation's schema by name, defaults included.
            Tensors are `Operand`s (lists of them where the schema has lists), the same objects for
            all ranks; all else is as it was passed.
        outputs: The tensors made; for an in-place operation, the tensors written.
        full_sizes: For arguments that are sizes: the size that the unsharded program passes, if it
            is known; None in the list if only this rank's number is known.
        tags: Of the ATen operation.
    """

    name: str
    arguments: tuple[Mapping[str, Any], ...]
    outputs: tuple[Operand, ...]
    overload: str = ""
    full_sizes: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    tags: Sequence[Any] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.arguments)

    def __getitem__(self, name: str) -> Any:
        """Return the argument's value. `ArgumentsDifferError` if it is not the same on all
        ranks.
        """
        values = self.by_rank(name)
        if differ(values):
            raise ArgumentsDifferError(name)
        return values[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Return ``operation[name]``; ``default`` if the schema has no such argument."""
        return self[name] if name in self.arguments[0] else default

    def by_rank(self, name: str) -> list[Any]:
        """Return the argument's values, by rank."""
        return [arguments[name] for arguments in self.arguments]

    def with_arguments(self, **given: Any) -> Operation:
        """Return the operation with these arguments, the same on all ranks."""
        return replace(self, arguments=tuple({**of_rank, **given} for of_rank in self.arguments))

    def without(self, *names: str) -> Operation:
        """Return the operation without arguments that it does not read."""
        arguments = tuple(
            {name: value for name, value in of_rank.items() if name not in names}
            for of_rank in self.arguments
        )
        return replace(self, arguments=arguments)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Every tensor that the operation reads, in the order of its schema."""
        found: list[Operand] = []
        for value in self.arguments[0].values():
            if isinstance(value, Operand):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [item for item in value if isinstance(item, Operand)]
        return tuple(found)

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """The values of those tensors."""
        return tuple(operand.value for operand in self.operands)


RuleFunction = Callable[[Operation], "Placement | Sequence[Placement | None] | None"]
_Function = TypeVar("_Function", bound=RuleFunction)


@dataclass(frozen=True)
class Rule:
    """A rule, and the arguments that it reads by rank: those may differ between ranks, and from
    those of the unsharded program.

    Attributes:
        is_local: Whether the backward of an operation of another library communicates nothing.
    """

    function: RuleFunction
    per_rank: frozenset[str] = frozenset()
    is_local: bool = False


#: By name: of ATen operations without namespace, of others ``"namespace::name"``.
RULES: dict[str, Rule] = {}


def rule(names: str | Iterable[str], per_rank: str = "") -> Callable[[_Function], _Function]:
    """Add a function to the rules, for operations of these names."""

    def add(function: _Function) -> _Function:
        each = names.split() if isinstance(names, str) else names
        RULES.update(dict.fromkeys(each, Rule(function, frozenset(per_rank.split()))))
        return function

    return add
