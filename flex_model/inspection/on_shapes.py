"""Running the model on shapes alone, and what all ranks' runs together tell of a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flex_model.distributed.channel import Channel
from flex_model.distributed.header import DTYPES, Header, site_hash
from flex_model.distributed.layout import Partial, Placement, Replicate, Shape, ShardLayout
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookError
from flex_model.inspection.shapes_only import check_nothing_is_kept, fakes_alive, shapes_only
from flex_model.layouts import resolve
from flex_model.layouts.exchange import exchange_chunks
from flex_model.layouts.follow import UNKNOWN, Follower, Pair
from flex_model.layouts.placement_encoding import decode, encode

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
    """What ``follow(inputs)`` returns, in which it runs the model on shapes alone, without hooks,
    while ``follower`` follows. Collective over the grid.

    Args:
        name: What is done, for messages.

    Raises:
        HookError: it failed; with several ranks, told at their next exchange.
        RuntimeError: called during a run.
    """
    if core.run is not None or core.in_backward():
        raise RuntimeError(f"{name}: a run of this FlexModel goes on; call it before or after")
    channel = core.channel
    found: list[T] = []
    with core.table.nothing_chosen():
        if not channel.is_local:
            core.tracking.seed(follower, args, kwargs)
        try:
            given, fakes = (args, kwargs), fakes_alive()
            with shapes_only(core.module, core.mesh, follower, given) as given:
                found = follow(given)
            del given
            check_nothing_is_kept(fakes)
        except Exception as error:
            message = (
                f"{name}: the model can't be run on shapes alone ({type(error).__name__}: "
                f"{str(error)[:600]}); run it for real, and ask flex.layouts()"
            )
            if channel.is_local:
                raise HookError(message) from error
            channel.set_error(message, error)
        if not channel.is_local:
            exchange_chunks(channel, follower)
    return found


@dataclass(frozen=True)
class Seen:
    """What one rank saw at one call of a hook.

    Attributes:
        hook: The registration's index.
        pair: Placements along dp and tp, as a DTensor states or the followed run proves them.
        known: What a DTensor states, the same on every rank.
        value: Of the followed run.
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
        """With what the run has proven."""
        proven = follower.placements(self.value)
        dp, tp = (a if a is not None else b for a, b in zip(self.pair, proven))
        return replace(self, pair=(dp, tp))


def exchange_seen(channel: Channel, seen: list[Seen]) -> list[list[Seen]]:
    """What all ranks of the grid saw, call by call. Collective.

    Raises:
        HookError: a rank could not run the model.
        HookMismatchError: ranks came by different hooks.
    """
    if channel.is_local:
        return [[one] for one in seen]
    header = Header("end of the run", site=site_hash(*(one.hook for one in seen)))
    channel.agree(header, f"the end of a run on shapes, which came by {len(seen)} sites")
    if not seen:
        return []
    mine = [_to_json(one) for one in seen]
    told = exchange_json(channel, mine, "what a run on shapes saw")
    return [[_from_json(rank[i], one) for rank in told] for i, one in enumerate(seen)]


def _to_json(one: Seen) -> list[Any]:
    pair = [encode(placement) for placement in one.pair]
    return [one.hook, one.shape, DTYPES.index(one.dtype), pair, one.needs_gradient]


def _from_json(words: list[Any], mine: Seen) -> Seen:
    hook, shape, dtype, pair, needs_gradient = words
    dp, tp = (decode(placement) for placement in pair)
    kind = DTYPES[dtype]
    return Seen(hook, tuple(shape), kind, (dp, tp), needs_gradient, mine.known, mine.device)


def layout_from_shapes(
    site: resolve.Site,
    ranks: Sequence[Seen],
    mesh: Mesh,
    stated: Mapping[str, Placement] | None = None,
    expected_shape: resolve.ExpectedShape = None,
    is_gradient: bool = False,
) -> ShardLayout:
    """As a run will resolve it; gradients are taken to be whole where ranks share the tensor.
    Local.

    Raises:
        ValueError: the sources contradict each other, or an axis is not known.
    """
    shapes = [one.shape for one in ranks]
    known = ShardLayout(source="one process") if len(mesh.grid) == 1 else ranks[0].known
    dp, tp = (
        placements.pop() if len(placements := {one.pair[i] for one in ranks}) == 1 else None
        for i in range(2)
    )
    layout = resolve.resolve(site, shapes, mesh, (dp, tp), stated or {}, expected_shape, known)
    if not is_gradient or known is not None:
        return layout
    dp = Partial() if layout.dp == Replicate() and mesh.dp_size > 1 else layout.dp
    tp = Replicate() if isinstance(layout.tp, Partial) else layout.tp
    return replace(layout, dp=dp, tp=tp, source=f"its tensor's: {layout.source}")
