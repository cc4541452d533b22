"""A store as a memory-mapped Hugging Face dataset, with a row for each sequence."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flex_model.records.store.manifest import Index, Manifest, RecordLayout
from flex_model.records.store.reader import Reader, as_numpy


def as_dataset(
    folder: Path, manifest: Manifest, names: Sequence[str], cache_dir: str | Path | None
) -> Any:
    """Return the dataset; see ``ActivationStore.to_datasets``."""
    from datasets import Dataset, Features

    columns: dict[str, list[RecordLayout]] = {}
    for index in Reader(folder, manifest).indices():
        for batch in range(index.first, index.last + 1):
            for name, layout in _layouts(manifest, index, batch, names).items():
                columns.setdefault(name, []).append(layout)
    partial = sorted(n for n, layouts in columns.items() if len(layouts) < manifest.num_batches)
    if partial:
        raise ValueError(
            f"to_datasets: batches of {folder} differ in their columns: {partial} are in some of "
            "them; give names of records that are in all batches, and annotate all batches alike"
        )
    # The manifest has hashes of what the files hold, so no older cache is taken for this store.
    return Dataset.from_generator(
        _sequences,
        features=Features({name: _feature(name, layouts) for name, layouts in columns.items()}),
        cache_dir=None if cache_dir is None else str(cache_dir),
        gen_kwargs={"folder": folder, "manifest": manifest, "names": tuple(names)},
    )


def _layouts(
    manifest: Manifest, index: Index, batch: int, names: Sequence[str]
) -> dict[str, RecordLayout]:
    """Return the layouts of a batch's columns: its records, and annotations with as many rows."""
    records = index.of_batch.get(batch, {})
    found = {name: records[name][0][1] for name in names if name in records}
    num_rows = {layout.shape[:1] for layout in found.values()}
    several = [name for name in found if len(records[name]) > 1]
    if several or len(num_rows) != 1 or num_rows == {()}:
        what = (
            f"several calls of {several}" if several else "records with different numbers of rows"
        )
        raise ValueError(
            f"to_datasets: batch {batch} has {what}; give names=[...] of records with one row for "
            "each sequence, or use store.dataset(), which has a row for each batch"
        )
    has_rows = all(manifest.num_whole_dims([n], one.shape) > 0 for n, one in found.items())
    for name, layout in index.annotations_of_batch.get(batch, {}).items():
        if {layout.shape[:1]} == num_rows and has_rows:
            check_column(name, found)
            found[name] = layout
    return found


def check_column(name: str, others: Container[str]) -> None:
    """ValueError if a dataset has a column of this name."""
    if name in others:
        raise ValueError(
            f"two columns of the dataset would be named {name!r}: of a record, an annotation, or "
            "the batches' numbers; name records by HookFunction(output_name=...), or leave this "
            "one out of names="
        )


def _feature(name: str, layouts: Sequence[RecordLayout]) -> Any:
    """Return the type of a column; its first dim may differ between batches."""
    import datasets

    shapes, dtypes = {layout.shape[1:] for layout in layouts}, {layout.dtype for layout in layouts}
    inner = {shape[1:] for shape in shapes}
    if len({len(shape) for shape in shapes}) > 1 or len(inner) > 1 or len(dtypes) > 1:
        raise ValueError(
            f"to_datasets: rows of {name!r} differ in more than their length: shapes "
            f"{sorted(shapes)}, dtypes {sorted(map(str, dtypes))}"
        )
    dtype = as_numpy(torch.empty(0, dtype=dtypes.pop(), device="cpu")).dtype.name
    shape = shapes.pop()
    if not shape:
        return datasets.Value(dtype)
    length = None if shapes else shape[0]
    if len(shape) == 1:
        return datasets.Sequence(datasets.Value(dtype), length=-1 if length is None else length)
    return getattr(datasets, f"Array{len(shape)}D")((length, *shape[1:]), dtype)


def _sequences(folder: Path, manifest: Manifest, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    reader = Reader(folder, manifest)
    for batch in range(manifest.num_batches):
        columns = _layouts(manifest, reader.index_of(batch), batch, names)
        values: dict[str, Tensor] = {
            n: v for n, v in reader.annotations(batch).items() if n in columns
        }
        values |= {name: calls[0] for name, calls in reader.records(batch, names).items()}
        for row in zip(*(as_numpy(values[name]) for name in columns)):
            yield dict(zip(columns, row))
