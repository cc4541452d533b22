"""The layout that an ``expected_shape`` states in release 0.1.0: a dim in which the ranks' sizes
add up to the full size is split over them in consecutive parts, and all others are whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.layouts.resolve import ExpectedShape, unique


def layout_of(
    site: str,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    batch_on_dp: bool,
) -> ShardLayout:
    """The layout of a tensor whose local shapes are ``shapes``.

    Args:
        batch_on_dp: Whether dim 0 holds rows of the batch, of which data-parallel ranks have
            different ones.

    Raises:
        ValueError: the sizes fit no split along one dim.
    """
    if expected_shape is not None and len(expected_shape) != len(shapes[0]):
        raise ValueError(
            f"{site}: expected_shape {expected_shape} has {len(expected_shape)} dims, the tensor "
            f"has {len(shapes[0])}: local shapes {unique(shapes)}"
        )
    has_rows = batch_on_dp and mesh.dp_size > 1 and bool(shapes[0])
    over_dp: list[Placement] = [Shard(0), Replicate()] if has_rows else [Replicate()]
    over_tp: list[Placement] = [Replicate()]
    if mesh.tp_size > 1:
        over_tp += [Shard(dim) for dim, size in enumerate(expected_shape or ()) if size is not None]
    sizes = expected_shape or (None,) * len(shapes[0])
    for dp, tp in itertools.product(over_dp, over_tp):
        layout = ShardLayout(dp, tp, source="expected_shape")
        try:
            full = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
        except ValueError:
            continue
        if all(size in (None, own) for size, own in zip(sizes, full)):
            return layout
    held = [sorted({shape[dim] for shape in shapes}) for dim in range(len(sizes))]
    dim, size = next(
        ((dim, size) for dim, size in enumerate(sizes) if size is not None and [size] != held[dim]),
        (0, None),
    )
    raise ValueError(
        f"{site}: expected_shape {expected_shape} says {size} along dim {dim}, but the ranks hold "
        f"{held[dim] if held else 'one number'} there (local shapes {unique(shapes)}, "
        f"{mesh.describe()}); give the size of the full tensor there, or None"
    )
