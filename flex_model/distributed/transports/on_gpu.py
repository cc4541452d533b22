"""Chooses the transport of a group's GPU tensors: the best that all its ranks can use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flex_model import _load
from flex_model.distributed.transports import nccl, peer_buffers
from flex_model.distributed.transports.by_device import ByDevice, GpuTransport
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.peer_memory import PeerMemory
from flex_model.distributed.transports.transport import Transport, Wait

NAMES = ("peer_memory", "nccl")
_REASON_BYTES = 300


@dataclass(frozen=True)
class Rank:
    """The capabilities of a rank.

    Attributes:
        gpu: A number that identifies its GPU; 0 if it has none.
        has_kernels: Whether `_cuda` is loaded.
        has_nccl: Whether torch has it.
    """

    gpu: int
    has_kernels: bool
    has_nccl: bool


def candidates(
    ranks: list[Rank], is_one_host: bool, wanted: str = "auto"
) -> tuple[list[str], list[str]]:
    """The names of the transports to try, the best first, and why the others are left out."""
    reasons: dict[str, list[str]] = {name: [] for name in NAMES}

    def leave_out(names: tuple[str, ...], which: list[int], why: str) -> None:
        for name in names if which else ():
            reasons[name].append(f"ranks {which} {why}")

    leave_out(NAMES, [r for r, rank in enumerate(ranks) if not rank.gpu], "have no GPU")
    without = [r for r, rank in enumerate(ranks) if not rank.has_kernels]
    leave_out(NAMES, without, "have no CUDA kernels of flex_model")
    leave_out(("nccl",), [r for r, rank in enumerate(ranks) if not rank.has_nccl], "have no NCCL")
    gpus = [rank.gpu for rank in ranks]
    shared = [r for r, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    leave_out(("nccl",), shared, "share a GPU")
    if not is_one_host:
        reasons["peer_memory"].append("the ranks are on several hosts")
    for name in NAMES:
        if wanted not in ("auto", name):
            reasons[name].append(f"FLEX_MODEL_TRANSPORT={wanted}")
    chosen = [name for name in NAMES if not reasons[name]]
    return chosen, [f"{name}: {', '.join(why)}" for name, why in reasons.items() if why]


def connect(
    on_cpu: Transport, why: str, wait: Wait, device: torch.device, wanted: str = "auto"
) -> tuple[Transport, str]:
    """Return a transport of CPU and GPU tensors, and the reason for the choice. Collective.

    If no GPU transport is available, ``on_cpu`` stages GPU tensors through the CPU; then ``why``,
    its own reason, comes first. Gathers to rank 0 use its host memory where possible: see
    ``HostGather``.

    Args:
        device: The device of this rank's model; may be a CPU.
        wanted: ``FLEX_MODEL_TRANSPORT``.
    """
    group = on_cpu.group
    rows = on_cpu.exchange(torch.tensor(_facts(device), dtype=torch.int64)).tolist()
    ranks = [Rank(row[0], bool(row[1]), bool(row[2])) for row in rows]
    names, reasons = candidates(ranks, group.hosts.is_one, wanted)
    host_gather = None
    if wanted not in NAMES and all(rank.gpu and rank.has_kernels for rank in ranks):
        host_gather = connect_host_gather(on_cpu, device, reasons)
    for name in names:
        on_gpu, error = None, ""
        try:
            on_gpu = _make(name, on_cpu, wait, device)
        except RuntimeError as reason:
            if group.broken:  # a rank is missing: no other transport would find it
                raise
            error = " ".join(str(reason).split())[:300]
        if not on_cpu.exchange(torch.tensor([bool(error)])).any():
            assert on_gpu is not None
            why = "; ".join(["the ranks' GPUs reach each other", *reasons])
            return ByDevice(on_cpu, on_gpu, host_gather), why
        if on_gpu is not None:
            on_gpu.close()
        reasons.append(f"{name}: {error or 'it failed on another rank'}")
    why = "; ".join([why, *reasons])
    return (on_cpu if host_gather is None else ByDevice(on_cpu, None, host_gather)), why


def connect_host_gather(
    on_cpu: Transport, device: torch.device, reasons: list[str]
) -> HostGather | None:
    """Return the gather of GPU tensors into host memory of rank 0, if the ranks share it, and
    append its description to ``reasons``. Collective.
    """
    group = on_cpu.group
    if group.hosts.here is None or not group.hosts.is_one:
        reasons.append("host_copies: the ranks share no host memory")
        return None
    gather = HostGather(group, group.hosts.here, device)
    text = gather.try_locking().encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    texts = [other.rstrip(b"\0").decode(errors="replace") for other in on_cpu.exchange_bytes(text)]
    reasons.append("collected shards go from each GPU to host memory that the ranks share")
    refused = [f"rank {rank}: {other}" for rank, other in enumerate(texts) if other]
    if refused:
        reasons.append(f"host_copies: staged through other memory on {', '.join(refused)}")
    return gather


def _make(name: str, on_cpu: Transport, wait: Wait, device: torch.device) -> GpuTransport:
    if name == "nccl":
        return nccl.Nccl(on_cpu, wait, device)
    return PeerMemory(on_cpu.group, peer_buffers.connect(on_cpu, wait, device))


def _facts(device: torch.device) -> list[int]:
    """Return the fields of ``Rank`` as numbers."""
    if device.type != "cuda":
        return [0, 0, 0]
    properties: Any = torch.cuda.get_device_properties(device)
    gpu = int(str(properties.uuid).replace("-", "")[:15], 16)
    return [gpu, int(_load.has_cuda_kernels()), int(nccl.is_available())]
