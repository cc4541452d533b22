"""The layout of one record over the ranks that write it, and the shard of one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flex_model.distributed.placement import Shape

if TYPE_CHECKING:
    from flex_model.distributed.gather import TensorSpec

# A box: its shard (an index of `RecordLayout.shards`), start in full, start in the shard, sizes.
Box = tuple[int, Shape, Shape, Shape]


@dataclass(frozen=True)
class RecordLayout:
    """The ranks that write shards of a record, and where these lie in the full tensor.

    Attributes:
        shape, dtype: Those of the full tensor.
        description: The layout as text, as ``flex.layouts()`` prints it.
        shards: For each rank that writes: the rank, and the shape of its shard.
        boxes: Where the shards lie in the full tensor, each element once.
    """

    shape: Shape
    dtype: torch.dtype
    description: str
    shards: tuple[tuple[int, Shape], ...]
    boxes: tuple[Box, ...]

    @staticmethod
    def whole(tensor: Tensor) -> RecordLayout:
        """Return the layout of a tensor that rank 0 has in full."""
        return RecordLayout._of_first(tuple(tensor.shape), tensor.dtype, "whole")

    @staticmethod
    def of(spec: TensorSpec, dtype: torch.dtype) -> RecordLayout:
        """Return the layout of shards, after reduction, of the ranks from which rank 0 gathers."""
        description, full_shape = str(spec.layout), spec.full_shape
        if not spec.axes:
            return RecordLayout._of_first(full_shape, dtype, description)
        mesh = spec.communicator.mesh
        ranks = [mesh.rank_at(place) for place in spec.ranks_of_first]
        shapes = [tuple(sizes) for sizes in spec.plan.shard_sizes]
        boxes = tuple((i, *map(tuple, box)) for i, *box in spec.boxes)
        shards = tuple(zip(ranks, shapes, strict=True))
        return RecordLayout(full_shape, dtype, description, shards, boxes)  # type: ignore[arg-type]

    @staticmethod
    def _of_first(shape: Shape, dtype: torch.dtype, description: str) -> RecordLayout:
        zeros = (0,) * len(shape)
        return RecordLayout(shape, dtype, description, ((0, shape),), ((0, zeros, zeros, shape),))

    @property
    def num_bytes(self) -> int:
        """The size of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether one shard is the full tensor."""
        return len(self.boxes) == 1 and self.boxes[0][3] == self.shape == self.shards[0][1]


@dataclass(eq=False)
class RecordShard:
    """One rank's shard of a record.

    Attributes:
        tensor: The shard that this rank writes, on the CPU; None if it writes none.
    """

    layout: RecordLayout
    tensor: Tensor | None

    @staticmethod
    def whole(tensor: Tensor) -> RecordShard:
        return RecordShard(RecordLayout.whole(tensor), tensor)
