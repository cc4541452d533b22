"""Selection of rows, positions, heads or units of a full tensor, as indices of its dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from torch import Tensor

from flex_model.distributed.placement import Shape
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
    """The keyword arguments of edits and `Select`; a dim without an argument is selected in full.

    Each of rows, positions, heads and units is an int, a slice, a sequence of ints, or a boolean
    mask of that dim; negative ints count from the end. An int out of range is an IndexError; a
    slice is clipped, as in Python.

    rows: Dim 0: rows of the whole batch, over all data-parallel ranks and micro-batches.
    positions: Dim 1 of ``(rows, positions, units)``, counted within one call of the module. In
        ``generate()`` with a cache, the first call has the whole prompt, and each later one has one
        position, with index 0: only ``"every"`` (the default) and ``"last"`` make sense for all
        calls. A boolean mask ``(rows, positions)`` of the whole batch selects positions for each
        row.
    heads: Equal parts of the last dim, ``num_heads`` of them, as before an output projection.
    num_heads: The number of heads over all ranks.
    units: The last dim.
    dims: The dims of a tensor in another order: ``{"heads": 1, "positions": 2}`` for attention
        patterns, ``{"positions": 0, "rows": 1}`` for Megatron. Heads with their own dim need no
        ``num_heads``.
    """

    rows: Selector
    positions: Selector
    heads: Selector
    num_heads: int
    units: Selector
    dims: Mapping[str, int]


class Selection:
    """A selection made from `SelectionArguments`.

    Attributes:
        mask_by_row: ``positions=``, if it is a mask ``(rows, positions)``.

    Raises:
        TypeError, ValueError: invalid arguments.
    """

    def __init__(self, **arguments: Unpack[SelectionArguments]) -> None:
        unknown = set(arguments) - set(SelectionArguments.__annotations__)
        if unknown:
            raise TypeError(
                f"unknown arguments {sorted(unknown)}; a part of a tensor is selected by "
                f"{', '.join(SelectionArguments.__annotations__)}"
            )
        self.arguments = arguments
        dims: object = arguments.get("dims")
        if dims is not None and not isinstance(dims, Mapping):
            raise TypeError(f"dims: expected a mapping, as {{'rows': 1}}, got {dims!r}")
        self._given = given = dict(dims or {})
        if not set(given) <= set(_DIMS) or not all(is_int(dim) for dim in given.values()):
            raise ValueError(f"dims: expected a mapping of {sorted(_DIMS)} to ints, got {given!r}")
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
                raise ValueError("positions is a mask (rows, positions): leave out rows=")
            del self._selected["positions"]
            self.mask_by_row = positions

    def _check_heads(self, arguments: SelectionArguments) -> None:
        heads, units = arguments.get("heads"), arguments.get("units")
        if self.num_heads is not None and (not is_int(self.num_heads) or self.num_heads < 1):
            raise ValueError(f"num_heads: expected a positive int, got {self.num_heads}")
        if heads is None:
            return
        if "heads" in self._given:
            return
        if self.num_heads is None:
            raise ValueError(
                "heads= needs num_heads=, their number over all ranks; or dims={'heads': 1} if the "
                "heads have their own dim"
            )
        if units is not None:
            raise ValueError("give heads= or units=, not both: they select along the same dim")

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensor is selected."""
        return not self._selected and self.mask_by_row is None

    @property
    def has_indices(self) -> bool:
        """Whether indices of dims are selected, with or without a mask by row."""
        return bool(self._selected)

    def dim(self, name: str, shape: Shape) -> int:
        """Return the dim of rows, positions, heads or units, counted from the front.

        Raises:
            ValueError: the tensor has no such dim, or has not three dims and ``dims=`` is missing.
        """
        is_usual = len(shape) == 3 or (name == "heads" and len(shape) == 2)
        if name in ("positions", "heads") and not is_usual and name not in self._given:
            raise ValueError(
                f"{name}: expected a tensor (rows, positions, units), got the shape "
                f"{tuple(shape)}; give the dim with dims={{{name!r}: ...}}"
            )
        dim = self._dims[name]
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"{name} are dim {dim}, which the tensor of shape {tuple(shape)} does not have; "
                f"give the dim with dims={{{name!r}: ...}}"
            )
        return dim % len(shape)

    def numbers(
        self, shape: Shape, rows: tuple[Sequence[int], int] | None = None
    ) -> dict[int, Sequence[int]]:
        """Return the selected indices of each dim (counted from the front) that is not selected in
        full.

        Args:
            rows: (The batch's rows that the tensor has, their number in all); None for all rows.

        Raises:
            IndexError, ValueError: an index is out of range, or the tensor has no such dim.
        """
        found: dict[int, Sequence[int]] = {}
        names: dict[int, str] = {}
        for name, selected in self._selected.items():
            dim = self.dim(name, shape)
            if dim in found:
                raise ValueError(
                    f"{names[dim]} and {name} are both dim {dim} of {tuple(shape)}; give their "
                    "dims with dims="
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
            local = {row: index for index, row in enumerate(rows[0])}
            chosen = numbers(name, selected, rows[1], f"rows of the batch, {where}")
            return [local[row] for row in chosen if row in local]
        if name != "heads" or name in self._given:
            return numbers(name, selected, size, where)
        assert self.num_heads is not None
        if size % self.num_heads:
            raise ValueError(
                f"num_heads: {where} can't be divided into {self.num_heads} equal heads; hook the "
                "heads' output, such as the input of the output projection"
            )
        width = size // self.num_heads
        heads = numbers(name, selected, self.num_heads, where)
        return [unit for head in heads for unit in range(head * width, (head + 1) * width)]

    def __repr__(self) -> str:
        return ", ".join(f"{name}={show(value)}" for name, value in self.arguments.items())
