"""Release 0.1.0's collective functions: along one axis of a ParallelState, with gradients.

The gradients are those of `gather`: what was gathered is edited alike on every rank, so gather's
backward is a slice and scatter's an all-gather; along dp, where the loss is the mean over ranks,
they also multiply and divide by dp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function

from flex_model.compat.parallel_state import ParallelState, check_state
from flex_model.distributed import gather
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.placement import Shard, ShardLayout
from flex_model.errors import agreed


def unity(tensor: Tensor, fmps: ParallelState) -> Tensor:
    """The tensor itself. Local."""
    return tensor


def all_gather_tensor_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """The tensor-parallel ranks' tensors, put together along ``dim``; the same on every rank.

    Example::

        full = all_gather_tensor_parallel(shard, -1, fmps)
        shard = scatter_tensor_parallel(edit(full), -1, fmps)

    Shapes:
        tensor: ``(..., n_rank, ...)``, n_rank at ``dim``; it may differ from rank to rank.
        returns: ``(..., sum of n_rank, ...)``, a copy also where there is one rank only.

    Collective over the tensor-parallel ranks. Its backward is a slice, local. Any dtype, on CPU or
    CUDA.

    Raises:
        TypeError, IndexError: not a dense tensor, no state; ``dim`` out of range.
        ValueError: the ranks' tensors differ in size along other dims too; on every rank.
        HookMismatchError: the ranks differ in dtype, number of dims, ``dim`` or in what they call;
            on every rank.
        HookError: a rank did not call it within the timeout; the message names it.
    """
    return _all_gather(tensor, dim, fmps, "tp", "all_gather_tensor_parallel")


def all_gather_data_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """Gather as ``all_gather_tensor_parallel`` does, over dp; backward multiplies by its size."""
    return _all_gather(tensor, dim, fmps, "dp", "all_gather_data_parallel")


def scatter_tensor_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """This rank's part along ``dim`` of a tensor that all tensor-parallel ranks hold.

    Shapes:
        tensor: ``(..., n, ...)``, n at ``dim``, the same on every rank.
        returns: ``(..., n_rank, ...)``, contiguous; ``tensor`` itself where there is one rank. The
            ranks' sizes are those of the last ``all_gather_tensor_parallel`` to this size along
            ``dim``, so that a scatter undoes its gather; else those of ``torch.chunk``.

    Local, but its backward is an all-gather, collective over the tensor-parallel ranks; then so is
    the first call, which connects them.

    Raises:
        TypeError, IndexError: not a dense tensor, no state; ``dim`` out of range.
    """
    return _scatter(tensor, dim, fmps, "tp", "scatter_tensor_parallel")


def scatter_data_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """Scatter as ``scatter_tensor_parallel`` does, over dp; backward divides by its size."""
    return _scatter(tensor, dim, fmps, "dp", "scatter_data_parallel")


def broadcast_tensor_parallel(tensor: Tensor, fmps: ParallelState) -> Tensor:
    """The tensor of the first tensor-parallel rank, on every one of them.

    As in 0.1.0 the values are written into ``tensor``, which is returned; only where autograd
    records it, on any rank, a new tensor is returned and ``tensor`` stays. Then the first rank gets
    the gradient, and the others zero: all ranks use the values alike, so each has the whole
    gradient.

    Shapes:
        tensor: the same shape and dtype on every rank.

    Collective over the tensor-parallel ranks.

    Raises:
        TypeError: not a dense tensor, no state.
        HookMismatchError: the ranks differ in shape or dtype, or in what they call; on every rank.
        HookError: a rank did not call it within the timeout; the message names it.
    """
    return _broadcast(tensor, fmps, "tp", "broadcast_tensor_parallel")


def broadcast_data_parallel(tensor: Tensor, fmps: ParallelState) -> Tensor:
    """Broadcast as ``broadcast_tensor_parallel`` does, over the data-parallel ranks.

    The first rank gets the sum of the ranks' gradients, which DDP's or FSDP's average then makes
    that of the mean loss; so its backward is collective too.
    """
    return _broadcast(tensor, fmps, "dp", "broadcast_data_parallel")


def _all_gather(tensor: Tensor, dim: int, fmps: ParallelState, axis: str, name: str) -> Tensor:
    dim = _check_dim(tensor, dim, name)
    check_state(fmps, name)
    communicator = fmps.communicator(axis)
    if communicator.is_local:
        return tensor.clone()
    exchange_headers = header_exchange(fmps, axis, f"{name} along dim {dim}")
    shapes = [header.shape for header in exchange_headers(tensor)]
    try:
        spec = gather.TensorSpec.of(communicator, _split_along(axis, dim), shapes, tensor.dtype)
    except ValueError as error:
        raise agreed(
            ValueError(f"{name} along dim {dim}: {error}; only that dim may differ")
        ) from None
    fmps.remember_sizes(axis, dim, [shape[dim] for shape in shapes])
    return gather.gather(tensor, gather.GatherContext(spec, exchange_headers))


def _scatter(tensor: Tensor, dim: int, fmps: ParallelState, axis: str, name: str) -> Tensor:
    dim = _check_dim(tensor, dim, name)
    check_state(fmps, name)
    sizes = fmps.sizes(axis, dim, tensor.shape[dim])
    if len(sizes) == 1:
        return tensor
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        rank = fmps.mesh.coordinates[axis]
        return tensor.split(sizes, dim)[rank].clone(memory_format=torch.contiguous_format)
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    communicator = fmps.communicator(axis)
    spec = gather.TensorSpec.of(communicator, _split_along(axis, dim), shapes, tensor.dtype)
    exchange_headers = header_exchange(fmps, axis, f"backward of {name} along dim {dim}")
    return gather.scatter(tensor, gather.GatherContext(spec, exchange_headers))


def _broadcast(tensor: Tensor, fmps: ParallelState, axis: str, name: str) -> Tensor:
    check_tensor(tensor, name)
    check_state(fmps, name)
    communicator = fmps.communicator(axis)
    if communicator.is_local:
        return tensor
    needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
    flags = Header.NEEDS_GRADIENT if needs_gradient else 0
    headers = header_exchange(fmps, axis, name)(tensor, flags)
    if any(header.shape != headers[0].shape for header in headers):
        here = f"{name} with shape {tuple(tensor.shape)}"
        raise communicator.mismatch(here, "have tensors of different shapes")
    if any(header.flags & Header.NEEDS_GRADIENT for header in headers) and torch.is_grad_enabled():
        if not needs_gradient:  # in the graph all the same: the backward may be collective
            tensor = tensor.detach().requires_grad_()
        exchange_headers = header_exchange(fmps, axis, f"backward of {name}")
        return _Broadcast.apply(tensor, communicator, axis, exchange_headers)
    with torch.no_grad():
        received = communicator.broadcast(tensor.detach(), tensor.detach())
        if communicator.mesh.rank > 0:
            tensor.copy_(received)
    return tensor


class _Broadcast(Function):
    @staticmethod
    def forward(ctx, tensor, communicator, axis, exchange_headers):
        ctx.communicator, ctx.axis, ctx.exchange_headers = communicator, axis, exchange_headers
        received = communicator.broadcast(tensor, tensor)
        return received.clone() if communicator.mesh.rank == 0 else received

    @staticmethod
    def backward(ctx, grad):
        if ctx.axis == "dp":
            ctx.exchange_headers(grad)
            grad = ctx.communicator.all_reduce_sum(("dp",), grad)
        own = grad if ctx.communicator.mesh.rank == 0 else torch.zeros_like(grad)
        return own, None, None, None


def _split_along(axis: str, dim: int) -> ShardLayout:
    return ShardLayout(dp=Shard(dim)) if axis == "dp" else ShardLayout(tp=Shard(dim))


def header_exchange(fmps: ParallelState, axis: str, what: str) -> Callable[..., list[Header]]:
    """Return a function that exchanges headers about a tensor with the ranks of ``axis``.

    A graph that holds it keeps ``fmps`` alive, and so its connections.
    """

    def exchange_headers(tensor: Tensor, flags: int = 0) -> list[Header]:
        site, shape = site_hash(what), tuple(tensor.shape)
        header = Header("forward", site, dtype=tensor.dtype, shape=shape, flags=flags)
        where = f"{what} of a tensor of shape {shape}"
        return fmps.communicator(axis).check_consistency(header, where)

    return exchange_headers


def check_tensor(tensor: object, name: str) -> None:
    is_dtensor = hasattr(tensor, "to_local")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or is_dtensor:
        hint = "; pass its .to_local()" if is_dtensor else ""
        raise TypeError(f"{name}: expected a dense torch.Tensor, got {type(tensor).__name__}{hint}")


def _check_dim(tensor: Tensor, dim: int, name: str) -> int:
    check_tensor(tensor, name)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: dim must be an int, got {dim!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(
            f"{name}: dim {dim} is out of range for a tensor of shape {tuple(tensor.shape)}; pass "
            f"a dim in [{-tensor.dim()}, {tensor.dim() - 1}]"
        )
    return dim % tensor.dim()
