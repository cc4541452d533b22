"""Rules as text: labels as in ``einsum``, and arguments that name dims.

A form says which dim of which operand becomes which dim of an output:

- A label of an output dim is *parallel*: index ``i`` of it needs index ``i`` of the operands that
  carry the label, and nothing else along it. Operands split there alike give an output split there.
- A dim without a label must be whole.
- A label that only operands carry is *summed over*: operands split there alike give partial sums.

An output that depends linearly on some operands is the sum of products of operands, so that
products with one partial sum are partial sums, and sums of those.

One output after the other behind the arrow, divided by ``;``::

    self:~ik mat1:ij mat2:jk -> ik = self + mat1*mat2

===============  =================================================================================
``a``  ``*``     a dim with a label (a letter or a digit); a dim that must be whole
``...``  ``_``   any number of dims with a label each; any number that must be whole
``...[dim]``     those at the argument ``dim`` (an int, a list; None is all) must be whole
``...[dim:i]``   those at ``dim`` have this label
``...[-dim]``    those at ``dim`` are not there, or whole if the operation has ``keepdim``
``~...``         the operand is broadcast: it has fewer dims, or dims of size 1
``name?:``       the operand may be None
``:``            every operand that is not named
``-> ...+``      this output, and all that follow it
``= a*!b + c``   the output is this sum of products, not linear in ``b``; factors may be absent
``|``            between alternatives: the first that has the operands' numbers of dims
===============  =================================================================================

Of all ``...`` in a form, dims are the same if they have the same distance from the last one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard
from flex_model.layouts.propagation.operation import PARTIAL, REPLICATED, Operand, Operation

Label = Hashable | None
Labels = tuple[Label, ...]
Placements = list[Placement | None]
#: Computes the dims of a name in brackets, of the number of dims of ``...``.
DimsFunction = Callable[[Operation, int], Sequence[int]]
_Terms = tuple[tuple[tuple[str, bool], ...], ...]  # of (name, whether it is linear in it)

_LABELS = re.compile(r"(~?)([a-zA-Z0-9*]*)(\.\.\.|_|)(?:\[(.*)\])?([a-zA-Z0-9*]*)(\+?)")


@dataclass(frozen=True, eq=False)
class Input:
    """An operand with the labels of its dims."""

    operand: Operand
    labels: Labels
    broadcasts: bool = False


_Products = list[tuple[tuple[Input, ...], tuple[Input, ...]]]  # linear in the first ones


@dataclass(frozen=True)
class _Dims:
    """The labels of one tensor, as text."""

    broadcasts: bool
    head: str
    dots: str
    changes: tuple[str, ...]
    tail: str
    is_of_rest: bool

    @property
    def num_fixed(self) -> int:
        return len(self.head) + len(self.tail)

    @property
    def spans_all(self) -> bool:
        """Whether ``...`` has all its dims here."""
        return self.dots == "..." and not any(change[0] == "-" for change in self.changes)

    def fits(self, ndim: int) -> bool:
        if self.broadcasts:
            return bool(self.dots) or ndim <= self.num_fixed
        return ndim >= self.num_fixed if self.dots else ndim == self.num_fixed

    def labels(self, ndim: int, count: int, at: Callable[[str], Sequence[int]], keep: bool) -> Any:
        """Return the labels of ``ndim`` dims, if ``...`` has ``count``."""
        middle: list[Label] = [("...", count - i) for i in range(count)]
        gone: set[int] = set()
        if self.dots != "...":
            middle = [None] * (ndim - self.num_fixed) if self.dots else []
        for change in self.changes:
            name, _, letter = change.partition(":")
            for dim in at(name.lstrip("-")):
                if dim < count:
                    middle[dim] = letter or None
                    gone |= {dim} if name[0] == "-" and not keep else set()
        rest = [label for dim, label in enumerate(middle) if dim not in gone]
        found = (*_letters(self.head), *rest, *_letters(self.tail))
        return found[len(found) - ndim :] if self.broadcasts and ndim <= len(found) else found


def _letters(text: str) -> Labels:
    return tuple(None if letter == "*" else letter for letter in text)


@dataclass(frozen=True)
class _Form:
    inputs: tuple[tuple[str, bool, _Dims], ...]  # name, whether it may be None, labels
    outputs: tuple[tuple[_Dims, _Terms], ...]


def _dims(text: str) -> _Dims:
    found = _LABELS.fullmatch(text)
    assert found is not None, text
    broadcasts, head, dots, changes, tail, rest = found.groups()
    names = tuple(changes.split(",")) if changes else ()
    return _Dims(bool(broadcasts), head, dots, names, tail, bool(rest))


@cache
def _parsed(text: str) -> tuple[_Form, ...]:
    """Return the alternatives."""
    found = []
    for one in text.split("|"):
        before, after = one.split("->")
        inputs = [word.partition(":")[::2] for word in before.split()]
        outputs = [part.partition("=")[::2] for part in after.split(";")]
        found.append(
            _Form(
                tuple((name.rstrip("?"), "?" in name, _dims(labels)) for name, labels in inputs),
                tuple((_dims(labels.strip()), _parsed_terms(terms)) for labels, terms in outputs),
            )
        )
    return tuple(found)


def _parsed_terms(text: str) -> _Terms:
    return tuple(
        tuple((factor.strip("! "), "!" not in factor) for factor in term.split("*"))
        for term in text.split("+")
        if term.strip()
    )


def form(text: str, **dims: DimsFunction) -> Callable[[Operation], Placements]:
    """Return the rule that a text form describes; ``dims``: of names in brackets that are no
    arguments.
    """

    def rule(operation: Operation) -> Placements:
        for one in _parsed(text):
            found = _placed(one, operation, dims)
            if found is not None:
                return found
        return [None] * len(operation.outputs)

    rule.__doc__ = text
    return rule


def _placed(
    of: _Form, operation: Operation, functions: Mapping[str, DimsFunction]
) -> Placements | None:
    """Return the placements of the outputs; None if the form does not fit the operands."""
    arguments = operation.arguments[0]
    named = {name for name, _, _ in of.inputs}
    operands: dict[str, tuple[list[Operand], _Dims]] = {}
    for name, is_optional, dims in of.inputs:
        for own in [name] if name else [other for other in arguments if other not in named]:
            found = _tensors(arguments.get(own))
            if not all(dims.fits(operand.ndim) for operand in found):
                return None
            if name and not found and not is_optional:
                return None
            operands[own] = found, dims
    if sum(len(found) for found, _ in operands.values()) != len(operation.operands):
        return None  # an operand that the form does not name
    spans = [(o.ndim, dims) for found, dims in operands.values() for o in found]
    spans.append((operation.outputs[0].ndim, of.outputs[0][0]))
    count = max((ndim - dims.num_fixed for ndim, dims in spans if dims.spans_all), default=0)

    def at(name: str) -> Sequence[int]:
        if name in functions:
            return functions[name](operation, count)
        return as_dims(operation.get(name), count)

    def labels(dims: _Dims, ndim: int) -> Labels:
        return dims.labels(ndim, count, at, bool(operation.get("keepdim")))

    inputs = {
        name: [Input(o, labels(dims, o.ndim), dims.broadcasts) for o in found]
        for name, (found, dims) in operands.items()
    }
    placed: Placements = [None] * len(operation.outputs)
    for i, made in enumerate(operation.outputs):
        dims, text = of.outputs[min(i, len(of.outputs) - 1)]
        if i < len(of.outputs) or dims.is_of_rest:
            terms = _terms(text, inputs, operation)
            factors = [one for linear, other in terms for one in (*linear, *other)]
            reads = dict.fromkeys(factors or itertools.chain(*inputs.values()))
            placed[i] = _placement(labels(dims, made.ndim), tuple(reads), terms, made)
    return placed


def _tensors(value: Any) -> list[Operand]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, Operand)]


def _terms(terms: _Terms, inputs: Mapping[str, Sequence[Input]], operation: Operation) -> _Products:
    """Return products of inputs; of a list of tensors, one for each. A constant is not a partial
    sum, but zero is.
    """
    made: _Products = []
    for factors in terms:
        names = [name for name, is_linear in factors if is_linear]
        linear = [inputs[name] for name in names if inputs.get(name)]
        if names and not linear:
            if any(operation.get(name) not in (None, 0) for name in names):
                return []
            continue
        others = [i for name, _ in factors if name not in names for i in inputs.get(name, ())]
        made += [(each, tuple(others)) for each in itertools.product(*linear)]
    return made


def _placement(
    labels: Labels, reads: Sequence[Input], terms: _Products, made: Operand
) -> Placement | None:
    """Return the placement of an output with these labels that is computed of ``reads``."""
    if len(labels) != made.ndim or any(len(i.labels) != i.operand.ndim for i in reads):
        return None
    if any(i.operand.placement is None for i in reads):
        return None
    partial = {i for i in reads if isinstance(i.operand.placement, Partial)}
    if any(not keeps_sums(i.operand.dtype, made.dtype) for i in partial):
        return None
    split = [(i, i.operand.shard) for i in reads if i.operand.shard is not None]
    if not split:
        if not partial:
            return REPLICATED
        return PARTIAL if _is_sum(terms, partial, set()) else None
    first, shard = split[0]
    assert shard is not None
    label = first.labels[shard.dim]
    sizes = sizes_along(first.operand, shard.dim)
    if label is None or not all(_is_split_alike(i, label, shard, sizes) for i in reads):
        return None
    if label in labels:
        dim = labels.index(label)
        if partial or labels.count(label) > 1 or sizes_along(made, dim) != sizes:
            return None
        return replace(shard, dim=dim)
    if shard.pieces is not None or not _is_sum(terms, partial, {i for i, _ in split}):
        return None
    return PARTIAL


def _is_split_alike(i: Input, label: Hashable, shard: Shard, sizes: tuple[int, ...]) -> bool:
    """Whether the operand is split at the label as the others are, or lacks it and is whole."""
    at = [dim for dim, own in enumerate(i.labels) if own == label]
    own = i.operand.shard
    if own is not None:
        alike = at == [own.dim] and replace(own, dim=0) == replace(shard, dim=0)
        return alike and sizes_along(i.operand, own.dim) == sizes
    if not at:
        return True
    is_whole = isinstance(i.operand.placement, Replicate)
    return is_whole and i.broadcasts and all(set(sizes_along(i.operand, dim)) == {1} for dim in at)


def _is_sum(terms: _Products, partial: set[Input], split: set[Input]) -> bool:
    """Whether every term is a partial sum: a product with one partial sum, or one that is summed
    over the split dim.
    """
    for linear, other in terms:
        sums = [i for i in (*linear, *other) if i in partial]
        if any(i in split for i in (*linear, *other)):
            if sums:
                return False
        elif len(sums) != 1 or sums[0] in other:
            return False
    return bool(terms)


def keeps_sums(source: torch.dtype, result: torch.dtype) -> bool:
    """Whether a cast of partial sums results in partial sums of the cast."""
    if source is torch.bool or result is torch.bool:
        return False
    is_integer = not (result.is_floating_point or result.is_complex)
    return not (is_integer and (source.is_floating_point or source.is_complex))


def sizes_along(operand: Operand, dim: int) -> tuple[int, ...]:
    """Return the local sizes along ``dim``, by rank."""
    return tuple(shape[dim] for shape in operand.shapes)


# ---- For rules that are functions ----------------------------------------------------------------


def as_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims counted from the start; None and an empty list are all dims."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return tuple(range(ndim))
    return tuple(dim % max(ndim, 1) for dim in dims)


def operand_of(operation: Operation) -> Operand:
    """Return the only tensor among the arguments."""
    (operand,) = operation.operands
    return operand


def words(text: str) -> list[str]:
    """Split a text into a list of names."""
    return text.split()
