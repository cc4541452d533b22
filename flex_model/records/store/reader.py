"""Reads full tensors from the files that the ranks wrote, on any number of ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flex_model.records.store.manifest import (
    Index,
    Manifest,
    annotation_key,
    index_name,
    shard_name,
)
from flex_model.records.store.record_layout import RecordLayout

_OPEN_GROUPS = 2  # files kept open: batches are mostly read in order


class Reader:
    """Reads the batches of one manifest of a folder, each when it is requested."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._opened: OrderedDict[int, tuple[Index, dict[int, Any]]] = OrderedDict()

    def index_of(self, batch: int) -> Index:
        """Return the index of a batch's group."""
        return self._group(batch)[0]

    def indices(self) -> list[Index]:
        """Return the indices of all groups."""
        return [self.index_of(first) for first, _, _ in self._manifest.groups]

    def records(self, batch: int, names: Collection[str] | None = None) -> dict[str, list[Tensor]]:
        """Return the records of these names (None: all), in the order of calls."""
        index, files = self._group(batch)
        return {
            name: [self._tensor(index, files, key, layout) for key, layout in calls]
            for name, calls in index.of_batch.get(batch, {}).items()
            if names is None or name in names
        }

    def call(self, batch: int, name: str, call: int) -> Tensor:
        """Return the record of one call."""
        index, files = self._group(batch)
        return self._tensor(index, files, *index.of_batch[batch][name][call])

    def annotations(self, batch: int) -> dict[str, Any]:
        index, files = self._group(batch)
        found = dict(index.batches[batch - index.first]["notes"])
        for other, name, layout in index.annotations:
            if other == batch:
                key = annotation_key(batch, name)
                found[name] = self._tensor(index, files, key, index.layouts[layout])
        return found

    def _group(self, batch: int) -> tuple[Index, dict[int, Any]]:
        place = self._manifest.group_of(batch)
        if place not in self._opened:
            first, last, digest = self._manifest.groups[place]
            self._opened[place] = (Index.read(self._folder, first, last, digest), {})
            while len(self._opened) > _OPEN_GROUPS:
                self._opened.popitem(last=False)
        self._opened.move_to_end(place)
        return self._opened[place]

    def _tensor(
        self, index: Index, files: dict[int, Any], key: str, layout: RecordLayout
    ) -> Tensor:
        if layout.is_whole:
            rank, shape = layout.shards[0]
            # A file is mapped once: a caller's writes to its record must not change the mapping.
            return self._shard(index, files, key, rank, shape, layout.dtype).clone()
        full = torch.empty(layout.shape, dtype=layout.dtype)
        shards = [
            self._shard(index, files, key, rank, shape, layout.dtype)
            for rank, shape in layout.shards
        ]
        for shard, start, shard_start, sizes in layout.boxes:
            to = tuple(slice(a, a + n) for a, n in zip(start, sizes))
            source = tuple(slice(a, a + n) for a, n in zip(shard_start, sizes))
            full[to] = shards[shard][source]
        return full

    def _shard(
        self,
        index: Index,
        files: dict[int, Any],
        key: str,
        rank: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._folder / shard_name(index.first, index.last, index.session, rank)
        try:
            if rank not in files:
                files[rank] = safe_open(str(path), framework="pt")
            tensor = files[rank].get_tensor(key)
            if tensor.dtype != dtype:  # a dtype that safetensors has no name for
                if tensor.dtype != torch.uint8 or tensor.dim() != 1:
                    raise ValueError(f"{key!r} is of {tensor.dtype}, not {dtype}")
                tensor = tensor.clone().view(dtype).reshape(shape)  # aligned for operations
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{key!r} has shape {tuple(tensor.shape)}, not {shape}")
        except (SafetensorError, ValueError, RuntimeError, OSError) as error:
            raise ValueError(
                f"ActivationStore: {path} is not the file that a store wrote with "
                f"{index_name(index.first, index.last)} ({error}); delete {self._folder} and run "
                "again"
            ) from error
        return tensor
