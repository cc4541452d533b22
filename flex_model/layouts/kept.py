"""Tracks the placements of tensors that outlive the forward that made them, such as caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flex_model.layouts import memory_map
from flex_model.layouts.follow import Follower, Pair
from flex_model.layouts.placement_encoding import encode

_MIN_LIMIT = 64


class _Kept(NamedTuple):
    storage: StorageWeakRef
    version: int
    name: str  # the same on all ranks
    pair: Pair


class KeptTensors:
    """Tracks the tensors of earlier forwards, by memory, as long as they were not written to
    since.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, Any], _Kept] = {}
        self._num_forwards = 0
        self._limit = _MIN_LIMIT  # the number of tensors at which those that are gone are dropped

    def note(self, follower: Follower, written: Iterable[tuple[Tensor, Any]]) -> None:
        """Keep the tensors of a followed forward, after the ranks' logs were compared.

        Args:
            written: Weights that the forward wrote to, with their joint values.
        """
        self._begin()
        for tensor, value in (*follower.recorder.live_tensors(), *written):
            pair = follower.placements(value)
            if pair != (None, None):
                self._add(tensor, f"value {value}", pair)

    def note_state(self, tensors: Iterable[tuple[Tensor, Pair]]) -> None:
        """Keep the tensors of a forward that was not followed, but ran as the one that the pairs
        are from.
        """
        self._begin()
        for i, (tensor, pair) in enumerate(tensors):
            if pair[0] is not None or pair[1] is not None:
                self._add(tensor, f"tensor {i}", pair)

    def _begin(self) -> None:
        self._num_forwards += 1
        if len(self._kept) >= self._limit:  # rarely: a cache may be many tensors
            self._kept = {k: kept for k, kept in self._kept.items() if not kept.storage.expired()}
            self._limit = max(_MIN_LIMIT, 2 * len(self._kept))

    def _add(self, tensor: Tensor, name: str, pair: Pair) -> None:
        local = memory_map.plain(tensor)
        storage = memory_map.storage_of(local)
        if storage is not None:
            text = f"{name} of forward {self._num_forwards}"
            kept = _Kept(StorageWeakRef(storage), memory_map.version_of(tensor), text, pair)
            self._kept[_key(storage, local)] = kept

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

    def _of(self, tensor: Tensor) -> _Kept | None:
        local = memory_map.plain(tensor)
        storage = memory_map.storage_of(local)
        if storage is None:
            return None
        kept = self._kept.get(_key(storage, local))
        if kept is None or kept.storage.expired() or kept.version != memory_map.version_of(tensor):
            return None
        return kept


def _key(storage: Any, local: Tensor) -> tuple[int, Any]:
    return storage._cdata, memory_map.geometry(local)
