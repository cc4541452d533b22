"""Rules by labelled dims: which dim of which operand becomes which dim of an output.

An operation is described as in ``einsum``: a label for every dim of every operand and output.

- A label of an output dim is *parallel*: index ``i`` of it needs index ``i`` of the operands that
  carry the label, and nothing else along it. Operands split there alike give an output split there.
- A dim without a label (None, ``*`` in the text form) must be whole.
- A label that only operands carry is *summed over*: operands split there alike give partial sums.

An output that depends linearly on some operands states its terms: it is the sum of products of
operands, so that products with one partial sum are partial sums, and sums of those. The text form
of this is in `text_forms`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard
from flex_model.layouts.propagation.operation import PARTIAL, REPLICATED, Operand, Operation

Label = Hashable | None
Labels = tuple[Label, ...]
Placements = list[Placement | None]


@dataclass(frozen=True, eq=False)
class Input:
    """An operand with the labels of its dims."""

    operand: Operand
    labels: Labels
    broadcasts: bool = False


@dataclass(frozen=True, eq=False)
class Term:
    """A product of operands; it is linear in each of ``linear``."""

    linear: tuple[Input, ...] = ()
    other: tuple[Input, ...] = ()

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (*self.linear, *self.other)


@dataclass(frozen=True, eq=False)
class Output:
    """The labels of an output's dims, and the operands from which it is computed.

    Attributes:
        terms: The products that are summed; empty if it is computed otherwise.
        inputs: The operands that it depends on, if it has no terms.
    """

    labels: Labels
    inputs: tuple[Input, ...] = ()
    terms: tuple[Term, ...] = ()

    @property
    def reads(self) -> tuple[Input, ...]:
        return tuple(dict.fromkeys(i for term in self.terms for i in term.inputs)) or self.inputs


def resolve(operation: Operation, outputs: Sequence[Output | None]) -> Placements:
    """Return the placements of the operation's outputs; None for an output that is None."""
    if len(outputs) != len(operation.outputs):
        return [None] * len(operation.outputs)
    return [
        None if output is None else _placement(output, made)
        for output, made in zip(outputs, operation.outputs)
    ]


def _placement(output: Output, made: Operand) -> Placement | None:
    reads = output.reads
    if len(output.labels) != made.ndim or any(len(i.labels) != i.operand.ndim for i in reads):
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
        return PARTIAL if _is_sum(output.terms, partial, set()) else None
    first, shard = split[0]
    assert shard is not None
    label = first.labels[shard.dim]
    sizes = sizes_along(first.operand, shard.dim)
    if label is None or not all(_is_split_alike(i, label, shard, sizes) for i in reads):
        return None
    if label in output.labels:
        dim = output.labels.index(label)
        if partial or output.labels.count(label) > 1 or sizes_along(made, dim) != sizes:
            return None
        return replace(shard, dim=dim)
    if shard.pieces is not None or not _is_sum(output.terms, partial, {i for i, _ in split}):
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


def _is_sum(terms: Sequence[Term], partial: set[Input], split: set[Input]) -> bool:
    """Whether every term is a partial sum: a product with one partial sum, or one that is summed
    over the split dim.
    """
    for term in terms:
        sums = [i for i in term.inputs if i in partial]
        if any(i in split for i in term.inputs):
            if sums:
                return False
        elif len(sums) != 1 or sums[0] in term.other:
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
