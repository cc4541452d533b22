"""Transfers over several hosts: shared memory inside a host, gloo between the first ranks of hosts.

Data that another host needs is sent there once, for all its ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.hosts import Hosts
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import transport
from flex_model.distributed.transports.gloo import Gloo, assemble, assemble_all, split
from flex_model.distributed.transports.shared_memory import SharedMemory
from flex_model.distributed.transports.transport import (
    Gathered,
    as_bytes,
    end_to_end,
    on_cpu,
)


class AcrossHosts:
    """See ``Transport``.

    Args:
        group: All ranks.
        inside: The ranks of this host.
        between: The first rank of each host, on those; None elsewhere.
    """

    name = "shared_memory inside a host, gloo between hosts"

    def __init__(
        self, group: PrivateGroup, hosts: Hosts, inside: SharedMemory, between: Gloo | None
    ) -> None:
        self.group = group
        self._inside, self._between = inside, between
        names = list(dict.fromkeys(hosts.names))
        self._ranks_of_hosts = [hosts.ranks_of(name) for name in names]
        self._host = names.index(hosts.names[group.rank])

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return transport.exchange_bytes(self, data)

    def exchange(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        everyone = self._bytes_of_all(as_bytes(tensor), [size] * self.group.size)
        rows = torch.stack(everyone) if size else torch.empty(0, dtype=torch.uint8)
        return rows.view(tensor.dtype).reshape(self.group.size, *tensor.shape)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        everyone = self._bytes_of_all(as_bytes(shard), plan.shard_bytes)
        if not num_copies:
            return []
        full = _put_together(everyone, plan, shard.dtype)
        return [copy.to(shard.device) for copy in transport.copies(full, num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        rank, size = self.group.rank, self.group.size
        data, sizes, starts = transport.pack_shards(tensors, rank, size)
        everyone = self._bytes_on_first(data, sizes)
        if everyone is None:
            return None
        return assemble_all(torch.cat(everyone), sizes, starts, tensors)

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        sizes = [sum(plan.shard_bytes[r] for r in ranks) for ranks in self._ranks_of_hosts]
        of_host = None
        if self._between is not None:
            of_hosts = torch.empty(0, dtype=torch.uint8)
            if full is not None:
                host = on_cpu(full)
                of_hosts = torch.cat(
                    [
                        as_bytes(split(host, plan, r))
                        for ranks in self._ranks_of_hosts
                        for r in ranks
                    ]
                )
            of_host = self._between.scatter_from_first(
                of_hosts if full is not None else None,
                torch.empty(sizes[self._host], dtype=torch.uint8),
                end_to_end(sizes),
            )
        here = [plan.shard_bytes[r] for r in self._ranks_of_hosts[self._host]]
        local = torch.empty(plan.shard_bytes[self.group.rank], dtype=torch.uint8)
        received = self._inside.scatter_from_first(of_host, local, end_to_end(here))
        return received.view(like.dtype).reshape(like.shape).to(like.device)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        host = like.to("cpu") if tensor is None else on_cpu(tensor)
        if self._between is not None:
            host = self._between.broadcast(None if tensor is None else host, host)
        leads = self._between is not None
        received = self._inside.broadcast(host if leads else None, host)
        return tensor if tensor is not None else received.to(like.device)

    def _bytes_on_first(self, local: Tensor, sizes: list[int]) -> list[Tensor] | None:
        """Gather the bytes of every rank on rank 0, through the first rank of each host."""
        of_host = self._bytes_of_host(local, sizes)
        if self._between is None:
            return None
        assert of_host is not None
        totals = [sum(sizes[r] for r in ranks) for ranks in self._ranks_of_hosts]
        everyone = self._between.gather_to_first(
            [Gathered(end_to_end(totals), list(range(len(totals))), of_host)]
        )
        return None if everyone is None else self._by_rank(everyone[0], sizes)

    def _bytes_of_all(self, local: Tensor, sizes: list[int]) -> list[Tensor]:
        """Gather the bytes of every rank on every rank."""
        of_host = self._bytes_of_host(local, sizes)
        totals = [sum(sizes[r] for r in ranks) for ranks in self._ranks_of_hosts]
        everyone = torch.empty(sum(totals), dtype=torch.uint8)
        if self._between is not None:
            assert of_host is not None
            (everyone,) = self._between.all_gather(of_host, end_to_end(totals))
        leads = self._between is not None
        everyone = self._inside.broadcast(everyone if leads else None, everyone)
        return self._by_rank(everyone, sizes)

    def _bytes_of_host(self, local: Tensor, sizes: list[int]) -> Tensor | None:
        """Gather the bytes of this host's ranks on the first of them."""
        ranks = self._ranks_of_hosts[self._host]
        plan = end_to_end([sizes[r] for r in ranks])
        gathered = self._inside.gather_to_first([Gathered(plan, list(range(len(ranks))), local)])
        return None if gathered is None else gathered[0]

    def _by_rank(self, everyone: Tensor, sizes: list[int]) -> list[Tensor]:
        order = [r for ranks in self._ranks_of_hosts for r in ranks]
        parts = dict(zip(order, everyone.split([sizes[r] for r in order])))
        return [parts[r] for r in range(self.group.size)]


def _put_together(shards: list[Tensor], plan: GatherPlan, dtype: torch.dtype) -> Tensor:
    offsets = [sum(plan.shard_bytes[:r]) for r in range(len(shards))]
    return assemble(torch.cat(shards), offsets, plan, dtype)
