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
from flex_model.layouts.constants import with_extents_of_whole, with_placements
from flex_model.layouts.contracts.collectives import SAME_ELEMENTS
from flex_model.layouts.factories import ZEROS
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation
from flex_model.layouts.propagation.slicing import SPLITS, follow_to_end, range_taken
from flex_model.layouts.propagation.text_cases import RECURRENT
from flex_model.layouts.propagation.text_forms import sizes_along
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
        like: How all rows are split over the ranks, as along dim 0: also in parts. None for an
            index that counts them, however they are split.
        dim: The dim along which each index belongs to a row; None where the tensor belongs to all
            of these rows together.
        counts: Whether its elements are the places of these rows among all.
        column: Of the indices that ``nonzero`` returns: the column that counts rows.
    """

    place: Any
    total: int
    like: Shard | None
    dim: int | None = None
    counts: bool = False
    column: int | None = None

    @property
    def split(self) -> Placement:
        """How the rows of all ranks together would be split: some, by each rank's own number."""
        if self.dim is None:
            return REPLICATED
        return replace((self.place == ALL and self.like) or Shard(0), dim=self.dim)


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
        or _computed(operation, output, proofs)
    )


def _taken(operation: Operation, output: int) -> OwnRows | None:
    """Return the rows that a slice takes of a tensor in rows. ``x[i]`` is its row's alone; others
    keep their dim of rows, as the unsharded program may take others there: ``x[len(x) // 2 :]``.
    """
    name, operands = operation.name, operation.operands
    if name not in (*SPLITS, "unbind", "select", "slice") or len(operands) != 1:
        return None
    operand, dim = operands[0], operation.get("dim", 0) % max(operands[0].ndim, 1)
    own, found = _own(operand, {}), range_taken(operation, output, dim)
    if found is None or own is None or own.dim != dim:
        return None
    is_row = name in ("select", "unbind")
    is_row |= operation.full_sizes.get("chunks") == [own.total * operation.num_ranks]
    return own._replace(place=range(*found), dim=None if is_row else dim)


def _counted(operation: Operation, split_sizes: Set[int]) -> OwnRows | None:
    """Return the rows that an index counts: all, by ``arange``, or those that a mask picks."""
    if operation.name == "arange":
        ((size,), *_), first = operation.outputs[0].shapes, operation.arguments[0]
        full = list(operation.full_sizes.get("end", ()))
        is_plain = first.get("start", 0) == 0 and first.get("step", 1) == 1
        is_count = full == [size * operation.num_ranks] or (full == [None] and size in split_sizes)
        return OwnRows(ALL, size, None, 0, True) if is_plain and is_count else None
    mask = operation["self"] if operation.name == "nonzero" else None
    own = None if mask is None else _own(mask, {})
    if mask is None or own is None:
        return None
    return own._replace(
        place=_picked(mask), dim=0, counts=True, column=own.dim if mask.ndim > 1 else None
    )


def _picked(mask: Operand) -> Any:
    """Return which rows a mask picks. Those of two masks may be of other ranks, or of other parts,
    in the unsharded program, but for plain rows along the first dim, by which indices are sorted.
    """
    return PICKED if mask.placement == Shard(0) else ("nonzero", mask.value)


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
        return own._replace(place=(name, key.value, *settings), dim=0, counts=counts)
    is_order = own.counts and own.place[:1] in (("sort",), ("argsort",))
    if name == "scatter":  # empty[order] = torch.arange(rows)
        of_all = OwnRows(ALL, own.total, None, 0, True)
        is_inverted = known.get(operation.operands[-1].value) == of_all
        is_inverted &= len({one.shapes for one in operation.operands}) == 1
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
    if shard is None:
        return known.get(operand.value)
    return OwnRows(ALL, operand.shapes[0][shard.dim], replace(shard, dim=0), shard.dim)


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
    its rank. Their dim is that of the output, of which dims may be left out in front.
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
    if len(given) == 1 and index.dtype == torch.bool and dim == 0:
        # As the indices that `nonzero` returns: one for each dim of the mask.
        if index.placement != of_self.like:
            return None
        own = of_self._replace(place=_picked(index), counts=True)
        given = [Operand(tuple(shape[:1] for shape in index.shapes), torch.int64)] * index.ndim
        operation, index = operation.with_arguments(indices=given), given[0]
    if own is None or not own.counts or own.dim is None or own.column is not None:
        return None
    sizes, own = sizes_along(index, own.dim), own._replace(like=own.like or of_self.like)
    if own[1:3] != of_self[1:3]:
        return None
    if of_self.place != ALL and own.place != ("inverse", of_self.place):
        return None
    placed: dict[int, Placement | None] = {id(self): REPLICATED}
    for one in given:
        other = own if one is index else _own(one, known)
        if other is not None and (other is own or (other[:3], other.counts) == (own[:3], False)):
            placed[id(one)] = other.split
        elif one.placement != REPLICATED:
            return None
    ndim = self.ndim - len(given) + max(one.ndim for one in given)
    made = replace(self, shapes=tuple((size,) * ndim for size in sizes))
    (found,) = rules.propagate(replace(with_placements(operation, placed), outputs=(made,)))
    if not isinstance(found, Shard):
        return None
    place = own.place if of_self.place == ALL else ALL
    return own._replace(place=place, dim=found.dim - ndim + operation.outputs[0].ndim, counts=False)


def _joined(operation: Operation, known: Known) -> OwnRows | None:
    """Return all rows, where an operation joins them in their order."""
    name, values = operation.name, operation.values
    if name not in ("stack", "cat", "pad_sequence") or not known.keys() >= {*values}:
        return None
    dim = 1 - operation["batch_first"] if name == "pad_sequence" else operation.get("dim", 0)
    dim, rows = dim % operation.outputs[0].ndim, [known[value] for value in values]
    if len({one[1:3] for one in rows}) > 1 or not all(isinstance(r.place, range) for r in rows):
        return None
    are_single = all(one.dim is None and len(one.place) == 1 for one in rows)
    are_along = name == "cat" and all(one.dim in (None, dim) for one in rows)
    ranges = [(one.place.start, one.place.stop) for one in rows]
    is_all = follow_to_end(ranges, rows[0].total) and (are_single or are_along)
    if name == "cat" and rows[0].like is not None and rows[0].like.parts > 1:
        # Blocks of rows have the same size only if all rows have.
        joined = zip(operation.operands, rows)
        is_all &= len({own.shapes[0][dim] / len(one.place) for own, one in joined}) == 1
    return rows[0]._replace(place=ALL, dim=dim) if is_all else None


def _written(operation: Operation, known: Known) -> OwnRows | None:
    """Return all rows, where an operation replaces some, ``x[i] = y``, or adds to them."""
    if operation.name != "masked_scatter" and operation.name not in _WRITES:
        return None
    reading, of_values = _WRITES.get(operation.name, ("", "source"))
    self, values = operation.operands[0], operation.arguments[0][of_values]
    rows, own = _own(self, known), _own(values, known)
    if rows is None or rows.place != ALL or rows.counts:
        return None
    if own is None and values.placement != REPLICATED:
        return None
    if own is not None and (own.counts or own.like != rows.like):
        return None
    if not reading:
        mask = operation["mask"]
        is_by_rows = mask.ndim == self.ndim and mask.placement == self.placement == Shard(0)
        is_in_order = own is not None and (own.place, own.dim) in ((ALL, 0), (PICKED, 0))
        return rows if is_by_rows and is_in_order else None
    if own is not None and own.dim is None and rows.total == own.total == 1:
        others = [one for one in operation.operands if one is not self and one is not values]
        if all(one.placement == REPLICATED for one in others):
            return rows
    read = _read(replace(operation.without(of_values), name=reading, outputs=(values,)), known)
    if read is None or read.dim is None:
        return None
    if own is None:  # one value for all rows that are written
        is_shared = read.dim < 0 or {shape[read.dim] for shape in values.shapes} == {1}
        return rows if is_shared else None
    places = {own.place, read.place}
    is_in_order = PICKED in places and places <= {ALL, PICKED}
    is_alike = own[:3] == read[:3] or is_in_order
    return rows if is_alike and own.dim in (None, read.dim) else None


def _computed(operation: Operation, output: int, proofs: AxisProofs) -> OwnRows | None:
    """Return the rows of all operands that belong to some, if all rows share the others."""
    known = proofs.own_rows
    own = {id(one): known[one.value] for one in operation.operands if one.value in known}
    if torch.Tag.pointwise in operation.tags and all(one.dim is None for one in own.values()):
        # Beside a row, which is whole, plain numbers that are as large count no rows.
        operation = with_extents_of_whole(operation, proofs)
    others = [one for one in operation.operands if id(one) not in own]
    if len({one[:3] for one in own.values()}) != 1:
        return None
    if any(one.placement != REPLICATED for one in others):
        return None
    first, counts = next(iter(own.values())), any(one.counts for one in own.values())
    if first.column is not None:
        if operation.name not in ("select", "unbind") or operation["dim"] not in (1, -1):
            return None
        (column, _) = range_taken(operation, output, 1) or (None, None)
        return OwnRows(*first[:4], column == first.column)
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
