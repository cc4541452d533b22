"""Rules as text: labels as in ``einsum``, and arguments that name dims.

One output after the other behind the arrow, divided by ``;``::

    self:~ik mat1:ij mat2:jk -> ik = self + mat1*mat2

===============  =================================================================================
``a``  ``*``     a dim with a label; a dim that must be whole
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from flex_model.layouts.propagation.labels import (
    Input,
    Label,
    Labels,
    Output,
    Placements,
    Term,
    as_dims,
    resolve,
)
from flex_model.layouts.propagation.operation import Operand, Operation

#: Computes the dims of a name in brackets, of the number of dims of ``...``.
DimsFunction = Callable[[Operation, int], Sequence[int]]
_Terms = tuple[tuple[tuple[str, bool], ...], ...]  # of (name, whether it is linear in it)

_LABELS = re.compile(r"(~?)([a-z*]*)(\.\.\.|_|)(?:\[(.*)\])?([a-z*]*)(\+?)")


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
            outputs = _outputs(one, operation, dims)
            if outputs is not None:
                return resolve(operation, outputs)
        return [None] * len(operation.outputs)

    rule.__doc__ = text
    return rule


def _outputs(
    of: _Form, operation: Operation, functions: Mapping[str, DimsFunction]
) -> list[Output | None] | None:
    """Return the outputs with labels and terms; None if the form does not fit the operands."""
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
    reads = tuple(itertools.chain(*inputs.values()))
    outputs: list[Output | None] = []
    for i, made in enumerate(operation.outputs):
        dims, terms = of.outputs[min(i, len(of.outputs) - 1)]
        if i < len(of.outputs) or dims.is_of_rest:
            found_terms = _terms(terms, inputs, operation)
            outputs.append(Output(labels(dims, made.ndim), reads, found_terms))
        else:
            outputs.append(None)
    return outputs


def _tensors(value: Any) -> list[Operand]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, Operand)]


def _terms(
    terms: _Terms, inputs: Mapping[str, Sequence[Input]], operation: Operation
) -> tuple[Term, ...]:
    """Return terms of inputs; of a list of tensors, one for each. A constant is not a partial sum,
    but zero is.
    """
    made: list[Term] = []
    for factors in terms:
        names = [name for name, is_linear in factors if is_linear]
        linear = [inputs[name] for name in names if inputs.get(name)]
        if names and not linear:
            if any(operation.get(name) not in (None, 0) for name in names):
                return ()
            continue
        others = [i for name, _ in factors if name not in names for i in inputs.get(name, ())]
        made += [Term(each, tuple(others)) for each in itertools.product(*linear)]
    return tuple(made)


def labels_of(text: str, ndim: int) -> Labels:
    """Return the labels of a tensor as text, of which ``...`` has all that are left."""
    dims = _dims(text)
    return dims.labels(ndim, ndim - dims.num_fixed, lambda name: (), keep=False)
