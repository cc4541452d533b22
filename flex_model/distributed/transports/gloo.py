"""Transfers by one private gloo group, for ranks that share no memory. CUDA tensors are staged
through the CPU.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.costs import are_padded
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import transport
from flex_model.distributed.transports.transport import Gathered, Wait, as_bytes, on_cpu


class Gloo:
    """See ``Transport``."""

    name = "gloo"

    def __init__(self, group: PrivateGroup, wait: Wait) -> None:
        self.group = group
        self._wait = wait

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return transport.exchange_bytes(self, data)

    def exchange(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)
        gathered = torch.empty(self.group.size * flat.numel(), dtype=flat.dtype)
        if flat.numel():
            self._wait([self.group.backend._allgather_base(gathered, flat)])
        return gathered.reshape(self.group.size, *tensor.shape)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        gathered, offsets = self._gather_bytes(as_bytes(shard), plan.shard_bytes)
        if not num_copies:
            return []
        full = assemble(gathered, offsets, plan, shard.dtype)
        return [copy.to(shard.device) for copy in transport.copies(full, num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        size, rank = self.group.size, self.group.rank
        data, sizes, starts = transport.pack_shards(tensors, rank, size)
        none = [0] * size
        received = self._exchange_unevenly(data, [data.numel(), *none[1:]], none if rank else sizes)
        if rank != 0:
            return None
        return assemble_all(received, sizes, starts, tensors)

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        none = [0] * self.group.size
        data, send = torch.empty(0, dtype=torch.uint8), none
        if self.group.rank == 0:
            assert full is not None
            host = on_cpu(full)
            data = torch.cat([as_bytes(split(host, plan, r)) for r in range(self.group.size)])
            send = plan.shard_bytes
        receive = [plan.shard_bytes[self.group.rank], *none[1:]]
        received = self._exchange_unevenly(data, send, receive)
        return received.view(like.dtype).reshape(like.shape).to(like.device)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        if self.group.rank == 0:
            assert tensor is not None
            data, result = as_bytes(tensor), tensor
        else:
            host = memory.empty(like.shape, like.dtype)
            data, result = host.reshape(-1).view(torch.uint8), host
        if data.numel():
            self._wait([self._broadcast(data, 0)])
        return result.to(like.device)

    def _gather_bytes(self, data: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
        """Gather ``sizes[r]`` bytes of each rank; return them, and where those of each begin."""
        width = max(sizes)
        if are_padded(sizes):
            if data.numel() < width:  # gloo needs equal sizes
                data = torch.cat([data, data.new_zeros(width - data.numel())])
            return self.exchange(data).reshape(-1), [r * width for r in range(len(sizes))]
        gathered = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = gathered.split(sizes)
        parts[self.group.rank].copy_(data)
        self._wait([self._broadcast(part, r) for r, part in enumerate(parts) if part.numel()])
        return gathered, list(itertools.accumulate(sizes, initial=0))[:-1]

    def _broadcast(self, data: Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self.group.backend.broadcast([data], options)

    def _exchange_unevenly(self, data: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """All-to-all of ``send[r]`` bytes to and ``receive[r]`` bytes from rank r. Gloo's send and
        receive can't be polled.
        """
        received = memory.empty([sum(receive)], torch.uint8)
        self._wait([self.group.backend.alltoall_base(received, data, receive, send)])
        return received


def assemble(gathered: Tensor, offsets: list[int], plan: GatherPlan, dtype: torch.dtype) -> Tensor:
    """Assemble the full tensor from all shards' bytes; rank r's begin at ``offsets[r]``. Local."""
    return torch.ops.flex_model.assemble(gathered, offsets, plan.code, plan.full_sizes, dtype)


def assemble_all(
    received: Tensor, sizes: list[int], starts: list[list[int]], tensors: list[Gathered]
) -> list[Tensor]:
    """Return the full tensors, and their copies, of the bytes of ``pack_shards`` of all ranks."""
    before, fulls = [0, *itertools.accumulate(sizes)], []
    for tensor, placed in zip(tensors, starts):
        offsets = [before[holder] + start for holder, start in zip(tensor.ranks, placed)]
        full = assemble(received, offsets, tensor.plan, tensor.shard.dtype)
        fulls += tensor.copies(full)
    return fulls


def split(full: Tensor, plan: GatherPlan, rank: int) -> Tensor:
    """Copy one rank's shard out of a contiguous ``full``. Local."""
    return torch.ops.flex_model.split(full, plan.code, rank, plan.shard_sizes[rank])
