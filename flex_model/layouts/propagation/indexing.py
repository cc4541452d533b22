"""Rules for reads and writes at indices that are tensors."""

from __future__ import annotations

import itertools

import torch

from flex_model.layouts.propagation.labels import (
    Input,
    Labels,
    Output,
    Placements,
    Term,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation


def _indexed(self: Operand, indices: list[Operand | None]) -> tuple[Labels, list[Input], Labels]:
    """Return the labels of ``self``, of the indices, and of ``self[indices]``.

    The indexed dims are replaced by those of the indices, broadcast: at the first indexed dim if
    all are adjacent, else in front. A mask indexes as many dims as it has, and is replaced by one.
    """
    given = [index for index in indices if index is not None]
    has_mask = any(map(_is_mask, given))
    width = max(1 if _is_mask(index) else index.ndim for index in given)
    # The length of a mask's one dim is its count of ones, which only all of them determine.
    of_index: Labels = tuple(None if has_mask else ("index", i) for i in range(width))
    dim, indexed = 0, []
    for one in indices:
        count = one.ndim if one is not None and _is_mask(one) else 1
        indexed += [(dim, dim + count)] if one is not None else []
        dim += count
    whole = {d for start, end in indexed for d in range(start, end)}
    of_self: Labels = tuple(None if d in whole else d for d in range(self.ndim))
    rest = tuple(label for label in of_self if label is not None)
    at = indexed[0][0] if all(a[1] == b[0] for a, b in itertools.pairwise(indexed)) else 0
    inputs = [
        Input(one, (None,) * one.ndim if has_mask else of_index[width - one.ndim :], True)
        for one in given
    ]
    return of_self, inputs, (*rest[:at], *of_index, *rest[at:])


def _is_mask(index: Operand) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def index(operation: Operation) -> Placements:
    """Read ``self[i, j, :, ...]``."""
    self = operation["self"]
    of_self, inputs, after = _indexed(self, list(operation["indices"]))
    terms = (Term((Input(self, of_self),), tuple(inputs)),)
    return resolve(operation, [Output(after, terms=terms)])


def index_put(operation: Operation) -> Placements:
    """Write ``self[i, j, :, ...] = values``, or add to it."""
    self, values = operation["self"], operation["values"]
    found = _where_mask(operation, self, values)
    if found is not None and found[0] is not None:
        return found
    of_self, inputs, after = _indexed(self, list(operation["indices"]))
    # Two indices may write to the same place: all must be on every rank.
    inputs = [Input(i.operand, (None,) * i.operand.ndim) for i in inputs]
    of_values = tuple(None if isinstance(label, tuple) else label for label in after)
    of_values = of_values[len(of_values) - values.ndim :]
    terms = (
        Term((Input(self, of_self),)),
        Term((Input(values, of_values, broadcasts=True),), tuple(inputs)),
    )
    return resolve(operation, [Output(of_self, terms=terms)])


def _where_mask(operation: Operation, self: Operand, value: Operand) -> Placements | None:
    """Resolve ``self[mask] = value`` with the same value for all that the mask selects, and no
    other index: by element of the mask.
    """
    masks = [(i, m) for i, m in enumerate(operation["indices"]) if m is not None]
    if len(masks) != 1 or masks[0][1].dtype is not torch.bool:
        return None
    ((first, mask),) = masks
    labels: Labels = tuple(range(self.ndim))
    rest = labels[first + mask.ndim :]
    selected = value.ndim - len(rest) - 1  # the dim of what the mask selects
    if selected >= 0 and any(shape[selected] != 1 for shape in value.shapes):
        return None
    of_selected = (*labels[:first], None, *rest)
    of_value = Input(value, of_selected[len(of_selected) - value.ndim :], broadcasts=True)
    of_mask = Input(mask, labels[first : first + mask.ndim])
    return resolve(operation, [Output(labels, (Input(self, labels), of_mask, of_value))])


RULES = {
    "index": index,
    "_unsafe_index": index,
    **dict.fromkeys(words("index_put _unsafe_index_put _index_put_impl"), index_put),
}
