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
from flex_model.distributed.rounds import Round, even_parts, is_in_parts
from flex_model.distributed.transports import transport
from flex_model.distributed.transports.transport import (
    Gathered,
    Wait,
    added_up,
    as_bytes,
    on_cpu,
    sum_of_pieces,
)


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
        rank, size = self.group.rank, self.group.size
        if rank == 0:
            assert tensor is not None
            data, result = as_bytes(tensor), tensor
        else:
            host = memory.empty(like.shape, like.dtype)
            data, result = host.reshape(-1).view(torch.uint8), host
        if not is_in_parts(size, size, data.numel()):
            self._exchange(data, rounds.broadcast(rank, size, data.numel()))
            return result.to(like.device)
        parts = even_parts(data.numel(), size)
        part = data[: parts[rank]]
        self._exchange(data if rank == 0 else part, rounds.scatter_from_first(rank, parts))
        gathered, starts = self.gather_bytes(part, parts)
        if rank > 0:
            data.copy_(gathered.roll(-starts[0]))
        return result.to(like.device)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        ones = [1] * self.group.size

        def of_piece(piece: Tensor) -> Tensor:
            return self.sum_of_rows(piece.unsqueeze(0), ones, list(range(self.group.size)))

        return sum_of_pieces(on_cpu(tensor), of_piece).to(tensor.device)

    def sum_of_rows(self, rows: Tensor, num_rows: list[int], order: list[int]) -> Tensor:
        """Add up the rows of all ranks, 2-D CPU tensors of one width.

        Args:
            num_rows: Those of each rank.
            order: The rows in the order in which they are added, by their numbers if those of a
                rank follow those of the ranks before it.
        """
        rank, size, width = self.group.rank, self.group.size, rows.shape[1]
        row_bytes, element_bytes = width * rows.element_size(), rows.element_size()
        if not is_in_parts(size, len(order), row_bytes):
            gathered, starts = self.gather_bytes(as_bytes(rows), [n * row_bytes for n in num_rows])
            in_order = gathered.roll(-starts[0]).view(rows.dtype).reshape(-1, width)
            return added_up([in_order[i] for i in order])
        # Each rank adds up one part: summands can't be combined before, in another order.
        parts = even_parts(row_bytes, size)
        own = rows.split([part // element_bytes for part in parts], 1)
        received = rows.new_empty(len(order) * own[rank].shape[1])
        data = torch.cat([*(part.reshape(-1) for part in own), received])
        sent, expected = [part.nbytes for part in own], [n * parts[rank] for n in num_rows]
        self._exchange(as_bytes(data), rounds.all_to_all(rank, sent, expected))
        to_add = list(data[rows.numel() :].split(own[rank].shape[1]))
        before = sum(num_rows[:rank])
        to_add[before : before + len(rows)] = own[rank]
        total = added_up([to_add[i] for i in order])
        gathered, starts = self.gather_bytes(as_bytes(total), parts)
        return gathered.roll(-starts[0]).view(rows.dtype)

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
