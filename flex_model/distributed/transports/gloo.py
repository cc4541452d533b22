"""Transfers by one private gloo group, for ranks that share no memory. CUDA tensors are staged
through the CPU.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed import memory, rounds
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.rounds import Round
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
        sizes = [tensor.nbytes] * self.group.size
        gathered, _ = self.gather_bytes(as_bytes(tensor), sizes)
        rows = gathered.reshape(self.group.size, tensor.nbytes).roll(self.group.rank, 0)
        return rows.flatten().view(tensor.dtype).reshape(self.group.size, *tensor.shape)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        gathered, offsets = self.gather_bytes(as_bytes(shard), plan.shard_bytes)
        if not num_copies:
            return []
        full = assemble(gathered, offsets, plan, shard.dtype)
        return [copy.to(shard.device) for copy in transport.copies(full, num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        rank = self.group.rank
        data, sizes, starts = transport.pack_shards(tensors, rank, self.group.size)
        if rank == 0:
            own, data = data, memory.empty([sum(sizes)], torch.uint8)
            data[: own.numel()].copy_(own)
        self._exchange(data, rounds.gather_to_first(rank, sizes))
        if rank != 0:
            return None
        before = list(itertools.accumulate(sizes, initial=0))
        return assemble_all(data, before, starts, tensors)

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        rank, sizes = self.group.rank, plan.shard_bytes
        if rank == 0:
            assert full is not None
            host = on_cpu(full)
            data = torch.cat([as_bytes(split(host, plan, r)) for r in range(self.group.size)])
        else:
            data = memory.empty([sizes[rank]], torch.uint8)
        self._exchange(data, rounds.scatter_from_first(rank, sizes))
        return data[: sizes[rank]].view(like.dtype).reshape(like.shape).to(like.device)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        if self.group.rank == 0:
            assert tensor is not None
            data, result = as_bytes(tensor), tensor
        else:
            host = memory.empty(like.shape, like.dtype)
            data, result = host.reshape(-1).view(torch.uint8), host
        self._exchange(data, rounds.broadcast(self.group.rank, self.group.size, data.numel()))
        return result.to(like.device)

    def gather_bytes(self, data: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
        """Gather ``sizes[r]`` bytes of each rank; return them, and where those of each begin."""
        offsets, all_rounds = rounds.all_gather(self.group.rank, sizes)
        gathered = torch.empty(sum(sizes), dtype=torch.uint8)
        gathered[: data.numel()].copy_(data)
        self._exchange(gathered, all_rounds)
        return gathered, offsets

    def _exchange(self, data: Tensor, all_rounds: list[Round]) -> None:
        messages = self.group.messages
        assert messages is not None
        if any(sends or receives for sends, receives in all_rounds):
            self._wait([messages.exchange(data, all_rounds)])


def assemble(gathered: Tensor, offsets: list[int], plan: GatherPlan, dtype: torch.dtype) -> Tensor:
    """Assemble the full tensor from all shards' bytes; rank r's begin at ``offsets[r]``. Local."""
    return torch.ops.flex_model.assemble(gathered, offsets, plan.code, plan.full_sizes, dtype)


def assemble_all(
    received: Tensor, before: list[int], starts: list[list[int]], tensors: list[Gathered]
) -> list[Tensor]:
    """Return the full tensors, and their copies, of the bytes of ``pack_shards`` of all ranks;
    those of rank r begin at ``before[r]``.
    """
    fulls = []
    for tensor, placed in zip(tensors, starts):
        offsets = [before[holder] + start for holder, start in zip(tensor.ranks, placed)]
        full = assemble(received, offsets, tensor.plan, tensor.shard.dtype)
        fulls += tensor.copies(full)
    return fulls


def split(full: Tensor, plan: GatherPlan, rank: int) -> Tensor:
    """Copy one rank's shard out of a contiguous ``full``. Local."""
    return torch.ops.flex_model.split(full, plan.code, rank, plan.shard_sizes[rank])
