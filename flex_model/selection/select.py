"""Select: the part of a full tensor that a hook needs, so that only that is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flex_model.distributed.layout import Shape
from flex_model.selection.selection import Selection, SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Select:
    """What a hook needs of its tensor, by indices of the *full* tensor; the rest is not moved.

    Example::

        last = HookFunction("model.layers.3", select=Select(positions="last"))
        head = HookFunction("model.layers.3.self_attn.o_proj", select=Select(heads=5, num_heads=12))

    The function, and the record, get the selected part, in the order of the indices; dims are kept,
    an int leaves one of size 1. What the function returns has the part's shape, and goes back to
    where the part was; gradients too. Of a hook on a gradient, the gradient's part is meant.

    Args:
        rows, positions, heads, num_heads, units, dims: As ready edits take them
            (``flex_model.editing``): ints, slices, sequences of ints without repeats, or masks.
        dtype: Floating dtype to move, hand over and record the part in; an edit comes back in the
            tensor's own.

    With micro-batches, rows can only be selected in a step of one (``batch_mode="full"``).

    Raises:
        TypeError, ValueError: arguments that say nothing. Where the hook runs: an IndexError for an
            index that the tensor does not have, a ValueError for dims that it does not have.
    """

    def __init__(
        self, *, dtype: torch.dtype | None = None, **arguments: Unpack[SelectionArguments]
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Select: dtype must be a floating torch.dtype or None, got {dtype!r}")
        self.dtype = dtype
        self._selection = Selection(**arguments)
        if self._selection.mask_by_row is not None:
            raise TypeError("Select: a mask for each row is no part of a tensor; give positions")
        if self._selection.is_whole and dtype is None:
            raise ValueError("Select: nothing is selected; give rows, positions, heads or units")

    def indices(self, shape: Shape, split_dim: int | None = None) -> dict[int, list[int]]:
        """By dim, counted from the front: the indices selected of a tensor of this shape.

        Args:
            split_dim: Along which micro-batches divide the tensor, of which this is one.

        Raises:
            IndexError: an index that the tensor does not have.
            ValueError: dims that it does not have, or an index that is given twice.
        """
        found: dict[int, list[int]] = {}
        for dim, numbers in self._selection.numbers(shape).items():
            if split_dim is not None and dim == split_dim % len(shape):
                raise ValueError(
                    f"{self} selects of dim {dim}, along which micro-batches divide the batch; use "
                    'batch_mode="full", or select in the editing function'
                )
            found[dim] = list(numbers)
            if len(set(numbers)) < len(found[dim]):
                raise ValueError(f"{self}: an index of dim {dim} of {shape} is given twice")
        return found

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype a tensor of ``dtype`` is handed over."""
        if self.dtype is None:
            return dtype
        if not dtype.is_floating_point:
            raise TypeError(f"{self}: the tensor is of {dtype}, which is no floating dtype")
        return self.dtype

    def __repr__(self) -> str:
        parts = [repr(self._selection)] if not self._selection.is_whole else []
        if self.dtype is not None:
            parts.append(f"dtype={self.dtype}")
        return f"Select({', '.join(parts)})"
