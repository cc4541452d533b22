"""Copies whole tensors of GPUs to memory of the CPU, at the speed of the bus where that memory is
page-locked, else through other memory; and gathers shards on any device into full tensors in host
memory that the ranks of a host share.

Rank 0 sends the addresses of its tensors; GPUs copy their shards there, each over its own bus, and
the CPU writes the others. Each rank chooses for each shard by itself: it may have moved the shard
to the CPU before, or may not be allowed to page-lock memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flex_model import _C
from flex_model.distributed import memory
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import buffer_layout, host_copies
from flex_model.distributed.transports.transport import Gathered, end_to_end, on_cpu


def to_host(tensors: list[tuple[Tensor, host_copies.Ready | None]]) -> list[Tensor]:
    """Copy tensors of GPUs to CPU memory of their own, each when it is ready; where the process's
    pool is open and page-locked, the host waits once, for all of them. Local.
    """
    results, others = [], []
    for tensor, ready in tensors:
        full = memory.empty(tensor.shape, tensor.dtype)
        results.append(full)
        segment, num_bytes = _C.arena_segment(full.data_ptr())
        if segment and host_copies.of_arena.has(segment, num_bytes, tensor.device):
            host_copies.of_process.start(
                tensor, full.data_ptr(), end_to_end([full.nbytes]), 0, ready, full
            )
        else:
            others.append((full, tensor, ready))
    for (full, *_), host in zip(others, staged([(t, ready) for _, t, ready in others])):
        full.copy_(host)
    host_copies.of_process.wait()
    return results


def staged(tensors: list[tuple[Tensor, host_copies.Ready | None]]) -> list[Tensor]:
    """Return contiguous CPU tensors of the same values, by copies that the host waits for; small
    ones of a GPU share one. Local.
    """
    results: list[Tensor | None] = []
    small: dict[torch.device, list[int]] = {}
    for i, (tensor, ready) in enumerate(tensors):
        if ready is not None:
            ready.wait(tensor)
        if host_copies.is_on_gpu(tensor) and 0 < tensor.nbytes < memory.POOLED_BYTES:
            small.setdefault(tensor.device, []).append(i)
            results.append(None)
        else:
            results.append(on_cpu(tensor))
    for places in small.values():
        offsets, total = [], 0
        for i in places:
            offsets.append(total)
            total += buffer_layout.aligned(tensors[i][0].nbytes)
        plain = [tensors[i][0].detach().resolve_conj().resolve_neg() for i in places]
        packed = torch.ops.flex_model.pack_tensors(plain, offsets, total).cpu()
        for i, tensor, offset in zip(places, plain, offsets):
            data = packed[offset : offset + tensor.nbytes]
            results[i] = data.view(tensor.dtype).view(tensor.shape)
    return [result for result in results if result is not None]


# ---- Gathers to rank 0 ---------------------------------------------------------------------------


class HostGather:
    """Implements ``Transport.gather_to_first`` for shards on any device.

    Args:
        group: The ranks, all of one host, ``host``.
        device: This rank's GPU.
    """

    name = "host_copies"

    def __init__(self, group: PrivateGroup, host: _C.HostGroup, device: torch.device) -> None:
        self.group = group
        self._host = host
        self._device = device
        self._copies = host_copies.of_process
        # Locks of rank 0's pool, which the other ranks map with the group.
        self._locks = host_copies.of_arena if group.rank == 0 else group.locks

    def why_not_locked(self) -> str:
        """Why some of this rank's shards are staged through other memory; empty if none is.
        Local.
        """
        return self._locks.why_refused or host_copies.of_arena.why_refused

    def try_locking(self) -> str:
        """Try to lock a segment, and return ``why_not_locked``. Local."""
        probe = memory.empty([memory.POOLED_BYTES], torch.uint8)
        segment, num_bytes = _C.arena_segment(probe.data_ptr())
        if segment:
            host_copies.of_arena.has(segment, num_bytes, self._device)
        return self.why_not_locked()

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """Gather as ``Transport.gather_to_first`` does; the device of a tensor's shard may differ
        by rank. Collective.

        An error if a shard does not fit its plan.
        """
        rank, is_first = self.group.rank, self.group.rank == 0
        local = [(i, t.ranks.index(rank)) for i, t in enumerate(tensors) if rank in t.ranks]
        fulls = [memory.empty(t.plan.full_sizes, t.shard.dtype) for t in tensors if is_first]
        targets: Sequence[Tensor | None] = fulls or [None] * len(tensors)
        opened = self._host.open_gather([(t.plan, t.ranks, f) for t, f in zip(tensors, targets)])
        by_cpu = []
        addresses = opened.targets
        for i, place in local:
            tensor, (address, segment, num_bytes) = tensors[i], addresses[i]
            if (
                address
                and tensor.shard.nbytes
                and host_copies.is_on_gpu(tensor.shard)
                and self._locks.has(segment, num_bytes, self._device)
            ):
                self._copies.start(tensor.shard, address, tensor.plan, place, tensor.ready)
            else:
                by_cpu.append(i)
        copies = staged([(tensors[i].shard, tensors[i].ready) for i in by_cpu])
        shards: list[Tensor | None] = [None] * len(tensors)
        for i, shard in zip(by_cpu, copies):
            shards[i] = shard
        self._copies.wait(lambda: self._host.is_broken)  # then `end` raises the reason
        opened.end(shards)
        if not is_first:
            return None
        return [copy for tensor, full in zip(tensors, fulls) for copy in tensor.copies(full)]
