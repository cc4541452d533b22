"""Reads full tensors, or rows of them, from the files of a store, each when it is requested."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.placement import Shape, located
from flex_model.records.store.files import MappedFile
from flex_model.records.store.manifest import (
    Index,
    Manifest,
    RecordLayout,
    annotation_key,
    index_name,
    shard_name,
)
from flex_model.records.store.statistics import merged, statistics_key, width_of


def as_numpy(tensor: Tensor) -> Any:
    """Return an array of the same values."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).numpy()


class RecordRows:
    """The rows of a record, mapped from its files. A row is the last dim; its number counts through
    all dims before that.

    Attributes:
        start, step: The place of a row is ``start + step * number``: in its file, if that has the
            record as a whole.
    """

    def __init__(self, layout: RecordLayout, shards: list[Tensor]) -> None:
        self._layout, self._shards = layout, [shard.flatten(0, -2) for shard in shards]
        self.start, self.step = 0, 1
        if layout.is_whole:
            first, self.step = self._shards[0], layout.shape[-1]
            self.start = int(first.storage_offset())
            places = first.untyped_storage().nbytes() // first.itemsize - self.step + 1
            self._anywhere = first.as_strided((places, self.step), (1, 1), 0)

    def reads(self, other: RecordRows) -> bool:
        """Whether the rows of the other record can be read by this one: they are in one file."""
        if not (self._layout.is_whole and other._layout.is_whole):
            return self is other
        return self._anywhere.data_ptr() == other._anywhere.data_ptr()

    def read(self, places: Tensor, out: Tensor) -> None:
        """Read the rows at these places alone into ``out``: contiguous, (rows, width)."""
        layout = self._layout
        if layout.is_whole:
            torch.index_select(self._anywhere, 0, places, out=out)
            return
        indices = torch.unravel_index(places, layout.shape[:-1])
        for box in layout.boxes:
            shard, start, shard_start, sizes = box
            is_held, number = located(indices, box, layout.shards[shard][1])
            held = self._shards[shard][:, shard_start[-1] : shard_start[-1] + sizes[-1]]
            channels = slice(start[-1], start[-1] + sizes[-1])
            if is_held.all():
                out[:, channels] = held.index_select(0, number)
            else:
                out[is_held, channels] = held.index_select(0, number[is_held])


class _Group:
    """The index of a group of batches, and its files, each opened when it is first read."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.index = index
        self._folder = folder
        self._files: dict[int, MappedFile] = {}  # by rank

    def tensor(self, key: str, layout: RecordLayout) -> Tensor:
        """Return a full tensor, in memory of its own."""
        shards = self.shards(key, layout)
        if layout.is_whole:
            # A file is mapped once: a caller's writes to its record must not change the mapping.
            return shards[0].clone()
        full = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
        for shard, start, shard_start, sizes in layout.boxes:
            to = tuple(slice(a, a + n) for a, n in zip(start, sizes))
            source = tuple(slice(a, a + n) for a, n in zip(shard_start, sizes))
            full[to] = shards[shard][source]
        return full

    def shards(self, key: str, layout: RecordLayout) -> list[Tensor]:
        """Return the shards of a tensor, as they are mapped from the files."""
        return [self.shard(key, rank, shape, layout.dtype) for rank, shape in layout.shards]

    def shard(self, key: str, rank: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return one rank's shard. ValueError if its file does not have it."""
        try:
            tensor = self.file(rank).tensor(key)
            if tensor.dtype != dtype:  # a dtype that safetensors has no name for
                if tensor.dtype != torch.uint8 or tensor.dim() != 1:
                    raise ValueError(f"{key!r} is of {tensor.dtype}, not {dtype}")
                tensor = tensor.clone().view(dtype).reshape(shape)  # aligned for operations
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{key!r} has shape {tuple(tensor.shape)}, not {shape}")
        except (KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
            raise ValueError(
                f"ActivationStore: {self._path(rank)} is not the file that a store wrote with "
                f"{index_name(self.index.first, self.index.last)} ({error}); delete "
                f"{self._folder} and run again"
            ) from error
        return tensor

    def file(self, rank: int) -> MappedFile:
        """Return a rank's file, which is mapped once."""
        if rank not in self._files:
            self._files[rank] = MappedFile(self._path(rank))
        return self._files[rank]

    def _path(self, rank: int) -> Path:
        index = self.index
        return self._folder / shard_name(index.first, index.last, index.session, rank)


class Reader:
    """Reads the batches of one manifest of a folder, each when it is requested.

    Args:
        open_groups: The most groups whose files are kept open; batches are mostly read in order.
    """

    def __init__(self, folder: Path, manifest: Manifest, open_groups: int = 2) -> None:
        self._folder, self._manifest, self._open_groups = folder, manifest, open_groups
        self._opened: OrderedDict[int, _Group] = OrderedDict()

    def index_of(self, batch: int) -> Index:
        """Return the index of a batch's group."""
        return self._group(batch).index

    def indices(self) -> list[Index]:
        """Return the indices of all groups."""
        return [self.index_of(first) for first, _, _ in self._manifest.groups]

    def records(self, batch: int, names: Collection[str] | None = None) -> dict[str, list[Tensor]]:
        """Return the records of these names (None: all), in the order of calls."""
        group = self._group(batch)
        return {
            name: [group.tensor(key, layout) for key, layout in calls]
            for name, calls in group.index.of_batch.get(batch, {}).items()
            if names is None or name in names
        }

    def call(self, batch: int, name: str, call: int) -> Tensor:
        """Return the record of one call."""
        group = self._group(batch)
        return group.tensor(*group.index.of_batch[batch][name][call])

    def rows(self, batch: int, name: str, call: int) -> RecordRows:
        """Return the rows of the record of one call; none is read yet."""
        group = self._group(batch)
        key, layout = group.index.of_batch[batch][name][call]
        return RecordRows(layout, group.shards(key, layout))

    def load(self, batch: int, name: str, call: int) -> None:
        """Read the record of one call from the disk, if it is not in memory."""
        group = self._group(batch)
        key, layout = group.index.of_batch[batch][name][call]
        for rank, _ in layout.shards:
            group.file(rank).load(key)

    def moments(self, name: str) -> Tensor | None:
        """Return the moments of all rows of one name; None if the files do not have them, or its
        records differ in width.
        """
        total: Tensor | None = None
        for index in self.indices():
            layouts = [
                index.layouts[number] for _, other, _, number in index.records if other == name
            ]
            if not layouts:
                continue
            width = width_of(layouts)
            if width is None or name not in index.statistics:
                return None
            if total is None:
                total = torch.zeros(3, width, dtype=torch.float64, device="cpu")
            if total.shape[1] != width:
                return None
            group, key = self._group(index.first), statistics_key(name)
            for rank in {rank for layout in layouts for rank, _ in layout.shards}:
                total = merged(total, group.shard(key, rank, (3, width), torch.float64))
        return total

    def annotations(self, batch: int) -> dict[str, Any]:
        group = self._group(batch)
        index = group.index
        found = dict(index.batches[batch - index.first]["notes"])
        for name, layout in index.annotations_of_batch.get(batch, {}).items():
            found[name] = group.tensor(annotation_key(batch, name), layout)
        return found

    def _group(self, batch: int) -> _Group:
        place = self._manifest.group_of(batch)
        group = self._opened.pop(place, None)  # two threads may read
        if group is None:
            group = _Group(self._folder, Index.read(self._folder, *self._manifest.groups[place]))
        self._opened[place] = group
        while len(self._opened) > self._open_groups:
            self._opened.popitem(last=False)
        return group
