"""Select: the part of a full tensor that a hook needs, so that only that is moved."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.layout import Shape

#: Along one dim: an index, a slice, indices in any order, or a mask.
Index = int | slice | Sequence[int] | Sequence[bool] | Tensor


class Select:
    """What a hook needs of its tensor, by indices of the *full* tensor; the rest is not moved.

    Example::

        last = HookFunction("model.layers.3", select=Select(positions=-1))
        head = HookFunction("model.layers.3.self_attn.o_proj", select=Select(heads=5, num_heads=12))

    The function, and the record, get the selected part, in the order of the indices; dims are kept,
    an int leaves one of size 1. What the function returns has the part's shape, and goes back to
    where the part was; gradients too. Of a hook on a gradient, the gradient's part is meant.

    Args:
        rows: Of the batch: dim 0.
        positions: Of the sequence: dim 1.
        units: Of the hidden dim: the last one.
        heads: Of the last dim as ``num_heads`` equal parts.
        num_heads: How many heads the last dim has.
        dims: Indices for any dim, ``{dim: index}``.
        dtype: Floating dtype to move, hand over and record the part in; an edit comes back in the
            tensor's own.

    An index is an int (negative ones count from the end), a slice, a sequence of ints without
    repeats, or a mask with a bool for each index of the dim.

    With micro-batches, rows can only be selected in a step of one (``batch_mode="full"``).

    Raises:
        TypeError, ValueError: an argument of the wrong type, a dim selected twice, ``heads``
            without ``num_heads``. IndexError where the hook runs: an index beyond the tensor.
    """

    def __init__(
        self,
        rows: Index | None = None,
        positions: Index | None = None,
        units: Index | None = None,
        *,
        heads: Index | None = None,
        num_heads: int | None = None,
        dims: Mapping[int, Index] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if heads is not None and units is not None:
            raise ValueError("Select: units and heads are both of the last dim; give one of them")
        if (heads is None) != (num_heads is None):
            raise ValueError("Select: heads need num_heads, how many the last dim holds, and back")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Select: dtype must be a floating torch.dtype or None, got {dtype!r}")
        self.dtype = dtype
        self.num_heads = None if num_heads is None else _checked_size("num_heads", num_heads)
        last = units if heads is None else heads
        named = {0: rows, 1: positions, -1: last}
        self._indices: dict[int, _Index] = {
            dim: _Index.of(index) for dim, index in named.items() if index is not None
        }
        for dim, index in (dims or {}).items():
            dim = _checked_dim(dim)
            if dim in self._indices:
                raise ValueError(f"Select: dim {dim} is selected twice")
            self._indices[dim] = _Index.of(index)
        if not self._indices and dtype is None:
            raise ValueError("Select: nothing is selected; give rows, positions, units, or dims")

    def indices(self, shape: Shape, split_dim: int | None = None) -> dict[int, list[int]]:
        """By dim, counted from the front: the indices selected of a tensor of this shape.

        Args:
            split_dim: Along which micro-batches divide the tensor, of which this is one.

        Raises:
            IndexError: a dim or an index that the tensor does not have.
            ValueError: a dim selected twice, or one that is not ``num_heads`` equal parts.
        """
        found: dict[int, list[int]] = {}
        for dim, index in self._indices.items():
            if not -len(shape) <= dim < len(shape):
                raise IndexError(
                    f"{self} selects of dim {dim}, and the tensor has shape {shape}; give "
                    "the dims that are meant with Select(dims={dim: index})"
                )
            place = dim % len(shape)
            if place in found:
                raise ValueError(f"{self} selects dim {place} of a tensor of shape {shape} twice")
            if split_dim is not None and place == split_dim % len(shape):
                raise ValueError(
                    f"{self} selects of dim {dim}, along which micro-batches divide the batch, and "
                    'which rows each of them has is not told to hooks; use batch_mode="full", or '
                    "select in the editing function"
                )
            num = size = shape[place]
            if dim == -1 and self.num_heads is not None:
                num = self.num_heads
                if size % num:
                    raise ValueError(f"{self}: the last dim of {shape} is not {num} equal heads")
            chosen = index.among(num, f"{self}: dim {dim} of shape {shape}")
            width = size // num if num else 0
            if num != size:
                chosen = [unit for i in chosen for unit in range(i * width, (i + 1) * width)]
            found[place] = chosen
        return found

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype a tensor of ``dtype`` is handed over."""
        if self.dtype is None:
            return dtype
        if not dtype.is_floating_point:
            raise TypeError(f"{self}: the tensor is of {dtype}, which is no floating dtype")
        return self.dtype

    def __repr__(self) -> str:
        names = {0: "rows", 1: "positions", -1: "units" if self.num_heads is None else "heads"}
        parts = [f"{names[dim]}={index}" for dim, index in self._indices.items() if dim in names]
        if self.num_heads is not None:
            parts.append(f"num_heads={self.num_heads}")
        others = {dim: index for dim, index in self._indices.items() if dim not in names}
        if others:
            parts.append("dims={" + ", ".join(f"{d}: {i}" for d, i in others.items()) + "}")
        if self.dtype is not None:
            parts.append(f"dtype={self.dtype}")
        return f"Select({', '.join(parts)})"


@dataclass(frozen=True)
class _Index:
    """Along one dim."""

    slice: slice | None = None
    numbers: tuple[int, ...] = ()
    mask: tuple[bool, ...] | None = None
    is_int: bool = False

    @staticmethod
    def of(index: Any) -> _Index:
        if isinstance(index, slice):
            return _Index(slice=index)
        if isinstance(index, Tensor):
            if index.dim() > 1 or index.is_floating_point() or index.is_complex():
                raise TypeError(f"Select: expected ints or bools in one dim, got {index!r}")
            index = index.tolist()
        if isinstance(index, (list, tuple, range)):
            if index and all(isinstance(one, bool) for one in index):
                return _Index(mask=tuple(bool(one) for one in index))
            return _Index(numbers=tuple(_checked_int(one) for one in index))
        return _Index(numbers=(_checked_int(index),), is_int=True)

    def among(self, size: int, what: str) -> list[int]:
        """The indices that are meant of a dim of this size, none negative."""
        if self.slice is not None:
            return list(range(*self.slice.indices(size)))
        if self.mask is not None:
            if len(self.mask) != size:
                raise IndexError(f"{what}: the mask has {len(self.mask)} bools, expected {size}")
            return [i for i, is_meant in enumerate(self.mask) if is_meant]
        found = []
        for number in self.numbers:
            if not -size <= number < size:
                raise IndexError(f"{what}: index {number} is out of range for {size}")
            found.append(number % size)
        if len(set(found)) < len(found):
            raise ValueError(f"{what}: an index is given twice: {list(self.numbers)}")
        return found

    def __str__(self) -> str:
        if self.slice is not None:
            return repr(self.slice)
        if self.mask is not None:
            return repr(list(self.mask))
        return str(self.numbers[0]) if self.is_int else repr(list(self.numbers))


def _checked_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("Select: a mask holds bools only, and an index is no bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"Select: expected an int, a slice, ints or bools, got {value!r}") from None


def _checked_dim(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Select: dims are ints, got {value!r}")
    return value


def _checked_size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Select: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"Select: {name} must be at least 1, got {value}")
    return value
