"""Segment: some records whose rows are shuffled together, mapped from their files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flex_model.records.store.reader import Reader, RecordRows
from flex_model.records.store.row_table import Block, RowTable, per_row

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
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *parts.values()])
        sizes = [len(part) for part in parts.values()]
        columns = [_beside(reader, table, block) for block in blocks]
        beside = {
            name: torch.cat([one[name] for one in columns]).index_select(0, rows)
            for name in columns[0]
        }
        self.beside = {name: dict(zip(parts, one.split(sizes))) for name, one in beside.items()}
        ends = list(itertools.accumulate(block.num_rows for block in blocks))
        of_blocks = torch.bucketize(rows, torch.tensor(ends), right=True)
        used = of_blocks.bincount(minlength=len(blocks)).nonzero().flatten().tolist()
        self.runs: dict[str, dict[int, Runs]] = {}
        for name in table.names:
            records = {i: reader.rows(blocks[i].batch, name, blocks[i].call) for i in used}
            steps = torch.zeros(len(blocks), 2, dtype=torch.int64)
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
            at = torch.tensor(bounds, dtype=torch.int64)
            cuts = [torch.searchsorted(part, at).tolist() for part in parts.values()]
            self.runs[name] = {
                batch: list(zip(sources, one.tensor_split(cut)))
                for batch, one, cut in zip(parts, places, cuts)
            }


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
