"""Segment: some records whose rows are shuffled together, mapped from their files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from flex_model.records.store.reader import Reader
from flex_model.records.store.row_table import Block, RowTable, per_row


class Segment:
    """The rows of some blocks at one stretch of a loader's stream.

    The pages of the records, and all beside them, are in memory when it is made: a loader makes the
    next one in a thread.

    Args:
        start: Where it begins in the stream, in rows.
        order: The numbers of its rows, shuffled; a row's number counts through the blocks. The
            stream has those of a batch in ascending order.
        share: The blocks whose rows are read.
    """

    def __init__(
        self,
        reader: Reader,
        table: RowTable,
        start: int,
        blocks: Sequence[Block],
        order: Tensor,
        batch_rows: int,
        share: slice,
    ) -> None:
        num_rows = len(order)
        self.start, self.end = start, start + num_rows
        batches = torch.arange(self.start, self.end) // batch_rows
        self._rows = (batches * num_rows + order).sort().values % num_rows
        self._bounds = torch.tensor([0, *itertools.accumulate(b.num_rows for b in blocks)])
        beside = [_beside(reader, table, block) for block in blocks]
        self._beside = {
            name: torch.cat([one[name] for one in beside])[self._rows] for name in beside[0]
        }
        self._numbers = self._beside["origins"][:, 2].contiguous()
        self._records = [
            {name: reader.rows(block.batch, name, block.call) for name in table.names}
            for block in blocks
        ]
        for records in self._records[share]:
            for record in records.values():
                record.load()

    def beside(self, name: str, places: range) -> Tensor:
        """Return a column beside the records, at these places of the stream."""
        return self._beside[name][places.start - self.start : places.stop - self.start]

    def read(self, name: str, places: range, out: Tensor) -> None:
        """Read the rows of a name at these places of the stream."""
        here = slice(places.start - self.start, places.stop - self.start)
        numbers = self._numbers[here]
        cuts = torch.searchsorted(self._rows[here], self._bounds).tolist()
        for records, (first, last) in zip(self._records, itertools.pairwise(cuts)):
            if first < last:
                records[name].read(numbers[first:last], out[first:last])


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
