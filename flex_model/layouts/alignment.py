"""Aligns the logs of several ranks: finds which of their operations are one operation of the
model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flex_model.layouts.operation_log import MARKERS, Entry


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
    marks = ({entry for entry in log if entry[0] in MARKERS} for log in logs)
    common = set.intersection(*marks)
    for segments in itertools.zip_longest(*(_cut(log, common) for log in logs), fillvalue=[]):
        alike = list(itertools.takewhile(_are_alike, zip(*segments)))
        yield from alike
        for segment in segments:
            for entry in segment[len(alike) :]:
                skipped(entry)


def _cut(log: Sequence[Entry], markers: set[Entry]) -> list[list[Entry]]:
    """Return the log in segments, of which all but the first begin with one of these markers."""
    segments: list[list[Entry]] = [[]]
    for entry in log:
        if entry[0] in MARKERS and entry in markers:
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
    kind = entry[0]
    if kind in MARKERS:
        return entry
    if kind == "op":
        _, name, args, kwargs, outputs, _, carriers = entry
        return kind, name, len(carriers), _tensors(args), _tensors(kwargs), _made(outputs)
    if kind == "collective":
        _, name, reduction, axes, args, kwargs, outputs, _ = entry
        read = _tensors(args), _tensors(kwargs)
        return kind, name, reduction, axes, *read, _made(outputs)
    return entry[:2]  # placed: its value; invalidated: the values


def _made(outputs: Any) -> Any:
    return tuple((value, len(shape), dtype) for value, shape, dtype, *_ in outputs)


def _tensors(arguments: Any) -> Any:
    """Return the positions, numbers of dims and dtypes of the tensors among arguments."""
    if not isinstance(arguments, tuple):
        return None
    if arguments and arguments[0] == "t":
        return "t", len(arguments[2]), arguments[3]
    if arguments and arguments[0] in ("n", "s", "c"):
        return None
    return tuple(found for item in arguments if (found := _tensors(item)) is not None)
