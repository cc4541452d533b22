"""Selectors: the ints, slices, sequences and masks by which a user selects indices of a dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Selector = int | slice | Sequence[int] | Tensor | str | None


@dataclass(frozen=True)
class Mask:
    """The indices that a boolean mask selects, and its length."""

    numbers: list[int]
    length: int


Parsed = slice | list[int] | Mask | Tensor  # a Tensor: a mask (rows, positions)


def is_everything(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == "every")


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse(name: str, value: Any) -> Parsed:
    """Parse a selector; TypeError if it is none of the accepted kinds."""
    if isinstance(value, slice):
        return value
    if name == "positions" and isinstance(value, str) and value == "last":
        return [-1]
    if isinstance(value, Tensor):
        if name == "positions" and value.dtype == torch.bool and value.dim() == 2:
            return value.detach().cpu()
        is_whole = not (value.is_floating_point() or value.is_complex()) and value.dim() < 2
        items = value.reshape(-1).tolist() if is_whole else None
    else:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        items = [value] if is_int(value) else list(value) if is_sequence else None
    if items is None or not all(isinstance(item, int) for item in items):
        names = ", 'every' or 'last'" if name == "positions" else ""
        shown = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise TypeError(
            f"{name}: expected an int, a slice, a sequence of ints or a boolean mask{names}, got "
            f"{shown!r}"
        )
    num_bools = sum(isinstance(item, bool) for item in items)
    if num_bools == 0:
        return items
    if num_bools < len(items):
        raise TypeError(f"{name}: expected ints or bools, got a list of both: {value!r}")
    return Mask([number for number, item in enumerate(items) if item], len(items))


def numbers(name: str, chosen: Parsed, size: int, where: str) -> Sequence[int]:
    """Return the selected indices of a dim of ``size``, none negative.

    Raises:
        IndexError: an index is out of range, or a mask has another length.
    """
    if isinstance(chosen, slice):
        return range(*chosen.indices(size))
    if isinstance(chosen, Mask):
        if chosen.length != size:
            raise IndexError(
                f"{name}: the mask has {chosen.length} entries for {size} {name} ({where})"
            )
        return chosen.numbers
    assert isinstance(chosen, list)
    wrong = next((number for number in chosen if not -size <= number < size), None)
    if wrong is not None:
        hint = ""
        if name == "positions":
            hint = (
                "; positions are counted within one call, and with a cache generate() has calls of "
                "one position: 'last', 'every' or a slice fit all of them"
            )
        raise IndexError(f"{name}: {wrong} is out of range, there are {size} ({where}){hint}")
    return [number % size for number in chosen]


def as_slice(chosen: Sequence[int]) -> slice | Sequence[int]:
    """Return a slice if the indices are consecutive: indexing by it makes no copy."""
    if not chosen:
        return slice(0, 0)
    if isinstance(chosen, range) and chosen.step == 1:
        return slice(chosen.start, chosen.stop)
    consecutive = range(chosen[0], chosen[0] + len(chosen))
    if chosen[-1] == consecutive[-1] and list(chosen) == list(consecutive):
        return slice(consecutive.start, consecutive.stop)
    return chosen


def show(value: object) -> str:
    """Return a value in one line, for ``repr``."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{value.item():g}"
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, slice):
        ends = [":".join("" if end is None else str(end) for end in (value.start, value.stop))]
        return ":".join([*ends, *([str(value.step)] if value.step is not None else [])])
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"<{len(value)} of them>"
    return repr(value)
