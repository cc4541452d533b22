"""Transfers by a private NCCL group, along a GatherPlan: for CUDA shards on any hosts.

A collective runs on NCCL's own stream, for which the current stream waits, but not the host. When
a wait of the host fails, the NCCL communicator is aborted, which ends its kernels on the GPU; the
user's groups are untouched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.transports import buffer_layout
from flex_model.distributed.transports.transport import (
    Gathered,
    TensorTransport,
    Transport,
    UnavailableError,
    Wait,
    on_every_rank,
)

# NCCL's own watchdog ends the process at its timeout, so ours must come well before.
_BACKEND_SLACK_S = 60.0
_ROUND_BYTES = 256 << 20  # of what rank 0 of the group gathers on its GPU at once
_CLOSE_S = 5.0  # how long to wait for peers, which close at their own time


def is_available() -> bool:
    """Whether torch has NCCL and there is a GPU. Local."""
    return torch.cuda.is_available() and dist.is_nccl_available()


class Nccl(TensorTransport):
    """Implements ``GpuTransport`` by NCCL, with one CUDA device per rank; see ``ByDevice``.

    The transfers are collective over the group, and so is the constructor: it connects the
    communicator at once, so that a missing rank is detected here, with a deadline.

    Args:
        on_cpu: The CPU transport of the same ranks; it and its group's store are used to connect.
        wait: Waits for works with a deadline, then raises what they raise.
        device: This rank's GPU; no two ranks of the group may have the same.

    Raises:
        UnavailableError: the ranks can't be connected; on every rank.
    """

    name = "nccl"

    def __init__(self, on_cpu: Transport, wait: Wait, device: torch.device) -> None:
        self.group = on_cpu.group
        self._host_wait = wait
        self._device = device
        self._works: list[Any] = []  # of the last transfer
        self._backend: Any = None
        try:
            # Connecting blocks the thread until all ranks connect: check first that they will.
            self._backend = on_every_rank(on_cpu, self._make)
            on_every_rank(on_cpu, self._connect)
        except UnavailableError:
            self.abort()
            raise

    def _make(self) -> Any:
        group = self.group
        # A store's keys outlive the group, so a name is never used twice; ranks count equally.
        number = group.bounded_store.next_number(f"nccl/{group.rank}")
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=group.timeout_s + _BACKEND_SLACK_S)
        options.global_ranks_in_group = list(group.ranks)
        options.group_name = f"flex_model/nccl/{group.number}/{number}"
        store = dist.PrefixStore(f"nccl/{number}", group.store)
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(store, group.rank, group.size, options)

    def _connect(self) -> None:
        flags = torch.zeros(self.group.size, dtype=torch.uint8, device=self._device)
        self._queue([self._backend._allgather_base(flags, flags[:1].clone())])
        self.finish()

    def check(self) -> None:
        """See ``GpuTransport``; NCCL reports failures only to those who wait."""

    def finish(self) -> None:
        """See ``GpuTransport``."""
        try:
            self._host_wait(self._works)
        except BaseException:
            self.abort()
            raise
        self._works = []

    def close(self) -> None:
        """End the communicator, once its transfers are complete on all ranks; without that if a
        rank is missing, or after 5 s. Local.
        """
        if self.group.broken is not None:
            self.abort()
            return
        backend, self._backend, self._works = self._backend, None, []
        if backend is not None:
            # What a peer still receives is sent by this process. In a thread, because it waits for
            # peers without a deadline; one that is late then keeps the communicator.
            end = threading.Thread(target=_quietly, args=(backend.shutdown,), daemon=True)
            end.start()
            end.join(_CLOSE_S)

    def abort(self) -> None:
        """See ``GpuTransport``."""
        backend, self._backend, self._works = self._backend, None, []
        if backend is not None:
            _quietly(backend.abort)

    def _queue(self, works: list) -> None:
        """Make the current stream wait for works. Those before them end before them."""
        self._works = works
        for work in works:
            work.wait()

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _gathered(self, data: Tensor, out: Tensor) -> Tensor:
        """All-gather ``data`` into ``out``, in rank order, and return ``out``."""
        if data.numel():
            self._queue([self._backend._allgather_base(out, data)])
        return out

    def _grouped(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]):
        """Do sends and receives in one group call."""
        sends = [(data, rank) for data, rank in sends if data.numel()]
        receives = [(data, rank) for data, rank in receives if data.numel()]
        if not sends and not receives:
            return
        self._backend._start_coalescing()
        for data, rank in sends:
            self._backend.send([data], rank, 0)
        for data, rank in receives:
            self._backend.recv([data], rank, 0)
        self._queue([self._backend._end_coalescing()])

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        """Return ``num_copies`` full tensors, on the device of ``shard``; the number may differ by
        rank.

        If the full tensor is the concatenation of the shards, they are received in it directly;
        otherwise in one buffer, from which one kernel assembles it.
        """
        shard = shard.detach()
        if buffer_layout.is_concatenation(plan):
            full = shard.new_empty(plan.full_sizes)
            self._gathered(buffer_layout.as_bytes(shard), full.reshape(-1).view(torch.uint8))
            return [full, *(full.clone() for _ in range(num_copies - 1))][:num_copies]
        width = buffer_layout.even_width(plan)
        if shard.nbytes == width:
            data = buffer_layout.as_bytes(shard)
        else:
            data = torch.ops.flex_model.pack_tensors([shard], [0], width)
        gathered = self._gathered(data, self._empty(self.group.size * width))
        offsets = [rank * width for rank in range(self.group.size)]
        return [
            torch.ops.flex_model.assemble(
                gathered, offsets, plan.code, plan.full_sizes, shard.dtype
            )
            for _ in range(num_copies)
        ]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """Gather as ``Transport.gather_to_first`` does, with many tensors per message. Rank 0 holds
        at most 256 MiB of shards on its GPU at once, or one tensor.
        """
        fulls: list[Tensor] = []
        rank = self.group.rank
        for part in buffer_layout.rounds([tensor.plan for tensor in tensors], _ROUND_BYTES):
            some = [tensors[i] for i in part]
            packing = buffer_layout.Packing.of([(t.plan, t.ranks) for t in some], self.group.size)
            plans, shards = [t.plan for t in some], [t.shard for t in some]
            packed = packing.packed(shards, rank)
            if rank != 0:
                self._grouped([(packed, 0)], [])
                continue
            gathered = self._empty(sum(packing.totals))
            parts = gathered.split(packing.totals)
            parts[0].copy_(packed)
            self._grouped([], [(parts[r], r) for r in range(1, self.group.size)])
            for tensor, full in zip(
                some, buffer_layout.assemble_tensors(gathered, packing, plans, shards)
            ):
                fulls += tensor.copies(full)
        return fulls if rank == 0 else None

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        """This rank's shard of rank 0's ``full``, with the shape, dtype and device of ``like``."""
        if self.group.rank != 0:
            shard = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self._grouped([], [(buffer_layout.as_bytes(shard), 0)])
            return shard
        assert full is not None
        full = full.detach().contiguous()
        packing = buffer_layout.Packing.of([(plan, list(range(self.group.size)))], self.group.size)
        packed = torch.ops.flex_model.pack(full, plan.code, packing.starts, sum(packing.totals))
        parts = [
            packed.narrow(0, start, size) for start, size in zip(packing.starts, plan.shard_bytes)
        ]
        self._grouped([(parts[rank], rank) for rank in range(1, self.group.size)], [])
        return torch.ops.flex_model.split(full, plan.code, 0, list(like.shape))

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; ``like`` has its shape, dtype and device."""
        if self.group.rank == 0:
            assert tensor is not None
            result, data = tensor, buffer_layout.as_bytes(tensor)
        else:
            result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            data = buffer_layout.as_bytes(result)
        if data.numel():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._queue([self._backend.broadcast([data], options)])
        return result


def _quietly(end: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # it may be broken already
        end()
