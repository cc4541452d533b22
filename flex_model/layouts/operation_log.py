"""The log of one forward: the operations as one rank ran them, in a form that ranks can exchange.

An entry is a tuple of plain values (numbers, strings, None, and tuples of them):

- ``("enter", path)``, ``("exit", path)``: a module's forward begins, ends; ``("sync", n)``: ranks
  have compared their logs. These are *markers*: values are numbered from the last one.
- ``("placed", value, placements, shape, before)``: a hook replaced the value ``before``.
  Placements by axis (dp, tp), encoded; None for those that are not known.
- ``("stated", value, before, placements, shape, text, sizes)``: the user states the placement of a
  tensor, which has another value from then on.
- ``("op", name, args, kwargs, outputs, writes, carriers)``: an operation; ``carriers``: the values
  that it read and passes gradients to.
- ``("collective", name, reduction, axes, args, kwargs, outputs, writes)``: along ``axes``, which
  are None for a group that is not an axis of the mesh; ``reduction``: "sum" and the like, "" where
  there is none or it is not known.
- ``("call", name, inputs, outputs, stated)``: a call with a contract, see
  `contracts.logged_calls`: the values of its tensors, and what the first states, a DTensor.
- ``("experts", value, before, inputs, shape, refusal, is_opaque)``: a call of experts, whose result
  has another value from then on; see `contracts.experts`.
- ``("invalidated", values)``: nothing is known of these values from here on.
- ``("joint", value, before)``: every rank has a tensor here, such as that of a hook; ``value`` has
  a placement only where all have the same tensor of the program, or each its piece of one.
- ``("output", value, part)``: the forward returned it; ``part``: of this module, "" for the root.
- ``("detached", values)``: an operation made them for its backward alone: they carry no gradients.
- ``("hooked", value)``: a hook of the model's own may change its gradient.
- ``("named", value, values, source)``: a tensor that had one of these values has one of its own
  from here on, since a hook gets its gradient, which is also that of ``source``; None where a node
  shows where the gradient goes.
- ``("node", number, name, contract, inputs, place, value)``: a node of autograd's graph that is
  not one of ATen's operations, its contract (`contracts.functions`), the values that it passes
  gradients to, and the value of its output ``place``.

Tensors are ``("t", value, shape, dtype)`` in arguments, and ``(value, shape, dtype, placements,
local shape)`` among outputs, where DTensors have their stated placements and their full shape. A
*value* is a number that is the same on all ranks as long as they run the same operations: it counts
from the last marker, whose name is part of it. It is None for a tensor of which nothing is known.
Weights and inputs are values by name, and have no entry: `Log.sources` holds what is known of each
that was used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Entry = tuple[Any, ...]
Value = int

_INDEX_BITS = 20
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

MARKERS = ("enter", "exit", "sync")


class Source(NamedTuple):
    """A tensor that no operation of the forward made.

    Attributes:
        placements: By axis (dp, tp), encoded; None for those that are not known.
        shape: The local one.
        sizes: The full ones, where its layer states them.
    """

    name: str
    placements: Any
    shape: tuple[int, ...]
    sizes: tuple[int | None, ...] | None = None
    is_weight: bool = False


class Log:
    """Logs what one rank runs since the followed forward began. Local."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # since the last comparison of the logs
        self.sources: dict[Value, Source] = {}  # since then
        self._seen: set[Value] = set()
        self.num_syncs = 0
        self._segment, self._index = 0, 0
        self._calls: dict[str, int] = {}  # by module path: number of calls
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, *entry: Any) -> None:
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
        """A 63-bit hash of all entries so far."""
        return int.from_bytes(self._digest.digest(), "little") >> 1

    def take(self) -> Chunk:
        """Return what was added since the last ``take``, for the ranks to compare now."""
        chunk = Chunk(self.entries, self.sources)
        self.entries, self.sources = [], {}
        self.num_syncs += 1
        self._mark("sync", self.num_syncs)
        self.entries.clear()  # every rank adds the marker itself
        return chunk


@dataclass(frozen=True)
class Chunk:
    """A part of a log, as it is exchanged."""

    entries: list[Entry]
    sources: dict[Value, Source]

    def pack(self) -> bytes:
        """Serialize the chunk for an exchange between ranks."""
        both = [self.entries, list(self.sources.items())]
        return json.dumps(both, separators=(",", ":")).encode()

    @staticmethod
    def unpack(packed: bytes) -> Chunk:
        """Deserialize a chunk: the inverse of ``pack``."""
        entries, sources = _as_tuples(json.loads(packed))
        return Chunk(list(entries), {value: Source(*source) for value, source in sources})


def hash_of(*parts: object) -> Value:
    """Return a value derived from these parts, the same on all ranks."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _as_tuples(values: list[Any]) -> tuple[Any, ...]:
    return tuple([_as_tuples(item) if type(item) is list else item for item in values])


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that entries store under this name."""
    return _DTYPES[name]
