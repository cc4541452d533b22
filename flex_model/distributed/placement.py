"""How one tensor is split over the ranks: a placement per mesh axis."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.mesh import Axis
from flex_model.errors import LayoutMismatchError

Shape = tuple[int, ...]

_Range = tuple[int, int, int]  # along one dim: start in the full tensor, start in the shard, size
Box = tuple[int, list[int], list[int], list[int]]  # rank, then of all dims what a range has


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """The ranks of the axis hold consecutive parts along ``dim`` (never negative), evenly or
    not.

    With ``parts`` above 1 the full dim is that many equal parts, each of them split over the ranks,
    and a rank holds its pieces of all parts one after the other: a fused ``[gate; up]`` projection
    of which each rank has ``[gate_r; up_r]`` is ``Shard(0, parts=2)``. The same as torch's
    ``_StridedShard(dim, split_factor=parts)``.

    ``part_sizes`` are the full sizes along ``dim`` of parts that may differ: a fused projection of
    32 query, 8 key and 8 value heads is ``Shard(2, part_sizes=(32, 8, 8))`` times the head size.
    Each part is split evenly over the ranks; where that leaves a rest, as ``torch.tensor_split``
    does (the first ranks one more) or as ``torch.chunk`` and DTensor do, whichever gives the sizes
    that the ranks hold (no sizes fit both). ``parts`` is then their number.

    With ``pieces`` set, the axis has fewer pieces than ranks, and rank ``i`` of it holds piece
    ``(i // stride) % pieces``: key-value heads that two neighbouring ranks share have ``stride=2``,
    the replicas of HSDP ``stride=1``.

    With ``order``, rank ``i`` of the axis holds piece ``order[i]``: experts that are split over
    pairs of neighbouring ranks first, and then, by FSDP, among the pairs, have ``(0, 2, 1, 3)``.
    """

    dim: int
    parts: int = 1
    pieces: int | None = None
    stride: int = 1
    part_sizes: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.part_sizes is None:
            return
        sizes = tuple(self.part_sizes)
        if not sizes or any(size < 0 for size in sizes):
            raise ValueError(
                f"part_sizes must be the full size of each part, one or more and none negative, "
                f"got {sizes}; example: part_sizes=(4096, 1024, 1024)"
            )
        if self.parts not in (1, len(sizes)):
            raise ValueError(f"parts={self.parts} contradicts part_sizes {sizes}; leave parts out")
        object.__setattr__(self, "part_sizes", sizes)
        object.__setattr__(self, "parts", len(sizes))

    def piece(self, place: int) -> int:
        """The index of the piece that the rank at ``place`` of the axis holds."""
        if self.order is not None:
            return self.order[place]
        return place if self.pieces is None else place // self.stride % self.pieces

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank holds pieces of several parts, or the sizes of its parts are stated."""
        return self.parts > 1 or self.part_sizes is not None

    def part_widths(self, held: Sequence[int]) -> list[list[int]] | None:
        """How much of each part the holder of each piece has, from how much each has along ``dim``
        in all. None if the parts can't be split so.
        """
        if self.part_sizes is None:
            if any(size % self.parts for size in held):
                return None
            return [[size // self.parts] * self.parts for size in held]
        for split in (_first_have_one_more, chunk_sizes):
            by_part = [split(size, len(held)) for size in self.part_sizes]
            widths = [list(of_piece) for of_piece in zip(*by_part)]
            if [sum(of_piece) for of_piece in widths] == list(held):
                return widths
        return None

    def __str__(self) -> str:
        more = f", {self.parts} parts" if self.parts > 1 else ""
        if self.part_sizes is not None:
            more = f", parts {'+'.join(map(str, self.part_sizes))}"
        if self.pieces is not None:
            more += f", {self.pieces} pieces"
        if self.order is not None:
            more += f", pieces {self.order}"
        return f"S({self.dim}{more})"


def _first_have_one_more(size: int, count: int) -> list[int]:
    """The sizes that ``torch.tensor_split`` gives."""
    return [size // count + (i < size % count) for i in range(count)]


def chunk_sizes(size: int, count: int) -> list[int]:
    """The sizes that ``torch.chunk`` gives, with zeros where it gives fewer chunks."""
    width = -(-size // count)
    return [max(0, min(size, (i + 1) * width) - i * width) for i in range(count)]


@dataclass(frozen=True)
class Partial:
    """The full tensor is the sum of what the ranks of the axis hold."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial


@dataclass(frozen=True)
class ShardLayout:
    """A placement on each of the axes dp and tp, and the source of the information; in
    ``sized_axes`` those along which only the sizes of the full tensor state it.

    Example::

        layout = ShardLayout(dp=Shard(0), tp=Shard(2))
        shapes = [(2, 5, 8)] * 4              # of all ranks, in the order (dp, tp), tp fastest
        layout.full_shape(shapes, 2, 2)       # (4, 5, 16)
        layout.plan(shapes, 2, 2, element_bytes=4)

    Where both axes shard one dim, the ranks' parts lie in the order (dp, tp), tp fastest; with
    ``tp_first`` (FSDP2 over a tensor-parallel model) in the order (tp, dp).

    The names are those of ``torch.distributed.tensor``; unlike its ``Shard``, the sizes of the
    parts are whatever the ranks hold.
    """

    dp: Placement = Replicate()
    tp: Placement = Replicate()
    tp_first: bool = False
    sized_axes: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default="", compare=False)

    @cached_property
    def sharded_axes(self) -> tuple[Axis, ...]:
        """Axes along which ranks hold different parts, in the order (dp, tp)."""
        axes: list[Axis] = []
        for axis in ("dp", "tp"):
            placement = getattr(self, axis)
            if isinstance(placement, Shard):
                axes.append(
                    axis if placement.pieces is None else (axis, placement.pieces, placement.stride)
                )
        return tuple(axes)

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes along which the shards must be summed."""
        return tuple(axis for axis in ("dp", "tp") if isinstance(getattr(self, axis), Partial))

    @property
    def splits_one_dim(self) -> bool:
        """Whether both axes split the same dim."""
        dp, tp = self.dp, self.tp
        return isinstance(dp, Shard) and isinstance(tp, Shard) and dp.dim == tp.dim

    def placements_of_proofs(self, dp_size: int, tp_size: int) -> tuple[Placement, Placement]:
        """The placements along dp and tp as operations prove them: parts are counted in the dim
        that one rank of the other axis holds.
        """
        dp, tp = self.dp, self.tp
        if not (self.splits_one_dim and isinstance(dp, Shard) and isinstance(tp, Shard)):
            return dp, tp
        if self.tp_first:
            return dp, replace(tp, parts=max(1, tp.parts // (dp.pieces or dp_size)))
        return replace(dp, parts=max(1, dp.parts // (tp.pieces or tp_size))), tp

    @property
    def without_copies(self) -> ShardLayout:
        """The layout among ranks that hold different pieces, one rank a piece."""
        dp, tp = (
            replace(placement, pieces=None, stride=1) if isinstance(placement, Shard) else placement
            for placement in (self.dp, self.tp)
        )
        return replace(self, dp=dp, tp=tp)

    def full_shape(self, shapes: Sequence[Shape], dp_size: int, tp_size: int) -> Shape:
        """Shape of the full tensor, from the local shapes of the ranks in the order (dp, tp).
        Local.
        """
        return _along_dims(self, _as_key(shapes), dp_size, tp_size)[0]

    def plan(
        self, shapes: Sequence[Shape], dp_size: int, tp_size: int, element_bytes: int
    ) -> GatherPlan:
        """Plan the copy of all shards into the full tensor.

        ``shapes`` are of the ranks that hold *different* parts, in the order (dp, tp): along an
        axis that does not shard, the size to give is 1.
        """
        return self.plan_of({}, shapes, dp_size, tp_size, element_bytes)[0]

    def plan_of(
        self,
        indices: Mapping[int, Sequence[int]],
        shapes: Sequence[Shape],
        dp_size: int,
        tp_size: int,
        element_bytes: int,
    ) -> tuple[GatherPlan, list[dict[int, list[int]]], list[Box]]:
        """Plan the gather of the part of the full tensor with these indices by dim. Also
        return, by rank, the ascending indices of its shard that are in the part, and their boxes.
        """
        if not indices:
            plan, boxes = _plan_of_all(self, _as_key(shapes), dp_size, tp_size, element_bytes)
            return plan, [{} for _ in shapes], boxes
        full_shape, of_dims = _along_dims(self.without_copies, _as_key(shapes), dp_size, tp_size)
        along_dims = list(of_dims)
        part_shape, part_shapes = list(full_shape), [list(shape) for shape in shapes]
        held: list[dict[int, list[int]]] = [{} for _ in shapes]
        for dim, chosen in indices.items():
            part_shape[dim] = len(chosen)
            along = []
            for rank, ranges in enumerate(along_dims[dim]):
                held[rank][dim], ranges_of_part = _chosen(ranges, chosen)
                part_shapes[rank][dim] = len(held[rank][dim])
                along.append(ranges_of_part)
            along_dims[dim] = along
        boxes = _boxes(along_dims, len(shapes))
        return GatherPlan(part_shape, part_shapes, boxes, element_bytes), held, boxes

    def along(
        self, dim: int, shapes: Sequence[Shape], dp_size: int, tp_size: int
    ) -> tuple[int, list[list[_Range]]]:
        """The full size along ``dim``, and where each rank's indices along it lie in it."""
        order = ("tp", "dp") if self.tp_first else ("dp", "tp")
        sizes = {"dp": dp_size, "tp": tp_size}
        axes = [
            axis
            for axis in order
            if isinstance(placement := getattr(self, axis), Shard)
            and placement.dim == dim
            and (sizes[axis] > 1 or placement.is_interleaved)
        ]
        places = [self._place_on(divmod(rank, tp_size), axes) for rank in range(len(shapes))]
        extent: dict[tuple[int, ...], int] = {}
        for place, shape in zip(places, shapes):
            if extent.setdefault(place, shape[dim]) != shape[dim]:
                self._does_not_fit(dim, shapes, dp_size, tp_size)
        start_of, start = {}, 0
        for place in sorted(extent):
            start_of[place] = start
            start += extent[place]
        shards: list[Shard] = [getattr(self, axis) for axis in axes]
        if not any(shard.is_interleaved for shard in shards):
            return start, [[(start_of[place], 0, extent[place])] for place in places]
        if any(shard.is_interleaved for shard in shards[1:]):
            raise ValueError(
                f"the layout {self} interleaves parts along dim {dim} inside the shards of another "
                "axis: only the axis that splits the full dim can hold pieces of its parts"
            )
        # The outer axis interleaves; an inner one splits what a rank of the outer one holds.
        outer = sorted({place[0] for place in places})
        held = [sum(n for place, n in extent.items() if place[0] == i) for i in outer]
        widths = shards[0].part_widths(held)
        if widths is None:
            self._does_not_fit(dim, shapes, dp_size, tp_size)
        full_starts = _starts([sum(of_part) for of_part in zip(*widths)])
        before = [_starts(of_part) for of_part in zip(*widths)]  # by part and piece
        ranges = []
        for place in places:
            own = outer.index(place[0])
            first = start_of[place] - start_of[(place[0],) + (0,) * (len(place) - 1)]
            last = first + extent[place]
            local = []
            for part, part_start in enumerate(_starts(widths[own])):
                low, high = max(first, part_start), min(last, part_start + widths[own][part])
                if low < high:
                    full_start = full_starts[part] + before[part][own] + low - part_start
                    local.append((full_start, low - first, high - low))
            ranges.append(local)
        return start, ranges

    def _does_not_fit(
        self, dim: int, shapes: Sequence[Shape], dp_size: int, tp_size: int
    ) -> NoReturn:
        raise LayoutMismatchError(
            f"ranks hold {[shape[dim] for shape in shapes]} along dim {dim} (shapes "
            f"{[tuple(s) for s in shapes]}, in the order dp {dp_size} x tp {tp_size}), which does "
            f"not fit the layout {self}"
        )

    def _place_on(self, coordinates: tuple[int, int], along: list[str]) -> tuple[int, ...]:
        return tuple(
            getattr(self, axis).piece(coordinates[("dp", "tp").index(axis)]) for axis in along
        )

    def __str__(self) -> str:
        return f"dp {self.dp}, tp {self.tp}" + (", tp first" if self.tp_first else "")


def _as_key(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(map(tuple, shapes))


# Kept, because the hooks of all layers have the same shapes, mostly, and a plan of a thousand ranks
# takes milliseconds.


@lru_cache(maxsize=32)
def _along_dims(
    layout: ShardLayout, shapes: tuple[Shape, ...], dp_size: int, tp_size: int
) -> tuple[Shape, list[list[list[_Range]]]]:
    """The full shape, and by dim and rank where its shard's indices lie in it."""
    if len(shapes) != dp_size * tp_size:
        raise ValueError(
            f"a layout over dp {dp_size} x tp {tp_size} needs {dp_size * tp_size} shapes, got "
            f"{len(shapes)}"
        )
    of_dims = [layout.along(dim, shapes, dp_size, tp_size) for dim in range(len(shapes[0]))]
    return tuple(size for size, _ in of_dims), [ranges for _, ranges in of_dims]


@lru_cache(maxsize=32)
def _plan_of_all(
    layout: ShardLayout, shapes: tuple[Shape, ...], dp_size: int, tp_size: int, element_bytes: int
) -> tuple[GatherPlan, list[Box]]:
    full_shape, along_dims = _along_dims(layout.without_copies, shapes, dp_size, tp_size)
    boxes = _boxes(along_dims, len(shapes))
    return GatherPlan(full_shape, shapes, boxes, element_bytes), boxes


def _starts(sizes: Sequence[int]) -> list[int]:
    """The starts of consecutive ranges of these sizes."""
    return [0, *itertools.accumulate(sizes)][:-1]


def _boxes(along_dims: Sequence[Sequence[Sequence[_Range]]], num_ranks: int) -> list[Box]:
    """Combine the ranges along each dim, by rank, to boxes."""
    boxes: list[Box] = []
    for rank in range(num_ranks):
        for box in itertools.product(*(ranges[rank] for ranges in along_dims)):
            starts, shard_starts, sizes = ([r[i] for r in box] for i in range(3))
            boxes.append((rank, starts, shard_starts, sizes))
    return boxes


def located(
    indices: Sequence[Tensor], box: Sequence[Any], shard: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return which elements of the full tensor are in a box of a shard, by their indices along each
    dim, and where they are in the flat shard; the places of the others are any numbers.
    """
    is_inside, place = torch.tensor(True, device="cpu"), torch.tensor(0, device="cpu")
    for index, held, start, shard_start, size in zip(indices, shard, *box[1:]):
        is_inside = is_inside & (index >= start) & (index < start + size)
        place = place * held + (index - start + shard_start)
    return is_inside, place


def _chosen(ranges: Sequence[_Range], chosen: Sequence[int]) -> tuple[list[int], list[_Range]]:
    """Return the chosen indices of the full dim that are in a shard's ranges, as ascending indices
    of the shard, and their ranges in the part of all chosen indices.
    """
    held = sorted(
        (shard_start + index - start, place)
        for place, index in enumerate(chosen)
        for start, shard_start, size in ranges
        if start <= index < start + size
    )
    runs: list[_Range] = []
    for at, (_, place) in enumerate(held):
        start, shard_start, size = runs[-1] if runs else (0, 0, 0)
        if size and place == start + size:
            runs[-1] = (start, shard_start, size + 1)
        else:
            runs.append((place, at, 1))
    return [index for index, _ in held], runs
