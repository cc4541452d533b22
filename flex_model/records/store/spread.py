"""How one record is spread over ranks, and what one of them has of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flex_model.distributed.layout import Shape

if TYPE_CHECKING:
    from flex_model.distributed.gather import Move

# Of one box: whose shard (an index of `Spread.shards`), start in full, start in the shard, sizes.
Box = tuple[int, Shape, Shape, Shape]


@dataclass(frozen=True)
class Spread:
    """Where the parts of a record are, and where they belong.

    Attributes:
        shape, dtype: Of the full tensor.
        layout: In words, as ``flex.layouts()`` has it.
        shards: Of the ranks that write: rank, and the shape of what it writes.
        boxes: Where they lie in the full tensor, each element once.
    """

    shape: Shape
    dtype: torch.dtype
    layout: str
    shards: tuple[tuple[int, Shape], ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(tensor: Tensor) -> Spread:
        """Of what rank 0 has in full."""
        return Spread._of_first(tuple(tensor.shape), tensor.dtype, "whole")

    @staticmethod
    def of(move: Move, dtype: torch.dtype) -> Spread:
        """Of shards, with their sums done: those of the ranks of which rank 0 would gather."""
        layout, full_shape = str(move.layout), move.full_shape
        if not move.axes:
            return Spread._of_first(full_shape, dtype, layout)
        mesh = move.channel.mesh
        ranks = [mesh.rank_at(place) for place in mesh.members(move.axes, place=0)]
        shapes = [tuple(sizes) for sizes in move.plan.shard_sizes]
        boxes = tuple((i, *map(tuple, box)) for i, *box in move.boxes)
        shards = tuple(zip(ranks, shapes, strict=True))
        return Spread(full_shape, dtype, layout, shards, boxes)  # type: ignore[arg-type]

    @staticmethod
    def _of_first(shape: Shape, dtype: torch.dtype, layout: str) -> Spread:
        zeros = (0,) * len(shape)
        return Spread(shape, dtype, layout, ((0, shape),), ((0, zeros, zeros, shape),))

    @property
    def num_bytes(self) -> int:
        """Of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether one shard is the full tensor."""
        return len(self.boxes) == 1 and self.boxes[0][3] == self.shape == self.shards[0][1]


@dataclass(eq=False)
class Part:
    """A record as one rank has it.

    Attributes:
        tensor: What this rank writes, on the CPU; None if that is nothing.
    """

    spread: Spread
    tensor: Tensor | None

    @staticmethod
    def whole(tensor: Tensor) -> Part:
        return Part(Spread.whole(tensor), tensor)
