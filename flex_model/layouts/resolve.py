"""Resolves a tensor's layout from what is proven and stated. Values and sizes are no evidence for a
layout: they can only refute it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard, ShardLayout
from flex_model.distributed.values import Fingerprints
from flex_model.errors import LayoutMismatchError
from flex_model.layouts.expected_shape import ExpectedShape, check_dims, fits, stated_by, unique
from flex_model.layouts.follow import AXES, Pair
from flex_model.layouts.obstacle import Obstacle
from flex_model.layouts.refusal import PAD, refusal
from flex_model.layouts.statements import Site, Statements, describe

PROVEN = "the operations that made it"
STATED = "its statement"
SIZES = "its expected_shape"


def resolve(
    site: Site,
    shapes: Sequence[Shape],
    mesh: Mesh,
    proven: Pair,
    stated: Mapping[str, Placement],
    expected_shape: ExpectedShape = None,
    known: ShardLayout | None = None,
    obstacles: Mapping[str, Obstacle] | None = None,
    *,
    rows_dim: int | None = 0,
    prints: Fingerprints | None = None,
    statements: Statements | None = None,
) -> ShardLayout:
    """Return the layout of a tensor whose local shapes are ``shapes`` (all ranks of the grid, tp
    fastest).

    Args:
        proven: The proven placements along dp and tp, the same on all ranks.
        stated: By axis, the placements that the user states for this site.
        expected_shape: The sizes of the full tensor; where nothing else is known of an axis, its
            placement follows from them.
        known: The whole layout, if a DTensor states it.
        rows_dim: The dim in which data-parallel ranks hold rows.
        prints: The ranks' values, for the message.

    Raises:
        ValueError: the sources contradict each other, or an axis is not known. The same on every
            rank.
    """
    check_dims(site.name, expected_shape, shapes)
    layout = known
    if layout is None:
        placed: dict[str, Placement | None] = dict(zip(AXES, proven))
        for axis, placement in stated.items():
            _check_statement(site, axis, placement, placed[axis])
            placed[axis] = placement
        if placed["tp"] is None and site.parameter.share is not None:
            placed["tp"] = _of_share(*site.parameter.share, placed["dp"], shapes, mesh)
        axes = [axis for axis in AXES if placed[axis] is None and mesh.size(axis) > 1]
        sized: dict[str, Placement] = {}
        if axes and expected_shape is not None:
            pair = stated_by(
                site.name, expected_shape, shapes, mesh, (placed["dp"], placed["tp"]), rows_dim
            )
            by_sizes = dict(zip(AXES, pair))
            sized = {axis: one for axis in axes if (one := by_sizes[axis]) is not None}
            placed.update(sized)
        if unknown := [axis for axis in axes if axis not in sized]:
            raise ValueError(
                refusal(site, shapes, mesh, unknown, obstacles or {}, rows_dim, prints, statements)
            )
        dp, tp = (placed[axis] or Replicate() for axis in AXES)
        source = SIZES if sized else STATED if stated else PROVEN
        layout = ShardLayout(dp, tp, sized_axes=tuple(sized), source=source)
        layout = order_axes(site, layout, mesh, are_both_stated=len(stated) == len(AXES))
    full_shape = _full_shape(site, layout, shapes, mesh)
    for what, sizes in (
        (f"expected_shape {expected_shape} contradicts", expected_shape),
        (f"the stated sizes {site.parameter.sizes} contradict", site.parameter.sizes),
    ):
        if not fits(full_shape, sizes):
            raise ValueError(
                f"{site.name}: {what} {layout.source}: the full tensor has shape {full_shape} "
                f"(layout {layout}, local shapes {unique(shapes)})"
            )
    return layout


def gradient_by_sizes(layout: ShardLayout, expected_shape: ExpectedShape) -> dict[str, Placement]:
    """Return, by axis, how the gradient of a tensor of this layout is placed where only the sizes
    state it: sharded as the tensor is. Of a replicated tensor it may be replicated or partial.
    """
    placed = {"dp": layout.dp, "tp": layout.tp}
    return {
        axis: shard
        for axis, shard in placed.items()
        if isinstance(shard, Shard) and expected_shape and expected_shape[shard.dim] is not None
    }


def order_axes(site: Site, layout: ShardLayout, mesh: Mesh, are_both_stated: bool) -> ShardLayout:
    """Return the layout with the order of the axes, if both split one dim, such as joined rows and
    heads; else the layout as it is.

    A proof counts the parts of its axis in the dim that one rank of the other axis holds, so the
    axis with more parts is the inner one (in a concatenation each tensor has the same parts). A
    layout counts them in the full dim. FSDP splits what a layer holds of a parameter: its
    tensor-parallel shard. For shards without parts, a statement of both axes means that dp is the
    outer one.

    Raises:
        ValueError: it is not known which axis is the outer one. The same on every rank.
    """
    if not _is_split_by_both(layout, mesh):
        return layout
    if site.kind == "parameter":
        return replace(layout, tp_first=True)
    dp, tp = layout.dp, layout.tp
    assert isinstance(dp, Shard) and isinstance(tp, Shard)
    if are_both_stated and not dp.is_interleaved and not tp.is_interleaved:
        return layout
    is_uneven = dp.part_sizes is not None or tp.part_sizes is not None
    if dp.parts == tp.parts or is_uneven:
        raise ValueError(
            f"{site.name}: both axes split dim {dp.dim}, and it is not known which of them is the "
            f'outer one; where dp is, give HookFunction(..., placements={{"dp": Shard({dp.dim}), '
            f'"tp": Shard({dp.dim})}}), else hook the tensor before the dims are joined'
        )
    if dp.parts > tp.parts:
        count = tp.pieces or mesh.tp_size
        return replace(layout, dp=replace(dp, parts=dp.parts * count))
    count = dp.pieces or mesh.dp_size
    return replace(layout, tp=replace(tp, parts=tp.parts * count), tp_first=True)


def _is_split_by_both(layout: ShardLayout, mesh: Mesh) -> bool:
    return layout.splits_one_dim and min(mesh.dp_size, mesh.tp_size) > 1


def _of_share(
    shard: Shard, sizes: Shape, dp: Placement | None, shapes: Sequence[Shape], mesh: Mesh
) -> Shard | None:
    """Return the share's placement, if the ranks' shares make up the sizes."""
    layout = ShardLayout(dp or Replicate(), shard)
    try:
        return shard if layout.full_shape(shapes, mesh.dp_size, mesh.tp_size) == sizes else None
    except LayoutMismatchError:
        return None


def _check_statement(site: Site, axis: str, stated: Placement, proven: Placement | None) -> None:
    if proven is not None and proven != stated:
        raise ValueError(
            f"{site.name}: it is stated to be {describe(stated)} along {axis}, but by {PROVEN} it "
            f"is {describe(proven)}; leave the statement out, or state the layout of the weight "
            "that it was made with (flex.layouts(why=True) has the proof)"
        )


def _full_shape(site: Site, layout: ShardLayout, shapes: Sequence[Shape], mesh: Mesh) -> Shape:
    for axis in AXES:
        placement = getattr(layout, axis)
        if isinstance(placement, Shard) and placement.dim >= len(shapes[0]):
            raise ValueError(
                f"{site.name}: it is stated to be {describe(placement)} along {axis}, but it has "
                f"{len(shapes[0])} dims (local shapes {unique(shapes)}); count the dims from 0"
            )
    try:
        return layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
    except LayoutMismatchError as error:
        columns = [shapes[place :: mesh.tp_size] for place in range(mesh.tp_size)]
        rows = layout.dp.dim if isinstance(layout.dp, Shard) else None
        others = [
            {tuple(n for dim, n in enumerate(shape) if dim != rows) for shape in column}
            for column in columns
        ]
        if any(len(sizes) > 1 for sizes in others):
            advice = PAD
        else:
            advice = "give the tensor-parallel ranks the same inputs, or hook another module"
        raise LayoutMismatchError(f"{site.name}: {error}; {advice}") from None


def differing_axes(layout: ShardLayout, prints: Fingerprints) -> list[str]:
    """Return the axes along which replicas differ, by hashes of their values. Equal values prove
    nothing, so shards and partial sums are not compared.
    """
    axes = axes_of_replicas(layout, prints.mesh)
    return [axis for axis in axes if not prints.equal_along(axis)]


def axes_of_replicas(layout: ShardLayout, mesh: Mesh) -> list[str]:
    """Return the axes along which several ranks hold replicas."""
    return [axis for axis in AXES if mesh.size(axis) > 1 and getattr(layout, axis) == Replicate()]
