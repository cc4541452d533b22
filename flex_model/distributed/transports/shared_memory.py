"""Transfers by memory that the ranks of one host share: each rank writes its shard directly into
every rank's full tensor, or into one that all of them read.

CUDA tensors are staged through the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flex_model import _C
from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports.transport import Gathered, Transport, on_cpu


class SharedMemory(Transport):
    """See ``Transport``. ``host`` connects the group's ranks, all on this host."""

    name = "shared_memory"

    def __init__(self, group: PrivateGroup, host: _C.HostGroup) -> None:
        self.group = group
        self._host = host
        self._rank = host.rank

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return self._host.exchange_bytes(data)

    def gather_at_once(self, *args: Any) -> list[bytes]:
        """Exchange a header, and gather small CPU tensors in the same round, if all headers are
        alike; return the headers. See ``Communicator.gather_at_once``.
        """
        return self._host.gather_at_once(*args)

    def exchange(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        everyone = torch.empty((self._host.size, *tensor.shape), dtype=tensor.dtype, device="cpu")
        self._host.exchange(tensor, tensor.nbytes, everyone)
        return everyone

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        host = on_cpu(shard)
        if num_copies == 1 and shard.is_cpu and plan.full_bytes < memory.POOLED_BYTES:
            full = host.new_empty(plan.full_sizes)  # the short path of small tensors
            self._host.all_gather(plan, host, (full,))
            return [full]
        are_viewed = 0 <= self.group.hosts.viewed_bytes <= plan.full_bytes
        num_views = min(num_read, num_copies) if are_viewed else 0
        fulls = [memory.empty(plan.full_sizes, shard.dtype) for _ in range(num_copies - num_views)]
        if num_views:
            sizes, code, bits = memory.as_leased(plan.full_sizes, shard.dtype)
            capsules = self._host.all_gather_views(plan, host, fulls, num_views, sizes, code, bits)
            fulls += [memory.tensor(each, plan.full_sizes, shard.dtype) for each in capsules]
        else:
            self._host.all_gather(plan, host, fulls)
        return fulls if shard.is_cpu else [full.to(shard.device) for full in fulls]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        rank = self._rank
        fulls, items = [], []
        for tensor in tensors:
            shard = on_cpu(tensor.shard) if rank in tensor.ranks else None
            for _ in range(tensor.num_copies):
                full = None
                if rank == 0:
                    full = memory.empty(tensor.plan.full_sizes, tensor.shard.dtype)
                    fulls.append(full)
                items.append((tensor.plan, tensor.ranks, shard, full))
        self._host.gather_to_first(items)
        return fulls if rank == 0 else None

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        host = None if full is None else on_cpu(full)
        shard = memory.empty(like.shape, like.dtype)
        self._host.scatter_from_first(plan, host, shard)
        return shard.to(like.device)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        if self._rank == 0:
            assert tensor is not None
            host = on_cpu(tensor)
            self._host.broadcast(host, host.nbytes, None)
            return tensor
        received = memory.empty(like.shape, like.dtype)
        self._host.broadcast(None, received.nbytes, received)
        return received.to(like.device)
