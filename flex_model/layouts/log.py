"""The operations of one forward as one rank ran them, in a form that ranks can exchange.

An entry is a tuple of plain values (numbers, texts, None, and tuples of such):

- ``("enter", path)``, ``("exit", path)``: a module's forward begins, ends; ``("sync", n)``: ranks
  have compared their logs. These are *markers*: what follows one is counted from it.
- ``("placed", value, placements, shape, before)``: what a hook put into the model in the place of
  another value. Placements by axis (dp, tp), encoded; None for what is not known.
- ``("stated", value, before, placements, shape, text, sizes)``: what the user states of a tensor,
  which has another value from then on.
- ``("op", name, args, kwargs, outputs, numbers, writes, carriers)``: an operation; ``carriers``:
  the values that it read and hands gradients to.
- ``("collective", name, reduction, axes, args, kwargs, outputs, writes, by_plan)``: along ``axes``,
  which are None for a group that is no axis of the mesh; ``reduction``: "sum" and the like, ""
  where there is none, or it is not known.
- ``("lost", values)``: these values are not known from here on.
- ``("read", value)``: its elements were read, as numbers or by something that is not torch.
- ``("asked", value, answer)``: whether something is so of its elements.
- ``("number", number, expression, conversion)``: a size was made a plain number.
- ``("compared", by, expression, other, answer)``: a size was compared with another number.
- ``("met", value, before)``: a hook meets a tensor, of which ``value`` tells whether it is the same
  one on all ranks.
- ``("output", value)``: the forward returned it.
- ``("idle", values)``: an operation made them for its backward alone: they carry no gradients.
- ``("hooked", value, text, number)``: the hook of this number may change its gradient;
  ``("looked", number)``: that has run and has not.
- ``("named", value, values, source)``: a tensor that has one of these values has one of its own
  from here on: a hook looks at its gradient, which is that of ``source``, too; None where a node
  tells where it goes.
- ``("node", number, name, inputs, place, value)``: a node of autograd's graph that is not one of
  ATen's operations, the values that it hands gradients to, and the value of its output ``place``.
- ``("backward", number, gradients)``: such a node runs: ``(place, value, shape, placements)`` of
  each gradient that it gets. ``("gradients", number, values, placements)``: what it has
  handed on.

Tensors are ``("t", value, shape, dtype)`` in arguments, and ``(value, shape, dtype, placements,
local shape)`` among outputs, where DTensors state their placements, and have their full shape as
shape. A *value* is a number that ranks give alike as long as they run the same operations: it
counts from the last marker, whose name is part of it. Of a tensor that nothing is known of it is
None. Weights and inputs are values by name, and have no entry: `Log.sources` says what is known of
each that was met.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

Entry = tuple[Any, ...]
Value = int

_INDEX_BITS = 20
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

MARKERS = ("enter", "exit", "sync")


class Log:
    """What one rank has run since the followed forward began. Local."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # since the ranks compared their logs last
        self.sources: dict[Value, Entry] = {}  # likewise: (name, placements, shape, sizes)
        self._met: set[Value] = set()
        self.num_syncs = 0
        self._segment, self._index = 0, 0
        self._calls: dict[str, int] = {}  # by module path: how often it was entered
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, *entry: Any) -> None:
        self.entries.append(entry)
        self._digest.update(repr(entry).encode())

    def new_value(self) -> Value:
        self._index += 1
        return self._segment << _INDEX_BITS | self._index

    def source(
        self,
        name: str,
        placements: Any,
        shape: tuple[int, ...],
        sizes: tuple[int | None, ...] | None = None,
    ) -> Value:
        """The value of a tensor that no operation made, and what is known of it; ``sizes``: the
        full ones, where its layer states those.
        """
        value = hash_of("source", name, placements)
        if value not in self._met:
            self._met.add(value)
            entry = self.sources[value] = (name, placements, shape, sizes)
            self._digest.update(repr(entry).encode())
        return value

    def enter(self, name: str) -> str:
        """A module's forward begins; the path to give to ``exit``."""
        number = self._calls[name] = self._calls.get(name, 0) + 1
        path = f"{name}/{number}"
        self._mark("enter", path)
        return path

    def exit(self, path: str) -> None:
        self._mark("exit", path)

    def _mark(self, kind: str, name: Any) -> None:
        self.add(kind, name)
        digest = hashlib.blake2b(f"{kind} {name}".encode(), digest_size=5).digest()
        self._segment, self._index = int.from_bytes(digest, "little"), 0

    @property
    def digest(self) -> int:
        """63 bits that stand for all entries so far."""
        return int.from_bytes(self._digest.digest(), "little") >> 1

    def take(self) -> Chunk:
        """What was added since the last ``take``: the ranks compare it now."""
        chunk = Chunk(self.entries, self.sources)
        self.entries, self.sources = [], {}
        self.num_syncs += 1
        self._mark("sync", self.num_syncs)
        self.entries.clear()  # the marker is not news to anyone
        return chunk


@dataclass(frozen=True)
class Chunk:
    """A part of a log."""

    entries: list[Entry]
    sources: dict[Value, Entry]

    def pack(self) -> bytes:
        """For an exchange between ranks."""
        both = [self.entries, list(self.sources.items())]
        return json.dumps(both, separators=(",", ":")).encode()

    @staticmethod
    def unpack(packed: bytes) -> Chunk:
        """The inverse of ``pack``."""
        entries, sources = _as_tuples(json.loads(packed))
        return Chunk(list(entries), dict(sources))


def hash_of(*parts: object) -> Value:
    """A value that stands for these parts, the same on all ranks."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name, as entries have it."""
    return _DTYPES[name]
