"""Aligns the logs of several ranks: finds which of their operations are one operation of the
model.
"""

from __future__ import annotations

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
    places = [0] * len(logs)
    open_modules: list[Any] = []
    while True:
        entries = [log[place] if place < len(log) else None for log, place in zip(logs, places)]
        if all(entry is None for entry in entries):
            return
        if all(entry is not None for entry in entries) and _are_alike(entries):  # type: ignore[arg-type]
            first = entries[0]
            assert first is not None
            if first[0] == "enter":
                open_modules.append(first[1])
            elif first[0] == "exit" and open_modules and open_modules[-1] == first[1]:
                open_modules.pop()
            yield tuple(entries)  # type: ignore[arg-type]
            places = [place + 1 for place in places]
            continue
        following = _next_marker(logs, places, open_modules)
        for log, place, end in zip(logs, places, following):
            for entry in log[place:end]:
                skipped(entry)
        places = following


def _next_marker(
    logs: Sequence[Sequence[Entry]], places: list[int], open_modules: list[Any]
) -> list[int]:
    """Return each rank's index of the next marker that all have, inside the innermost open
    module.
    """
    ends = _next_end(logs, places, open_modules)
    found = [
        {entry: i for i, entry in reversed(list(enumerate(log[:end]))[place:]) if _marks(entry)}
        for log, place, end in zip(logs, places, ends)
    ]
    for marker, place in sorted(found[0].items(), key=lambda item: item[1]):
        if all(marker in of_rank for of_rank in found[1:]):
            return [place, *(of_rank[marker] for of_rank in found[1:])]
    return ends


def _marks(entry: Entry) -> bool:
    return entry[0] in MARKERS


def _next_end(
    logs: Sequence[Sequence[Entry]], places: list[int], open_modules: list[Any]
) -> list[int]:
    """Return each rank's index of the end of the innermost open module that ends on all ranks."""
    while open_modules:
        end = ("exit", open_modules.pop())
        found = [
            next((i for i in range(place, len(log)) if log[i][:2] == end), None)
            for log, place in zip(logs, places)
        ]
        if all(place is not None for place in found):
            open_modules.append(end[1])
            return found  # type: ignore[return-value]
    return [len(log) for log in logs]


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
