"""Resolves a tensor's layout from what is proven and stated. Values and sizes are no evidence for a
layout: they can only refute it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.values import Fingerprints
from flex_model.errors import LayoutMismatchError
from flex_model.layouts.follow import AXES, UNKNOWN, Pair
from flex_model.layouts.statements import describe, text_of

ExpectedShape = tuple[int | None, ...] | None

PROVEN = "the operations that made it"
STATED = "its statement"

PAD = (
    "pad the inputs of the data-parallel ranks to one length, or choose how hooks see different "
    'ones: FlexModel(dp_batch="global") pads them, "local" passes each rank its own'
)

AXIS_NAMES = {"dp": "data-parallel", "tp": "tensor-parallel"}


Share = tuple[Shard, Shape]


@dataclass(frozen=True)
class ParameterSources:
    """What is stated about a parameter, and so about its gradient.

    Attributes:
        placements: Along dp and tp.
        share: The shard along tp that its layer's sizes imply, and these sizes; used if the ranks'
            shares make up the sizes.
        sizes: Of the full parameter, as the user states them.
    """

    placements: Pair = UNKNOWN
    share: Share | None = None
    sizes: ExpectedShape = None


@dataclass(frozen=True)
class Site:
    """The place of a tensor in the model, for messages.

    Attributes:
        name: Such as ``forward hook on 'layers.0'``.
        module: The clean name of the module or parameter, for the call that states its layout.
        kind: The ``kind`` for ``annotate_layout``; empty if that can't be used.
        index: The number of the tensor among the module's.
        parameter: For a parameter or its gradient: what is stated about it.
    """

    name: str
    module: str = ""
    kind: str = ""
    index: int = 0
    parameter: ParameterSources = ParameterSources()


def resolve(
    site: Site,
    shapes: Sequence[Shape],
    mesh: Mesh,
    proven: Pair,
    stated: Mapping[str, Placement],
    expected_shape: ExpectedShape = None,
    known: ShardLayout | None = None,
    obstacles: Mapping[str, str] | None = None,
) -> ShardLayout:
    """Return the layout of a tensor whose local shapes are ``shapes`` (all ranks of the grid, tp
    fastest).

    Args:
        proven: The proven placements along dp and tp, the same on all ranks.
        stated: By axis, the placements that the user states for this site.
        known: The whole layout, if a DTensor states it.

    Raises:
        ValueError: the sources contradict each other, or an axis is not known. The same on every
            rank.
    """
    if expected_shape is not None and len(expected_shape) != len(shapes[0]):
        raise ValueError(
            f"{site.name}: expected_shape {expected_shape} has {len(expected_shape)} dims, the "
            f"tensor has {len(shapes[0])}: local shapes {unique(shapes)}"
        )
    layout = known
    if layout is None:
        placed: dict[str, Placement | None] = dict(zip(AXES, proven))
        for axis, placement in stated.items():
            _check_statement(site, axis, placement, placed[axis])
            placed[axis] = placement
        if placed["tp"] is None and site.parameter.share is not None:
            placed["tp"] = _of_share(*site.parameter.share, placed["dp"], shapes, mesh)
        unknown = [axis for axis in AXES if placed[axis] is None and _size(mesh, axis) > 1]
        if unknown:
            raise ValueError(refusal(site, shapes, mesh, unknown, expected_shape, obstacles or {}))
        dp, tp = (placed[axis] or Replicate() for axis in AXES)
        layout = ShardLayout(dp, tp, source=STATED if stated else PROVEN)
        layout = order_axes(site, layout, mesh, are_both_stated=len(stated) == len(AXES))
    full_shape = _full_shape(site, layout, shapes, mesh)
    for what, sizes in (
        (f"expected_shape {expected_shape} contradicts", expected_shape),
        (f"the stated sizes {site.parameter.sizes} contradict", site.parameter.sizes),
    ):
        if not _fits(full_shape, sizes):
            raise ValueError(
                f"{site.name}: {what} {layout.source}: the full tensor has shape {full_shape} "
                f"(layout {layout}, local shapes {unique(shapes)})"
            )
    return layout


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


def placements_as_proven(layout: ShardLayout, mesh: Mesh) -> Pair:
    """Return the placements from which `order_axes` made an activation's layout: parts are counted
    in the dim that one rank of the other axis holds.
    """
    dp, tp = layout.dp, layout.tp
    if not _is_split_by_both(layout, mesh):
        return dp, tp
    assert isinstance(dp, Shard) and isinstance(tp, Shard)
    if layout.tp_first:
        return dp, replace(tp, parts=tp.parts // (dp.pieces or mesh.dp_size))
    if dp.is_interleaved:
        return replace(dp, parts=dp.parts // (tp.pieces or mesh.tp_size)), tp
    return dp, tp


def _of_share(
    shard: Shard, sizes: Shape, dp: Placement | None, shapes: Sequence[Shape], mesh: Mesh
) -> Shard | None:
    """Return the share's placement, if the ranks' shares make up the sizes."""
    layout = ShardLayout(dp or Replicate(), shard)
    try:
        return shard if layout.full_shape(shapes, mesh.dp_size, mesh.tp_size) == sizes else None
    except LayoutMismatchError:
        return None


def _size(mesh: Mesh, axis: str) -> int:
    return mesh.dp_size if axis == "dp" else mesh.tp_size


def _check_statement(site: Site, axis: str, stated: Placement, proven: Placement | None) -> None:
    if proven is not None and proven != stated:
        raise ValueError(
            f"{site.name}: it is stated to be {describe(stated)} along {axis}, but by {PROVEN} it "
            f"is {describe(proven)}; leave the statement out, or state the layout of the weight "
            "that it was made with (flex.layouts(why=True) has the proof)"
        )


def _full_shape(site: Site, layout: ShardLayout, shapes: Sequence[Shape], mesh: Mesh) -> Shape:
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


def refusal(
    site: Site,
    shapes: Sequence[Shape],
    mesh: Mesh,
    unknown: Sequence[str],
    expected_shape: ExpectedShape,
    obstacles: Mapping[str, str],
) -> str:
    """Return the message for a tensor with unknown axes, with the call that states its layout."""
    parts, of_inputs = [], ""
    for axis in unknown:
        candidates = _candidates(shapes, mesh, axis)
        listed = "; or ".join(one[0] for one in candidates) or "split as no shard of one tensor"
        obstacle = obstacles.get(axis, "")
        lost = f" (lost at {obstacle})" if obstacle else ""
        if obstacle.startswith("input "):
            of_inputs = (
                "; where ranks are given shards as inputs, state that with flex.annotate_layout("
                f"re.compile('^$'), kind='forward_pre', {axis}=Shard(...)), index= of which"
            )
        parts.append(
            f"how the tensor is placed over the {AXIS_NAMES[axis]} ranks is not known{lost}; "
            f"it may be {listed}"
        )
    lines = _lines(site, shapes, mesh, unknown, expected_shape)
    not_enough = (
        f" (expected_shape {expected_shape} gives sizes, which don't tell the order of the ranks' "
        "parts)"
        if expected_shape is not None
        else ""
    )
    return (
        f"{site.name}: {'; '.join(parts)} (local shapes {unique(shapes)}, {mesh.describe()})"
        f"{not_enough}; state it before the run with {lines}, from torch.distributed.tensor import "
        f"Partial, Replicate, Shard{of_inputs}{_uneven(shapes, mesh, unknown)}; "
        "flex.layouts(why=True) says what could not be followed"
    )


def _uneven(shapes: Sequence[Shape], mesh: Mesh, unknown: Sequence[str]) -> str:
    """Return the advice for data-parallel ranks whose rows have different lengths."""
    line = [shapes[place] for place in mesh.ranks_along(("dp",), 0)]
    if "dp" not in unknown or len({shape[1:] for shape in line}) == 1:
        return ""
    return f"; {PAD}"


def _lines(
    site: Site,
    shapes: Sequence[Shape],
    mesh: Mesh,
    unknown: Sequence[str],
    expected_shape: ExpectedShape,
) -> str:
    placed = []
    for axis in unknown:
        found = _candidates(shapes, mesh, axis)
        fitting = [one for one in found if _fits(one[2], expected_shape)]
        candidates = [placement for _, placement, _ in fitting or found]
        example = candidates[-1] if candidates else Replicate()
        if candidates and isinstance(example, Partial):
            shards = [one for one in candidates if isinstance(one, Shard)]
            example = (shards[0] if axis == "dp" else shards[-1]) if shards else Replicate()
        placed.append((axis, text_of(example)))
    if not site.kind:
        values = ", ".join(f'"{axis}": {text}' for axis, text in placed)
        return f"HookFunction(..., placements={{{values}}}), or whichever of these it is"
    values = ", ".join(f"{axis}={text}" for axis, text in placed)
    index = f", index={site.index}" if site.index else ""
    return (
        f"flex.annotate_layout({site.module!r}, kind={site.kind!r}{index}, {values}), or whichever "
        "of these it is"
    )


def _fits(full: Shape, expected_shape: ExpectedShape) -> bool:
    return all(size in (None, own) for size, own in zip(expected_shape or (), full))


def _candidates(
    shapes: Sequence[Shape], mesh: Mesh, axis: str
) -> list[tuple[str, Placement, Shape]]:
    """Return the placements along an axis that the local shapes allow, with the full shape
    of each.
    """
    line = [shapes[place] for place in mesh.ranks_along((axis,), 0)]
    placements: list[Placement] = [Replicate(), *map(Shard, range(len(line[0]))), Partial()]
    found = []
    for placement in placements:
        if not isinstance(placement, Shard) and len(set(line)) > 1:
            continue
        try:
            full = ShardLayout(tp=placement).full_shape(line, 1, len(line))
        except ValueError:
            continue
        found.append((f"{describe(placement)}, in full {full}", placement, full))
    return found


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


def differing_axes(layout: ShardLayout, prints: Fingerprints) -> list[str]:
    """Return the axes along which replicas differ, by hashes of their values. Equal values prove
    nothing, so shards and partial sums are not compared.
    """
    return [
        axis
        for axis in AXES
        if getattr(layout, axis) == Replicate() and not prints.equal_along(axis)
    ]
