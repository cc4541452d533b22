"""How one tensor is split over the ranks: a placement per mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flex_model._C import GatherPlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """The ranks of the axis hold consecutive parts along ``dim`` (never negative), evenly or
    not.
    """

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Partial:
    """The full tensor is the sum of what the ranks of the axis hold."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial


@dataclass(frozen=True)
class ShardLayout:
    """A placement on each of the axes dp and tp, and whence it is known.

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
    source: str = field(default="", compare=False)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold different parts, in the order (dp, tp)."""
        return tuple(axis for axis in ("dp", "tp") if isinstance(getattr(self, axis), Shard))

    def full_shape(self, shapes: Sequence[Shape], dp_size: int, tp_size: int) -> Shape:
        """Shape of the full tensor, from the local shapes of the ranks in the order (dp, tp).
        Local.
        """
        return self._place(shapes, dp_size, tp_size)[0]

    def plan(
        self, shapes: Sequence[Shape], dp_size: int, tp_size: int, element_bytes: int
    ) -> GatherPlan:
        """The copy of all shards into the full tensor.

        ``shapes`` are of the ranks that hold *different* parts, in the order (dp, tp): along an
        axis that does not shard, the size to give is 1.
        """
        full_shape, starts = self._place(shapes, dp_size, tp_size)
        pieces = [
            (rank, list(start), [0] * len(start), list(shape))
            for rank, (start, shape) in enumerate(zip(starts, shapes))
        ]
        return GatherPlan(
            list(full_shape), [list(shape) for shape in shapes], pieces, element_bytes
        )

    def _place(
        self, shapes: Sequence[Shape], dp_size: int, tp_size: int
    ) -> tuple[Shape, list[Shape]]:
        """The full shape, and where each rank's shard starts in it."""
        if len(shapes) != dp_size * tp_size:
            raise ValueError(
                f"a layout over dp {dp_size} x tp {tp_size} needs {dp_size * tp_size} shapes, got "
                f"{len(shapes)}"
            )
        ndim = len(shapes[0])
        full, starts = [], [[0] * ndim for _ in shapes]
        for dim in range(ndim):
            sizes = [shape[dim] for shape in shapes]
            order = ("tp", "dp") if self.tp_first else ("dp", "tp")
            along = [axis for axis in order if getattr(self, axis) == Shard(dim)]
            places = [self._place_on(divmod(rank, tp_size), along) for rank in range(len(shapes))]
            extent: dict[tuple[int, ...], int] = {}
            for rank, place in enumerate(places):
                if extent.setdefault(place, sizes[rank]) != sizes[rank]:
                    raise ValueError(
                        f"ranks hold {sizes} along dim {dim} (shapes "
                        f"{[tuple(s) for s in shapes]}, in the order "
                        f"dp {dp_size} x tp {tp_size}), which does not fit the layout {self}"
                    )
            start = 0
            start_of = {}
            for place in sorted(extent):
                start_of[place] = start
                start += extent[place]
            full.append(start)
            for rank, place in enumerate(places):
                starts[rank][dim] = start_of[place]
        return tuple(full), [tuple(start) for start in starts]

    @staticmethod
    def _place_on(coordinates: tuple[int, int], along: list[str]) -> tuple[int, ...]:
        return tuple(coordinates[("dp", "tp").index(axis)] for axis in along)

    def __str__(self) -> str:
        return f"dp {self.dp}, tp {self.tp}" + (", tp first" if self.tp_first else "")
