"""Which layout a site has: from DTensor placements, a probe of the values, and ``expected_shape``;
they must agree.

On the dp axis dim 0 is the batch, so ranks hold different rows unless a source says otherwise. On
the tp axis a tensor is replicated only if the ranks' bytes are seen to be equal, and sharded only
if ``expected_shape`` or DTensor says so.
What is neither is an error: a shard is never handed over as the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.channel import Channel, agreed
from flex_model.distributed.layout import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.distributed.mesh import Mesh

ExpectedShape = tuple[int | None, ...] | None

# Per rank of the grid: a hash of the bytes this rank holds, and whether they show anything (not
# constant, not empty).
Fingerprints = Sequence[tuple[int, bool]]


def check_expected_shape(expected_shape: Any) -> ExpectedShape:
    """``expected_shape`` as a tuple. TypeError or ValueError if it is not one of ints and None."""
    if expected_shape is None:
        return None
    try:
        sizes: tuple[Any, ...] = tuple(expected_shape)
    except TypeError:
        raise TypeError(
            f"expected_shape must be a tuple of ints and None, got {expected_shape!r}; example: "
            "(None, None, 4096)"
        ) from None
    for size in sizes:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise TypeError(
                f"expected_shape must hold ints and None, got {size!r} in {sizes}; example: "
                "(None, None, 4096)"
            )
        if size is not None and size < 0:
            raise ValueError(
                f"expected_shape {sizes} has a negative size; write None for a size that is not "
                "known"
            )
    return sizes


def settle(
    channel: Channel,
    site: str,
    shard: Tensor,
    shapes: Sequence[Shape],
    expected_shape: ExpectedShape,
    known: ShardLayout | None,
    batch_on_dp: bool,
    is_certain: bool = True,
) -> tuple[ShardLayout, bool]:
    """``resolve`` for this rank's ``shard``; collective where the values must be probed.

    Returns:
        The layout, and whether it is proven: constant values show nothing, so it holds for them
        only.
    """
    is_proven = True

    def probe() -> Fingerprints:
        nonlocal is_proven
        table = channel.exchange(values.fingerprint(shard)).tolist()
        is_proven = not all(constant for _, constant in table)
        return [(value, not constant) for value, constant in table]

    try:
        layout = resolve(
            site, shapes, channel.mesh, expected_shape, known, probe, batch_on_dp, is_certain
        )
    except ValueError as error:
        raise agreed(error) from None
    return layout, is_proven


def resolve(
    site: str,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    known: ShardLayout | None,
    probe: Callable[[], Fingerprints],
    batch_on_dp: bool = True,
    is_certain: bool = True,
) -> ShardLayout:
    """The layout of a tensor whose local shapes are ``shapes`` (all ranks of the grid, tp fastest).

    Args:
        site: For messages.
        known: The layout that the tensor itself tells (DTensor), or something beside it; its dp
            placement may be a default.
        is_certain: Whether ``known`` is the tensor's own, so that its values need no check.
        probe: Exchanges fingerprints of the values; collective over the grid, called at most once.
        batch_on_dp: Whether dim 0 is the batch, of which dp ranks hold different rows (not so for
            parameters).

    Raises:
        ValueError: the sources contradict each other, or none of them settles the layout. The same
            on every rank, since it depends on nothing but what all ranks were told.
    """
    if expected_shape is not None and len(expected_shape) != len(shapes[0]):
        raise ValueError(
            f"{site}: expected_shape {expected_shape} has {len(expected_shape)} dims, the tensor "
            "has "
            f"{len(shapes[0])}: local shapes {_unique(shapes)}"
        )
    layout = (
        known if known is not None else _from_sizes(site, shapes, mesh, expected_shape, batch_on_dp)
    )
    full_shape = _full_shape(site, layout, shapes, mesh)
    if expected_shape is not None and any(
        size is not None and size != full for size, full in zip(expected_shape, full_shape)
    ):
        raise ValueError(
            f"{site}: expected_shape {expected_shape} contradicts {layout.source}: the full "
            "tensor has shape "
            f"{full_shape} (layout {layout}, local shapes {_unique(shapes)})"
        )
    if len(shapes) > 1 and (known is None or not is_certain):
        fingerprints = probe()
        if mesh.tp_size > 1:
            _check_values(site, layout, shapes, mesh, expected_shape, fingerprints)
        if mesh.dp_size > 1:
            _check_values_over_dp(site, layout, shapes, mesh, fingerprints)
    return layout


def _from_sizes(
    site: str, shapes: Sequence[Shape], mesh: Mesh, expected_shape: ExpectedShape, batch_on_dp: bool
) -> ShardLayout:
    """Read the split off the sizes: where the ranks' sizes add up to the expected one, that dim is
    sharded.
    """
    ndim = len(shapes[0])
    expected = expected_shape if expected_shape is not None else (None,) * ndim
    batch_on_dp = batch_on_dp and mesh.dp_size > 1 and ndim > 0
    dp: Placement = Shard(0) if batch_on_dp else Replicate()
    tp: Placement = Replicate()
    for dim, size in enumerate(expected):
        if size is None:
            continue
        table = [
            [shapes[i * mesh.tp_size + j][dim] for j in range(mesh.tp_size)]
            for i in range(mesh.dp_size)
        ]
        by_dp = {sum(column) for column in zip(*table)} if dim == 0 and batch_on_dp else set()
        by_tp = {sum(row) for row in table} if mesh.tp_size > 1 else set()
        local = {n for row in table for n in row}
        if dim == 0 and batch_on_dp:
            if by_dp == {size}:
                continue
            if {sum(map(sum, table))} == {size} and mesh.tp_size > 1:
                tp = _shard_tp(site, tp, dim, expected)
                continue
            dp = Replicate()
        if local == {size}:
            continue
        if by_tp == {size}:
            tp = _shard_tp(site, tp, dim, expected)
            continue
        raise ValueError(
            f"{site}: expected_shape {expected_shape} says {size} along dim {dim}, but the ranks "
            "hold "
            f"{sorted(local)} there"
            + (f", together {sorted(by_dp)} over data-parallel ranks" if by_dp else "")
            + (f", together {sorted(by_tp)} over tensor-parallel ranks" if by_tp else "")
            + f" (local shapes {_unique(shapes)}, {mesh.describe()}); give the size of the full "
            "tensor there, or None"
        )
    source = "expected_shape" if expected_shape is not None else "the local sizes"
    return ShardLayout(dp, tp, source=source)


def _shard_tp(site: str, tp: Placement, dim: int, expected: tuple[int | None, ...]) -> Placement:
    if isinstance(tp, Shard):
        raise ValueError(
            f"{site}: by expected_shape {expected} both dim {tp.dim} and dim {dim} are sharded "
            "over the tensor-parallel "
            "ranks, but one axis can shard one dim only; write None for dims that are not sharded"
        )
    return Shard(dim)


def _full_shape(site: str, layout: ShardLayout, shapes: Sequence[Shape], mesh: Mesh) -> Shape:
    try:
        return layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
    except ValueError as error:
        raise ValueError(
            f"{site}: {error}. Give the full sizes in expected_shape where the ranks hold "
            "different sizes"
        ) from None


def _check_values(
    site: str,
    layout: ShardLayout,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    fingerprints: Fingerprints,
) -> None:
    """Replicated must mean equal bytes, sharded must not, along tp. Constant values show nothing
    either way.
    """
    rows = [fingerprints[i * mesh.tp_size : (i + 1) * mesh.tp_size] for i in range(mesh.dp_size)]
    equal = all(len({value for value, _ in row}) == 1 for row in rows)
    telling = any(tells for row in rows for _, tells in row)
    if isinstance(layout.tp, Shard):
        if equal and telling:
            told = f" {expected_shape}" if layout.source == "expected_shape" else ""
            raise ValueError(
                f"{site}: by {layout.source}{told} dim {layout.tp.dim} is sharded over "
                f"{mesh.tp_size} tensor-parallel ranks, but all of them hold the same values of "
                f"shape {_unique(shapes)}: the tensor is replicated; give its own sizes in "
                "expected_shape, or None"
            )
    elif not equal:
        raise ValueError(
            f"{site}: the tensor-parallel ranks hold different values of shape {_unique(shapes)}, "
            "so each has a shard "
            f"or a partial sum, and which is not known; give the full sizes in expected_shape"
            + (f" (it is {expected_shape} now)" if expected_shape is not None else "")
        )
    elif not telling and expected_shape is None and any(_has_many(shape) for shape in shapes):
        raise ValueError(
            f"{site}: all ranks hold one constant value of shape {_unique(shapes)}, which does "
            "not show whether the "
            "tensor is sharded; give the full sizes in expected_shape"
        )


def _has_many(shape: Shape) -> bool:
    return len(shape) > 0 and 0 not in shape


def _check_values_over_dp(
    site: str,
    layout: ShardLayout,
    shapes: Sequence[Shape],
    mesh: Mesh,
    fingerprints: Fingerprints,
) -> None:
    """What data-parallel ranks share must be equal. (Rows of a batch may be: same rows, twice.)"""
    columns = [fingerprints[j :: mesh.tp_size] for j in range(mesh.tp_size)]
    if layout.dp == Replicate() and any(len({v for v, _ in column}) > 1 for column in columns):
        raise ValueError(
            f"{site}: the data-parallel ranks hold different values of shape {_unique(shapes)} "
            "where they should share one; for gradients: average them over the ranks first"
        )


def _unique(shapes: Sequence[Shape]) -> str:
    unique = list(dict.fromkeys(map(tuple, shapes)))
    return str(unique[0]) if len(unique) == 1 else f"{list(map(tuple, shapes))} by rank"
