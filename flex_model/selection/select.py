"""Select: the part of a full tensor that a hook needs, so that only this part is gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flex_model.distributed.placement import Shape
from flex_model.selection.selection import Selection, SelectionArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Select:
    """The part of its tensor that a hook needs, by indices of the *full* tensor; the rest is not
    gathered.

    Example::

        last = HookFunction("model.layers.3", select=Select(positions="last"))
        head = HookFunction("model.layers.3.self_attn.o_proj", select=Select(heads=5, num_heads=12))

    The function and the record get the selected part, in the order of the indices. Dims are kept:
    an int leaves a dim of size 1. The function returns a tensor of the part's shape, which replaces
    the part; gradients follow. A hook on a gradient gets that part of the gradient.

    Args:
        rows, positions, heads, num_heads, units, dims: As in `SelectionArguments`: ints, slices,
            sequences of ints without repeats, or masks.
        dtype: The floating dtype in which the part is moved, passed to the function and recorded;
            an edit is cast back to the tensor's dtype.

    In a pipeline, rows can only be selected with ``batch_mode="full"``.

    Raises:
        TypeError, ValueError: invalid arguments. When the hook runs: an IndexError for an index out
            of range, a ValueError for dims that the tensor does not have.
    """

    def __init__(
        self, *, dtype: torch.dtype | None = None, **arguments: Unpack[SelectionArguments]
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Select: dtype must be a floating torch.dtype or None, got {dtype!r}")
        self.dtype = dtype
        self._selection = Selection(**arguments)
        if self._selection.mask_by_row is not None:
            raise TypeError(
                "Select: a mask with other positions in each row selects no rectangular part of a "
                "tensor; give positions"
            )
        if self._selection.is_whole and dtype is None:
            raise ValueError("Select: nothing is selected; give rows, positions, heads or units")

    def indices(self, shape: Shape, split_dim: int | None = None) -> dict[int, list[int]]:
        """Return the selected indices of each dim (counted from the front) of a tensor of this
        shape.

        Args:
            split_dim: The dim along which the batch is split, if the tensor is a micro-batch's.

        Raises:
            IndexError: an index is out of range.
            ValueError: the tensor has no such dim, or an index is given twice.
        """
        found: dict[int, list[int]] = {}
        for dim, numbers in self._selection.numbers(shape).items():
            if split_dim is not None and dim == split_dim % len(shape):
                raise ValueError(
                    f"{self} selects along dim {dim}, along which the batch is split into "
                    'micro-batches; use batch_mode="full", or select in the editing function'
                )
            found[dim] = list(numbers)
            if len(set(numbers)) < len(found[dim]):
                raise ValueError(f"{self}: an index of dim {dim} of {shape} is given twice")
        return found

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of ``dtype`` is passed to the function."""
        if self.dtype is None:
            return dtype
        if not dtype.is_floating_point:
            raise TypeError(f"{self}: expected a tensor of a floating dtype, got {dtype}")
        return self.dtype

    def __repr__(self) -> str:
        parts = [repr(self._selection)] if not self._selection.is_whole else []
        if self.dtype is not None:
            parts.append(f"dtype={self.dtype}")
        return f"Select({', '.join(parts)})"
