"""Shards to the full tensor and back, with gradients.

The edit of a gathered tensor runs on every rank, on the same values, so its gradient is the same on
every rank: gather's backward is a slice, scatter's backward an all-gather. Along dp the loss is the
mean over ranks, which DDP and FSDP average to afterwards: there scatter's backward divides by dp
and gather's multiplies by it. With an edit on rank 0 only, gather's backward is a scatter from rank
0, and scatter's a gather to it.

Source: the conjugate pairs f and g of Megatron-LM (Shoeybi et al. 2019, section 3), here in their
"replicated" form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from flex_model import _C
from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.layout import (
    Partial,
    Piece,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.mesh import Axis
from flex_model.distributed.picked import Pick
from flex_model.distributed.plain import plain
from flex_model.distributed.transports.transport import Gathered, on_cpu

if TYPE_CHECKING:
    from flex_model.selection import Select

CheckConsistency = Callable[[Tensor], object]  # collective: headers, before a gradient moves


@dataclass(eq=False)
class GatherSpec:
    """One tensor's way between shards and full, planned: what a hook's call, and its backward,
    need.

    With ``pick``, the way of the part that a hook selected: ``shard`` below is what that takes of a
    rank's shard, and ``full`` what all of them make.

    Attributes:
        layout: Of the shards.
        axes: Along which ranks hold different parts.
        plan: Of the ranks along ``axes``, in their order.
        rank: This rank's place among them.
        full_shape: Of the full tensor.
        pick: Of this rank's shard; None for all of it.
        picked: Where the ranks' picks lie, as ``boxes``.
        grad_scale: dp where the batch is split over dp, else 1.
        gradient_of_replicas: How tp ranks that hold the same tensor hold its gradient: each the
            whole, or parts of a sum; None as long as it is not known how ranks hold it.
    """

    channel: Communicator
    layout: ShardLayout
    axes: tuple[Axis, ...]
    plan: GatherPlan
    rank: int
    full_shape: Shape
    grad_scale: int
    pick: Pick | None = None
    picked: list[Piece] | None = None
    gradient_of_replicas: Placement | None = field(init=False)

    def __post_init__(self) -> None:
        self.gradient_of_replicas = Replicate() if self.channel.is_local else None

    @staticmethod
    def of(
        channel: Communicator,
        layout: ShardLayout,
        shapes: list[Shape],
        dtype: torch.dtype,
        select: Select | None = None,
        split_dim: int | None = None,
    ) -> GatherSpec:
        """Plan for this rank's part of the grid; ``shapes`` are of all ranks of the grid.

        Raises:
            IndexError, ValueError, TypeError: ``select`` does not fit the tensor; on all ranks
                alike.
        """
        mesh, axes = channel.mesh, layout.sharded_axes
        places = mesh.ranks_along(axes)
        sizes = {"dp": mesh.dp_size, "tp": mesh.tp_size}
        counts = dict(axis[:2] if isinstance(axis, tuple) else (axis, sizes[axis]) for axis in axes)
        dp, tp = counts.get("dp", 1), counts.get("tp", 1)
        of_parts = [shapes[place] for place in places]
        full_shape = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
        rank = places.index(mesh.group_rank)
        if select is None:
            plan = layout.plan(of_parts, dp, tp, dtype.itemsize)
            return GatherSpec(channel, layout, axes, plan, rank, full_shape, dp)
        moved_dtype = select.dtype_of(dtype)
        casts_last = bool(layout.partial_axes)
        item_bytes = (dtype if casts_last else moved_dtype).itemsize
        indices = select.indices(full_shape, split_dim)
        plan, held, pieces = layout.plan_of(indices, of_parts, dp, tp, item_bytes)
        # Where nothing is gathered, nothing else puts the part in the order that was asked for.
        pick = Pick(held[rank] if axes else indices, select.dtype, casts_last)
        part_shape = tuple(plan.full_sizes)
        return GatherSpec(channel, layout, axes, plan, rank, part_shape, dp, pick, pieces)

    def all_gather(self, shard: Tensor) -> Tensor:
        """The full tensor on every rank. Collective along the axes that shard or sum; a copy where
        there are none.
        """
        return self.copies(shard, 1)[0]

    def copies(self, shard: Tensor, number: int, num_read: int = 0) -> list[Tensor]:
        """As ``all_gather``, several times over: cheaper than a gather and a copy of what it gave.

        The last ``num_read`` are expected to be read only: ranks of one host may share their memory
        until something is written to it. Both numbers may differ by rank.
        """
        shard = self.summed(shard)
        if self.axes:
            return self.channel.all_gather(self.axes, shard, self.plan, number, num_read)
        return [_copy(shard) for _ in range(number)]

    def cast(self, full: Tensor) -> Tensor:
        """In the dtype that the hook wants."""
        return full if self.pick is None else self.pick.cast(full)

    def summed(self, shard: Tensor) -> Tensor:
        """The shard with the sums done that are due. Collective along the axes that sum."""
        for axis in self.layout.partial_axes:
            shard = self.channel.all_reduce_sum((axis,), shard)
        return shard

    def slice(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor, contiguous: a copy, but where every rank holds the
        full tensor. Local.

        Of a sum that is due, the first rank has the whole and the others have zeros, so that the
        sum is exactly ``full``.
        """
        partial = self.layout.partial_axes
        mesh = self.channel.mesh
        if partial and mesh.ranks_along(partial)[0] != mesh.group_rank:
            return full.new_zeros(self.plan.shard_sizes[self.rank])
        full = full.detach()
        if not self.axes:
            return _copy(full) if partial else full.contiguous()
        host = on_cpu(full)
        shard = memory.empty(self.plan.shard_sizes[self.rank], full.dtype)
        _C.split_into(self.plan, self.rank, host, shard)
        return shard.to(full.device)

    @property
    def boxes(self) -> list[Piece]:
        """Where the shards of the ranks along ``axes`` lie: rank among them, start in the full
        tensor, start in the shard, sizes.
        """
        if self.picked is not None:
            return self.picked
        dp_size = self.grad_scale
        shapes = [tuple(sizes) for sizes in self.plan.shard_sizes]
        return self.layout.without_copies.place(shapes, dp_size, len(shapes) // dp_size)[1]

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the full tensor."""
        return not self.axes and not self.layout.partial_axes

    @property
    def is_shared_over_dp(self) -> bool:
        """Whether data-parallel ranks hold the same tensor, not rows of a batch."""
        return self.channel.mesh.dp_size > 1 and not isinstance(self.layout.dp, Shard)

    @property
    def covers_grid(self) -> bool:
        """Whether every rank of the grid holds its own part, so that rank 0 can hand each its
        own.
        """
        return len(self.plan.shard_sizes) == len(self.channel.mesh.stage_ranks)

    @property
    def rank_0_gathers(self) -> bool:
        """Whether this rank is among those whose parts make rank 0's full tensor."""
        mesh = self.channel.mesh
        return mesh.group_rank in mesh.ranks_along(self.axes, place=0)

    def copies_on_first(self, shard: Tensor, number: int) -> list[Tensor] | None:
        """The full tensor on rank 0 of the grid, ``number`` times over, on the CPU if it had to be
        gathered; None elsewhere. The number is the same on all ranks.
        """
        shard = self.summed(shard)
        if not self.axes:
            is_first = self.channel.mesh.group_rank == 0
            return [_copy(shard) for _ in range(number)] if is_first else None
        if not self.rank_0_gathers:
            return None
        gathered = Gathered(self.plan, list(range(len(self.plan.shard_sizes))), shard, number)
        return self.channel.gather_to_first(self.axes, [gathered])

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        """The full tensor on rank 0 of the grid, on the device of ``shard``; None elsewhere."""
        fulls = self.copies_on_first(shard, 1)
        return None if fulls is None else fulls[0].to(shard.device)

    def scatter_from_first(self, full: Tensor | None, like: Tensor) -> Tensor:
        """Each rank's shard of rank 0's full tensor."""
        if self.covers_grid and self.axes:
            return self.channel.scatter_from_first(self.axes, full, like, self.plan)
        like_full = like.new_empty(self.full_shape)
        if full is not None:  # a copy: the model may change its tensor, and the user keep this one
            full = _copy(full)
        return self.slice(self.channel.broadcast(full, like_full))

    def of_gradient(self, tp: Placement) -> GatherSpec:
        """The way of this tensor's gradient, which ``tp`` says of the tensor's replicas: split as
        the tensor is, and whole where the tensor is a sum.
        """
        dp = Replicate() if isinstance(self.layout.dp, Partial) else self.layout.dp
        if isinstance(self.layout.tp, Shard):
            tp = self.layout.tp
        return replace(self, layout=replace(self.layout, dp=dp, tp=tp))


@dataclass(eq=False)
class GatherContext:
    """One call's way to the full tensor and back, and the way of its gradients.

    Attributes:
        check_consistency: Exchanges headers before a gradient moves; collective.
        of_replicas: How tp ranks that hold the same tensor hold its gradient, of which this rank
            may have a sample, and whether that holds for later calls, too; an error where how ranks
            hold the gradient is not known; collective.
        num_records: How many more full tensors are wanted, to keep: 0 or 1.
        is_read: Whether the full tensor itself is expected to be read only.
        record: That one, once the tensor was gathered.
    """

    spec: GatherSpec
    check_consistency: CheckConsistency
    of_replicas: Callable[[Tensor | None], tuple[Placement, bool]] = lambda _: (Replicate(), True)
    num_records: int = 0
    is_read: bool = False
    record: Tensor | None = None
    _gradient: GatherSpec | None = None

    def gradient(self, grad: Tensor | None = None) -> GatherSpec:
        """The way of the gradient. Of a replicated tensor it is whole on every rank (the model
        reduces it before it gets here), or a sum that the model will reduce. Collective where that
        is not known yet.
        """
        if self._gradient is None:
            tp = self.spec.gradient_of_replicas
            if tp is None:
                tp, holds = self.of_replicas(grad)
                if holds:
                    self.spec.gradient_of_replicas = tp
            self._gradient = self.spec.of_gradient(tp)
        return self._gradient


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the same device, detached."""
    if tensor.device.type == "cpu":
        return memory.copy(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _first_of(context: GatherContext, fulls: list[Tensor]) -> Tensor:
    context.record = fulls[1] if context.num_records else None
    return fulls[0]


def _aborting_at_ctrl_c(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The others wait for a transfer that does not come: what they are told at the end of the
    backward would be out of step with it.
    """

    @functools.wraps(backward)
    def told(ctx: Any, grad: Tensor) -> Any:
        try:
            return backward(ctx, grad)
        except (KeyboardInterrupt, SystemExit) as error:
            ctx.context.spec.channel.abort_on(error)
            raise

    return told


class _Gather(Function):
    @staticmethod
    def forward(ctx, shard, context):
        ctx.context = context
        num_read = context.num_records + context.is_read
        return _first_of(context, context.spec.copies(shard, 1 + context.num_records, num_read))

    @staticmethod
    @_aborting_at_ctrl_c
    @once_differentiable
    def backward(ctx, grad):
        scale = ctx.context.spec.grad_scale
        shard = ctx.context.gradient().slice(plain(grad))
        return (shard * scale if scale > 1 else shard), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, full, context):
        ctx.context = context
        return full.detach().clone() if context.spec.is_whole else context.spec.slice(full)

    @staticmethod
    @_aborting_at_ctrl_c
    @once_differentiable
    def backward(ctx, grad):
        context, grad = ctx.context, plain(grad)
        way = context.gradient(grad)
        if way.is_whole:
            return grad, None
        context.check_consistency(grad)
        full = way.all_gather(grad)
        return (full / way.grad_scale if way.grad_scale > 1 else full), None


def _once_on_every_rank(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As ``once_differentiable``, which leaves gradients alone that don't need one: so do those
    here on all ranks but the first, which would go on where that one raises.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def backward_once(ctx: Any, grad: Tensor) -> Any:
        return once(ctx, grad.detach().requires_grad_() if torch.is_grad_enabled() else grad)

    return backward_once


class _GatherToFirst(Function):
    @staticmethod
    def forward(ctx, shard, context):
        ctx.context = context
        ctx.like = shard.detach()
        fulls = context.spec.copies_on_first(shard, 1 + context.num_records)
        return shard.new_empty(0) if fulls is None else _first_of(context, fulls).to(shard.device)

    @staticmethod
    @_aborting_at_ctrl_c
    @_once_on_every_rank
    def backward(ctx, grad):
        context, grad = ctx.context, plain(grad)
        context.check_consistency(ctx.like)
        way = context.gradient()
        first = way.channel.mesh.group_rank == 0
        shard = way.scatter_from_first(grad if first else None, ctx.like)
        return (shard * way.grad_scale if way.grad_scale > 1 else shard), None


class _ScatterFromFirst(Function):
    @staticmethod
    def forward(ctx, full, context, like, *gathered):
        # `gathered` is here for the graph alone: it makes every rank run the gathers' backward,
        # used by the edit or not
        ctx.context = context
        ctx.size = full.shape
        first = context.spec.channel.mesh.group_rank == 0
        return context.spec.scatter_from_first(full.detach() if first else None, like)

    @staticmethod
    @_aborting_at_ctrl_c
    @once_differentiable
    def backward(ctx, grad):
        context, grad = ctx.context, plain(grad)
        way = context.gradient(grad)
        context.check_consistency(grad)
        mesh = way.channel.mesh
        if way.is_shared_over_dp:  # as _MeanGradientOverDp
            grad = way.channel.all_reduce_sum(("dp",), grad) / mesh.dp_size
        full = way.gather_to_first(grad.contiguous())
        if full is None:
            full = grad.new_zeros(ctx.size)
        elif way.grad_scale > 1:
            full = full / way.grad_scale
        return full, *[None] * (len(ctx.needs_input_grad) - 1)


class _MeanGradientOverDp(Function):
    """Identity whose gradient is averaged over dp: an edit of a tensor that dp ranks share sees
    every rank's loss.
    """

    @staticmethod
    def forward(ctx, full, context):
        ctx.context = context
        return full.detach().clone()

    @staticmethod
    @_aborting_at_ctrl_c
    @once_differentiable
    def backward(ctx, grad):
        channel, grad = ctx.context.spec.channel, plain(grad)
        ctx.context.check_consistency(grad)
        return channel.all_reduce_sum(("dp",), grad) / channel.mesh.dp_size, None


def gather(shard: Tensor, context: GatherContext) -> Tensor:
    """The full tensor on every rank, in the graph. Collective along the axes that shard or sum."""
    return _Gather.apply(shard, context)


def scatter(full: Tensor, context: GatherContext) -> Tensor:
    """This rank's shard of a full tensor that all ranks hold, in the graph. Local; its backward is
    collective.
    """
    if context.spec.is_shared_over_dp and full.requires_grad:
        full = _MeanGradientOverDp.apply(full, context)
    return _Scatter.apply(full, context)


def gather_to_first(shard: Tensor, context: GatherContext) -> Tensor:
    """The full tensor on rank 0, an empty one elsewhere, in the graph. Collective."""
    return _GatherToFirst.apply(shard, context)


def scatter_from_first(
    full: Tensor | None,
    gathered: Sequence[Tensor],
    context: GatherContext,
    like: Tensor,
    requires_grad: bool,
) -> Tensor:
    """This rank's shard of rank 0's edit of what was ``gathered``, in the graph where that edit is
    (``requires_grad``). Collective.
    """
    if not requires_grad:
        return context.spec.scatter_from_first(full, like)
    if full is None:
        full = like.new_empty(0).requires_grad_()
    return _ScatterFromFirst.apply(full, context, like.detach(), *gathered)
