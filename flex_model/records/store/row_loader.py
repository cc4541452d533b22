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
import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from flex_model.records.store.manifest import Manifest, digest_of
from flex_model.records.store.reader import Reader
from flex_model.records.store.row_segment import Segment
from flex_model.records.store.row_table import Block, RowTable

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
        positions: Its index in the record's dim before the last: the position in a sequence.
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
            return torch.empty(rows, width, dtype=dtype)
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
        if state["stream"] != self._stream:
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
            return torch.arange(count)
        digest = digest_of(json.dumps([self._seed, *of]).encode())
        generator = torch.Generator().manual_seed(int(digest[:15], 16))
        return torch.randperm(count, generator=generator)
