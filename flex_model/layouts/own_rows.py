"""Tracks what belongs to some of a rank's own rows, and what counts these: ``for row in x``,
``x[mask]``, ``x[torch.arange(rows), last]``, ``x[order]``.

A row has the place in the batch that it has on its rank, so such a tensor is not a part of one that
the unsharded program has, or has not as many rows as the batch. What is computed of it and of what
all rows share belongs to the same rows. They are rows of the batch again where all of them are
joined in their order, ``torch.stack([f(row) for row in x])``, and where they are written to the
places from which they were read, ``x[mask] = f(x[mask])``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flex_model.distributed.placement import Placement, Shard
from flex_model.layouts.constants import with_placements
from flex_model.layouts.contracts.collectives import SAME_ELEMENTS
from flex_model.layouts.factories import ZEROS
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation
from flex_model.layouts.propagation.slicing import SPLITS, follow_to_end, range_taken
from flex_model.layouts.propagation.text_cases import RECURRENT
from flex_model.layouts.propagation.views import TO_SIZES

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

#: Which rows: all of them, and some, in their order.
ALL, PICKED = "all", "picked"

# Operations that keep the elements of an index.
_MOVES = SAME_ELEMENTS | {*TO_SIZES, "unflatten", "flatten", "select", "unbind"}
_MOVES |= {"unsqueeze", "squeeze", "expand", "repeat", "permute", "transpose"}
# By operation: the one that reads what it writes, and its argument with the values.
_WRITES = {
    "index_put": ("index", "values"),
    "index_add": ("index_select", "source"),
    "index_copy": ("index_select", "source"),
}


class OwnRows(NamedTuple):
    """Some rows of a rank, of which it has ``total``.

    Attributes:
        place: Which ones, in which order: a range, ``ALL``, ``PICKED``, or what made the order.
        dim: The dim along which each index belongs to a row; None where the tensor belongs to all
            of these rows together.
        counts: Whether its elements are the places of these rows among all.
        column: Of the indices that ``nonzero`` returns: the column that counts rows.
    """

    place: Any
    total: int
    dim: int | None = None
    counts: bool = False
    column: int | None = None

    @property
    def split(self) -> Placement:
        """How the rows of all ranks together would be split."""
        return REPLICATED if self.dim is None else Shard(self.dim)


Known = Mapping[Any, OwnRows]


def infer(operation: Operation, output: int, proofs: AxisProofs) -> OwnRows | None:
    """Return which rows an output belongs to; None if it belongs to no such rows. Where these are
    all, and it does not count them, it is split as rows of the batch.
    """
    known = proofs.own_rows
    return (
        _taken(operation, output)
        or _counted(operation, proofs.split_sizes)
        or _sorted(operation, output, known)
        or _packed(operation, output, known, proofs)
        or _without_ones(operation, known)
        or _read(operation, known)
        or _joined(operation, known)
        or _written(operation, known)
        or _computed(operation, output, known)
    )


def _taken(operation: Operation, output: int) -> OwnRows | None:
    """Return the rows that a slice takes of a tensor in rows. ``x[i]`` is its row's alone; others
    keep their dim of rows, as the unsharded program may take others there: ``x[len(x) // 2 :]``.
    """
    name, operands = operation.name, operation.operands
    if name not in (*SPLITS, "unbind", "select", "slice") or len(operands) != 1:
        return None
    operand, dim = operands[0], operation.get("dim", 0) % max(operands[0].ndim, 1)
    found = range_taken(operation, output, dim) if operand.placement == Shard(dim) else None
    if found is None:
        return None
    total = operand.shapes[0][dim]
    is_row = name in ("select", "unbind")
    is_row |= operation.full_sizes.get("chunks") == [total * operation.num_ranks]
    return OwnRows(range(*found), total, None if is_row else dim)


def _counted(operation: Operation, split_sizes: Set[int]) -> OwnRows | None:
    """Return the rows that an index counts: all, by ``arange``, or those that a mask picks."""
    if operation.name == "arange":
        ((size,), *_), first = operation.outputs[0].shapes, operation.arguments[0]
        full = list(operation.full_sizes.get("end", ()))
        is_plain = first.get("start", 0) == 0 and first.get("step", 1) == 1
        is_count = full == [size * operation.num_ranks] or (full == [None] and size in split_sizes)
        return OwnRows(ALL, size, 0, True) if is_plain and is_count else None
    mask = operation["self"] if operation.name == "nonzero" else None
    if mask is None or mask.shard is None or mask.shard != Shard(mask.shard.dim):
        return None
    dim = mask.shard.dim  # indices are sorted by the first dim first
    place = PICKED if dim == 0 else ("nonzero", mask.value)
    return OwnRows(place, mask.shapes[0][dim], 0, True, dim if mask.ndim > 1 else None)


def _sorted(operation: Operation, output: int, known: Known) -> OwnRows | None:
    """Return all rows in the order of a key, and the inverse of such an order."""
    name, arguments = operation.name, operation.arguments[0]
    if name not in ("sort", "argsort", "scatter"):
        return None
    key: Operand = arguments["index" if name == "scatter" else "self"]
    if key.ndim != 1:
        return None
    own, counts = _own(key, known), output == len(operation.outputs) - 1
    if own is None or own.dim is None or key.shapes[0] != (own.total,):
        return None
    if own.place == ALL and not own.counts and name != "scatter":
        settings = [one for one in arguments.values() if not isinstance(one, Operand)]
        return OwnRows((name, key.value, *settings), own.total, 0, counts)
    is_order = own.counts and own.place[:1] in (("sort",), ("argsort",))
    if name == "scatter":  # empty[order] = torch.arange(rows)
        of_all = OwnRows(ALL, own.total, 0, True)
        is_inverted = known.get(operation.operands[-1].value) == of_all
        is_inverted &= operation.operands[0].shapes == key.shapes
    else:
        is_inverted = counts and not operation.get("descending")
    return own._replace(place=("inverse", own.place)) if is_order and is_inverted else None


def _packed(operation: Operation, output: int, known: Known, proofs: AxisProofs) -> OwnRows | None:
    """Return the sequences of a batch that ``pack_padded_sequence`` joins, step by step, what a
    recurrent layer makes of them, and these sequences again.
    """
    name, first = operation.name, operation.operands[0] if operation.operands else None
    if first is None or name not in ("_pack_padded_sequence", "_pad_packed_sequence", *RECURRENT):
        return None
    own, dim = _own(first, known), 1 - operation.get("batch_first", False)
    if name == "_pack_padded_sequence":
        lengths = _own(operation["lengths"], known)
        is_batch = own is not None and lengths == own._replace(dim=0) and own.dim == dim
        joined = own and own._replace(place=("packed", own.place), dim=0 if output == 0 else None)
        return joined if is_batch else None
    batch_sizes = known.get(operation.operands[1].value)
    if own is None or own.place[:1] != ("packed",) or batch_sizes != own._replace(dim=None):
        return None
    rows = own._replace(place=own.place[1], dim=dim if output == 0 else 0)
    if name == "_pad_packed_sequence":
        return rows
    of_state = rows._replace(dim=1)
    for one in operation.operands[2:]:  # states and weights
        is_zeros = proofs.is_made_by(one.value, *ZEROS)
        if one.placement != REPLICATED and not is_zeros and _own(one, known) != of_state:
            return None
    return own if output == 0 else of_state


def _own(operand: Operand, known: Known) -> OwnRows | None:
    """Return the rows along the split dim of a tensor; those of a rank are all."""
    shard = operand.shard
    if shard is None or shard != Shard(shard.dim):
        return known.get(operand.value)
    return OwnRows(ALL, operand.shapes[0][shard.dim], shard.dim)


def _without_ones(operation: Operation, known: Known) -> OwnRows | None:
    """Return the only row of which torch drops the dims of size 1 before it writes it:
    ``x[:, i] = y``.
    """
    if operation.name != "view" or "size" not in operation.arguments[0]:
        return None
    (operand,), sizes = operation.operands, list(operation["size"])
    own, full = _own(operand, known), list(operation.full_sizes.get("size", sizes))
    if own is None or own.dim is None or own.counts or -1 in sizes or full != sizes:
        return None
    if operand.shapes[0][own.dim] != 1 or len(sizes) >= operand.ndim:
        return None
    return own._replace(place=range(1) if own.place == ALL else own.place, dim=None)


def _read(operation: Operation, known: Known) -> OwnRows | None:
    """Return which rows an index or a mask reads of a tensor in rows, ``x[i]``, which is whole for
    its rank.
    """
    if operation.name not in ("index", "_unsafe_index", "index_select"):
        return None
    self, *given = operation.operands
    of_self = _own(self, known)
    if of_self is None or of_self.dim is None or of_self.counts:
        return None
    dim = of_self.dim
    if operation.name == "index_select":
        index = given[0] if operation["dim"] % self.ndim == dim else None
    else:
        index = (*operation["indices"], *[None] * self.ndim)[dim]
    if index is None:
        return None
    own = known.get(index.value)
    if len(given) == 1 and index.dtype == torch.bool and index.placement == Shard(dim) == Shard(0):
        # As the indices that `nonzero` returns: one for each dim of the mask.
        shapes = tuple(shape[:1] for shape in operation.outputs[0].shapes)
        picked = Operand(shapes, torch.int64, Shard(0))
        operation = operation.with_arguments(indices=[picked] * index.ndim)
        own = OwnRows(PICKED, of_self.total, 0, True)
    if own is None or not own.counts or own.total != of_self.total or own.column is not None:
        return None
    for one in given:
        other = known.get(one.value)
        is_alike = own.place == ALL if other is None else other[::3] == (own.place, False)
        if not (one is index or one.placement == REPLICATED or is_alike):
            return None
    if of_self.place != ALL and own.place != ("inverse", of_self.place):
        return None
    placed = {id(one): known[one.value].split for one in given if one.value in known}
    placed[id(self)] = REPLICATED
    (made,) = rules.propagate(with_placements(operation, placed))
    place = own.place if of_self.place == ALL else ALL
    return OwnRows(place, own.total, made.dim) if isinstance(made, Shard) else None


def _joined(operation: Operation, known: Known) -> OwnRows | None:
    """Return all rows, where an operation joins them in their order."""
    name, values = operation.name, operation.values
    if name not in ("stack", "cat", "pad_sequence") or not known.keys() >= {*values}:
        return None
    dim = 1 - operation["batch_first"] if name == "pad_sequence" else operation.get("dim", 0)
    dim, rows = dim % operation.outputs[0].ndim, [known[value] for value in values]
    if len({one.total for one in rows}) > 1 or not all(isinstance(r.place, range) for r in rows):
        return None
    are_single = all(one.dim is None and len(one.place) == 1 for one in rows)
    are_along = name == "cat" and all(one.dim in (None, dim) for one in rows)
    ranges = [(one.place.start, one.place.stop) for one in rows]
    is_all = follow_to_end(ranges, rows[0].total) and (are_single or are_along)
    return OwnRows(ALL, rows[0].total, dim) if is_all else None


def _written(operation: Operation, known: Known) -> OwnRows | None:
    """Return all rows, where an operation replaces some, ``x[i] = y``, or adds to them."""
    if operation.name != "masked_scatter" and operation.name not in _WRITES:
        return None
    reading, of_values = _WRITES.get(operation.name, ("", "source"))
    self, values = operation.operands[0], operation.arguments[0][of_values]
    rows, own = _own(self, known), _own(values, known)
    if rows is None or rows.place != ALL or rows.counts or own is None or own.counts:
        return None
    if not reading:
        mask = operation["mask"]
        is_by_rows = mask.ndim == self.ndim and mask.placement == self.placement == Shard(0)
        return rows if is_by_rows and (own.place, own.dim) in ((ALL, 0), (PICKED, 0)) else None
    if own.dim is None and rows.total == own.total == 1:
        others = [one for one in operation.operands if one is not self and one is not values]
        if all(one.placement == REPLICATED for one in others):
            return rows
    # Where torch has dropped dims of size 1, they are there again.
    for num_ones in range(1 if own.dim is not None else self.ndim + 1):
        made = replace(values, shapes=tuple((1,) * num_ones + shape for shape in values.shapes))
        read = _read(replace(operation.without(of_values), name=reading, outputs=(made,)), known)
        if read is not None and own.dim in (None, read.dim):
            is_in_order = {own.place, read.place} <= {ALL, PICKED}
            return rows if own.place == read.place or is_in_order else None
    return None


def _computed(operation: Operation, output: int, known: Known) -> OwnRows | None:
    """Return the rows of all operands that belong to some, if all rows share the others."""
    own = {id(one): known[one.value] for one in operation.operands if one.value in known}
    others = [one for one in operation.operands if id(one) not in own]
    if len({one[:2] for one in own.values()}) != 1:
        return None
    if any(one.placement != REPLICATED for one in others):
        return None
    first, counts = next(iter(own.values())), any(one.counts for one in own.values())
    if first.column is not None:
        if operation.name not in ("select", "unbind") or operation["dim"] not in (1, -1):
            return None
        (column, _) = range_taken(operation, output, 1) or (None, None)
        return OwnRows(*first[:3], column == first.column)
    if counts and operation.name not in _MOVES:
        return None
    if all(one.dim is None for one in own.values()):
        return first
    placed: dict[int, Placement | None] = {key: one.split for key, one in own.items()}
    made = rules.propagate(with_placements(operation, placed))[output]
    if isinstance(made, Shard) and made == Shard(made.dim):
        return first._replace(dim=made.dim, counts=counts)
    is_row = isinstance(first.place, range) and len(first.place) == 1 and not counts
    return first._replace(dim=None) if is_row else None
