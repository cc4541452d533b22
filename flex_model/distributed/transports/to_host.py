"""Copies whole tensors of GPUs to memory of the CPU: at the speed of the bus where that memory is
page-locked, else through other memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flex_model import _C
from flex_model.distributed import memory, page_locks
from flex_model.distributed.transports import buffer_layout, host_copies
from flex_model.distributed.transports.transport import end_to_end, on_cpu


def to_host(tensors: list[tuple[Tensor, host_copies.Ready | None]]) -> list[Tensor]:
    """Copy tensors of GPUs to CPU memory of their own, each when it is ready; where the process's
    pool is open and page-locked, the host waits once, for all of them. Local.
    """
    results, others = [], []
    for tensor, ready in tensors:
        full = memory.empty(tensor.shape, tensor.dtype)
        results.append(full)
        segment, num_bytes = _C.arena_segment(full.data_ptr())
        if segment and page_locks.of_arena.has(segment, num_bytes, tensor.device):
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
