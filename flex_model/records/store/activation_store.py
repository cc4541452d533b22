"""ActivationStore: a folder into which a FlexModel writes records, readable anywhere."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from flex_model.records.store.manifest import (
    MANIFEST,
    MANIFEST_ASIDE,
    Index,
    Manifest,
    RecordLayout,
    annotation_key,
    index_name,
    is_of_batches,
    shard_name,
)

if TYPE_CHECKING:
    from flex_model.records.store.session import Session


class ActivationStore:
    """A folder with the records of runs, by batch, name and call: safetensors files and JSON.

    Example::

        store = ActivationStore("activations/")
        with FlexModel(model, store) as flex:
            flex.register_forward_hook(HookFunction("layers.3.mlp"))
            for tokens in batches[store.num_batches :]:  # skips those of a run that was killed
                store.annotate(token_ids=tokens)
                flex(tokens)
        for full in ActivationStore("activations/").tensors("layers.3.mlp"):  # on any number of
            ...                                                               # ranks

    As ``output_ptr`` of a FlexModel, each outermost run is one batch (``flex(...)``, everything
    inside one ``active()``, one method such as ``generate``). A rank writes its own shard of a
    sharded record; rank 0 writes what all ranks hold. Stored batches are whole, and always the
    first ones; after a kill the next FlexModel continues from there.

    Args:
        folder: Made if it does not exist; on a file system that all ranks share. One FlexModel at a
            time writes into it.
        key: What the records depend on besides model and hooks (the data, say): any JSON value. To
            continue a store, pass an equal one.
        shard_bytes: A new file is begun when the full tensors of a file's batches have so many
            bytes.
        max_bytes: The most that a rank holds for its writer; a run faster than the disk waits.
        seconds: A new file is also begun, at the end of a run, when this long has passed.

    Attributes:
        num_batches: The number of stored batches, as the ranks agreed on when the FlexModel was
            made, or at the last ``flush``.
        is_complete: Whether the FlexModel (or sequential run) was closed normally.

    Raises:
        ValueError: the folder holds something else, or records with another key. Reading raises it
            too, if a file was changed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        key: Any = None,
        shard_bytes: int = 256 * 2**20,
        max_bytes: int = 2**30,
        seconds: float = 30.0,
    ) -> None:
        if shard_bytes < 1 or max_bytes < 1 or seconds < 0:
            raise ValueError(
                "ActivationStore: shard_bytes and max_bytes must be at least 1, and seconds at "
                f"least 0; got {shard_bytes}, {max_bytes} and {seconds}"
            )
        self.folder = Path(folder)
        self.shard_bytes, self.max_bytes, self.seconds = shard_bytes, max_bytes, seconds
        self.key = json.loads(json.dumps(key))
        self._notes: dict[str, Any] = {}
        self._session: Session | None = None
        self._manifest = Manifest("", self.key)
        self._reader = Reader(self.folder, self._manifest)
        self.reload()

    def reload(self) -> None:
        """Read the manifest again. Local; what a FlexModel writes is visible after ``flush``."""
        found = Manifest.read(self.folder)
        if found is None and self.folder.is_dir():
            names = sorted(path.name for path in self.folder.iterdir())
            found = Manifest.read(self.folder)  # another process may have created it meanwhile
            if found is None:
                self._check_never_begun(names)
        if found is None:
            return
        if self.key is not None and found.key != self.key:
            raise ValueError(
                f"ActivationStore: {self.folder} holds records with key {found.key!r}, not "
                f"{self.key!r}; give another folder, or delete that one"
            )
        if found != self._manifest:
            self._manifest, self._reader = found, Reader(self.folder, found)

    def _check_never_begun(self, names: list[str]) -> None:
        """ValueError for files in the folder, besides the manifest that a store writes first."""
        others = [name for name in names if name != MANIFEST_ASIDE]
        batches = [name for name in others if is_of_batches(name)]
        if batches:
            raise ValueError(
                f"ActivationStore: {self.folder} holds batches ({batches[0]!r}), and the "
                f"{MANIFEST} that lists them is gone; put it back, or delete the folder"
            )
        if others:
            raise ValueError(
                f"ActivationStore: {self.folder} holds other files ({others[0]!r}) and no "
                f"{MANIFEST}; give a folder of its own"
            )

    def annotate(self, **values: Any) -> None:
        """Annotate the next batch: with tensors, such as ``token_ids``, or JSON values.

        Call it on every rank before the run, with what the rank passes to the model: tensors that
        differ over data-parallel ranks are rows of one batch, and are read as one tensor. Local.
        """
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            self._notes[name] = (
                value.detach().to("cpu", copy=True) if is_tensor else json.loads(json.dumps(value))
            )

    def take_annotations(self) -> dict[str, Any]:
        """Return the annotations of the next batch, and forget them. Local."""
        taken, self._notes = self._notes, {}
        return taken

    def check_unused(self) -> None:
        """ValueError if a FlexModel writes the store."""
        if self._session is not None:
            raise ValueError(
                f"ActivationStore: {self.folder} is written by another FlexModel; restore() that "
                "first, or give each a store of its own"
            )

    def set_session(self, session: Session | None) -> None:
        """Set what writes the store; None: nothing does any more. Local."""
        self._session = session

    def flush(self) -> None:
        """Wait until all batches so far are on the disk of every rank and in the manifest, so that
        a kill can't lose them.

        Collective over the ranks of the FlexModel. The batch of the last run ends here: a backward
        of it that comes later is an error.

        Raises:
            HookError: a rank's disk failed; on every rank.
        """
        if self._session is not None:
            self._session.flush()

    def close(self) -> None:
        """Flush, and unlock the folder. Collective; ``FlexModel.restore`` calls it."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if self._session is not None:
            self._session.close_on_exit(kind)

    @property
    def num_batches(self) -> int:
        return self._manifest.num_batches

    @property
    def is_complete(self) -> bool:
        return self._manifest.is_complete

    @property
    def names(self) -> list[str]:
        """Names of all records, sorted."""
        return sorted({name for index in self._reader.indices() for name in index.names})

    def batch(self, index: int) -> dict[str, list[Tensor]]:
        """Return the records of one batch, by name, in the order of calls: full tensors.

        Raises:
            IndexError: there is no such batch (yet).
        """
        self._check_batch(index)
        return self._reader.records(index)

    def annotations(self, index: int) -> dict[str, Any]:
        """Return the annotations of one batch. IndexError as ``batch``."""
        self._check_batch(index)
        return self._reader.annotations(index)

    def tensors(self, name: str) -> Iterator[Tensor]:
        """Yield the records of one name in the order of batches, then calls, as in ``output_ptr``;
        one at a time, each in memory of its own.

        Raises:
            KeyError: no batch has such a record.
        """
        return iter(self[name])

    def __getitem__(self, name: str) -> RecordSequence:
        """Return the records of one name as a sequence that reads each when it is indexed.

        Raises:
            KeyError: no batch has such a record.
        """
        found = [
            (batch, call)
            for index in self._reader.indices()
            for batch, other, call, _ in index.records
            if other == name
        ]
        if not found:
            raise self._no_record(name)
        return RecordSequence(self._reader, name, sorted(found))

    def numpy(self, name: str) -> Iterator[Any]:
        """Yield ``tensors`` as numpy arrays; dtypes that numpy lacks (bfloat16, float8) become
        float32 (complex32: complex64), which has all their values.
        """
        return map(as_numpy, self.tensors(name))

    def dataset(self, names: Sequence[str] | None = None) -> Any:
        """Return a Hugging Face ``datasets.IterableDataset`` with a row for each batch: ``batch``
        (its number), annotations, and each record by name, a list of them where there were several
        calls. It reads when it is iterated, and can be split among workers.

        Raises:
            ImportError: ``datasets`` is not installed.
            KeyError: as ``tensors``.
        """
        from datasets import IterableDataset

        known = set(self.names) if names else set()
        for name in names or ():
            if name not in known:
                raise self._no_record(name)
        return IterableDataset.from_generator(
            _rows,
            gen_kwargs={
                "folder": str(self.folder),
                "names": None if names is None else tuple(names),
                "batches": list(range(self.num_batches)),
            },
        )

    def layout(self, name: str, batch: int = 0, call: int = 0) -> str:
        """Return how a record was sharded when written. Raises as ``batch`` and ``tensors``."""
        self._check_batch(batch)
        calls = self._reader.index_of(batch).of_batch.get(batch, {}).get(name)
        if not calls:
            raise KeyError(f"batch {batch} of {self.folder} has no record {name!r}")
        return calls[call][1].description

    def inputs_hash(self, index: int) -> str | None:
        """Return the hash of a sequential run's inputs for a batch. IndexError as ``batch``."""
        self._check_batch(index)
        group = self._reader.index_of(index)
        return group.batches[index - group.first]["inputs"]

    def _no_record(self, name: str) -> KeyError:
        return KeyError(f"{self.folder} has no record {name!r}; it has {self.names}")

    def _check_batch(self, index: int) -> None:
        if not 0 <= index < self.num_batches:
            raise IndexError(f"{self.folder} has {self.num_batches} batches, no batch {index}")


class RecordSequence(Sequence[Tensor]):
    """The records of one name. ``records[i]`` reads one; a slice is another sequence."""

    def __init__(self, reader: Reader, name: str, places: Sequence[tuple[int, int]]) -> None:
        self._reader, self._name, self._places = reader, name, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> RecordSequence: ...
    def __getitem__(self, index: int | slice) -> Tensor | RecordSequence:
        if isinstance(index, slice):
            return RecordSequence(self._reader, self._name, self._places[index])
        batch, call = self._places[index]
        return self._reader.call(batch, self._name, call)


def as_numpy(tensor: Tensor) -> Any:
    """Return an array of the same values."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32).numpy()


def _rows(folder: str, names: Sequence[str] | None, batches: list[int]) -> Iterator[dict[str, Any]]:
    store = ActivationStore(folder)
    for batch in batches:
        row: dict[str, Any] = {"batch": batch}
        for name, value in store.annotations(batch).items():
            row[name] = as_numpy(value) if isinstance(value, Tensor) else value
        for name, calls in store._reader.records(batch, names).items():
            arrays = [as_numpy(tensor) for tensor in calls]
            row[name] = arrays[0] if len(arrays) == 1 else arrays
        yield row


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
