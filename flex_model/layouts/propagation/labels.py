"""Rules by labelled dims: which dim of which operand becomes which dim of an output.

An operation is described as in ``einsum``: a label for every dim of every operand and output.

- A label of an output dim is *parallel*: index ``i`` of it needs index ``i`` of the operands that
  carry the label, and nothing else along it. Operands split there alike give an output split there.
- A dim without a label (None, ``*`` in the text form) must be whole.
- A label that only operands carry is *summed over*: operands split there alike give partial sums.

An output that depends linearly on some operands states its terms: it is the sum of products of
operands, so that products with one partial sum are partial sums, and sums of those.

Text form, one output after the other behind the arrow, divided by ``;``::

    self:~ik mat1:ij mat2:jk -> ik = self + mat1*mat2

``~`` marks an operand that is broadcast (fewer dims, or dims of size 1), ``...`` any number of dims
with a label each, ``?`` an operand that may be None. Of what follows ``=``, an output depends on
the operands named there, on those with ``!`` not linearly; without it on all, on none linearly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

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
        terms: The products of which it is the sum; empty if it is no sum of products.
        inputs: The operands that it depends on, if it has no terms.
        scale: By label, the ratio of an output dim's length to the operands'.
    """

    labels: Labels
    inputs: tuple[Input, ...] = ()
    terms: tuple[Term, ...] = ()
    scale: Mapping[Hashable, int] = field(default_factory=dict)

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
        dim, scale = output.labels.index(label), output.scale.get(label, 1)
        if partial or output.labels.count(label) > 1:
            return None
        if scale != 1 and getattr(shard, "part_sizes", None) is not None:
            return None  # part_sizes are sizes of the operand
        if sizes_along(made, dim) != tuple(size * scale for size in sizes):
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


def all_but(ndim: int, dims: int | Sequence[int]) -> Labels:
    """Return a label for each dim except these, which must be whole."""
    whole = {dims % max(ndim, 1)} if isinstance(dims, int) else {d % max(ndim, 1) for d in dims}
    return tuple(None if dim in whole else dim for dim in range(ndim))


def leading(ndim: int, count: int) -> Labels:
    """Return a label for each of the first ``count`` dims; the others must be whole."""
    return tuple(dim if dim < count else None for dim in range(ndim))


def linear_in(*inputs: Input) -> tuple[Term, ...]:
    """Return the one product of all inputs."""
    return (Term(inputs),)


def unary(operation: Operation, before: Labels, *after: Labels, linear: bool = False) -> Placements:
    """Resolve an operation on ``self`` or ``input`` alone."""
    x = Input(operand_of(operation), before)
    terms = linear_in(x) if linear else ()
    return resolve(operation, [Output(labels, (x,), terms) for labels in after])


def operand_of(operation: Operation) -> Operand:
    """Return the only tensor among the arguments."""
    (operand,) = operation.operands
    return operand


def words(text: str) -> list[str]:
    """Split a text into a list of names."""
    return text.split()


# ---- The text form -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    inputs: tuple[tuple[str, str, bool, bool], ...]  # name, labels, broadcasts, optional
    outputs: tuple[tuple[str, tuple[tuple[tuple[str, bool], ...], ...] | None], ...]


def parse_terms(text: str) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """Parse ``a*!b + c`` into terms of (name, whether it is linear in it)."""
    return tuple(
        tuple(
            (factor.strip().lstrip("!"), not factor.strip().startswith("!"))
            for factor in term.split("*")
        )
        for term in text.split("+")
    )


@cache
def _parsed(text: str) -> _Form:
    before, after = text.split("->")
    inputs = []
    for word in before.split():
        name, labels = word.split(":")
        inputs.append(
            (name.rstrip("?"), labels.lstrip("~"), labels.startswith("~"), name.endswith("?"))
        )
    outputs = []
    for part in after.split(";"):
        labels, _, terms = part.partition("=")
        outputs.append((labels.strip(), parse_terms(terms) if terms else None))
    return _Form(tuple(inputs), tuple(outputs))


def _labels(text: str, ndim: int) -> Labels:
    head, dots, tail = text.partition("...")
    labels: list[Label] = [None if letter == "*" else letter for letter in head]
    if dots:
        count = ndim - len(head) - len(tail)
        labels += [("...", count - i) for i in range(count)]
    return (*labels, *(None if letter == "*" else letter for letter in tail))


def form(text: str) -> Callable[[Operation], Placements]:
    """Return the rule that a text form describes."""

    def rule(operation: Operation) -> Placements:
        parsed = _parsed(text)
        inputs: dict[str, Input | None] = {}
        for name, labels, broadcasts, optional in parsed.inputs:
            operand = operation.get(name)
            if operand is None and optional:
                inputs[name] = None
                continue
            own = _labels(labels, operand.ndim)
            if broadcasts:
                own = own[len(own) - operand.ndim :]
            inputs[name] = Input(operand, own, broadcasts)
        present = tuple(i for i in inputs.values() if i is not None)
        if any(o not in {id(i.operand) for i in present} for o in map(id, operation.operands)):
            return [None] * len(operation.outputs)  # an operand that the form does not name
        outputs = []
        for (labels, terms), made in zip(parsed.outputs, operation.outputs):
            found = () if terms is None else make_terms(terms, inputs)
            outputs.append(Output(_labels(labels, made.ndim), present, found))
        outputs += [None] * (len(operation.outputs) - len(outputs))  # type: ignore[list-item]
        return resolve(operation, outputs)

    rule.__doc__ = text
    return rule


def make_terms(
    terms: Sequence[Sequence[tuple[str, bool]]], inputs: Mapping[str, Any]
) -> tuple[Term, ...]:
    """Return terms of inputs by name. A term with an absent factor is omitted if it is linear in
    that.
    """
    made = []
    for factors in terms:
        if any(is_linear and inputs[name] is None for name, is_linear in factors):
            continue
        present = [(inputs[name], is_linear) for name, is_linear in factors if inputs[name]]
        made.append(
            Term(
                tuple(i for i, is_linear in present if is_linear),
                tuple(i for i, is_linear in present if not is_linear),
            )
        )
    return tuple(made)


def by_mask(operation: Operation, outputs: Sequence[Output]) -> list[Output]:
    """Return those of a backward operation's outputs that its mask selects."""
    names = ("output_mask", "grad_input_mask")
    mask = next(operation[name] for name in names if name in operation.arguments[0])
    return [output for output, is_made in zip(outputs, mask) if is_made]
