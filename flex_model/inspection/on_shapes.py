"""Running the model on shapes alone, and what all ranks' runs together tell of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from flex_model.distributed import inference
from flex_model.distributed.channel import Channel
from flex_model.distributed.header import DTYPES, Header, site_hash
from flex_model.distributed.inference import AXES, ExpectedShape, Splits, Told
from flex_model.distributed.layout import Placement, Replicate, Shape, ShardLayout
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.propagation import Cut
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.distributed.tracking import LayoutTracker, tensors_of
from flex_model.errors import HookError
from flex_model.inspection.shapes_only import check_nothing_is_kept, fakes_alive, shapes_only
from flex_model.integrations import dtensor

if TYPE_CHECKING:
    from flex_model.hooks.core import HookCore

T = TypeVar("T")


def on_shapes(
    core: HookCore,
    tracker: LayoutTracker,
    name: str,
    args: Any,
    kwargs: Any,
    follow: Callable[[Any], list[T]],
) -> list[T]:
    """What ``follow(inputs)`` returns, in which it runs the model on shapes alone, without hooks,
    while ``tracker`` follows. Collective over the grid.

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
            core.tracking.seed(tracker, list(tensors_of((args, kwargs))))
        try:
            given, fakes = (args, kwargs), fakes_alive()
            with shapes_only(core.module, core.mesh, tracker, given, channel.exchange) as given:
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
    return found


@dataclass(frozen=True)
class Seen:
    """What one rank saw at one call of a hook.

    Attributes:
        hook: The registration's index.
        known: What a DTensor told, the same on every rank.
    """

    hook: int
    shape: Shape
    dtype: torch.dtype
    splits: Splits
    needs_gradient: bool = False
    known: ShardLayout | None = field(default=None, compare=False)
    device: torch.device = field(default=torch.device("cpu"), compare=False)  # this rank's


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
    splits = inference.encode(one.splits)
    return [one.hook, one.shape, DTYPES.index(one.dtype), splits, one.needs_gradient]


def _from_json(words: list[Any], mine: Seen) -> Seen:
    hook, shape, dtype, splits, needs_gradient = words
    told = inference.decode(splits)
    return Seen(hook, tuple(shape), DTYPES[dtype], told, needs_gradient, mine.known, mine.device)


def layout_from_shapes(
    site: str,
    kind: str,
    module: nn.Module | None,
    ranks: Sequence[Seen],
    mesh: Mesh,
    expected_shape: ExpectedShape = None,
) -> ShardLayout | None:
    """As ``inference`` will settle it, where no values are needed; else None. Local.

    Raises:
        ValueError: the sources contradict each other.
    """
    shapes = [one.shape for one in ranks]
    known = ShardLayout(source="one process") if len(mesh.grid) == 1 else ranks[0].known
    dp, tp = (_along(i, [one.splits for one in ranks]) for i in range(len(AXES)))
    if tp is None and known is None:
        beside = dtensor.layout_beside_weight(module, kind, shapes, mesh, site)
        tp = None if beside is None else beside.tp
    if tp is None and known is None and mesh.tp_size > 1 and expected_shape is None:
        return None
    told = Told(None, [(dp, tp)] * len(ranks))
    role: inference.Role = "tensor"
    if kind in ("full_backward", "full_backward_pre"):
        role = "gradient"
    return inference.resolve(
        site, shapes, mesh, expected_shape, known, told, kind != "tensor", role
    )


def _along(axis: int, splits: Sequence[Splits]) -> Placement | None:
    """What the ranks' splits along an axis come to, values unseen. Ranks that all took their own
    part of a whole tensor hold a split one; ranks that took the same part hold a whole one.
    """
    told = {one[axis] for one in splits}
    cuts = [split for split in told if isinstance(split, Cut)]
    if not cuts:
        only = told.pop() if len(told) == 1 else None
        return None if isinstance(only, Cut) else only
    if len(told) == 1:
        return cuts[0].shard
    return Replicate() if told == {Replicate(), cuts[0]} else None
