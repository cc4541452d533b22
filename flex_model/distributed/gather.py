"""Shards to the full tensor and back, with gradients.

The edit of a gathered tensor runs on every rank, on the same values, so its gradient is the same on
every rank: gather's backward is a slice, scatter's backward an all-gather. Along dp the loss is the
mean over ranks, which DDP and FSDP average to afterwards: there scatter's backward divides by dp
and gather's multiplies by it, or by another number (``GatherContext.grad_scale``). With an edit on
rank 0 only, gather's backward is a scatter from rank 0, and scatter's a gather to it.

All of them are linear, so their backward is differentiable itself (``create_graph=True``): it is
made of the same functions, except for an edit on rank 0.

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

from flex_model import _C
from flex_model._C import GatherPlan
from flex_model.distributed import kernels, memory
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Axis
from flex_model.distributed.padding import Padding
from flex_model.distributed.picked import Pick
from flex_model.distributed.placement import (
    Box,
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.plain import plain
from flex_model.distributed.transports.transport import Gathered, on_cpu
from flex_model.errors import HookError, agreed, is_agreed
from flex_model.integrations.profiler import ranged
from flex_model.integrations.torch_private import FakeTensor, current_graph_task

if TYPE_CHECKING:
    from flex_model.selection import Select

CheckConsistency = Callable[[Tensor], object]  # collective: headers, before a gradient moves


@dataclass(eq=False)
class TensorSpec:
    """How one tensor is sharded: its layout for the shapes that the ranks hold, and the
    ``GatherPlan`` of its bytes. Gathers and scatters it, for a hook's call and its backward.

    With ``pick`` it describes the part that a hook selected: ``shard`` below is then the selected
    part of a rank's shard, and ``full`` the selected part of the full tensor.

    Attributes:
        layout: The layout of the shards.
        axes: The axes along which ranks hold different shards.
        plan: Where the bytes of the ranks along ``axes`` belong, in their order.
        rank: This rank's index among them.
        full_shape: That of the full tensor.
        num_batches: The parts into which dp splits the batch; 1 where it does not.
        boxes: The boxes of the shards of the ranks along ``axes``; see `ShardLayout.plan_of`.
        pick: The selected part of this rank's shard; None for all of it.
        padding: The padding of this rank's tensor, which ``shard`` includes; None for none.
        gradient_of_replicas: The placement of the gradient on tp ranks that hold the same tensor:
            replicated or partial; None as long as it is unknown.
    """

    communicator: Communicator
    layout: ShardLayout
    axes: tuple[Axis, ...]
    plan: GatherPlan
    rank: int
    full_shape: Shape
    num_batches: int
    boxes: list[Box]
    pick: Pick | None = None
    padding: Padding | None = None
    gradient_of_replicas: Placement | None = field(init=False)

    def __post_init__(self) -> None:
        self.gradient_of_replicas = Replicate() if self.communicator.is_local else None

    @staticmethod
    def of(
        communicator: Communicator,
        layout: ShardLayout,
        shapes: list[Shape],
        dtype: torch.dtype,
        select: Select | None = None,
        split_dim: int | None = None,
    ) -> TensorSpec:
        """Make the spec on this rank; ``shapes`` are those of all ranks of the stage.

        Raises:
            IndexError, ValueError, TypeError: ``select`` does not fit the tensor; on all ranks
                alike.
        """
        mesh, axes = communicator.mesh, layout.sharded_axes
        places = mesh.ranks_along(axes)
        counts = dict(one[:2] if isinstance(one, tuple) else (one, mesh.size(one)) for one in axes)
        dp, tp = counts.get("dp", 1), counts.get("tp", 1)
        of_parts = [shapes[place] for place in places]
        full_shape = layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
        rank, pick = places.index(mesh.group_rank), None
        if select is None:
            plan, _, boxes = layout.plan_of({}, of_parts, dp, tp, dtype.itemsize)
        else:
            moved_dtype, casts_last = select.dtype_of(dtype), bool(layout.partial_axes)
            item_bytes = (dtype if casts_last else moved_dtype).itemsize
            indices = select.indices(full_shape, split_dim)
            plan, held, boxes = layout.plan_of(indices, of_parts, dp, tp, item_bytes)
            # Where nothing is gathered, the pick itself puts the part in the selected order.
            pick = Pick(held[rank] if axes else indices, select.dtype, casts_last)
            full_shape = tuple(plan.full_sizes)
        return TensorSpec(communicator, layout, axes, plan, rank, full_shape, dp, boxes, pick)

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the full tensor on every rank. Collective along the axes that shard or sum; a copy
        where there are none.
        """
        return self.copies(shard, 1)[0]

    def copies(self, shard: Tensor, number: int, num_read: int = 0) -> list[Tensor]:
        """Return several full tensors: cheaper than ``all_gather`` and copies of its result.

        The last ``num_read`` are expected to be read only: ranks of one host may share their memory
        until something is written to it. Both numbers may differ by rank.
        """
        shard = self.summed(shard)
        if self.axes:
            return self.communicator.all_gather(self.axes, shard, self.plan, number, num_read)
        return [_copy(shard) for _ in range(number)]

    def cast(self, full: Tensor) -> Tensor:
        """Cast to the dtype that the hook selected."""
        return full if self.pick is None else self.pick.cast(full)

    def summed(self, shard: Tensor) -> Tensor:
        """Return the shard after the pending sums. Collective along the axes that sum."""
        for axis in self.layout.partial_axes:
            shard = self.communicator.all_reduce_sum((axis,), shard)
        return shard

    def slice(self, full: Tensor) -> Tensor:
        """Return this rank's contiguous shard of a full tensor: a copy, except where every rank
        holds the full tensor. Local.

        Along axes with a pending sum, the first rank gets the whole and the others zeros, so that
        the sum is exactly ``full``.
        """
        partial = self.layout.partial_axes
        mesh = self.communicator.mesh
        if partial and mesh.ranks_along(partial)[0] != mesh.group_rank:
            return full.new_zeros(self.plan.shard_sizes[self.rank])
        if not self.axes:
            full = full.detach()
            return _copy(full) if partial else full.contiguous()
        sizes = self.plan.shard_sizes[self.rank]
        is_fake = type(full) is FakeTensor
        if is_fake or (full.is_cuda and not kernels.why_unusable(full.device)):
            full = full.detach().resolve_conj().resolve_neg().contiguous()
            return torch.ops.flex_model.split(full, self.plan.code, self.rank, list(sizes))
        shard = memory.empty(sizes, full.dtype)
        _C.split_into(self.plan, self.rank, on_cpu(full), shard)
        return shard if full.is_cpu else shard.to(full.device)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the full tensor."""
        return not self.axes and not self.layout.partial_axes

    @property
    def is_in_parts(self) -> bool:
        """Whether the full tensor is made of shards as they are, not summed or padded."""
        return not self.layout.partial_axes and self.padding is None

    @property
    def is_shared_over_dp(self) -> bool:
        """Whether data-parallel ranks hold the same tensor, instead of rows of a batch."""
        return self.communicator.mesh.dp_size > 1 and not isinstance(self.layout.dp, Shard)

    @functools.cached_property
    def ranks_of_first(self) -> list[int]:
        """The indices of the ranks from which the stage's first rank gathers its full tensor."""
        return self.communicator.mesh.ranks_along(self.axes, place=0)

    @property
    def rank_0_gathers(self) -> bool:
        """Whether rank 0 gathers its full tensor from this rank, among others."""
        return self.communicator.mesh.group_rank in self.ranks_of_first

    def copies_on_first(self, shard: Tensor, number: int) -> list[Tensor] | None:
        """Return ``number`` full tensors on the stage's first rank, on the CPU if no transport
        gathers them on its GPU; None elsewhere. The number is the same on all ranks.
        """
        shard = self.summed(shard)
        if not self.axes:
            is_first = self.communicator.mesh.group_rank == 0
            return [_copy(shard) for _ in range(number)] if is_first else None
        if not self.rank_0_gathers:
            return None
        one = Gathered(self.plan, [*range(len(self.ranks_of_first))], shard, number, stays=True)
        return self.communicator.gather_to_first(self.axes, [one])

    def gather_to_first(self, shard: Tensor) -> Tensor | None:
        """Return the full tensor on the first rank, on the device of ``shard``; None elsewhere."""
        fulls = self.copies_on_first(shard, 1)
        return None if fulls is None else fulls[0].to(shard.device)

    def scatter_from_first(self, full: Tensor | None, like: Tensor) -> Tensor:
        """Return this rank's shard of rank 0's full tensor."""
        covers_grid = len(self.plan.shard_sizes) == len(self.communicator.mesh.stage_ranks)
        if covers_grid and self.axes:  # each rank has a part of its own
            return self.communicator.scatter_from_first(self.axes, full, like, self.plan)
        # A copy: the model may change its tensor, and the user keep this one.
        full = None if full is None else _copy(full)
        return self.slice(self.communicator.broadcast(full, like.new_empty(self.full_shape)))

    def note_gradient(self, of_replicas: Placement) -> None:
        """Note the gradient's placement on tp ranks that hold the same tensor, for later calls."""
        self.gradient_of_replicas = of_replicas

    def of_gradient(self, tp: Placement) -> TensorSpec:
        """Return the spec of the tensor's gradient: sharded as the tensor is, replicated where the
        tensor is partial; ``tp`` is the gradient's placement where tp ranks hold the same tensor.
        """
        dp = Replicate() if isinstance(self.layout.dp, Partial) else self.layout.dp
        if isinstance(self.layout.tp, Shard):
            tp = self.layout.tp
        return replace(self, layout=replace(self.layout, dp=dp, tp=tp))


@dataclass(eq=False)
class GatherContext:
    """The gather and scatter of one call of a hook, and the spec of its gradients.

    Attributes:
        check_consistency: Exchanges headers before a gradient moves; collective.
        of_replicas: Returns the placement of the gradient on tp ranks that hold the same tensor,
            from this rank's gradient if it has one; raises where it is unknown; collective.
        num_records: The number of further full tensors to keep as records: 0 or 1.
        is_read: Whether the full tensor itself is expected to be read only.
        record: The record, after the gather.
        hook: The hook, for messages.
        reached_in: Of an edit on rank 0: the backward pass that reached what the function returned.
        why_once: Returns why a gradient of the gradient would be wrong; empty where it is right.
        is_dtensor: Whether the tensor is a DTensor along dp.
    """

    spec: TensorSpec
    check_consistency: CheckConsistency
    of_replicas: Callable[[Tensor | None], Placement] = lambda _: Replicate()
    num_records: int = 0
    is_read: bool = False
    record: Tensor | None = None
    hook: str = ""
    reached_in: int = -1
    why_once: Callable[[], str] = str
    is_dtensor: bool = False
    _gradient: TensorSpec | None = None

    @property
    def cast_record(self) -> Tensor | None:
        """The record, after the gather, in the dtype of the hook."""
        return None if self.record is None else self.spec.cast(self.record)

    def take_record(self, fulls: list[Tensor]) -> Tensor:
        """Keep the record of several full tensors, if there is one; return the first."""
        self.record = fulls[1] if self.num_records else None
        return fulls[0]

    @property
    def grad_scale(self) -> float:
        """The gradient on a rank (their mean, where dp does not split the batch), by that of the
        loss of all ranks. Autograd sums a DTensor's over the ranks that share it.
        """
        communicator = self.spec.communicator
        divisor = communicator.divisor_at(self.hook, self.is_dtensor)
        if self.is_dtensor:
            return divisor
        return self.spec.num_batches * divisor / communicator.mesh.dp_size

    def reach(self) -> None:
        """Note that the running backward pass has reached what the editing function returned."""
        self.reached_in = current_graph_task()

    def check_is_reached(self) -> None:
        """HookError, on all ranks, where a backward on rank 0 comes from a tensor that the editing
        function kept: no other rank has that tensor, and takes part.
        """
        communicator = self.spec.communicator
        if communicator.mesh.group_rank > 0 or self.reached_in == current_graph_task():
            return
        text = (
            f"{self.hook}: a backward on rank 0 reaches the tensor that the editing function got, "
            "but not through what it returned, so the other ranks, which did not run the function, "
            "take no part in it; keep full.detach() for a loss of rank 0, or use "
            "FlexModel(edit_on='all')"
        )
        communicator.report_failure(text, None, "end of the backward")
        raise agreed(HookError(text))

    def gradient(self, grad: Tensor | None = None) -> TensorSpec:
        """Return the spec of the gradient. That of a replicated tensor is replicated (the model has
        reduced it), or partial (the model will reduce it). Collective where that is unknown yet.
        """
        if self._gradient is None:
            tp = self.spec.gradient_of_replicas
            if tp is None:
                tp = self.of_replicas(grad)
                self.spec.note_gradient(tp)
            self._gradient = self.spec.of_gradient(tp)
        return self._gradient

    def has_graph_of_gradient(self) -> bool:
        """Return whether the running backward makes a graph of its own (``create_graph=True``).

        Raises:
            HookError: it does, and second derivatives are not right here. On every rank.
        """
        if not torch.is_grad_enabled():
            return False
        why = self.why_once()
        if why:
            raise agreed(
                HookError(f"{self.hook}: a backward with create_graph=True is refused: {why}")
            )
        return True

    def of_gradient(self, spec: TensorSpec) -> GatherContext:
        """Return the context of the gather or scatter of the gradient, which has this ``spec``. The
        gradient of a gradient is placed as the tensor is.
        """
        return GatherContext(
            spec,
            self.check_consistency,
            hook=self.hook,
            is_dtensor=self.is_dtensor,
            _gradient=self.spec,
        )


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the same device, detached."""
    if tensor.device.type == "cpu":
        return memory.copy(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _transferring(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for GPUs when the pass ends. Abort at Ctrl-C: the other ranks wait in this transfer, so
    the report at the end of the backward would not match it. An error that all ranks raise, at one
    node of equal graphs, leaves them in step: it is not reported.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, grad: Tensor) -> Any:
        communicator = ctx.context.spec.communicator
        communicator.defer_in_backward()
        try:
            return backward(ctx, grad)
        except (KeyboardInterrupt, SystemExit) as error:
            communicator.abort_on(error)
            raise
        except Exception as error:
            if is_agreed(error):
                communicator.failure.agree()
            raise
        finally:
            communicator.defer(False)

    return guarded


def _gathered(shard: Tensor, context: GatherContext) -> Tensor:
    num_read = context.num_records + context.is_read
    return context.take_record(context.spec.copies(shard, 1 + context.num_records, num_read))


def _scattered(full: Tensor, context: GatherContext) -> Tensor:
    return full.detach().clone() if context.spec.is_whole else context.spec.slice(full)


class _Gather(Function):
    @staticmethod
    def forward(ctx, shard, context):
        ctx.context = context
        return _gathered(shard, context)

    @staticmethod
    @_transferring
    def backward(ctx, grad):
        context, grad = ctx.context, plain(grad)
        in_graph = context.has_graph_of_gradient()
        scale, spec = context.grad_scale, context.gradient()
        shard = scatter(grad, context.of_gradient(spec)) if in_graph else spec.slice(grad)
        return (shard * scale if scale != 1 else shard), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, full, context):
        ctx.context = context
        return _scattered(full, context)

    @staticmethod
    @_transferring
    def backward(ctx, grad):
        context, full = ctx.context, plain(grad)
        in_graph = context.has_graph_of_gradient()
        spec = context.gradient(full)
        if not spec.is_whole:
            context.check_consistency(full)
            full = gather(full, context.of_gradient(spec)) if in_graph else spec.all_gather(full)
        if context.spec.is_shared_over_dp:  # the edit's gradient depends on every rank's loss
            full = mean_over_dp(full, spec.communicator, context.check_consistency)
        scale = context.grad_scale
        return (full / scale if scale != 1 else full), None


class _GatherToFirst(Function):
    @staticmethod
    def forward(ctx, shard, context):
        ctx.context = context
        ctx.like = shard.detach()
        fulls = context.spec.copies_on_first(shard, 1 + context.num_records)
        return shard.new_empty(0) if fulls is None else context.take_record(fulls).to(shard.device)

    @staticmethod
    @_transferring
    def backward(ctx, grad):
        context, grad = ctx.context, plain(grad)
        context.has_graph_of_gradient()
        context.check_is_reached()
        context.check_consistency(ctx.like)
        spec = context.gradient()
        first = spec.communicator.mesh.group_rank == 0
        shard = spec.scatter_from_first(grad if first else None, ctx.like)
        scale = context.grad_scale
        return (shard * scale if scale != 1 else shard), None


class _ScatterFromFirst(Function):
    @staticmethod
    def forward(ctx, full, context, like, contexts, *gathered):
        # `gathered` is only for the graph: it makes every rank run the gathers' backward, whether
        # the edit used them or not
        ctx.context, ctx.contexts = context, contexts
        ctx.size = full.shape
        first = context.spec.communicator.mesh.group_rank == 0
        return context.spec.scatter_from_first(full.detach() if first else None, like)

    @staticmethod
    @_transferring
    def backward(ctx, grad):
        context, grad = ctx.context, plain(grad)
        context.has_graph_of_gradient()
        for one in ctx.contexts:
            one.reach()
        spec = context.gradient(grad)
        context.check_consistency(grad)
        mesh = spec.communicator.mesh
        if spec.is_shared_over_dp:  # as in _Scatter
            grad = spec.communicator.all_reduce_sum(("dp",), grad) / mesh.dp_size
        scale = context.grad_scale  # on every rank: its error is every rank's
        full = spec.gather_to_first(grad.contiguous())
        if full is None:
            full = grad.new_zeros(ctx.size)
        elif scale != 1:
            full = full / scale
        return full, *[None] * (len(ctx.needs_input_grad) - 1)


class _MeanOverDp(Function):
    @staticmethod
    def forward(ctx, tensor, communicator, check_consistency):
        ctx.arguments = communicator, check_consistency
        check_consistency(tensor)
        return communicator.all_reduce_sum(("dp",), tensor) / communicator.mesh.dp_size

    @staticmethod
    def backward(ctx, grad):
        return mean_over_dp(grad, *ctx.arguments), None, None


def mean_over_dp(
    tensor: Tensor, communicator: Communicator, check_consistency: CheckConsistency
) -> Tensor:
    """Return the mean over dp, in the graph; its gradient is the mean of the ranks' gradients."""
    return _MeanOverDp.apply(tensor, communicator, check_consistency)


@ranged("gather")
def gather(shard: Tensor, context: GatherContext) -> Tensor:
    """Return the full tensor on every rank, in the graph. Collective along the axes of the
    layout.
    """
    if not torch.is_grad_enabled():  # on all ranks alike
        return _gathered(shard, context)
    return _Gather.apply(shard, context)


@ranged("scatter")
def scatter(full: Tensor, context: GatherContext) -> Tensor:
    """Return this rank's shard of a full tensor that all ranks hold, in the graph. Local; its
    backward is collective.
    """
    if not torch.is_grad_enabled():
        return _scattered(full, context)
    return _Scatter.apply(full, context)


@ranged("gather")
def gather_to_first(shard: Tensor, context: GatherContext) -> Tensor:
    """Return the full tensor on rank 0, an empty one elsewhere, in the graph. Collective."""
    return _GatherToFirst.apply(shard, context)


def scatter_from_first(
    full: Tensor | None,
    gathered: Sequence[tuple[Tensor, GatherContext]],
    context: GatherContext,
    like: Tensor,
    requires_grad: bool,
) -> Tensor:
    """Return this rank's shard of rank 0's edit of the ``gathered`` tensors (each with its
    context), in the graph if the edit is (``requires_grad``). Collective.
    """
    if not requires_grad:
        return context.spec.scatter_from_first(full, like)
    if full is None:
        full = like.new_empty(0).requires_grad_()
    tensors, contexts = zip(*gathered)
    return _ScatterFromFirst.apply(full, context, like.detach(), contexts, *tensors)
