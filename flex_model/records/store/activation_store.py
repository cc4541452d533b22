"""ActivationStore: a folder into which a FlexModel writes records, readable anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from flex_model.records.store.manifest import MANIFEST, MANIFEST_ASIDE, Manifest, is_of_batches
from flex_model.records.store.reader import Reader, as_numpy
from flex_model.records.store.row_loader import RowLoader, RowTable
from flex_model.records.store.statistics import Statistics, statistics_from

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
            continue a store, pass an equal one; to read it, none is needed.
        shard_bytes: A new file is begun when the full tensors of a file's batches have so many
            bytes.
        max_bytes: The most that a rank holds for its writer; a run faster than the disk waits.
        seconds: A new file is also begun, at the end of a run, when this long has passed.
        statistics: Whether to compute what ``statistics`` returns while records are written.

    Attributes:
        num_batches: The number of stored batches, as the ranks agreed on when the FlexModel was
            made, or at the last ``flush``.
        is_complete: Whether the FlexModel (or sequential run) was closed normally.

    Raises:
        ValueError: the folder holds something else, or records with another key. Reading raises it
            too, if a file is missing, or an index was changed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        key: Any = None,
        shard_bytes: int = 256 * 2**20,
        max_bytes: int = 2**30,
        seconds: float = 30.0,
        statistics: bool = True,
    ) -> None:
        if shard_bytes < 1 or max_bytes < 1 or seconds < 0:
            raise ValueError(
                "ActivationStore: shard_bytes and max_bytes must be at least 1, and seconds at "
                f"least 0; got {shard_bytes}, {max_bytes} and {seconds}"
            )
        self.folder = Path(folder).absolute()  # os.chdir() may follow
        self.shard_bytes, self.max_bytes, self.seconds = shard_bytes, max_bytes, seconds
        self.keeps_statistics = statistics
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
        if self.key is not None:  # one that only reads needs none
            self.check_key(found)
        if found != self._manifest:
            self._manifest, self._reader = found, Reader(self.folder, found)

    def check_key(self, manifest: Manifest) -> None:
        """ValueError if the records of a manifest have another key. Local."""
        if manifest.key != self.key:
            raise ValueError(
                f"ActivationStore: {self.folder} holds records with key {manifest.key!r}, not "
                f"{self.key!r}; give another folder, or delete that one"
            )

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

        Call it on every rank before the run, with what the rank passes to the model. A tensor with
        as many rows on each data-parallel rank as that rank's inputs (along ``batch_dim``, else
        dim 0) is read as one tensor with the rows of all; where the lengths differ, padded with 0.
        Any other tensor must be the same on all ranks. One that all rows share, and that happens
        to have as many entries, is taken for rows unless ``FlexModel(batch_dim={name: None})`` says
        otherwise. JSON values are rank 0's. Local.
        """
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._notes[name] = value.detach().to("cpu", copy=True)
                continue
            try:
                self._notes[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"annotate({name}=...): expected a tensor or a JSON value, got "
                    f"{type(value).__name__} ({error}); torch.as_tensor(...) makes a tensor of an "
                    "array"
                ) from None

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
            self._session.close(kind)

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

        if names:
            self._checked(names)
        return IterableDataset.from_generator(
            _rows,
            gen_kwargs={
                "folder": str(self.folder),
                "names": None if names is None else tuple(names),
                "batches": list(range(self.num_batches)),
            },
        )

    def to_datasets(
        self, names: Sequence[str] | None = None, cache_dir: str | Path | None = None
    ) -> Any:
        """Return a Hugging Face ``datasets.Dataset`` with a row for each row of a batch (dim 0: a
        sequence), memory-mapped from files that are written once.

        Example::

            store.to_datasets(["layers.3"]).save_to_disk("cached/")  # what SAELens reads

        Columns are the records of each name, and the annotations that are tensors with as many
        rows. dtypes that numpy lacks become float32.

        Args:
            names: Names of records; None: all.
            cache_dir: Where the files are; None: the cache of ``datasets``.

        Raises:
            ImportError: ``datasets`` is not installed.
            KeyError: as ``tensors``.
            ValueError: records of a batch differ in their rows, or two batches in their columns.
        """
        from flex_model.records.store.hf_datasets import as_dataset

        return as_dataset(self.folder, self._manifest, self._checked(names), cache_dir)

    def statistics(self, name: str) -> Statistics:
        """Return number, mean, variance and norm of the rows of one name, computed while they were
        written. A row is the last dim of a record; padding counts.

        Raises:
            KeyError: as ``tensors``.
            ValueError: none were computed: for integers, rows of several widths, or a store with
                ``statistics=False``.
        """
        self._checked([name])
        moments = self._reader.moments(name)
        if moments is None:
            raise ValueError(
                f"{self.folder} has no statistics of {name!r}: its records differ in width or are "
                "no real numbers, or some were written with ActivationStore(statistics=False)"
            )
        return statistics_from(moments)

    def loader(
        self,
        names: str | Sequence[str] | None = None,
        batch_rows: int = 4096,
        *,
        buffer_rows: int = 2**17,
        seed: int | None = 0,
        rank: int = 0,
        world: int = 1,
        epochs: int = 1,
        mask: str | None = "attention_mask",
        annotations: str | Sequence[str] | None = None,
    ) -> RowLoader:
        """Return shuffled rows of records for training, as a torch ``IterableDataset``.

        Example::

            loader = store.loader("layers.3.mlp", 4096, rank=rank, world=world)
            for rows in DataLoader(loader, batch_size=None, num_workers=2):
                train(rows.records["layers.3.mlp"])  # (4096 / world, width)

        A row is the last dim of a record; rows of several names are aligned. Records are put in a
        random order, and the rows of each ``buffer_rows`` in one of their own. The stream of global
        batches is the same for any ``world`` and number of workers: each reader gets its share of
        every batch. ``loader.load_state_dict(rows.state)`` continues after a batch, with another
        ``world`` if need be. The rows after the last whole batch are not read.

        Args:
            names: Names of records; None: all.
            batch_rows: Rows of a batch, on all readers together.
            buffer_rows: Rows that are shuffled together; at least those of one record.
            seed: Determines the order; None: as stored.
            rank, world: This reader, and the number of readers.
            epochs: How often all rows are read, each time in another order.
            mask: An annotation that is 0 for rows to leave out, such as padding, where batches have
                it; None: all rows are read.
            annotations: Those to get beside the rows, which must have one value for each row, or
                for each of a record's first dims; None: all that have. None has in a batch with
                several calls, or along rows or positions of which a ``Select`` took some.

        Raises:
            KeyError: as ``tensors``.
            ValueError: the records of a batch are not aligned (those of forward hooks and
                gradients are not, where there are several calls), or those of a name differ in
                width or dtype; ``names`` is empty; ``world`` does not divide ``batch_rows``; there
                is less than one batch.
        """
        chosen = self._checked([names] if isinstance(names, str) else names)
        if names is not None and not chosen:
            raise ValueError(
                f"loader: names has no name; give some of {self.names}, or None for all records"
            )
        beside = [annotations] if isinstance(annotations, str) else annotations
        table = RowTable(self._manifest, self._reader, chosen, mask, beside)
        return RowLoader(
            self.folder, self._manifest, table, batch_rows, buffer_rows, seed, rank, world, epochs
        )

    def layout(self, name: str, batch: int = 0, call: int = 0) -> str:
        """Return how a record was sharded when written. Raises as ``batch`` and ``tensors``."""
        self._check_batch(batch)
        calls = self._reader.index_of(batch).of_batch.get(batch, {}).get(name)
        if not calls:
            raise KeyError(f"batch {batch} of {self.folder} has no record {name!r}")
        return calls[call][1].layout

    def inputs_hash(self, index: int) -> str | None:
        """Return the hash of a sequential run's inputs for a batch. IndexError as ``batch``."""
        self._check_batch(index)
        group = self._reader.index_of(index)
        return group.batches[index - group.first]["inputs"]

    def _checked(self, names: Sequence[str] | None) -> list[str]:
        """Return names of records, None for all. KeyError for one that no batch has."""
        known = self.names
        for name in names or ():
            if name not in known:
                raise self._no_record(name)
        return known if names is None else list(names)

    def _no_record(self, name: str) -> KeyError:
        return KeyError(f"{self.folder} has no record {name!r}; it has {self.names}{self._unread}")

    def _check_batch(self, index: int) -> None:
        if not 0 <= index < self.num_batches:
            raise IndexError(
                f"{self.folder} has {self.num_batches} batches, no batch {index}{self._unread}"
            )

    @property
    def _unread(self) -> str:
        return "" if self._session is None else " (call flush() first to read what runs have made)"


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


def _rows(folder: str, names: Sequence[str] | None, batches: list[int]) -> Iterator[dict[str, Any]]:
    from flex_model.records.store.hf_datasets import check_column

    store = ActivationStore(folder)
    for batch in batches:
        row: dict[str, Any] = {"batch": batch}
        for name, value in store.annotations(batch).items():
            check_column(name, row)
            row[name] = as_numpy(value) if isinstance(value, Tensor) else value
        for name, calls in store._reader.records(batch, names).items():
            check_column(name, row)
            arrays = [as_numpy(tensor) for tensor in calls]
            row[name] = arrays[0] if len(arrays) == 1 else arrays
        yield row
