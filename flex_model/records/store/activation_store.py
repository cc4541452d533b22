"""A folder of records: what a FlexModel writes into it, and what is read from it anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from flex_model.records.store.manifest import MANIFEST, MANIFEST_ASIDE, Manifest, is_of_batches
from flex_model.records.store.reader import Reader

if TYPE_CHECKING:
    from flex_model.records.store.session import Session


class ActivationStore:
    """Records of runs in a folder, by batch, name and call: safetensors files and JSON.

    Example::

        store = ActivationStore("activations/")
        with FlexModel(model, store) as flex:
            flex.register_forward_hook(HookFunction("layers.3.mlp"))
            for tokens in batches[store.num_batches :]:  # those of a run that was killed are there
                store.annotate(token_ids=tokens)
                flex(tokens)
        for full in ActivationStore("activations/").tensors("layers.3.mlp"):  # on any number of
            ...                                                               # ranks

    As ``output_ptr`` of a FlexModel, each outermost run is one batch (``flex(...)``, everything
    inside one ``active()``, one method such as ``generate``). A rank writes its own part of what is
    sharded, rank 0 what all ranks hold. What is there is whole, and the first batches always;
    after a kill the next FlexModel goes on from there.

    Args:
        folder: Made if it is not there; on a file system that all ranks share. One FlexModel at a
            time writes into it.
        key: What the records depend on besides model and hooks (the data, say): anything that JSON
            can hold. Who goes on must give the same.
        shard_bytes: Files are begun anew when their batches' full tensors have so many bytes.
        max_bytes: That a rank holds for its writer; a run that is faster than the disk waits.
        seconds: Files are begun anew at the end of a run, too, when this long has passed.

    Attributes:
        num_batches: How many are there: as the ranks agreed on when the FlexModel was made, or at
            the last ``flush``.
        is_complete: Whether the FlexModel (or sequential run) came to its end.

    Raises:
        ValueError: the folder holds something else, or records with another key. Raised by reading
            too, where a file is not what was written.
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
        """See what is in the folder now. Local; what a FlexModel writes is seen after ``flush``."""
        found = Manifest.read(self.folder)
        if found is None and self.folder.is_dir():
            names = sorted(path.name for path in self.folder.iterdir())
            found = Manifest.read(self.folder)  # another process may have begun it meanwhile
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
        """ValueError for what is in the folder besides the manifest, with which a store begins."""
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

    # Writing.

    def annotate(self, **values: Any) -> None:
        """Keep these with the next batch: tensors, such as ``token_ids``, or what JSON can hold.

        Called on every rank before the run, with what the rank gives to the model: tensors that
        differ over data-parallel ranks are rows of one batch, and are read as one tensor. Local.
        """
        for name, value in values.items():
            is_tensor = isinstance(value, Tensor)
            self._notes[name] = (
                value.detach().to("cpu", copy=True) if is_tensor else json.loads(json.dumps(value))
            )

    def flush(self) -> None:
        """Wait until all batches so far are on the disk of every rank and in the manifest: then no
        kill can lose them.

        Collective over the ranks of the FlexModel. The batch of the last run ends here: a backward
        of it that comes later is an error.

        Raises:
            HookError: a rank's disk failed; on every rank.
        """
        if self._session is not None:
            self._session.flush()

    def close(self) -> None:
        """``flush``, and let the folder go. Collective; a FlexModel does it when it is restored."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if self._session is not None:
            self._session.leave(kind)

    # Reading.

    @property
    def num_batches(self) -> int:
        return self._manifest.num_batches

    @property
    def is_complete(self) -> bool:
        return self._manifest.is_complete

    @property
    def names(self) -> list[str]:
        """Names of the records, sorted."""
        return sorted({name for index in self._reader.indices() for name in index.names})

    def batch(self, index: int) -> dict[str, list[Tensor]]:
        """The records of one batch, by name, in the order of calls: full tensors.

        Raises:
            IndexError: the batch isn't there (yet).
        """
        self._check_batch(index)
        return self._reader.records(index)

    def annotations(self, index: int) -> dict[str, Any]:
        """What ``annotate`` gave for one batch. IndexError as ``batch``."""
        self._check_batch(index)
        return self._reader.annotations(index)

    def tensors(self, name: str) -> Iterator[Tensor]:
        """The records of one name in the order of batches, then calls, as ``output_ptr`` has them;
        one at a time, each in memory of its own.

        Raises:
            KeyError: no batch has such a record.
        """
        return iter(self[name])

    def __getitem__(self, name: str) -> RecordSequence:
        """The records of one name as a sequence, of which each is read when it is asked for.

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
        """As ``tensors``, as numpy arrays; dtypes that numpy lacks (bfloat16, float8) become
        float32 (complex32: complex64), which has all their values.
        """
        return map(as_numpy, self.tensors(name))

    def dataset(self, names: Sequence[str] | None = None) -> Any:
        """A Hugging Face ``datasets.IterableDataset`` with a row for each batch: ``batch`` (its
        number), annotations, and each record by name, a list of them where there were several
        calls. It reads when it is iterated, and can be split among workers.

        Raises:
            ImportError: ``datasets`` is not installed.
            KeyError: as ``tensors``.
        """
        from datasets import IterableDataset

        there = set(self.names) if names else set()
        for name in names or ():
            if name not in there:
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
        """How a record was split when it was written. Raises as ``batch`` and ``tensors``."""
        self._check_batch(batch)
        calls = self._reader.index_of(batch).of_batch.get(batch, {}).get(name)
        if not calls:
            raise KeyError(f"batch {batch} of {self.folder} has no record {name!r}")
        return calls[call][1].description

    def inputs_hash(self, index: int) -> str | None:
        """Of what a sequential run gave to the model for a batch. IndexError as ``batch``."""
        self._check_batch(index)
        group = self._reader.index_of(index)
        return group.batches[index - group.first]["inputs"]

    def _no_record(self, name: str) -> KeyError:
        return KeyError(f"{self.folder} has no record {name!r}; it has {self.names}")

    def _check_batch(self, index: int) -> None:
        if not 0 <= index < self.num_batches:
            raise IndexError(f"{self.folder} has {self.num_batches} batches, no batch {index}")


class RecordSequence(Sequence[Tensor]):
    """The records of one name. ``records[i]`` reads one; a slice is a sequence again."""

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
    """An array of the same values."""
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
