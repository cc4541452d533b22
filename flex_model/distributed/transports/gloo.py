"""Transfers by gloo between the first ranks of hosts, and by shared memory inside a host. Ranks
that share no memory are hosts of their own.

Data that another host needs is sent there once, for all its ranks. CUDA tensors are staged through
the CPU.
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
from flex_model.distributed.transports.buffer_layout import Packing
from flex_model.distributed.transports.shared_memory import SharedMemory
from flex_model.distributed.transports.transport import (
    Gathered,
    Wait,
    added_up,
    as_bytes,
    end_to_end,
    on_cpu,
)


class BetweenHosts:
    """Moves bytes among the ranks of a gloo group. All methods are collective over them."""

    def __init__(self, group: PrivateGroup, wait: Wait) -> None:
        self.group = group
        self._wait = wait

    def gather(self, data: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
        """Gather ``sizes[r]`` bytes of each rank; return them, and where those of each begin."""
        offsets, all_rounds = rounds.all_gather(self.group.rank, sizes)
        gathered = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        gathered[: data.numel()].copy_(data)
        self._exchange(gathered, all_rounds)
        return gathered, offsets

    def gather_to_first(self, data: Tensor, sizes: list[int]) -> Tensor | None:
        """Return the bytes of all ranks, in order, on the first one; None elsewhere."""
        rank = self.group.rank
        if rank == 0:
            own, data = data, memory.empty([sum(sizes)], torch.uint8)
            data[: own.numel()].copy_(own)
        self._exchange(data, rounds.gather_to_first(rank, sizes))
        return data if rank == 0 else None

    def scatter_from_first(self, data: Tensor | None, sizes: list[int]) -> Tensor:
        """Return this rank's ``sizes[rank]`` bytes of those of the first one, in order of ranks."""
        rank = self.group.rank
        if data is None:
            data = memory.empty([sizes[rank]], torch.uint8)
        self._exchange(data, rounds.scatter_from_first(rank, sizes))
        return data[: sizes[rank]]

    def broadcast(self, data: Tensor) -> None:
        """Fill the bytes with those of the first rank."""
        rank, size = self.group.rank, self.group.size
        if not is_in_parts(size, size, data.numel()):
            self._exchange(data, rounds.broadcast(rank, size, data.numel()))
            return
        parts = even_parts(data.numel(), size)
        part = data[: parts[rank]]
        self._exchange(data if rank == 0 else part, rounds.scatter_from_first(rank, parts))
        gathered, starts = self.gather(part, parts)
        if rank > 0:
            data.copy_(gathered.roll(-starts[0]))

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
            gathered, starts = self.gather(as_bytes(rows), [n * row_bytes for n in num_rows])
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
        gathered, starts = self.gather(as_bytes(total), parts)
        return gathered.roll(-starts[0]).view(rows.dtype)

    def _exchange(self, data: Tensor, all_rounds: list[Round]) -> None:
        messages = self.group.messages
        assert messages is not None
        if any(sends or receives for sends, receives in all_rounds):
            self._wait([messages.exchange(data, all_rounds)])


class Gloo:
    """See ``Transport``.

    Args:
        group: All ranks.
        between: The first rank of each host, on those; None elsewhere.
        inside: The ranks of this host; None: each rank is a host.
    """

    def __init__(
        self, group: PrivateGroup, between: BetweenHosts | None, inside: SharedMemory | None = None
    ) -> None:
        self.group = group
        self._between, self._inside = between, inside
        if inside is None:
            self.name = "gloo"
            self._ranks_of_hosts, self._host = [[r] for r in range(group.size)], group.rank
        else:
            self.name = "shared_memory inside a host, gloo between hosts"
            by_name = group.hosts.by_name
            self._ranks_of_hosts = list(by_name.values())
            self._host = list(by_name).index(group.hosts.names[group.rank])

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return transport.exchange_bytes(self.exchange, data)

    def exchange(self, tensor: Tensor) -> Tensor:
        size, num_ranks = tensor.nbytes, self.group.size
        if not size:
            return tensor.new_empty((num_ranks, *tensor.shape))
        gathered = self._on_first_of_hosts(as_bytes(tensor), [size] * num_ranks)
        rows = None
        if gathered is not None:
            data, starts = gathered
            # The ranks of hosts follow one another from wherever this host's are.
            rows = data.reshape(num_ranks, size)[[start // size for start in starts]]
        rows = self._on_host(rows, torch.empty((num_ranks, size), dtype=torch.uint8, device="cpu"))
        return rows.view(tensor.dtype).reshape(num_ranks, *tensor.shape)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        gathered = self._on_first_of_hosts(as_bytes(shard), plan.shard_bytes)
        full = None if gathered is None else assemble(*gathered, plan, shard.dtype)
        full = self._on_host(
            full, torch.empty((), dtype=shard.dtype, device="cpu").expand(plan.full_sizes)
        )
        if not num_copies:
            return []
        return [copy.to(shard.device) for copy in transport.copies(full, num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        packing = Packing.of([(t.plan, t.ranks) for t in tensors], self.group.size)
        sizes = packing.totals
        data = packing.packed([on_cpu(t.shard) for t in tensors], self.group.rank)
        of_host = self._bytes_of_host(data, sizes)
        if self._between is None:
            return None
        assert of_host is not None
        totals = self._of_hosts(sizes)
        received = self._between.gather_to_first(of_host, totals)
        if received is None:
            return None
        before = self._starts(list(itertools.accumulate(totals, initial=0)), sizes)
        fulls = []
        for tensor, placed in zip(tensors, packing.offsets):
            offsets = [before[holder] + start for holder, start in zip(tensor.ranks, placed)]
            fulls += tensor.copies(assemble(received, offsets, tensor.plan, tensor.shard.dtype))
        return fulls

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        of_ranks = plan.shard_bytes
        shard = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._between is not None:
            data = None
            if full is not None:
                host, order = on_cpu(full), itertools.chain(*self._ranks_of_hosts)
                data = torch.cat([as_bytes(split(host, plan, r)) for r in order])
            shard = self._between.scatter_from_first(data, self._of_hosts(of_ranks))
        if self._inside is not None:
            here = end_to_end([of_ranks[r] for r in self._ranks_of_hosts[self._host]])
            own = torch.empty(of_ranks[self.group.rank], dtype=torch.uint8, device="cpu")
            of_host = None if self._between is None else shard
            shard = self._inside.scatter_from_first(of_host, own, here)
        return shard.view(like.dtype).reshape(like.shape).to(like.device)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        host = memory.empty(like.shape, like.dtype) if tensor is None else on_cpu(tensor)
        if self._between is not None:
            self._between.broadcast(as_bytes(host))
        received = self._on_host(host, host)
        return received.to(like.device) if tensor is None else tensor

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return transport.sum_of_pieces(on_cpu(tensor), self._sum).to(tensor.device)

    def _sum(self, piece: Tensor) -> Tensor:
        of_host = self._bytes_of_host(as_bytes(piece), [piece.nbytes] * self.group.size)
        total = None
        if self._between is not None:
            assert of_host is not None
            rows = of_host.view(piece.dtype).reshape(-1, piece.numel())
            num_rows = [len(ranks) for ranks in self._ranks_of_hosts]
            before = list(itertools.accumulate(num_rows, initial=0))
            order = self._starts(before, [1] * self.group.size)
            total = self._between.sum_of_rows(rows, num_rows, order)
        return self._on_host(total, piece)

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
        data, before = self._between.gather(of_host, self._of_hosts(sizes))
        return data, self._starts(before, sizes)

    def _on_host(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Return the CPU tensor of this host's first rank on all its ranks; see ``broadcast``."""
        if self._inside is None:
            assert tensor is not None
            return tensor
        return self._inside.broadcast(None if self._between is None else tensor, like)

    def _bytes_of_host(self, local: Tensor, sizes: list[int]) -> Tensor | None:
        """Gather the bytes of this host's ranks on the first of them."""
        if self._inside is None:
            return local
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


def assemble(gathered: Tensor, offsets: list[int], plan: GatherPlan, dtype: torch.dtype) -> Tensor:
    """Assemble the full tensor from all shards' bytes; rank r's begin at ``offsets[r]``. Local."""
    return torch.ops.flex_model.assemble(gathered, offsets, plan.code, plan.full_sizes, dtype)


def split(full: Tensor, plan: GatherPlan, rank: int) -> Tensor:
    """Copy one rank's shard out of a contiguous ``full``. Local."""
    return torch.ops.flex_model.split(full, plan.code, rank, plan.shard_sizes[rank])
