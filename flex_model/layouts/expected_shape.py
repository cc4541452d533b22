"""States a layout by the sizes of the full tensor, as ``expected_shape`` of release 0.1.0 does.

expected_shape=(None, None, 4096), and tp ranks hold (2, 7, 2048): consecutive shards of dim 2
expected_shape=(None, None, 4096), and tp ranks hold (2, 7, 4096): the same tensor on each
expected_shape=(8, None, 4096), and dp ranks hold (4, 7, 4096): rows of the batch
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.layouts.placement_encoding import Pair

ExpectedShape = tuple[int | None, ...] | None


def stated_by(
    site: str,
    sizes: ExpectedShape,
    shapes: Sequence[Shape],
    mesh: Mesh,
    known: Pair,
    rows_dim: int | None = 0,
) -> Pair:
    """Return the placements along dp and tp, with those that the sizes state where none is known.

    Along tp the tensor is split along the dim whose full size is given and is not the ranks' own,
    and along no other; without such a dim every rank has all of it. Along dp only the size of
    ``rows_dim`` counts: it is that of all ranks' rows, or of a tensor that they share; without it
    nothing is stated. No size says that ranks hold partial sums.

    Args:
        shapes: The local shapes of all ranks of the grid, tp fastest.

    Raises:
        ValueError: the ranks hold no such tensor. The same on every rank.
    """
    dp, tp = known
    sizes = sizes if sizes is not None else (None,) * len(shapes[0])
    over_tp: list[Placement] = [Replicate()] if tp is None else [tp]
    if tp is None and mesh.tp_size > 1:
        over_tp += [Shard(dim) for dim, size in enumerate(sizes) if size is not None]
    over_dp: list[Placement] = [Replicate()] if dp is None else [dp]
    says_rows = rows_dim is not None and rows_dim < len(sizes) and sizes[rows_dim] is not None
    dp_size = mesh.dp_size
    if dp is None and dp_size > 1:
        if rows_dim is not None and says_rows:
            over_dp.insert(0, Shard(rows_dim))
        else:  # not stated: the ranks along tp are those of one line
            shapes, dp_size = [shapes[i] for i in mesh.ranks_along(("tp",), 0)], 1
    for of_dp, of_tp in itertools.product(over_dp, over_tp):
        try:
            full = ShardLayout(of_dp, of_tp).full_shape(shapes, dp_size, mesh.tp_size)
        except ValueError:
            continue
        if fits(full, sizes):
            return (of_dp if dp_size == mesh.dp_size else None), of_tp
    held = [sorted({shape[dim] for shape in shapes}) for dim in range(len(sizes))]
    wrong = [dim for dim, own in enumerate(held) if own != [sizes[dim]]]
    dim = next((d for d in wrong if sizes[d] is not None or len(held[d]) > 1), 0)
    raise ValueError(
        f"{site}: expected_shape {sizes} says {sizes[dim]} along dim {dim}, but the ranks hold "
        f"{held[dim]} there, and no consecutive parts of one dim add up to these sizes (local "
        f"shapes {unique(shapes)}, {mesh.describe()}); give the size of the full tensor there, or "
        "None"
    )


def check_dims(site: str, sizes: ExpectedShape, shapes: Sequence[Shape]) -> None:
    """ValueError where the sizes are those of a tensor with another number of dims."""
    if sizes is not None and len(sizes) != len(shapes[0]):
        raise ValueError(
            f"{site}: expected_shape {sizes} has {len(sizes)} dims, the tensor has "
            f"{len(shapes[0])}: local shapes {unique(shapes)}"
        )


def fits(full: Shape, sizes: ExpectedShape) -> bool:
    """Whether a tensor of this full shape has the sizes that are given."""
    return all(size in (None, own) for size, own in zip(sizes or (), full))


def rows_dim(batch_dim: int | Mapping[str, int | None]) -> int | None:
    """Return the dim in which activations hold rows; None if the inputs have theirs in several."""
    if isinstance(batch_dim, int):
        return batch_dim
    dims = {dim for dim in batch_dim.values() if dim is not None} or {0}
    return dims.pop() if len(dims) == 1 else None


def unique(shapes: Sequence[Shape]) -> str:
    """Format local shapes for messages."""
    found = list(dict.fromkeys(map(tuple, shapes)))
    return str(found[0]) if len(found) == 1 else f"{list(map(tuple, shapes))} by rank"


def check_expected_shape(expected_shape: Any) -> ExpectedShape:
    """Return ``expected_shape`` as a tuple. TypeError or ValueError if it is not one of ints and
    None.
    """
    if expected_shape is None:
        return None
    sizes = tuple(expected_shape) if isinstance(expected_shape, Iterable) else None
    if sizes is None or any(type(n) is bool or not isinstance(n, int | None) for n in sizes):
        raise TypeError(
            f"expected_shape must be a tuple of ints and None, got {expected_shape!r}; example: "
            "(None, None, 4096)"
        )
    if any(size is not None and size < 0 for size in sizes):
        raise ValueError(
            f"expected_shape {sizes} has a negative size; write None for a size that is not known"
        )
    return sizes
