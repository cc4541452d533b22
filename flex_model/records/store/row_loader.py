"""RowLoader: rows of the records of a store in a random order, for training.

The stream of an epoch is a list of segments: some records, in random order, whose rows together are
at most the buffer's, and a permutation of these rows. Consecutive rows of the stream are a global
batch. Within it rows are sorted by record, so that a reader's part, consecutive rows, is of its own
records: the readers together read each file about once, and copy rows once, from the mapped files.

All of this follows from the seed and the store: every reader finds its part without the others.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from flex_model.distributed.placement import Shape
from flex_model.records.store.manifest import Manifest, RecordLayout, digest_of
from flex_model.records.store.reader import Reader, RecordRows

DEFAULT_MASK = "attention_mask"
_STREAM = 2  # the version of the order of rows
_OPEN_GROUPS = 64  # records are read in a random order
_THREADS = 2  # that read batches ahead of their use
_READ_BYTES = 2**23  # of batches, by a thread at once: threads that wait for each other are slow
_MOST_AT_ONCE = 16  # small batches, as the first one waits for the others


class Rows(NamedTuple):
    """One reader's part of a batch.

    Attributes:
        records: By name: rows x width.
        annotations: By name: a value for each row.
        origins: For each row: the batch of the store, the call, and its number in the record.
        positions: Its index in the record's dim before the last: the position in a sequence,
            counted within one call, and in what a ``Select`` took of it.
        state: For ``RowLoader.load_state_dict``, to continue after this batch.
    """

    records: dict[str, Tensor]
    annotations: dict[str, Tensor]
    origins: Tensor
    positions: Tensor
    state: dict[str, Any]


class _Buffers:
    """Memory of batches, which is used again when no tensor has it any more: page faults of fresh
    memory take longer than to read rows into it.
    """

    def __init__(self, most: int) -> None:
        self._unused: deque[mmap.mmap] = deque(maxlen=most)

    def __reduce__(self) -> Any:
        return _Buffers, (self._unused.maxlen,)  # a worker process has its own

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        size = rows * width * dtype.itemsize
        if not size:
            return torch.empty(rows, width, dtype=dtype, device="cpu")
        try:
            buffer = self._unused.pop()
        except IndexError:
            buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lease = memoryview(buffer)  # which the storage of the tensor, and of its views, refers to
        weakref.finalize(lease, self._unused.append, buffer).atexit = False
        return torch.frombuffer(lease, dtype=dtype).view(rows, width)


class RowLoader(IterableDataset[Rows]):
    """The rows of a store, as batches; see ``ActivationStore.loader``. ``len`` counts them.

    For a ``DataLoader`` with ``batch_size=None``; its workers share a reader's batches in turn.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        table: RowTable,
        batch_rows: int,
        buffer_rows: int,
        seed: int | None,
        rank: int,
        world: int,
        epochs: int,
    ) -> None:
        if min(batch_rows, buffer_rows, world, epochs) < 1 or not 0 <= rank < world:
            raise ValueError(
                "loader: batch_rows, buffer_rows, world and epochs must be at least 1, and rank "
                f"below world; got {batch_rows}, {buffer_rows}, {world}, {epochs} and rank {rank}"
            )
        if batch_rows % world:
            raise ValueError(
                f"loader: a batch of {batch_rows} rows can't be cut over {world} readers; give a "
                f"batch_rows that is a multiple of {world}"
            )
        self._folder, self._manifest, self._table = folder, manifest, table
        self._batch_rows, self._buffer_rows, self._seed = batch_rows, buffer_rows, seed
        self._rank, self._world, self._own_rows = rank, world, batch_rows // world
        self._first = 0
        row_bytes = sum(width * dtype.itemsize for width, dtype in table.rows.values())
        at_once = _READ_BYTES // max(1, self._own_rows * row_bytes)
        self._at_once = min(max(1, at_once), _MOST_AT_ONCE)
        self._buffers = {name: _Buffers((_THREADS + 1) * self._at_once) for name in table.names}
        self._num_rows = sum(block.num_rows for block in table.blocks)
        self._num_batches = epochs * self._num_rows // batch_rows
        if not self._num_batches:
            raise ValueError(
                f"loader: {folder} has {self._num_rows} rows of {table.names}, less than a batch "
                f"of {batch_rows}; give a smaller batch_rows"
            )
        stream = (_STREAM, manifest.id, manifest.groups, *table.names, table.mask)
        text = json.dumps((*stream, batch_rows, buffer_rows, seed))
        self._stream = digest_of(text.encode())

    def __len__(self) -> int:
        return self._num_batches - self._first

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin after the batch that had this state. The number of readers may be another.

        Raises:
            ValueError: it is of another store, or of a loader with other arguments.
        """
        if not isinstance(state, Mapping) or state.get("stream") != self._stream:
            raise ValueError(
                f"loader: this state is not of this stream: the records of {self._folder} have "
                "changed since, or the loader had other names, batch_rows, buffer_rows, seed or "
                "mask; make it with those"
            )
        self._first = int(state["batch"])

    def __iter__(self) -> Iterator[Rows]:
        ahead: deque[Future[list[Rows]]] = deque()
        with ThreadPoolExecutor(_THREADS) as threads:
            batches = self._batches(threads)
            while some := list(itertools.islice(batches, self._at_once)):
                ahead.append(threads.submit(list, itertools.starmap(self._read, some)))
                if len(ahead) == _THREADS:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()

    def _batches(self, threads: ThreadPoolExecutor) -> Iterator[tuple[int, list[Segment]]]:
        """Yield the batches of this reader, and the segments that have its own part of them."""
        reader = Reader(self._folder, self._manifest, _OPEN_GROUPS)
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = range(self._first + number, self._num_batches, count)
        segments: list[Segment] = []
        num_rows = 0
        made = (threads.submit(self._segment, reader, mine, *place) for place in self._places())
        # The next segment is loaded from the disk while the batches of this one are used.
        for loaded, _ in itertools.pairwise(itertools.chain(made, [None])):
            assert loaded is not None
            segment = loaded.result()
            for batch, origins in segment.beside["origins"].items():
                segments.append(segment)
                num_rows += len(origins)
                if num_rows == self._own_rows:
                    yield batch, segments
                    segments, num_rows = [], 0

    def _read(self, batch: int, segments: list[Segment]) -> Rows:
        records = {}
        for name, (width, dtype) in self._table.rows.items():
            runs = [run for segment in segments for run in segment.runs[name][batch]]
            records[name] = self._buffers[name].empty(self._own_rows, width, dtype)
            outs = records[name].split([len(places) for _, places in runs])
            for (source, places), out in zip(runs, outs):
                source.read(places, out)
        beside = {
            name: torch.cat([segment.beside[name][batch] for segment in segments])
            for name in segments[0].beside
        }
        annotations = {name: beside[f"annotation/{name}"] for name in self._table.annotations}
        state = {"stream": self._stream, "batch": batch + 1}
        return Rows(records, annotations, beside["origins"], beside["positions"], state)

    def _places(self) -> Iterator[tuple[int, list[Block]]]:
        """Yield the segments that are not read yet: where each starts, and its blocks."""
        begin, end = self._first * self._batch_rows, self._num_batches * self._batch_rows
        for epoch in range(begin // self._num_rows, -(-end // self._num_rows)):
            start = epoch * self._num_rows
            picked: list[Block] = []
            num_rows = 0
            order = self._order(len(self._table.blocks), "records", epoch).tolist()
            for place in [*order, None]:
                block = None if place is None else self._table.blocks[place]
                if block is None or num_rows + block.num_rows > self._buffer_rows:
                    if picked and begin < start + num_rows and start < end:
                        yield start, sorted(picked)  # rows of one file follow each other
                    start, picked, num_rows = start + num_rows, [], 0
                if block is not None:
                    picked.append(block)
                    num_rows += block.num_rows

    def _segment(self, reader: Reader, mine: range, start: int, blocks: list[Block]) -> Segment:
        """Return the segment that starts there, with the reader's part of the batches ``mine``."""
        order = self._order(sum(block.num_rows for block in blocks), "rows", start)
        parts = {}
        for batch in range(start // self._batch_rows, -(-(start + len(order)) // self._batch_rows)):
            at = batch * self._batch_rows - start
            own = at + self._rank * self._own_rows
            part = order[max(own, 0) : max(own + self._own_rows, 0)]
            if batch in mine and len(part):
                # In the tensor's memory. torch's sort takes ten times as long.
                order[max(at, 0) : at + self._batch_rows].numpy().sort()
                parts[batch] = part
        return Segment(reader, self._table, blocks, parts)

    def _order(self, count: int, *of: Any) -> Tensor:
        if self._seed is None:
            return torch.arange(count, device="cpu")
        digest = digest_of(json.dumps([self._seed, *of]).encode())
        generator = torch.Generator().manual_seed(int(digest[:15], 16))
        return torch.randperm(count, generator=generator, device="cpu")


# ---- Some records whose rows are shuffled together -----------------------------------------------

Runs: TypeAlias = list[tuple[RecordRows, Tensor]]  # records, and places of rows in them


class Segment:
    """A reader's rows of some blocks at one stretch of a loader's stream.

    The pages of the records, and all beside them, are in memory when it is made: a loader makes the
    next one in a thread. It prepares all batches at once: each operation of a thread makes the
    threads that read wait.

    Args:
        parts: By batch, the numbers of the reader's rows, ascending; a row's number counts through
            the blocks.

    Attributes:
        beside: By name and batch, the columns beside these rows.
        runs: By name and batch, these rows.
    """

    def __init__(
        self, reader: Reader, table: RowTable, blocks: Sequence[Block], parts: dict[int, Tensor]
    ) -> None:
        rows = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts.values()])
        sizes = [len(part) for part in parts.values()]
        columns = [_beside(reader, table, block) for block in blocks]
        beside = {
            name: torch.cat([one[name] for one in columns]).index_select(0, rows)
            for name in columns[0]
        }
        self.beside = {name: dict(zip(parts, one.split(sizes))) for name, one in beside.items()}
        ends = list(itertools.accumulate(block.num_rows for block in blocks))
        of_blocks = torch.bucketize(rows, torch.tensor(ends, device="cpu"), right=True)
        used = of_blocks.bincount(minlength=len(blocks)).nonzero().flatten().tolist()
        self.runs: dict[str, dict[int, Runs]] = {}
        for name in table.names:
            records = {i: reader.rows(blocks[i].batch, name, blocks[i].call) for i in used}
            steps = torch.zeros(len(blocks), 2, dtype=torch.int64, device="cpu")
            sources: list[RecordRows] = []
            bounds: list[int] = []  # where the rows of the next source begin
            for i, record in records.items():
                reader.load(blocks[i].batch, name, blocks[i].call)
                steps[i, 0], steps[i, 1] = record.start, record.step
                if not sources or not sources[-1].reads(record):
                    bounds += [ends[i - 1]] * bool(sources)
                    sources.append(record)
            start, step = steps.index_select(0, of_blocks).unbind(1)
            places = (start + step * beside["origins"][:, 2]).split(sizes)
            at = torch.tensor(bounds, dtype=torch.int64, device="cpu")
            cuts = [torch.searchsorted(part, at).tolist() for part in parts.values()]
            self.runs[name] = {
                batch: list(zip(sources, one.tensor_split(cut)))
                for batch, one, cut in zip(parts, places, cuts)
            }


def _beside(reader: Reader, table: RowTable, block: Block) -> dict[str, Tensor]:
    """Return the columns beside the records of a block."""
    notes = reader.annotations(block.batch) if table.annotations or table.mask else {}
    if table.mask is None:
        numbers = torch.arange(block.num_rows, device="cpu")
    else:
        numbers = per_row(notes[table.mask], block.shape).nonzero()[:, 0]
    origin = torch.tensor([block.batch, block.call, 0], device="cpu").repeat(len(numbers), 1)
    origin[:, 2] = numbers
    return {
        "origins": origin,
        "positions": numbers % block.shape[-1],
        **{
            f"annotation/{name}": per_row(notes[name], block.shape)[numbers]
            for name in table.annotations
        },
    }


# ---- What of a store is rows that fit together ---------------------------------------------------


class Block(NamedTuple):
    """The records of one call of one batch, one of each name.

    Attributes:
        shape: Their dims before the last.
        num_rows: The rows that are not masked.
    """

    batch: int
    call: int
    shape: Shape
    num_rows: int


class RowTable:
    """The blocks of a store whose rows are aligned over some names, and the columns beside them.

    Attributes:
        names: Those of the records.
        blocks: In the order of batches, then calls.
        rows: By name, the width and dtype of a row.
        annotations: The names of those with a value for each row.
        mask: The annotation that is 0 for rows to leave out; None: there is none.

    Raises:
        ValueError: see ``ActivationStore.loader``.
    """

    def __init__(
        self,
        manifest: Manifest,
        reader: Reader,
        names: Sequence[str],
        mask: str | None,
        annotations: Sequence[str] | None,
    ) -> None:
        self.names = list(names)
        self.blocks: list[Block] = []
        self.rows: dict[str, tuple[int, torch.dtype]] = {}
        found: dict[str, list[torch.dtype]] = {}  # annotations that fit, for each block
        is_annotated = False
        orders = {hook["kind"].startswith("forward") for hook in manifest.hooks_of(names)}
        for index in reader.indices():
            for batch in range(index.first, index.last + 1):
                beside = index.annotations_of_batch.get(batch, {})
                is_annotated |= mask in beside
                of_names = [index.of_batch.get(batch, {}).get(name, []) for name in names]
                if len({len(calls) for calls in of_names}) > 1:
                    raise ValueError(_misaligned(batch, names, [len(calls) for calls in of_names]))
                has_one_call = len(of_names[0]) == 1
                if len(orders) > 1 and not has_one_call:
                    raise ValueError(
                        f"loader: batch {batch} has several calls, and backward runs them in "
                        f"another order than forward, so records and gradients of {list(names)} "
                        "don't pair; give names of forward hooks, or of gradients, alone"
                    )
                for call, records in enumerate(zip(*of_names)):
                    shape = self._shape(batch, names, [layout for _, layout in records])
                    # One annotation of several calls may be of the inputs of one of them.
                    whole = shape[: manifest.num_whole_dims(names, (*shape, 0)) * has_one_call]
                    for name, layout in beside.items():
                        if layout.shape and layout.shape == whole[: len(layout.shape)]:
                            found.setdefault(name, []).append(layout.dtype)
                    self.blocks.append(Block(batch, call, shape, math.prod(shape)))
        fitting = {name for name, dtypes in found.items() if self._is_column(dtypes)}
        self.mask = None if mask == DEFAULT_MASK and not is_annotated else mask
        self.annotations = sorted(fitting) if annotations is None else list(annotations)
        for name in (*self.annotations, *([self.mask] if self.mask else ())):
            if name not in fitting:
                raise ValueError(
                    f"loader: the annotation {name!r} does not have a value of one dtype for each "
                    f"row of {list(names)} in every batch (one with several calls has none, nor "
                    f"rows and positions that a Select took); {sorted(fitting)} have. Give "
                    "annotations=[...] with names of those, or mask=None to read all rows"
                )
        if self.mask is not None:
            self.blocks = [self._masked(reader, block, self.mask) for block in self.blocks]

    def _shape(self, batch: int, names: Sequence[str], layouts: list[RecordLayout]) -> Shape:
        """Return the dims of a block's rows; note the width and dtype of each name."""
        shapes = [layout.shape for layout in layouts]
        if len({shape[:-1] for shape in shapes}) > 1 or any(len(shape) < 2 for shape in shapes):
            raise ValueError(_misaligned(batch, names, shapes))
        for name, layout in zip(names, layouts):
            row = layout.shape[-1], layout.dtype
            if self.rows.setdefault(name, row) != row:
                raise ValueError(
                    f"loader: rows of {name!r} are {self.rows[name]} in the first "
                    f"batch and {row} in batch {batch}; they have no common width and dtype"
                )
        return tuple(shapes[0][:-1])

    def _is_column(self, dtypes: list[torch.dtype]) -> bool:
        return len(dtypes) == len(self.blocks) and len(set(dtypes)) == 1

    def _masked(self, reader: Reader, block: Block, mask: str) -> Block:
        kept = per_row(reader.annotations(block.batch)[mask], block.shape)
        return block._replace(num_rows=int(kept.count_nonzero()))


def per_row(value: Tensor, shape: Shape) -> Tensor:
    """Return an annotation that has a value for each of a record's first dims, one for each row."""
    return value.reshape(*value.shape, *[1] * (len(shape) - value.dim())).expand(shape).flatten()


def _misaligned(batch: int, names: Sequence[str], got: Sequence[object]) -> str:
    return (
        f"loader: records of {list(names)} in batch {batch} have no rows that fit together (calls "
        f"or shapes: {list(map(str, got))}); give names of records that differ in their last dim "
        "alone"
    )
