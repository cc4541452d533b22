"""Which rows, positions, heads or units of a full tensor are meant, as numbers of its dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from torch import Tensor

from flex_model.distributed.layout import Shape
from flex_model.selection.selectors import (
    Parsed,
    Selector,
    is_everything,
    is_int,
    numbers,
    parse,
    show,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DIMS = {"rows": 0, "positions": 1, "heads": -1, "units": -1}


class SelectionArguments(TypedDict, total=False):
    """What ready edits and `Select` take, by keyword; all that is not given is meant in full.

    Each of rows, positions, heads and units is an int, a slice, a sequence of ints, or a boolean
    mask of that dim; negative ints count from the end. Out of range is an IndexError; a slice is
    cut, as Python does it.

    rows: Dim 0: rows of the whole batch, over all data-parallel ranks and micro-batches.
    positions: Dim 1 of ``(rows, positions, units)``, counted within one call of the module. In
        ``generate()`` with a cache, the first call has the whole prompt, and each later one has one
        position, which is number 0: ``"every"`` (the default) and ``"last"`` are what makes sense
        at all of them. A boolean mask ``(rows, positions)`` of the whole batch says it for each
        row.
    heads: Equal parts of the last dim, ``num_heads`` of them: before an output projection.
    num_heads: How many there are in all.
    units: The last dim.
    dims: Where the tensor has them elsewhere: ``{"heads": 1, "positions": 2}`` for attention
        patterns, ``{"positions": 0, "rows": 1}`` for Megatron. Heads that have a dim of their own
        need no ``num_heads``.
    """

    rows: Selector
    positions: Selector
    heads: Selector
    num_heads: int
    units: Selector
    dims: Mapping[str, int]


class Selection:
    """See `SelectionArguments`.

    Attributes:
        mask_by_row: ``positions=`` where it is a mask ``(rows, positions)``.

    Raises:
        TypeError, ValueError: arguments that say nothing.
    """

    def __init__(self, **arguments: Unpack[SelectionArguments]) -> None:
        unknown = set(arguments) - set(SelectionArguments.__annotations__)
        if unknown:
            raise TypeError(
                f"unknown arguments {sorted(unknown)}; what is meant of a tensor is said by "
                f"{', '.join(SelectionArguments.__annotations__)}"
            )
        self.arguments = arguments
        dims: object = arguments.get("dims")
        if dims is not None and not isinstance(dims, Mapping):
            raise TypeError(f"dims: expected a mapping, as {{'rows': 1}}, got {dims!r}")
        self._given = given = dict(dims or {})
        if not set(given) <= set(_DIMS) or not all(is_int(dim) for dim in given.values()):
            raise ValueError(f"dims: expected dims by the names {sorted(_DIMS)}, got {given!r}")
        self._dims = {**_DIMS, **given}
        self.num_heads = arguments.get("num_heads")
        self._check_heads(arguments)
        self._selected = {
            name: parse(name, arguments.get(name))
            for name in _DIMS
            if not is_everything(arguments.get(name))
        }
        self.mask_by_row: Tensor | None = None
        positions = self._selected.get("positions")
        if isinstance(positions, Tensor) and positions.dim() == 2:
            if "rows" in self._selected:
                raise ValueError("positions has a mask for each row: leave out rows=")
            del self._selected["positions"]
            self.mask_by_row = positions

    def _check_heads(self, arguments: SelectionArguments) -> None:
        heads, units = arguments.get("heads"), arguments.get("units")
        if self.num_heads is not None and (not is_int(self.num_heads) or self.num_heads < 1):
            raise ValueError(f"num_heads: expected how many heads there are, got {self.num_heads}")
        if heads is None:
            return
        if "heads" in self._given:
            return
        if self.num_heads is None:
            raise ValueError(
                "heads= needs num_heads=, how many there are over all ranks; or dims={'heads': 1} "
                "where heads have a dim of their own"
            )
        if units is not None:
            raise ValueError("give heads= or units=, not both: they choose along one dim")

    @property
    def is_whole(self) -> bool:
        """Whether all of a tensor is meant."""
        return not self._selected and self.mask_by_row is None

    @property
    def is_of_dims(self) -> bool:
        """Whether numbers of dims say a part of what is meant."""
        return bool(self._selected)

    def dim(self, name: str, shape: Shape) -> int:
        """Of rows, positions, heads or units, counted from 0.

        Raises:
            ValueError: the tensor has no such dim, or others than three and it was not said which
                one is meant.
        """
        is_usual = len(shape) == 3 or (name == "heads" and len(shape) == 2)
        if name in ("positions", "heads") and not is_usual and name not in self._given:
            raise ValueError(
                f"{name}: the tensor's shape is {tuple(shape)}, not (rows, positions, "
                f"units); say which dim is meant with dims={{{name!r}: ...}}"
            )
        dim = self._dims[name]
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"{name} are dim {dim}, and the tensor's shape is {tuple(shape)}; say where "
                f"they are with dims={{{name!r}: ...}}"
            )
        return dim % len(shape)

    def numbers(
        self, shape: Shape, rows: tuple[Sequence[int], int] | None = None
    ) -> dict[int, Sequence[int]]:
        """By dim, counted from 0: the numbers chosen of it. Dims of which all is meant are left
        out.

        Args:
            rows: Which rows of how many the tensor has; None: all.

        Raises:
            IndexError, ValueError: the tensor has no such numbers, or no such dims.
        """
        found: dict[int, Sequence[int]] = {}
        names: dict[int, str] = {}
        for name, selected in self._selected.items():
            dim = self.dim(name, shape)
            if dim in found:
                raise ValueError(
                    f"{names[dim]} and {name} are both dim {dim} of {tuple(shape)}; say where they "
                    "are with dims="
                )
            names[dim] = name
            found[dim] = self._along(name, selected, shape, dim, rows)
        return found

    def _along(
        self,
        name: str,
        selected: Parsed,
        shape: Shape,
        dim: int,
        rows: tuple[Sequence[int], int] | None,
    ) -> Sequence[int]:
        size, where = shape[dim], f"dim {dim} of {tuple(shape)}"
        if name == "rows" and rows is not None:
            here = {row: place for place, row in enumerate(rows[0])}
            wanted = numbers(name, selected, rows[1], f"rows of the batch, {where}")
            return [here[row] for row in wanted if row in here]
        if name != "heads" or name in self._given:
            return numbers(name, selected, size, where)
        assert self.num_heads is not None
        if size % self.num_heads:
            raise ValueError(
                f"num_heads: {self.num_heads} heads can't have equal parts of {where}; hook what "
                "the heads wrote, such as the input of the output projection"
            )
        width = size // self.num_heads
        heads = numbers(name, selected, self.num_heads, where)
        return [unit for head in heads for unit in range(head * width, (head + 1) * width)]

    def __repr__(self) -> str:
        return ", ".join(f"{name}={show(value)}" for name, value in self.arguments.items())
