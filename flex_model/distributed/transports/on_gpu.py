"""Which transport the GPU tensors of a group use: the best that all its ranks can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flex_model import _load
from flex_model.distributed.transports import nccl, peer_buffers
from flex_model.distributed.transports.by_device import ByDevice, GpuTransport
from flex_model.distributed.transports.peer_memory import PeerMemory
from flex_model.distributed.transports.transport import Transport, Wait

NAMES = ("peer_memory", "nccl")


@dataclass(frozen=True)
class Rank:
    """What a rank has.

    Attributes:
        gpu: Of its device: a number that no other GPU has; 0 if there is none.
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
    """A transport of CPU and GPU tensors, and why it is this one. Collective.

    Where no GPU transport can be had it is ``on_cpu``, which stages GPU tensors through the CPU;
    then ``why``, of that one, goes before the reasons.

    Args:
        device: Of this rank's model; may be a CPU.
        wanted: ``FLEX_MODEL_TRANSPORT``.
    """
    group = on_cpu.group
    told = on_cpu.exchange(torch.tensor(_facts(device), dtype=torch.int64)).tolist()
    ranks = [Rank(row[0], bool(row[1]), bool(row[2])) for row in told]
    names, reasons = candidates(ranks, group.hosts.is_one, wanted)
    for name in names:
        way, error = None, ""
        try:
            way = _make(name, on_cpu, wait, device)
        except RuntimeError as reason:
            if group.broken:  # a rank is missing: no other transport would find it
                raise
            error = " ".join(str(reason).split())[:300]
        if not on_cpu.exchange(torch.tensor([bool(error)])).any():
            assert way is not None
            return ByDevice(on_cpu, way), "; ".join(["the ranks' GPUs reach each other", *reasons])
        if way is not None:
            way.close()
        reasons.append(f"{name}: {error or 'it failed on another rank'}")
    return on_cpu, "; ".join([why, *reasons])


def _make(name: str, on_cpu: Transport, wait: Wait, device: torch.device) -> GpuTransport:
    if name == "nccl":
        return nccl.Nccl(on_cpu.group, wait, device)
    return PeerMemory(on_cpu.group, peer_buffers.connect(on_cpu, wait, device))


def _facts(device: torch.device) -> list[int]:
    """As ``Rank``, in words."""
    if device.type != "cuda":
        return [0, 0, 0]
    properties: Any = torch.cuda.get_device_properties(device)
    gpu = int(str(properties.uuid).replace("-", "")[:15], 16)
    has_kernels = _load.build_info()["loaded"].get("_cuda") == "loaded"
    return [gpu, int(has_kernels), int(nccl.is_available())]
