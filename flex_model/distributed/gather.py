"""Shards to the full tensor and back, with gradients.

The edit of a gathered tensor runs on every rank, on the same values, so its gradient is the same on
every rank: gather's backward is a slice, scatter's backward an all-gather. Along dp the loss is the
    mean over ranks, which DDP and
FSDP average to afterwards: there scatter's backward divides by dp and gather's multiplies by it.
    With an edit on rank 0
only, gather's backward is a scatter from rank 0, and scatter's a gather to it.

Source: the conjugate pairs f and g of Megatron-LM (Shoeybi et al. 2019, section 3), here in their
    "replicated" form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from flex_model._C import GatherPlan
from flex_model.distributed.channel import Channel
from flex_model.distributed.layout import Shape, ShardLayout
from flex_model.distributed.transports import gloo

AgreeOnGradient = Callable[[Tensor], object]  # collective: exchange headers before a gradient moves


@dataclass(frozen=True)
class Move:
    """One tensor's way between shards and full, planned: what a hook's call, and its backward,
    need.

    Attributes:
        axes: Along which ranks hold different parts.
        plan: Of the ranks along ``axes``, in their order.
        rank: This rank's place among them.
        grad_scale: dp where the batch is split over dp, else 1.
    """

    channel: Channel
    axes: tuple[str, ...]
    plan: GatherPlan
    rank: int
    full_shape: Shape
    grad_scale: int

    @staticmethod
    def of(channel: Channel, layout: ShardLayout, shapes: list[Shape], dtype: torch.dtype) -> Move:
        """Plan for this rank's part of the grid; ``shapes`` are of all ranks of the grid."""
        mesh, axes = channel.mesh, layout.sharded_axes
        places = mesh.members(axes)
        dp_size = mesh.dp_size if "dp" in axes else 1
        tp_size = mesh.tp_size if "tp" in axes else 1
        plan = layout.plan([shapes[place] for place in places], dp_size, tp_size, dtype.itemsize)
        full_shape = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
        return Move(channel, axes, plan, places.index(mesh.place), full_shape, dp_size)

    def all_gather(self, shard: Tensor) -> Tensor:
        """The full tensor on every rank. Collective along ``axes``; a copy where nothing is
        sharded.
        """
        if not self.axes:
            return shard.detach().clone(memory_format=torch.contiguous_format)
        return self.channel.all_gather(self.axes, shard, self.plan)

    def slice(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor, contiguous. Local."""
        full = full.detach().contiguous()
        if not self.axes:
            return full
        if full.device.type == "cpu":
            return gloo.split(full, self.plan, self.rank)
        return gloo.split(full.cpu(), self.plan, self.rank).to(full.device)

    @property
    def covers_grid(self) -> bool:
        """Whether every rank of the grid holds its own part, so that rank 0 can hand each its
        own.
        """
        return len(self.plan.shard_sizes) == len(self.channel.mesh.grid)

    @property
    def rank_0_gathers(self) -> bool:
        """Whether this rank is among those whose parts make rank 0's full tensor."""
        mesh = self.channel.mesh
        return mesh.place in mesh.members(self.axes, place=0)

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        """The full tensor on rank 0 of the grid, None elsewhere."""
        if not self.axes:
            return (
                shard.detach().clone(memory_format=torch.contiguous_format)
                if self.channel.mesh.place == 0
                else None
            )
        if not self.rank_0_gathers:
            return None
        return self.channel.gather_to_first(self.axes, shard, self.plan)

    def scatter_from_first(self, full: Tensor | None, like: Tensor) -> Tensor:
        """Each rank's shard of rank 0's full tensor."""
        if self.covers_grid and self.axes:
            return self.channel.scatter_from_first(self.axes, full, like, self.plan)
        like_full = like.new_empty(self.full_shape)
        if full is not None:  # a copy: the model may change its tensor, and the user keep this one
            full = full.detach().clone(memory_format=torch.contiguous_format)
        return self.slice(self.channel.broadcast(full, like_full))


class _Gather(Function):
    @staticmethod
    def forward(ctx, shard, move, agree):
        ctx.move = move
        return move.all_gather(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        shard = ctx.move.slice(grad)
        return (shard * ctx.move.grad_scale if ctx.move.grad_scale > 1 else shard), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, full, move, agree):
        ctx.move, ctx.agree = move, agree
        return move.slice(full) if move.axes else full.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not ctx.move.axes:
            return grad, None, None
        ctx.agree(grad)
        full = ctx.move.all_gather(grad)
        return (full / ctx.move.grad_scale if ctx.move.grad_scale > 1 else full), None, None


class _GatherToFirst(Function):
    @staticmethod
    def forward(ctx, shard, move, agree):
        ctx.move, ctx.agree = move, agree
        ctx.like = shard.detach()
        full = move.gather_to_first(shard)
        return shard.new_empty(0) if full is None else full

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        move = ctx.move
        ctx.agree(ctx.like)
        first = move.channel.mesh.place == 0
        shard = move.scatter_from_first(grad if first else None, ctx.like)
        return (shard * move.grad_scale if move.grad_scale > 1 else shard), None, None


class _ScatterFromFirst(Function):
    @staticmethod
    def forward(ctx, full, gathered, move, agree, like):
        # `gathered` is here for the graph alone: it makes every rank run the gather's backward,
        # used by the edit or not
        ctx.move, ctx.agree = move, agree
        ctx.size = full.shape
        return move.scatter_from_first(
            full.detach() if move.channel.mesh.place == 0 else None, like
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        move = ctx.move
        ctx.agree(grad)
        mesh = move.channel.mesh
        if mesh.dp_size > 1 and "dp" not in move.axes:  # as _MeanGradientOverDp
            grad = move.channel.all_reduce_sum(("dp",), grad) / mesh.dp_size
        full = move.gather_to_first(grad.contiguous())
        if full is None:
            full = grad.new_zeros(ctx.size)
        elif move.grad_scale > 1:
            full = full / move.grad_scale
        return full, None, None, None, None


class _MeanGradientOverDp(Function):
    """Identity whose gradient is averaged over dp: an edit of a tensor that dp ranks share sees
    every rank's loss.
    """

    @staticmethod
    def forward(ctx, full, move, agree):
        ctx.move, ctx.agree = move, agree
        return full.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        channel = ctx.move.channel
        ctx.agree(grad)
        return channel.all_reduce_sum(("dp",), grad) / channel.mesh.dp_size, None, None


def gather(shard: Tensor, move: Move, agree: AgreeOnGradient) -> Tensor:
    """The full tensor on every rank, in the graph. Collective along the sharded axes."""
    return _Gather.apply(shard, move, agree)


def scatter(full: Tensor, move: Move, agree: AgreeOnGradient) -> Tensor:
    """This rank's shard of an edit that every rank has made, in the graph. Local; its backward is
    collective.
    """
    mesh = move.channel.mesh
    if mesh.dp_size > 1 and "dp" not in move.axes and full.requires_grad:
        full = _MeanGradientOverDp.apply(full, move, agree)
    return _Scatter.apply(full, move, agree)


def gather_to_first(shard: Tensor, move: Move, agree: AgreeOnGradient) -> Tensor:
    """The full tensor on rank 0, an empty one elsewhere, in the graph. Collective."""
    return _GatherToFirst.apply(shard, move, agree)


def scatter_from_first(
    full: Tensor | None,
    gathered: Tensor,
    move: Move,
    agree: AgreeOnGradient,
    like: Tensor,
    requires_grad: bool,
) -> Tensor:
    """This rank's shard of rank 0's edit, in the graph where rank 0's edit is (``requires_grad``).
    Collective.
    """
    if not requires_grad:
        return move.scatter_from_first(full, like)
    if full is None:
        full = like.new_empty(0).requires_grad_()
    return _ScatterFromFirst.apply(full, gathered, move, agree, like.detach())
