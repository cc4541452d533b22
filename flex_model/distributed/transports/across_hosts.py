"""Transfers over several hosts: shared memory inside a host, gloo between the first ranks of hosts.

Data that another host needs is sent there once, for all its ranks.
"""

from __future__ import annotations

import itertools

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
        self._ranks_of_hosts = list(hosts.by_name.values())
        self._host = list(hosts.by_name).index(hosts.names[group.rank])

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return transport.exchange_bytes(self, data)

    def exchange(self, tensor: Tensor) -> Tensor:
        size, num_ranks = tensor.nbytes, self.group.size
        if not size:
            return tensor.new_empty((num_ranks, *tensor.shape))
        gathered = self._on_first_of_hosts(as_bytes(tensor), [size] * num_ranks)
        rows = torch.empty((num_ranks, size), dtype=torch.uint8)
        if gathered is not None:
            data, starts = gathered
            # The ranks of hosts follow one another from wherever this host's are.
            rows = data.reshape(num_ranks, size)[[start // size for start in starts]]
        rows = self._inside.broadcast(rows if gathered is not None else None, rows)
        return rows.view(tensor.dtype).reshape(num_ranks, *tensor.shape)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        gathered = self._on_first_of_hosts(as_bytes(shard), plan.shard_bytes)
        full = None
        if gathered is not None:
            full = assemble(*gathered, plan, shard.dtype)
        like = torch.empty((), dtype=shard.dtype).expand(plan.full_sizes)
        full = self._inside.broadcast(full, like)
        if not num_copies:
            return []
        return [copy.to(shard.device) for copy in transport.copies(full, num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        data, sizes, starts = transport.pack_shards(tensors, self.group.rank, self.group.size)
        of_host = self._bytes_of_host(data, sizes)
        if self._between is None:
            return None
        assert of_host is not None
        totals = self._of_hosts(sizes)
        everyone = self._between.gather_to_first(
            [Gathered(end_to_end(totals), list(range(len(totals))), of_host)]
        )
        if everyone is None:
            return None
        before = itertools.accumulate(totals, initial=0)
        return assemble_all(everyone[0], self._starts(list(before), sizes), starts, tensors)

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        of_ranks = plan.shard_bytes
        sizes = self._of_hosts(of_ranks)
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
        here = [of_ranks[r] for r in self._ranks_of_hosts[self._host]]
        local = torch.empty(of_ranks[self.group.rank], dtype=torch.uint8)
        received = self._inside.scatter_from_first(of_host, local, end_to_end(here))
        return received.view(like.dtype).reshape(like.shape).to(like.device)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        host = like.to("cpu") if tensor is None else on_cpu(tensor)
        if self._between is not None:
            host = self._between.broadcast(None if tensor is None else host, host)
        leads = self._between is not None
        received = self._inside.broadcast(host if leads else None, host)
        return tensor if tensor is not None else received.to(like.device)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return transport.sum_of_pieces(on_cpu(tensor), self._sum).to(tensor.device)

    def _sum(self, piece: Tensor) -> Tensor:
        of_host = self._bytes_of_host(as_bytes(piece), [piece.nbytes] * self.group.size)
        total = None
        if self._between is not None:
            assert of_host is not None
            rows = of_host.view(piece.dtype).reshape(-1, piece.numel())
            num_rows = [len(ranks) for ranks in self._ranks_of_hosts]
            numbers = self._starts(
                list(itertools.accumulate(num_rows, initial=0)), [1] * self.group.size
            )
            total = self._between.sum_of_rows(rows, num_rows, numbers)
        return self._inside.broadcast(total, piece)

    def _on_first_of_hosts(
        self, local: Tensor, sizes: list[int]
    ) -> tuple[Tensor, list[int]] | None:
        """Gather the bytes of every rank on the first rank of each host; return them, and where
        those of each rank begin. None on the other ranks.
        """
        of_host = self._bytes_of_host(local, sizes)
        if self._between is None:
            return None
        assert of_host is not None
        data, before = self._between.gather_bytes(of_host, self._of_hosts(sizes))
        return data, self._starts(before, sizes)

    def _bytes_of_host(self, local: Tensor, sizes: list[int]) -> Tensor | None:
        """Gather the bytes of this host's ranks on the first of them."""
        ranks = self._ranks_of_hosts[self._host]
        plan = end_to_end([sizes[r] for r in ranks])
        gathered = self._inside.gather_to_first([Gathered(plan, list(range(len(ranks))), local)])
        return None if gathered is None else gathered[0]

    def _of_hosts(self, sizes: list[int]) -> list[int]:
        return [sum(sizes[r] for r in ranks) for ranks in self._ranks_of_hosts]

    def _starts(self, before: list[int], sizes: list[int]) -> list[int]:
        """Where the bytes of each rank begin, of hosts whose bytes begin at ``before``."""
        starts = [0] * len(sizes)
        for at, ranks in zip(before, self._ranks_of_hosts):
            for r in ranks:
                starts[r] = at
                at += sizes[r]
        return starts
