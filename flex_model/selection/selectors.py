"""Selectors, the ints, slices, sequences and masks by which a user selects indices of a dim, and
selections of several dims.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from flex_model.distributed.header import site_hash
from flex_model.distributed.placement import Shape
from flex_model.integrations import past_positions
from flex_model.integrations.past_positions import Positions

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
            return value.detach().to("cpu", copy=True)
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


def show_exactly(value: object) -> str:
    """Return a selector in one line, which others don't have: ranks, and runs of a store, compare
    it.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"<{len(value)} of them, {site_hash(*value):x}>"
    return show(value)


_DIMS = {"rows": 0, "positions": 1, "heads": -1, "units": -1}


class SelectionArguments(TypedDict, total=False):
    """The keyword arguments of edits and `Select`; a dim without an argument is selected in full.

    Each of rows, positions, heads and units is an int, a slice, a sequence of ints, or a boolean
    mask of that dim; negative ints count from the end. An int out of range is an IndexError; a
    slice is clipped, as in Python. An edit counts an int once that is given twice.

    rows: Dim 0: rows of the whole batch, over all data-parallel ranks and micro-batches. Where a
        module gets the positions of all rows in one dim (experts, OPT's ``fc1``) they are tokens.
    positions: Dim 1 of ``(rows, positions, units)``, counted within one call of the module. In
        ``generate()`` with a cache, the first call has the whole prompt, and each later one has one
        position, with index 0: only ``"every"`` (the default) and ``"last"`` make sense for all
        calls, or ``of="sequence"``. A boolean mask ``(rows, positions)`` of the whole batch selects
        positions for each row.
    of: ``"call"`` (the default), or ``"sequence"``: positions count from the first token of the
        prompt on, padding included, also where a cache of transformers holds those before the call.
        Ints and slices that don't count from the end. A call that has none of them has an empty
        part. Not in a forward with a cache and gradients, nor in pipelines: a HookError.
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
    of: str
    num_heads: int
    units: Selector
    dims: Mapping[str, int]


class Selection:
    """A selection made from `SelectionArguments`.

    Attributes:
        mask_by_row: ``positions=``, if it is a mask ``(rows, positions)``.
        counts_sequence: Whether positions count in the sequence.

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
        self.counts_sequence = self._counts_sequence(arguments.get("of", "call"), positions)
        if isinstance(positions, Tensor) and positions.dim() == 2:
            if "rows" in self._selected:
                raise ValueError("positions is a mask (rows, positions): leave out rows=")
            del self._selected["positions"]
            self.mask_by_row = positions

    @staticmethod
    def _counts_sequence(of: object, positions: Parsed | Tensor | None) -> bool:
        if of not in ("call", "sequence"):
            raise ValueError(f"of: expected 'call' or 'sequence', got {of!r}")
        if of == "call":
            return False
        if isinstance(positions, slice):
            ends = [end for end in (positions.start, positions.stop, positions.step) if end]
        elif isinstance(positions, list):
            ends = positions
        else:
            raise ValueError("of='sequence' needs positions=, ints or a slice")
        if any(end < 0 for end in ends):
            raise ValueError(
                "positions: with of='sequence' they count from the first token on, since its end "
                f"is not known; got {positions!r}"
            )
        past_positions.count()
        return True

    def _check_heads(self, arguments: SelectionArguments) -> None:
        heads, units = arguments.get("heads"), arguments.get("units")
        if self.num_heads is not None and (not is_int(self.num_heads) or self.num_heads < 1):
            raise ValueError(f"num_heads: expected a positive int, got {self.num_heads}")
        if heads is None or "heads" in self._given:
            return
        if self.num_heads is None:
            raise ValueError(
                "heads= needs num_heads=, their number over all ranks; or dims={'heads': 1} if the "
                "heads have their own dim"
            )
        if units is not None:
            raise ValueError("give heads= or units=, not both: they select along the same dim")

    def check_rectangular(self, what: str) -> None:
        """Raise TypeError for a mask (rows, positions)."""
        if self.mask_by_row is not None:
            raise TypeError(
                f"{what}: a mask with other positions in each row selects no rectangular part of a "
                "tensor; give positions"
            )

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensor is selected."""
        return not self._selected and self.mask_by_row is None

    @property
    def dims(self) -> list[int]:
        """The dims that are not selected in full; negative ones count from the end."""
        return [self._dims[name] for name in self._selected]

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
        self,
        shape: Shape,
        rows: tuple[Sequence[int], int] | None = None,
        call: Positions | None = None,
    ) -> dict[int, Sequence[int]]:
        """Return the selected indices of each dim (counted from the front) that is not selected in
        full.

        Args:
            rows: (The batch's rows that the tensor has, their number in all); None for all rows.
            call: The positions of the forward in its sequence; None: none come before them.

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
            if name == "positions" and self.counts_sequence:
                found[dim] = _in_call(selected, call or Positions(), shape[dim])
            else:
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


def _in_call(selected: Parsed, call: Positions, size: int) -> list[int]:
    """Return the selected positions of a sequence that a call has, counted in the call."""
    if call.length not in (None, size):
        raise ValueError(
            f"positions: the tensor has {size}, and the forward {call.length} (logits may be those "
            "of the last position only), so which of the sequence they are is not known; hook a "
            "tensor of all positions, or leave out of='sequence'"
        )
    assert isinstance(selected, (slice, list))
    end = call.past + size
    chosen = range(*selected.indices(end)) if isinstance(selected, slice) else selected
    return [one - call.past for one in chosen if call.past <= one < end]


class Select(Selection):
    """The part of its tensor that a hook needs, by indices of the *full* tensor; the rest is not
    gathered.

    Example::

        last = HookFunction("model.layers.3", select=Select(positions="last"))
        head = HookFunction("model.layers.3.self_attn.o_proj", select=Select(heads=5, num_heads=12))

    The function and the record get the selected part, in the order of the indices. Dims are kept:
    an int leaves a dim of size 1. The function returns a tensor of the part's shape, which replaces
    the part; gradients follow. A hook on a gradient gets that part of the gradient.

    Args:
        experts: Of a module of ``flex.experts(...)``: the tokens' slots that these experts serve,
            in the order of tokens: (slots, units) of (tokens, k, units).
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
        self,
        *,
        dtype: torch.dtype | None = None,
        experts: Selector = None,
        **arguments: Unpack[SelectionArguments],
    ) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Select: dtype must be a floating torch.dtype or None, got {dtype!r}")
        self.dtype, self.experts = dtype, experts
        self._positions: Positions | None = None  # of the forward, where it counts in the sequence
        super().__init__(**arguments)
        if experts is not None:
            parse("experts", experts)
            if not set(arguments) <= {"units"}:
                raise TypeError("Select: beside experts only units can be selected")
        self.check_rectangular("Select")
        if self.is_whole and dtype is None and experts is None:
            raise ValueError("Select: nothing is selected; give rows, positions, heads or units")
        given = {**arguments, "experts": experts, "dtype": dtype}
        # Now: a list or tensor that was given may change later, what is selected does not.
        self._text = ", ".join(
            f"{name}={show_exactly(value)}"
            for name, value in given.items()
            if not is_everything(value)
        )

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
        for dim, numbers in self.numbers(shape, call=self._positions).items():
            if split_dim is not None and dim == split_dim % len(shape):
                raise ValueError(
                    f"{self} selects along dim {dim}, along which the batch is split into "
                    'micro-batches; use batch_mode="full", or select in the editing function'
                )
            found[dim] = list(numbers)
            if len(set(numbers)) < len(found[dim]):
                raise ValueError(f"{self}: an index of dim {dim} of {shape} is given twice")
        return found

    def at(self, positions: Positions | None) -> Select:
        """Return the selection in a forward of these positions of its sequence."""
        if positions is None:
            return self
        found = copy.copy(self)
        found._positions = positions
        return found

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of ``dtype`` is passed to the function."""
        if self.dtype is None:
            return dtype
        if not dtype.is_floating_point:
            raise TypeError(f"{self}: expected a tensor of a floating dtype, got {dtype}")
        return self.dtype

    def __repr__(self) -> str:
        return f"Select({self._text})"
