"""RowTable: what of a store is rows that fit together, for a RowLoader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flex_model.distributed.placement import Shape
from flex_model.records.store.manifest import RecordLayout
from flex_model.records.store.reader import Reader

DEFAULT_MASK = "attention_mask"


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
        for index in reader.indices():
            for batch in range(index.first, index.last + 1):
                beside = index.annotations_of_batch.get(batch, {})
                is_annotated |= mask in beside
                of_names = [index.of_batch.get(batch, {}).get(name, []) for name in names]
                if len({len(calls) for calls in of_names}) > 1:
                    raise ValueError(_misaligned(batch, names, [len(calls) for calls in of_names]))
                for call, records in enumerate(zip(*of_names)):
                    shape = self._shape(batch, names, [layout for _, layout in records])
                    for name, layout in beside.items():
                        if layout.shape and layout.shape == shape[: len(layout.shape)]:
                            found.setdefault(name, []).append(layout.dtype)
                    self.blocks.append(Block(batch, call, shape, math.prod(shape)))
        fitting = {name for name, dtypes in found.items() if self._is_column(dtypes)}
        self.mask = None if mask == DEFAULT_MASK and not is_annotated else mask
        self.annotations = sorted(found) if annotations is None else list(annotations)
        for name in (*self.annotations, *([self.mask] if self.mask else ())):
            if name not in fitting:
                raise ValueError(
                    f"loader: the annotation {name!r} does not have a value of one dtype for each "
                    f"row of {list(names)} in every batch and call; {sorted(fitting)} have. Give "
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
