"""The part of a full activation that an edit changes: rows, positions, heads or units, by indices
of the unsharded model and the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flex_model.integrations.past_positions import positions_of_forward
from flex_model.runs.step import current_rows
from flex_model.selection.selectors import Selection, as_slice


class Region(Selection):
    """The part of a tensor that an edit changes. ``replace`` and ``index`` are local."""

    def replace(self, full: Tensor, change: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """Return ``full`` with its part replaced by ``change(part, *parts_of_others)``.

        Args:
            full: The tensor of an editing function; its part is written in place.
            change: A function of a tensor with all dims of ``full``; it must keep the shape.
            others: Broadcast to ``full``; select a micro-batch's rows with ``of_microbatch`` first.
        """
        parts = [other.expand_as(full) for other in others]
        if self.is_whole:
            return change(full, *parts)
        index = self.index(full)
        part = full[index]
        if part.numel() == 0:
            return full
        if torch.is_grad_enabled():
            part = part.clone()  # `full` is written below, and the graph may save a view of it
        changed = change(part, *(other[index] for other in parts))
        _check_kept(changed, full)
        full[index] = changed
        return full

    def only(self, full: Tensor) -> Tensor:
        """Return ``full`` with zeros outside of the part."""
        index, kept = self.index(full), torch.zeros_like(full)
        kept[index] = full[index]
        return kept

    def index(self, full: Tensor, keeps_repeats: bool = False) -> tuple[Any, ...]:
        """Return an index for ``full[...]`` that keeps the number and order of its dims; of a mask
        (rows, positions) the dim of positions has size 1, and that of rows the selected pairs.

        Args:
            keeps_repeats: Whether what is given twice is there twice. Where the part is written,
                each copy would get the whole gradient.
        """
        rows = self.rows_of_microbatch(full) if "rows" in self.arguments else None
        chosen: list[Any] = [slice(None)] * full.dim()
        places = list(range(full.dim()))  # the dim of the part along which an index runs
        call = positions_of_forward(f"an edit of {self!r}") if self.counts_sequence else None
        for dim, numbers in self.numbers(full.shape, rows, call).items():
            if not keeps_repeats and not isinstance(numbers, range):
                numbers = list(dict.fromkeys(numbers))
            chosen[dim] = as_slice(numbers)
        if self.mask_by_row is not None:
            pair = self.dim("rows", full.shape), self.dim("positions", full.shape)
            of_rows, of_positions = self._mask(full, *pair).nonzero(as_tuple=True)
            chosen[pair[0]], chosen[pair[1]], places[pair[1]] = of_rows, of_positions, pair[0]
        listed = [dim for dim, item in enumerate(chosen) if not isinstance(item, slice)]
        if len(listed) < 2:  # one index tensor stays at its own dim
            for dim in listed:
                chosen[dim] = torch.tensor(chosen[dim], dtype=torch.int64, device=full.device)
            return tuple(chosen)
        return tuple(
            torch.as_tensor(
                range(full.shape[dim])[item] if isinstance(item, slice) else item,
                dtype=torch.int64,
                device=full.device,
            ).reshape([-1 if other == places[dim] else 1 for other in range(full.dim())])
            for dim, item in enumerate(chosen)
        )

    def rows_of_microbatch(self, full: Tensor) -> tuple[list[int], int] | None:
        """Return (the batch's rows that ``full`` has, their number in all); None for all rows.

        Raises:
            ValueError: the dim of rows has another size than the micro-batch.
        """
        found = current_rows()
        if found is None or len(found[0]) == found[1]:
            return None
        dim = self.dim("rows", full.shape)
        if full.shape[dim] != len(found[0]):
            raise ValueError(
                f"rows: the micro-batch has {len(found[0])} rows, but dim {dim} of "
                f"{tuple(full.shape)} has another size; give the dim of the rows with "
                "dims={'rows': ...}, or use batch_mode='full'"
            )
        return found

    def of_microbatch(self, whole: Tensor, full: Tensor) -> Tensor:
        """Return the values of ``whole`` for the rows of ``full``, on its device and in its dtype.

        Args:
            whole: Broadcasts to the activation of the whole batch.

        Raises:
            TypeError: the dtype of ``full`` can't represent its values.
            ValueError: its shape does not broadcast, or to other dims than those that were named.
        """
        _check_kept(whole, full)
        # It broadcasts from the last dim, as if that were the units, and the one before positions.
        first = full.dim() - whole.dim()
        for usual, name in enumerate(("rows", "positions", "units"), full.dim() - 3):
            if name in self._given and first > 0 and whole.numel() > 1:
                dim = self.dim(name, full.shape)
                if dim != usual and max(dim, usual) >= first:
                    raise ValueError(
                        f"a tensor of shape {tuple(whole.shape)} has no dim of its own for the "
                        f"{name}, dim {dim} of {tuple(full.shape)}; give it as many dims as the "
                        "activation has, in the same order"
                    )
        whole = whole.to(full.device, full.dtype)
        shape, rows = list(full.shape), None
        if whole.dim() == full.dim() and current_rows() is not None:
            dim = self.dim("rows", full.shape)
            microbatch = self.rows_of_microbatch(full) if whole.shape[dim] != 1 else None
            if microbatch is not None:
                rows, shape[dim] = microbatch
        if whole.dim() > len(shape) or any(
            ours not in (1, theirs)
            for ours, theirs in zip(reversed(whole.shape), reversed(shape), strict=False)
        ):
            raise ValueError(
                f"a tensor of shape {tuple(whole.shape)} can't be broadcast to {tuple(shape)}, the "
                "shape of the whole batch's activation; give one value, one per unit, or more dims"
            )
        if rows is None:
            return whole
        return whole.index_select(dim, torch.tensor(rows, device=whole.device))

    def _mask(self, full: Tensor, rows: int, positions: int) -> Tensor:
        assert self.mask_by_row is not None
        mask, microbatch = self.mask_by_row, self.rows_of_microbatch(full)
        expected = (
            full.shape[rows] if microbatch is None else microbatch[1],
            full.shape[positions],
        )
        if tuple(mask.shape) != expected:
            raise IndexError(
                f"positions: the mask's shape is {tuple(mask.shape)}, and the whole batch has "
                f"{expected[0]} rows of {expected[1]} positions in this call"
            )
        return mask if microbatch is None else mask[microbatch[0]]


def _check_kept(values: Tensor, full: Tensor) -> None:
    """Raise TypeError if writing ``values`` to ``full`` would truncate fractions or drop the
    imaginary part.
    """
    if not torch.can_cast(values.dtype, full.dtype):
        raise TypeError(f"an activation of {full.dtype} can't hold the edit's {values.dtype}")
