"""Runs a wrapped model on shapes alone, and resolves layouts from the observations of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import DTYPES, Header, site_hash
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Partial, Placement, Replicate, Shape, ShardLayout
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.inspection.shapes_only import shapes_only
from flex_model.layouts import resolve
from flex_model.layouts.exchange import exchange_chunks
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.layouts.follow import UNKNOWN, Follower, Pair
from flex_model.layouts.placement_encoding import decode, encode
from flex_model.layouts.statements import Statements

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

T = TypeVar("T")


def on_shapes(
    core: HookCore,
    follower: Follower,
    name: str,
    args: Any,
    kwargs: Any,
    follow: Callable[[Any], list[T]],
) -> list[T]:
    """Call ``follow(inputs)``, which runs the model, on shapes alone and without hooks, while
    ``follower`` records the operations; return its result. Collective over the mesh.

    Args:
        name: The operation, for messages.

    Raises:
        HookError: the run failed; with several ranks, raised at their next exchange.
        RuntimeError: called during a run.
    """
    if core.runs.is_inside:
        raise RuntimeError(f"{name}: a run of this FlexModel is under way; call it before or after")
    communicator = core.communicator
    found: list[T] = []
    with core.table.nothing_chosen():
        if not communicator.is_local:
            core.tracking.seed(follower, args, kwargs)
        try:
            with shapes_only(core.module, core.mesh, follower, (args, kwargs)) as given:
                found = follow(given)
        except Exception as error:
            message = (
                f"{name}: the model can't be run on shapes alone ({type(error).__name__}: "
                f"{str(error)[:600]}); run it with values, and call flex.layouts()"
            )
            communicator.fail(message, error)
        if not communicator.is_local:
            exchange_chunks(communicator, follower)
    return found


@dataclass(frozen=True)
class Seen:
    """One rank's tensor at one call of a hook.

    Attributes:
        hook: The registration's index, or the site's hash.
        pair: The placements along dp and tp that a DTensor states or the followed run proves.
        known: The layout that a DTensor states, the same on every rank.
        value: The follower's value for the tensor.
    """

    hook: int
    shape: Shape
    dtype: torch.dtype
    pair: Pair = UNKNOWN
    needs_gradient: bool = False
    known: ShardLayout | None = field(default=None, compare=False)
    device: torch.device = field(default=torch.device("cpu"), compare=False)  # this rank's
    value: Any = field(default=None, compare=False)

    def concluded(self, follower: Follower) -> Seen:
        """Return a copy with the placements that the run proves."""
        proven = follower.placements(self.value)
        dp, tp = (a if a is not None else b for a, b in zip(self.pair, proven))
        return replace(self, pair=(dp, tp))


def exchange_seen(communicator: Communicator, seen: list[Seen]) -> list[list[Seen]]:
    """Return the observations of all ranks of the mesh, call by call. Collective.

    Raises:
        HookError: a rank could not run the model.
        HookMismatchError: ranks called different hooks.
    """
    if communicator.is_local:
        return [[one] for one in seen]
    header = Header("end of the run", site=site_hash(*(one.hook for one in seen)))
    communicator.check_consistency(
        header, f"the end of a run on shapes, which called {len(seen)} sites"
    )
    if not seen:
        return []
    local = [_to_json(one) for one in seen]
    per_rank = exchange_json(communicator, local, "the tensors of a run on shapes")
    return [[_from_json(rank[i], one) for rank in per_rank] for i, one in enumerate(seen)]


def _to_json(one: Seen) -> list[Any]:
    pair = [encode(placement) for placement in one.pair]
    return [one.hook, one.shape, DTYPES.index(one.dtype), pair, one.needs_gradient]


def _from_json(fields: list[Any], local: Seen) -> Seen:
    hook, shape, dtype, pair, needs_gradient = fields
    dp, tp = (decode(placement) for placement in pair)
    kind = DTYPES[dtype]
    return Seen(hook, tuple(shape), kind, (dp, tp), needs_gradient, local.known, local.device)


def layout_from_shapes(
    site: resolve.Site,
    ranks: Sequence[Seen],
    mesh: Mesh,
    stated: Mapping[str, Placement] | None = None,
    expected_shape: ExpectedShape = None,
    is_gradient: bool = False,
    rows: int | None = 0,
    statements: Statements | None = None,
) -> ShardLayout:
    """Return the layout that a run will resolve. A gradient is assumed to be replicated along tp
    unless its tensor is sharded. Local.

    Raises:
        ValueError: the sources contradict each other, or the placement along an axis is not known.
    """
    shapes = [one.shape for one in ranks]
    known = ShardLayout(source="one process") if len(mesh.stage_ranks) == 1 else ranks[0].known
    dp, tp = (
        placements.pop() if len(placements := {one.pair[i] for one in ranks}) == 1 else None
        for i in range(2)
    )
    layout = resolve.resolve(
        site,
        shapes,
        mesh,
        (dp, tp),
        stated or {},
        expected_shape,
        known,
        rows_dim=rows,
        statements=statements,
    )
    if not is_gradient or known is not None:
        return layout
    dp = Partial() if layout.dp == Replicate() and mesh.dp_size > 1 else layout.dp
    tp = Replicate() if isinstance(layout.tp, Partial) else layout.tp
    return replace(layout, dp=dp, tp=tp, source=f"its tensor's: {layout.source}")
