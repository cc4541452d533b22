"""Aligns the logs of several ranks: finds which of their operations are one operation of the
model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flex_model.layouts import logged
from flex_model.layouts.logged import Entry


def align(
    logs: Sequence[Sequence[Entry]], skipped: Callable[[Entry], None] = lambda entry: None
) -> Iterator[tuple[Entry, ...]]:
    """Yield the entries of all ranks, one tuple for each that all of them have.

    Where ranks ran different operations, those are left out, up to the next begin or end of a
    module that all of them reach. The results of the operations left out have no entry, so they are
    not known.

    Args:
        skipped: Called with every entry, of any rank, that is left out.
    """
    marks = ({_form(entry) for entry in log if isinstance(entry, logged.MARKERS)} for log in logs)
    common = set.intersection(*marks)
    for segments in itertools.zip_longest(*(_cut(log, common) for log in logs), fillvalue=[]):
        alike = list(itertools.takewhile(_are_alike, zip(*segments)))
        yield from alike
        for segment in segments:
            for entry in segment[len(alike) :]:
                skipped(entry)


def _cut(log: Sequence[Entry], markers: set[Any]) -> list[list[Entry]]:
    """Return the log in segments, of which all but the first begin with one of these markers."""
    segments: list[list[Entry]] = [[]]
    for entry in log:
        if isinstance(entry, logged.MARKERS) and _form(entry) in markers:
            segments.append([])
        segments[-1].append(entry)
    return segments


def _are_alike(entries: Sequence[Entry]) -> bool:
    first = entries[0]
    return all(entry is first or _form(entry) == _form(first) for entry in entries[1:])


def _form(entry: Entry) -> Any:
    """Return what must be equal on all ranks for two entries to be one operation: all but sizes and
    other numbers, and which tensors are read.
    """
    if not isinstance(entry, (logged.Op, logged.Collective)):
        return type(entry), entry[0]  # a marker's name, the value or values of others
    read = entry.name, _tensors(entry.args), _tensors(entry.kwargs)
    made = tuple((one.value, len(one.shape), one.dtype) for one in entry.outputs)
    if isinstance(entry, logged.Op):
        return logged.Op, *read, made, len(entry.carriers)
    return logged.Collective, *read, made, entry.reduction, entry.axes


def _tensors(arguments: Any) -> Any:
    """Return the positions, numbers of dims and dtypes of the tensors among arguments."""
    if not isinstance(arguments, tuple):
        return None
    if arguments and arguments[0] == "t":
        return "t", len(arguments[2]), arguments[3]
    if arguments and arguments[0] in ("n", "s", "c"):
        return None
    return tuple(found for item in arguments if (found := _tensors(item)) is not None)
