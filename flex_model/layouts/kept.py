"""Tracks the placements of tensors that outlive the forward that made them, such as caches, and
plain attributes of modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flex_model.distributed import values
from flex_model.distributed.placement import Partial, Placement, Shard
from flex_model.layouts import memory_map
from flex_model.layouts.follow import Follower, Pair
from flex_model.layouts.placement_encoding import encode
from flex_model.layouts.sources import Constants, attributes, tensors_in, tensors_of

_MIN_LIMIT = 64


class _Kept(NamedTuple):
    storage: StorageWeakRef
    version: int
    name: str  # the same on all ranks
    pair: Pair
    is_made: bool  # by a forward, not passed to it
    digest: int | None  # of a partial sum


class KeptTensors:
    """Tracks the tensors of earlier forwards, by memory, as long as they were not written to
    since.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, Any], _Kept] = {}
        self._states: dict[tuple[type, int], list[tuple[tuple[int, ...], Pair]]] = {}
        self._num_forwards = 0
        self._limit = _MIN_LIMIT  # the number of tensors at which those that are gone are dropped

    def note(self, follower: Follower, written: Iterable[tuple[Tensor, Any]]) -> None:
        """Keep the tensors of a followed forward, after the ranks' logs were compared.

        Args:
            written: Weights that the forward wrote to, with their joint values.
        """
        self._begin()
        # A name is compared along tp, where proofs along dp may differ: they are of one rank's log.
        axis = max(follower.proofs.along, default="")
        live = [*follower.recorder.live_tensors()]
        of_inputs = {_memory(tensor) for tensor, value in live if value in follower.passed}
        for tensor, value in (*live, *written):
            pair = follower.placements(value)
            if pair != (None, None):
                lost = follower.obstacles(value).get(axis) if None in pair else None
                text = f"{lost}, value {value}" if lost else f"value {value}"
                self._add(tensor, text, pair, _memory(tensor) not in of_inputs)

    def note_state(self, tensors: Iterable[tuple[Tensor, Pair]]) -> None:
        """Keep the tensors of a forward that was not followed, but ran as the one that the pairs
        are from.
        """
        self._begin()
        for i, (tensor, pair) in enumerate(tensors):
            if pair[0] is not None or pair[1] is not None:
                self._add(tensor, f"tensor {i}", pair)

    def note_states(self, states: Iterable[Any]) -> None:
        """Note the objects of the user that a followed forward leaves, such as caches, whose
        tensors are kept.
        """
        for state in states:
            tensors = tensors_of(state)
            noted = [(tuple(tensor.shape), self.pair(tensor)) for tensor in tensors]
            self._states[type(state), len(tensors)] = noted

    def adopt(self, states: Iterable[Any]) -> None:
        """Keep the tensors of objects that were changed, or copied, since a forward left them, or
        one of their class: by contract they stay placed as it left them, tensor by tensor. So a
        cache may be cropped, repeated, scaled, or its rows reordered.
        """
        for state in states:
            tensors = tensors_of(state)
            noted = self._states.get((type(state), len(tensors)), [])
            for i, (tensor, (shape, pair)) in enumerate(zip(tensors, noted)):
                if self._of(tensor) is None and _is_placed_alike(tensor.shape, shape, pair):
                    self._add(tensor, f"tensor {i} of a {type(state).__name__}", pair)

    def _begin(self) -> None:
        self._num_forwards += 1
        if len(self._kept) >= self._limit:  # rarely: a cache may be many tensors
            self._kept = {k: kept for k, kept in self._kept.items() if not kept.storage.expired()}
            self._limit = max(_MIN_LIMIT, 2 * len(self._kept))

    def _add(self, tensor: Tensor, name: str, pair: Pair, is_made: bool = True) -> None:
        storage, geometry = memory_map.place(tensor)
        if storage is not None:
            before = self._of(tensor)
            is_made |= before is not None and before.is_made
            text = f"{name} of forward {self._num_forwards}"
            version, owner = memory_map.version_of(tensor), StorageWeakRef(storage)
            digest = _digest(tensor, pair)
            kept = _Kept(owner, version, text, pair, is_made, digest)
            self._kept[storage._cdata, geometry] = kept

    def source(self, tensor: Tensor) -> tuple[str, Any] | None:
        """Return the name and encoded placements of a tensor of an earlier forward; None for
        others.
        """
        kept = self._of(tensor)
        return None if kept is None else (kept.name, tuple(map(encode, kept.pair)))

    def pair(self, tensor: Tensor) -> Pair:
        """Return the placements of a tensor of an earlier forward; unknown for others."""
        kept = self._of(tensor)
        return (None, None) if kept is None else kept.pair

    def along_dp(self, tensor: Tensor, is_made: bool) -> Placement | None:
        """Return the placement along dp of a tensor of an earlier forward, if that is known; with
        ``is_made`` only of one that a forward has made.
        """
        kept = self._of(tensor)
        return None if kept is None or is_made > kept.is_made else kept.pair[0]

    def _of(self, tensor: Tensor) -> _Kept | None:
        storage, geometry = memory_map.place(tensor)
        if storage is None:
            return None
        kept = self._kept.get((storage._cdata, geometry))
        if kept is None or kept.storage.expired() or kept.version != memory_map.version_of(tensor):
            return None
        return kept if kept.digest == _digest(tensor, kept.pair) else None


def _digest(tensor: Tensor, pair: Pair) -> int | None:
    """Return a hash of a partial sum: a collective of the user's, which completes it, raises no
    version.
    """
    is_sum = any(isinstance(one, Partial) for one in pair) and tensor.device.type != "meta"
    return values.fingerprint(tensor) if is_sum else None


def _is_placed_alike(shape: Sequence[int], before: Sequence[int], pair: Pair) -> bool:
    """Whether a tensor may be placed as one of another shape was: its number of rows may differ."""
    if len(shape) != len(before):
        return False
    _, tp = pair
    return not isinstance(tp, Shard) or shape[tp.dim] == before[tp.dim]


Name = tuple[int, int]


class Attributes:
    """Tracks the attributes of one model that have ever held a tensor of a forward. Local."""

    def __init__(self, root: nn.Module, constants: Constants, kept: KeptTensors) -> None:
        self._root, self._constants, self._kept = root, constants, kept
        self._seen: dict[tuple[int, str], weakref.ref[nn.Module]] = {}

    def scan(self) -> None:
        """Find such attributes after a followed forward."""
        self._seen = {key: module for key, module in self._seen.items() if module() is not None}
        for module in self._root.modules():
            for name, value in attributes(module).items():
                if (id(module), name) in self._seen:
                    continue
                if any(tensor not in self._constants for tensor in tensors_in(value)):
                    self._seen[id(module), name] = weakref.ref(module)

    def _values(self) -> Iterator[Any]:
        for (_, name), reference in self._seen.items():
            yield vars(reference()).get(name) if reference() is not None else None

    def tensors(self) -> dict[Name, Tensor]:
        """Return their tensors, by number of the attribute and of the tensor in it."""
        return {
            (i, j): tensor
            for i, value in enumerate(self._values())
            for j, tensor in enumerate(tensors_in(value))
        }

    def describe(self, parts: list[Any], sizes: list[int]) -> None:
        """Append a description of all of them except for sizes to ``parts``, and the sizes."""
        for value in self._values():
            tensors = list(tensors_in(value))
            parts.append(f"{type(value).__name__} {len(tensors)}")
            for tensor in tensors:
                source = self._kept.source(tensor)
                placed: Any = "constant" if tensor in self._constants else source and source[1]
                parts.append(f"{tensor.dtype} {tensor.dim()} {tensor.requires_grad} {placed}")
                sizes.extend(tensor.shape)


def _memory(tensor: Tensor) -> int:
    storage, _ = memory_map.place(tensor)
    return 0 if storage is None else storage._cdata
