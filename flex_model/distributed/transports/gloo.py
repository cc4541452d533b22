"""Collectives of one private gloo group, on bytes, along a GatherPlan. CUDA tensors are staged
through the CPU.

Everything here only *starts* work or assumes that all ranks agreed on it: agreement and waiting are
the channel's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.groups import PrivateGroup

Wait = Callable[
    [list], None
]  # waits for works with the channel's deadline, then raises what they raise


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a contiguous 1-D uint8 CPU tensor; shares memory where it can."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def all_gather_fixed(group: PrivateGroup, tensor: Tensor, wait: Wait) -> Tensor:
    """``(size, *shape)`` of what every rank holds; shapes and dtypes are the same by
    construction.
    """
    flat = tensor.reshape(-1)
    gathered = torch.empty(group.size * flat.numel(), dtype=flat.dtype)
    wait([group.backend._allgather_base(gathered, flat)])
    return gathered.reshape(group.size, *tensor.shape)


def all_gather(group: PrivateGroup, shard: Tensor, plan: GatherPlan, wait: Wait) -> Tensor:
    """The full tensor, on every rank, on the device of ``shard``."""
    device, dtype = shard.device, shard.dtype
    width = max(plan.shard_bytes)
    data = as_bytes(shard)
    if data.numel() < width:  # gloo needs equal sizes
        data = torch.cat([data, data.new_zeros(width - data.numel())])
    gathered = torch.empty(group.size * width, dtype=torch.uint8)
    if width:
        wait([group.backend._allgather_base(gathered, data)])
    return assemble(gathered, [rank * width for rank in range(group.size)], plan, dtype).to(device)


def assemble(gathered: Tensor, offsets: list[int], plan: GatherPlan, dtype: torch.dtype) -> Tensor:
    """The full tensor out of all shards' bytes; rank r's begin at ``offsets[r]``."""
    return torch.ops.flex_model.assemble(gathered, offsets, plan.code, plan.full_sizes, dtype)


def _exchange(
    group: PrivateGroup, data: Tensor, send: list[int], receive: list[int], wait: Wait
) -> Tensor:
    """All-to-all of ``send[r]`` bytes to and ``receive[r]`` bytes from rank r. Gloo's send and
    receive can't be polled.
    """
    received = torch.empty(sum(receive), dtype=torch.uint8)
    wait([group.backend.alltoall_base(received, data, receive, send)])
    return received


def gather_bytes_to_first(
    group: PrivateGroup, data: Tensor, sizes: list[int], wait: Wait
) -> tuple[Tensor, list[int]] | None:
    """On rank 0: all ranks' bytes in one buffer, and where each rank's begin. ``sizes[r]`` bytes
    come from rank r.
    """
    none = [0] * group.size
    received = _exchange(
        group, data, [data.numel(), *none[1:]], sizes if group.rank == 0 else none, wait
    )
    if group.rank != 0:
        return None
    return received, [sum(sizes[:rank]) for rank in range(group.size)]


def gather_to_first(
    group: PrivateGroup, shard: Tensor, plan: GatherPlan, wait: Wait
) -> Tensor | None:
    """The full tensor on rank 0 of the group, None elsewhere."""
    gathered = gather_bytes_to_first(group, as_bytes(shard), plan.shard_bytes, wait)
    return None if gathered is None else assemble(*gathered, plan, shard.dtype).to(shard.device)


def scatter_from_first(
    group: PrivateGroup, full: Tensor | None, like: Tensor, plan: GatherPlan, wait: Wait
) -> Tensor:
    """Each rank's shard of rank 0's ``full``; shape, dtype and device are those of ``like``, this
    rank's own shard.
    """
    none = [0] * group.size
    data, send = torch.empty(0, dtype=torch.uint8), none
    if group.rank == 0:
        assert full is not None
        host = full.detach().cpu().contiguous()
        data = torch.cat([as_bytes(split(host, plan, rank)) for rank in range(group.size)])
        send = plan.shard_bytes
    received = _exchange(group, data, send, [plan.shard_bytes[group.rank], *none[1:]], wait)
    return received.view(like.dtype).reshape(like.shape).to(like.device)


def split(full: Tensor, plan: GatherPlan, rank: int) -> Tensor:
    """One rank's shard, contiguous, out of a contiguous ``full``. Local."""
    return torch.ops.flex_model.split(full, plan.code, rank, plan.shard_sizes[rank])


def broadcast(group: PrivateGroup, tensor: Tensor | None, like: Tensor, wait: Wait) -> Tensor:
    """Rank 0's tensor on every rank; ``like`` has its shape, dtype and device."""
    if group.rank == 0:
        assert tensor is not None
        data = as_bytes(tensor)
        result = tensor
    else:
        host = torch.empty(like.shape, dtype=like.dtype)
        data = host.reshape(-1).view(torch.uint8)
        result = host
    if data.numel():
        options = dist.BroadcastOptions()
        options.rootRank = 0
        wait([group.backend.broadcast([data], options)])
    return result if group.rank == 0 else result.to(like.device)


def all_reduce_sum(group: PrivateGroup, tensor: Tensor, wait: Wait) -> Tensor:
    """The sum over ranks, on every rank."""
    total = tensor.detach().cpu().contiguous().clone()
    if total.numel():
        wait([group.backend.allreduce([total])])
    return total.to(tensor.device)
