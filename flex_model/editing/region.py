"""Which part of a full activation an edit is about: rows, positions, heads or units, numbered as in
the unsharded model and in the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from flex_model.editing.selectors import (
    Parsed,
    Selector,
    as_slice,
    is_everything,
    is_int,
    numbers,
    parse,
    show,
)
from flex_model.hooks.step import current_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

_DIMS = {"rows": 0, "positions": 1, "heads": -1, "units": -1}


class RegionArguments(TypedDict, total=False):
    """What every factory takes, by keyword, to say where it edits; all that is not given is meant
    in full.

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


class Region:
    """See `RegionArguments`. ``replace`` and ``index`` are local.

    Raises:
        TypeError, ValueError: arguments that say nothing.
    """

    def __init__(self, **arguments: Unpack[RegionArguments]) -> None:
        unknown = set(arguments) - set(RegionArguments.__annotations__)
        if unknown:
            raise TypeError(
                f"unknown arguments {sorted(unknown)}; where an edit acts is said by "
                f"{', '.join(RegionArguments.__annotations__)}"
            )
        self.arguments = arguments
        self._given = given = dict(arguments.get("dims") or {})
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
        self._mask: Any = None  # (rows, positions)
        positions = self._selected.get("positions")
        if isinstance(positions, Tensor) and positions.dim() == 2:
            if "rows" in self._selected:
                raise ValueError("positions has a mask for each row: leave out rows=")
            self._mask = self._selected.pop("positions")

    def _check_heads(self, arguments: RegionArguments) -> None:
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
    def _is_whole(self) -> bool:
        return not self._selected and self._mask is None

    def dim(self, name: str, tensor: Tensor) -> int:
        """Of rows, positions, heads or units, counted from 0.

        Raises:
            ValueError: the tensor has no such dim, or others than three and it was not said which
                one is meant.
        """
        is_usual = tensor.dim() == 3 or (name == "heads" and tensor.dim() == 2)
        if name in ("positions", "heads") and not is_usual and name not in self._given:
            raise ValueError(
                f"{name}: the tensor's shape is {tuple(tensor.shape)}, not (rows, positions, "
                f"units); say which dim is meant with dims={{{name!r}: ...}}"
            )
        dim = self._dims[name]
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"{name} are dim {dim}, and the tensor's shape is {tuple(tensor.shape)}; say where "
                f"they are with dims={{{name!r}: ...}}"
            )
        return dim % tensor.dim()

    def replace(self, full: Tensor, change: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """``full`` with ``change(part, *parts_of_others)`` in the place of its part.

        Args:
            full: What an editing function was given; a part of it is written in place.
            change: Keeps the shape of what it is given, which has all dims of ``full``.
            others: Spread over ``full``; the whole batch's are cut by ``of_microbatch`` before.
        """
        parts = [other.expand_as(full) for other in others]
        if self._is_whole:
            return change(full, *parts)
        if self._mask is not None:
            return torch.where(self._full_mask(full), change(full, *parts), full)
        index = self.index(full)
        part = full[index]
        if part.numel() == 0:
            return full
        if torch.is_grad_enabled():
            part = part.clone()  # a view that the graph keeps may not be written over
        full[index] = change(part, *(other[index] for other in parts))
        return full

    def index(self, full: Tensor) -> tuple[Any, ...]:
        """For ``full[...]``: keeps the number and the order of its dims."""
        chosen: list[Any] = [slice(None)] * full.dim()
        names: dict[int, str] = {}
        for name, selected in self._selected.items():
            dim = self.dim(name, full)
            if dim in names:
                raise ValueError(
                    f"{names[dim]} and {name} are both dim {dim} of {tuple(full.shape)}; say "
                    "where they are with dims="
                )
            names[dim] = name
            chosen[dim] = as_slice(self._along(name, selected, full, dim))
        if all(isinstance(item, slice) for item in chosen):
            return tuple(chosen)
        return tuple(
            torch.tensor(
                range(full.shape[dim])[item] if isinstance(item, slice) else item,
                dtype=torch.int64,
                device=full.device,
            ).reshape([-1 if other == dim else 1 for other in range(full.dim())])
            for dim, item in enumerate(chosen)
        )

    def _along(self, name: str, selected: Parsed, full: Tensor, dim: int) -> Sequence[int]:
        size, where = full.shape[dim], f"dim {dim} of {tuple(full.shape)}"
        if name == "rows":
            microbatch = self.rows_of_microbatch(full)
            if microbatch is None:
                return numbers(name, selected, size, where)
            rows, in_all = microbatch
            here = {row: place for place, row in enumerate(rows)}
            wanted = numbers(name, selected, in_all, f"rows of the batch, {where}")
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

    def rows_of_microbatch(self, full: Tensor) -> tuple[list[int], int] | None:
        """Which rows of how many ``full`` has; None if it is of the whole batch.

        Raises:
            ValueError: it has no row for each of the micro-batch's.
        """
        found = current_rows()
        if found is None or len(found[0]) == found[1]:
            return None
        dim = self.dim("rows", full)
        if full.shape[dim] != len(found[0]):
            raise ValueError(
                f"rows: a micro-batch has {len(found[0])} rows, and dim {dim} of "
                f"{tuple(full.shape)} is not those; say where rows are with dims={{'rows': ...}}, "
                "or use batch_mode='full'"
            )
        return found

    def of_microbatch(self, whole: Tensor, full: Tensor) -> Tensor:
        """What belongs to the rows of ``full``, on its device and in its dtype.

        Args:
            whole: Broadcasts to the tensor that ``full`` is the whole batch's, or a micro-batch's.

        Raises:
            ValueError: it doesn't.
        """
        whole = whole.to(full.device, full.dtype)
        shape, rows = list(full.shape), None
        if whole.dim() == full.dim() and current_rows() is not None:
            dim = self.dim("rows", full)
            microbatch = self.rows_of_microbatch(full) if whole.shape[dim] != 1 else None
            if microbatch is not None:
                rows, shape[dim] = microbatch
        if whole.dim() > len(shape) or any(
            ours not in (1, theirs)
            for ours, theirs in zip(reversed(whole.shape), reversed(shape), strict=False)
        ):
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} can't be spread over {tuple(shape)}, the "
                "shape of the whole batch's activation; give one value, one per unit, or more dims"
            )
        if rows is None:
            return whole
        return whole.index_select(dim, torch.tensor(rows, device=whole.device))

    def _full_mask(self, full: Tensor) -> Tensor:
        assert self._mask is not None
        rows, positions = self.dim("rows", full), self.dim("positions", full)
        mask, microbatch = self._mask, self.rows_of_microbatch(full)
        expected = (
            full.shape[rows] if microbatch is None else microbatch[1],
            full.shape[positions],
        )
        if tuple(mask.shape) != expected:
            raise IndexError(
                f"positions: the mask's shape is {tuple(mask.shape)}, and the whole batch has "
                f"{expected[0]} rows of {expected[1]} positions in this call"
            )
        if microbatch is not None:
            mask = mask[microbatch[0]]
        shape = [1] * full.dim()
        shape[rows], shape[positions] = full.shape[rows], full.shape[positions]
        mask = (mask if rows < positions else mask.T).reshape(shape).to(full.device)
        if not self._selected:
            return mask
        inside = torch.zeros(full.shape, dtype=torch.bool, device=full.device)
        inside[self.index(full)] = True
        return mask & inside

    def __repr__(self) -> str:
        return ", ".join(f"{name}={show(value)}" for name, value in self.arguments.items())
