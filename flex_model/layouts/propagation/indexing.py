"""Rules for reads and writes at indices that are tensors."""

from __future__ import annotations

import itertools

import torch

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    Term,
    all_but,
    resolve,
    words,
)
from flex_model.layouts.propagation.operation import Operand, Operation
from flex_model.layouts.propagation.views import full_sizes_of


def embedding(operation: Operation) -> Placements:
    """Look up a row of ``weight`` for each index: any index may occur, so all rows must be
    there.
    """
    weight, indices = operation["weight"], operation["indices"]
    labels: Labels = tuple(range(indices.ndim))
    of_weight = Input(weight, (None, "features"))
    terms = (Term((of_weight,), (Input(indices, labels),)),)
    return resolve(operation, [Output((*labels, "features"), terms=terms)])


def _indexed(self: Operand, indices: list[Operand | None]) -> tuple[Labels, list[Input], Labels]:
    """Return the labels of ``self``, of the indices, and of ``self[indices]``.

    The indexed dims are replaced by those of the indices, broadcast: at the first indexed dim if
    all are adjacent, else in front. A mask indexes as many dims as it has, and is replaced by one.
    """
    whole: set[int] = set()
    inputs: list[Input] = []
    dim, width, dims_of_indices = 0, 0, []
    for index in indices:
        if index is None:
            dim += 1
            continue
        is_mask = index.dtype in (torch.bool, torch.uint8)
        count = index.ndim if is_mask else 1
        whole |= set(range(dim, dim + count))
        dims_of_indices.append((dim, dim + count))
        dim += count
        width = max(width, 1 if is_mask else index.ndim)
    for index in indices:
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            labels: Labels = (None,) * index.ndim
        else:
            labels = tuple(("index", width - index.ndim + i) for i in range(index.ndim))
        inputs.append(Input(index, labels, broadcasts=True))
    has_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
    of_self: Labels = tuple(None if d in whole else d for d in range(self.ndim))
    # The length of a mask's one dim is its count of ones, which only all of them determine.
    of_index: list[Label] = [None if has_mask else ("index", i) for i in range(width)]
    rest: list[Label] = [label for label in of_self if label is not None]
    adjacent = all(a[1] == b[0] for a, b in itertools.pairwise(dims_of_indices))
    at = dims_of_indices[0][0] if adjacent else 0
    if has_mask:
        inputs = [Input(i.operand, (None,) * i.operand.ndim) for i in inputs]
    return of_self, inputs, (*rest[:at], *of_index, *rest[at:])


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


def _along(operation: Operation, index_name: str = "index") -> tuple[Operand, int, Operand]:
    self = operation["self"]
    return self, operation["dim"] % max(self.ndim, 1), operation[index_name]


def index_select(operation: Operation) -> Placements:
    """Select whole slices along ``dim``; the indices may be split."""
    self, dim, indices = _along(operation)
    labels = all_but(self.ndim, dim)
    after = tuple("index" if d == dim else d for d in range(self.ndim))
    terms = (Term((Input(self, labels),), (Input(indices, ("index",) * indices.ndim),)),)
    return resolve(operation, [Output(after, terms=terms)])


def gather(operation: Operation) -> Placements:
    """Read an element for each index, at the same place along the other dims, which must have the
    same sizes: a shorter index would read the first rank's elements only.
    """
    self, dim, indices = _along(operation)
    of_self = Input(self, all_but(self.ndim, dim))
    after = tuple("index" if d == dim else d for d in range(self.ndim))
    terms = (Term((of_self,), (Input(indices, after),)),)
    return resolve(operation, [Output(after, terms=terms)])


def take_along_dim(operation: Operation) -> Placements:
    """Read as ``gather``, but with the other dims broadcast."""
    self, indices = operation["self"], operation["indices"]
    if operation["dim"] is None:
        terms = (Term((Input(self, (None,) * self.ndim),), (Input(indices, ("index",)),)),)
        return resolve(operation, [Output(("index",), terms=terms)])
    dim = operation["dim"] % self.ndim
    of_self = Input(self, all_but(self.ndim, dim), broadcasts=True)
    after = tuple("index" if d == dim else d for d in range(self.ndim))
    terms = (Term((of_self,), (Input(indices, after, broadcasts=True),)),)
    return resolve(operation, [Output(after, terms=terms)])


def scatter(operation: Operation, adds: bool = False) -> Placements:
    """Write elements at the same place along the other dims."""
    self, dim, indices = _along(operation)
    labels = all_but(self.ndim, dim)
    given = [Input(indices, labels)]
    source = operation.get("src")
    is_linear = adds or operation.get("reduce") in (None, "add", "sum")
    terms: tuple[Term, ...] = ()
    inputs = [Input(self, labels), *given]
    if isinstance(source, Operand):
        inputs.append(Input(source, labels))
        terms = (Term((inputs[0],)), Term((inputs[2],), (inputs[1],)))
    elif operation.get("value") == 0 and operation.get("reduce") is None:
        terms = (Term((inputs[0],), (inputs[1],)),)
    return resolve(operation, [Output(labels, tuple(inputs), terms if is_linear else ())])


def index_write(operation: Operation) -> Placements:
    """Write whole slices along ``dim``: ``index_add``, ``index_copy``, ``index_reduce``,
    ``index_fill``.
    """
    self, dim, indices = _along(operation)
    labels = all_but(self.ndim, dim)
    inputs = [Input(self, labels), Input(indices, (None,) * indices.ndim)]
    source = operation.get("source", operation.get("value"))
    terms: tuple[Term, ...] = ()
    if isinstance(source, Operand):
        of_source = labels if source.ndim == self.ndim else (None,) * source.ndim
        inputs.append(Input(source, of_source))
        if operation.name != "index_reduce":
            terms = (Term((inputs[0],)), Term((inputs[2],), (inputs[1],)))
    elif source == 0:
        terms = (Term((inputs[0],), (inputs[1],)),)
    return resolve(operation, [Output(labels, tuple(inputs), terms)])


def take(operation: Operation) -> Placements:
    """Read from the flattened tensor."""
    self, indices = operation["self"], operation["index"]
    labels = tuple(range(indices.ndim))
    terms = (Term((Input(self, (None,) * self.ndim),), (Input(indices, labels),)),)
    return resolve(operation, [Output(labels, terms=terms)])


def one_hot(operation: Operation) -> Placements:
    """Encode indices: if the largest index determines the number of classes, all must be there."""
    operand = operation["self"]
    known = operation["num_classes"] >= 0 and None not in full_sizes_of(operation, "num_classes")
    labels: Labels = tuple(range(operand.ndim)) if known else (None,) * operand.ndim
    return resolve(operation, [Output((*labels, None), (Input(operand, labels),))])


def slice_scatter(operation: Operation) -> Placements:
    """Return ``self`` with ``src`` in place of a slice or of one index along ``dim``."""
    self, source = operation["self"], operation["src"]
    labels = all_but(self.ndim, operation["dim"])
    of_source = labels
    if operation.name == "select_scatter":
        of_source = tuple(label for label in labels if label is not None)
    terms = (Term((Input(self, labels),)), Term((Input(source, of_source),)))
    return resolve(operation, [Output(labels, terms=terms)])


def scatter_add(operation: Operation) -> Placements:
    return scatter(operation, adds=True)


RULES = {
    "embedding": embedding,
    "index": index,
    "_unsafe_index": index,
    **dict.fromkeys(words("index_put _unsafe_index_put _index_put_impl"), index_put),
    "index_select": index_select,
    "gather": gather,
    "take_along_dim": take_along_dim,
    "scatter": scatter,
    "scatter_reduce": scatter,
    "scatter_add": scatter_add,
    **dict.fromkeys(words("index_add index_copy index_reduce index_fill"), index_write),
    "take": take,
    "one_hot": one_hot,
    "slice_scatter": slice_scatter,
    "select_scatter": slice_scatter,
}
