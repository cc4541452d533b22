"""Pads the tensors of data-parallel ranks whose batches differ in length to one shape.

A rank without rows takes part with none: of a tensor without rows, or of the rows of a stand-in,
which it runs only since the other ranks need it to take part in the model's own collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Shape, Shard, ShardLayout
from flex_model.errors import LayoutMismatchError

#: The number of rows in the batch of each data-parallel rank.
Rows = tuple[int, ...]


@dataclass(frozen=True)
class RankRows:
    """The rows of a forward's inputs, on each data-parallel rank.

    Attributes:
        is_ragged: Whether hooks pad: batches differ in length, or a rank has no rows.
    """

    counts: Rows
    is_ragged: bool


@dataclass(frozen=True)
class Padding:
    """The padding of one rank's shard, at the end of its dims.

    Attributes:
        shape: The shape of the shard; ``padded``: with the padding.
        value: The value of the padding.
        has_rows: Whether the shard's rows are rows of the batch, not those of a stand-in.
        lengths: By padded dim of the full tensor, the length of each of its rows without padding.
    """

    shape: Shape
    padded: Shape
    value: float
    has_rows: bool
    lengths: Mapping[int, tuple[int, ...]]

    def put(self, shard: Tensor) -> Tensor:
        """Return the shard with the padding, in the graph: the padding's gradient is dropped."""
        if not self.has_rows:
            for dim, size in enumerate(self.padded):
                shard = shard.narrow(dim, 0, min(size, shard.shape[dim]))
        added = [new - old for new, old in zip(self.padded, shard.shape)]
        if not any(added):
            return shard
        at_ends = [size for more in reversed(added) for size in (0, more)]
        return F.pad(shard, at_ends, value=self.value)

    def cut(self, shard: Tensor, own: Tensor) -> Tensor:
        """Return the shard without the padding, in the graph: the padding's gradient is zero.

        Args:
            own: What ``put`` was given; without rows it stays as it is, and the shard, which has no
                elements, in the graph: all ranks run its backward.
        """
        if not self.has_rows:
            return own + shard.sum().to(own.dtype) if torch.is_grad_enabled() else own
        for dim, size in enumerate(self.shape):
            shard = shard.narrow(dim, 0, size)
        return shard


def paddings(
    layout: ShardLayout, shapes: Sequence[Shape], rows: Rows, mesh: Mesh, value: float
) -> list[Padding]:
    """Return the padding of every rank of the stage, of a tensor with this layout.

    Args:
        shapes: The local shapes of all ranks, in the order (dp, tp), tp fastest.
        rows: The rows in the batch of each data-parallel rank.

    Raises:
        LayoutMismatchError: the tensors can't be joined by padding their ends: their first dim
            holds positions of the rows, or the tensor-parallel ranks split a dim that differs.
    """
    dim, tp_size = _rows_dim(layout.dp), mesh.tp_size
    has_rows = [rows[place // tp_size] > 0 for place in range(len(shapes))]
    _check_rows(layout, shapes, rows, mesh)
    counted = [shape for shape, has in zip(shapes, has_rows) if has] or list(shapes)
    largest = [max(sizes) for sizes in zip(*counted)]
    differing = {
        other
        for place in range(tp_size)
        for other, sizes in enumerate(zip(*shapes[place::tp_size]))
        if other != dim and len(set(sizes)) > 1
    }
    if differing and dim is None:
        raise LayoutMismatchError(
            f"the data-parallel ranks share the tensor (layout {layout}), and their batches give "
            f"it different shapes, {_listed(shapes)}"
        )
    if isinstance(layout.tp, Shard) and tp_size > 1 and layout.tp.dim in differing:
        raise LayoutMismatchError(
            f"the tensor-parallel ranks split dim {layout.tp.dim}, along which the batches of the "
            f"data-parallel ranks differ (shapes {_listed(shapes)})"
        )
    lengths = {
        other: tuple(
            shape[other]
            for shape, has in zip(shapes[::tp_size], has_rows[::tp_size])
            for _ in range(shape[dim or 0] * has)
        )
        for other in sorted(differing)
    }
    found = []
    for shape, has in zip(shapes, has_rows):
        padded = [largest[i] if i in differing else size for i, size in enumerate(shape)]
        if not has and dim is not None:
            padded[dim] = 0
        found.append(Padding(shape, tuple(padded), value, has or dim is None, lengths))
    return found


def _check_rows(layout: ShardLayout, shapes: Sequence[Shape], rows: Rows, mesh: Mesh) -> None:
    """Check that the dim that dp splits counts rows, in batches of different lengths: it must not
    be rows times positions, which the unsharded program pads in each row.

    Raises:
        LayoutMismatchError: it does not.
    """
    dim = _rows_dim(layout.dp)
    if dim is None:
        return
    for place in range(mesh.tp_size):
        column = shapes[place :: mesh.tp_size]
        sizes = [shape[dim] if own else 0 for shape, own in zip(column, rows)]
        first = max(range(len(rows)), key=rows.__getitem__)
        if any(size * rows[first] != sizes[first] * own for size, own in zip(sizes, rows)):
            raise LayoutMismatchError(
                f"dim {dim} is {sizes} on the data-parallel ranks, whose batches have {list(rows)} "
                "rows of different lengths: it joins rows with positions, of which the padded "
                "batch has others"
            )


def _rows_dim(placement: Placement) -> int | None:
    """Return the dim that data-parallel ranks split into consecutive parts; None for none."""
    if not isinstance(placement, Shard) or placement.is_interleaved or placement.pieces is not None:
        return None
    return placement.dim


def _listed(shapes: Sequence[Shape]) -> str:
    return str(list(dict.fromkeys(map(tuple, shapes))))
