"""Segment: some records whose rows are shuffled together, mapped from their files."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flex_model.records.store.reader import Reader
from flex_model.records.store.row_table import Block, RowTable, per_row


class Segment:
    """The rows of some blocks at one stretch of a loader's stream.

    Args:
        start: Where it begins in the stream, in rows.
        order: The numbers of its rows, as the stream has them; a row's number counts through the
            blocks.
        share: The blocks that are read; their pages are loaded in a thread from now on.
    """

    def __init__(
        self,
        reader: Reader,
        table: RowTable,
        start: int,
        blocks: Sequence[Block],
        order: Tensor,
        share: slice,
    ) -> None:
        self._start, self._order = start, order
        self._records = [
            {name: reader.rows(block.batch, name, block.call) for name in table.names}
            for block in blocks
        ]
        self._bounds = torch.tensor([0, *itertools.accumulate(b.num_rows for b in blocks)])
        beside = [_beside(reader, table, block) for block in blocks]
        self._beside = {name: torch.cat([one[name] for one in beside]) for name in beside[0]}

        self._loading = threading.Thread(target=self._load, args=[share], daemon=True)
        self._loading.start()

    def _load(self, share: slice) -> None:
        for records in self._records[share]:
            for rows in records.values():
                rows.load()

    def wait(self) -> None:
        """Wait until the pages of the share are in memory."""
        self._loading.join()

    def batches(self, first: int, batch_rows: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield what it has of each batch, from number ``first`` on: the batch's number, how many
        of its rows are in segments before, and its rows here, in ascending order.
        """
        end = self._start + len(self._order)
        for batch in range(max(first, self._start // batch_rows), -(-end // batch_rows)):
            begin = max(self._start, batch * batch_rows)
            part = self._order[begin - self._start : (batch + 1) * batch_rows - self._start]
            yield batch, begin - batch * batch_rows, part.sort().values

    def read(self, rows: Tensor, columns: dict[str, Tensor], at: int) -> None:
        """Read these rows into columns, from row ``at`` on."""
        for name, values in self._beside.items():
            columns[name][at : at + len(rows)] = values.index_select(0, rows)
        numbers = columns["origins"][at : at + len(rows), 2].contiguous()
        cuts = torch.searchsorted(rows, self._bounds).tolist()
        for records, (begin, end) in zip(self._records, itertools.pairwise(cuts)):
            if begin < end:
                for name, record in records.items():
                    out = columns[f"record/{name}"][at + begin : at + end]
                    record.read(numbers[begin:end], out)


def _beside(reader: Reader, table: RowTable, block: Block) -> dict[str, Tensor]:
    """Return the columns beside the records of a block."""
    notes = reader.annotations(block.batch) if table.annotations or table.mask else {}
    if table.mask is None:
        numbers = torch.arange(block.num_rows)
    else:
        numbers = per_row(notes[table.mask], block.shape).nonzero()[:, 0]
    origin = torch.tensor([block.batch, block.call, 0]).repeat(len(numbers), 1)
    origin[:, 2] = numbers
    return {
        "origins": origin,
        "positions": numbers % block.shape[-1],
        **{
            f"annotation/{name}": per_row(notes[name], block.shape)[numbers]
            for name in table.annotations
        },
    }
