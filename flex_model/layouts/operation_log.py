"""The log of one forward: the operations as one rank ran them, in a form that ranks can exchange.

A *value* is a number that stands for a tensor, the same on all ranks as long as they run the same
operations: values are numbered from the last *marker*, the begin or end of a module, a collective
or a comparison of the logs, whose name is part of them. Weights and inputs are values by name, and
have no entry: `Log.sources` holds what is known of each that was used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flex_model.layouts import logged
from flex_model.layouts.logged import Entry, Value

_INDEX_BITS = 20


class Source(NamedTuple):
    """A tensor that no operation of the forward made.

    Attributes:
        placements: By axis (dp, tp), encoded; None for those that are not known.
        shape: The local one.
        sizes: The full ones, where its layer states them.
        open_dims: Along dp: those of an input that may hold rows (see `constants`).
    """

    name: str
    placements: Any
    shape: tuple[int, ...]
    sizes: tuple[int | None, ...] | None = None
    is_weight: bool = False
    open_dims: tuple[int, ...] = ()


class Log:
    """Logs what one rank runs since the followed forward began. Local."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # since the last comparison of the logs
        self.sources: dict[Value, Source] = {}  # since then
        self._seen: set[Value] = set()
        self.num_syncs = 0
        self._segment, self._index = 0, 0
        self._calls: dict[Any, int] = {}  # by module, or kind of collective: number of calls
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._digest.update(repr(entry).encode())

    def new_value(self) -> Value:
        self._index += 1
        return self._segment << _INDEX_BITS | self._index

    def source(self, source: Source) -> Value:
        """Return the value of a tensor that no operation made, and log what is known of it."""
        value = hash_of("source", source.name, source.placements)
        if value not in self._seen:
            self._seen.add(value)
            self.sources[value] = source
            self._digest.update(repr(source).encode())
        return value

    def enter(self, name: str) -> str:
        """Log that a module's forward begins; return the path to pass to ``exit``."""
        path = f"{name}/{self._count(name)}"
        self._mark(logged.Enter(path))
        return path

    def exit(self, path: str) -> None:
        self._mark(logged.Exit(path))

    def meet(self, name: str, axes: tuple[str, ...]) -> None:
        """Log that the ranks of these axes call the collective now, in the same order, whatever
        each has run before: ``F.linear(x, w, bias if rank == 0 else None)``.
        """
        self._mark(logged.Met(f"{name}/{','.join(axes)}/{self._count((name, axes))}"))

    def _count(self, what: Any) -> int:
        number = self._calls[what] = self._calls.get(what, 0) + 1
        return number

    def _mark(self, entry: logged.Enter | logged.Exit | logged.Met | logged.Sync) -> None:
        """Log a marker, and number values from here on."""
        self.add(entry)
        digest = hashlib.blake2b(repr(entry).encode(), digest_size=5).digest()
        self._segment, self._index = int.from_bytes(digest, "little"), 0

    @property
    def digest(self) -> int:
        """A 63-bit hash of all entries so far."""
        return int.from_bytes(self._digest.digest(), "little") >> 1

    def take(self) -> Chunk:
        """Return what was added since the last ``take``, for the ranks to compare now."""
        chunk = Chunk(self.entries, self.sources)
        self.entries, self.sources = [], {}
        self.num_syncs += 1
        self._mark(logged.Sync(self.num_syncs))
        self.entries.clear()  # every rank adds the marker itself
        return chunk


@dataclass(frozen=True)
class Chunk:
    """A part of a log, as it is exchanged.

    Attributes:
        live: The values whose tensors exist when it is exchanged; None: not known.
    """

    entries: list[Entry]
    sources: dict[Value, Source]
    live: Sequence[Value] | None = None

    def pack(self, live: Iterable[Value]) -> bytes:
        """Serialize the chunk for an exchange between ranks, with the values that are live."""
        entries = [[type(entry).__name__, *entry] for entry in self.entries]
        parts = [entries, list(self.sources.items()), sorted(live)]
        return json.dumps(parts, separators=(",", ":")).encode()

    @staticmethod
    def unpack(packed: bytes) -> Chunk:
        """Deserialize a chunk: the inverse of ``pack``."""
        entries, sources, live = _as_tuples(json.loads(packed))
        sources = {value: Source(*source) for value, source in sources}
        return Chunk([_entry(*entry) for entry in entries], sources, live)


def _entry(kind: str, *fields: Any) -> Entry:
    entry = logged.KINDS[kind](*fields)
    if "outputs" in entry._fields:
        entry = entry._replace(outputs=tuple(logged.Made(*one) for one in entry.outputs))
    if "writes" in entry._fields:
        entry = entry._replace(writes=tuple(logged.Write(*one) for one in entry.writes))
    return entry


def hash_of(*parts: object) -> Value:
    """Return a value derived from these parts, the same on all ranks."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _as_tuples(values: list[Any]) -> tuple[Any, ...]:
    return tuple([_as_tuples(item) if type(item) is list else item for item in values])


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that entries store under this name."""
    return getattr(torch, name.removeprefix("torch."))
