"""Chooses the transport of a group: by all its ranks together, at their first transfer; for
GPU tensors the best that all of them can use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flex_model.distributed import kernels
from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import nccl
from flex_model.distributed.transports.by_device import ByDevice, GpuTransport, Untried
from flex_model.distributed.transports.gloo import BetweenHosts, Gloo
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.peer_memory import CudaIpc, PeerMemory, number_of
from flex_model.distributed.transports.shared_memory import SharedMemory
from flex_model.distributed.transports.transport import (
    Transport,
    UnavailableError,
    Wait,
    by_ranks,
    exchange_texts,
)


def choose(group: PrivateGroup, wait: Wait, device: torch.device) -> tuple[Transport, str]:
    """Choose the transport of a group; return it with the reason. Collective where a rank's
    ``device`` is a GPU; the same on all ranks.

    Raises:
        HookError: ``FLEX_MODEL_TRANSPORT`` is a transport that is not available; on every rank.
    """
    on_cpu, why = _choose_on_cpu(group, wait)
    if "cuda" not in group.hosts.devices:
        return on_cpu, why
    return connect(on_cpu, why, wait, device, group.hosts.settings.transport)


def _choose_on_cpu(group: PrivateGroup, wait: Wait) -> tuple[Transport, str]:
    hosts = group.hosts
    if hosts.here is None:
        return Gloo(group, BetweenHosts(group, wait)), hosts.why_not_shared
    inside = SharedMemory(group, hosts.here)
    if hosts.is_one:
        return inside, "the ranks are on one host"
    between = None if group.leaders is None else BetweenHosts(group.leaders, wait)
    names = ", ".join(dict.fromkeys(hosts.names))
    return Gloo(group, between, inside), f"the ranks are on several hosts: {names}"


# ---- GPU tensors ---------------------------------------------------------------------------------

NAMES = ("peer_memory", "nccl")


@dataclass(frozen=True)
class Rank:
    """The capabilities of a rank.

    Attributes:
        gpu: A number that identifies its GPU; 0 if it has none.
        has_nccl: Whether torch has it.
        why_no_kernels: Why its GPU can't run the CUDA kernels; empty if it can.
    """

    gpu: int
    has_nccl: bool
    why_no_kernels: str = ""


def candidates(
    ranks: list[Rank], is_one_host: bool, wanted: str = "auto"
) -> tuple[list[str], list[str]]:
    """The names of the transports to try, the best first, and why the others are left out."""
    left_out: list[tuple[tuple[str, ...], str]] = []

    def leave_out(names: tuple[str, ...], which: list[int], why: str) -> None:
        if which:
            left_out.append((names, f"ranks {which} {why}"))

    leave_out(NAMES, [r for r, rank in enumerate(ranks) if not rank.gpu], "have no GPU")
    left_out += [(NAMES, why) for why in by_ranks([rank.why_no_kernels for rank in ranks])]
    leave_out(("nccl",), [r for r, rank in enumerate(ranks) if not rank.has_nccl], "have no NCCL")
    gpus = [rank.gpu for rank in ranks]
    shared = [r for r, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]
    leave_out(("nccl",), shared, "share a GPU")
    if not is_one_host:
        left_out.append((("peer_memory",), "the ranks are on several hosts"))
    others = tuple(name for name in NAMES if wanted not in ("auto", name))
    if others:
        left_out.append((others, f"FLEX_MODEL_TRANSPORT={wanted}"))
    chosen = [name for name in NAMES if not any(name in names for names, _ in left_out)]
    return chosen, [f"{', '.join(names)}: {why}" for names, why in left_out]


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

    Raises:
        HookError: ``wanted`` is a GPU transport that is not available; on every rank.
    """
    group = on_cpu.group
    ranks = _ranks(on_cpu, device)
    names, reasons = candidates(ranks, group.hosts.is_one, wanted)
    failures = by_ranks([rank.why_no_kernels for rank in ranks])
    if failures and wanted == "auto":
        warnings.warn(
            f"GPU tensors pass through the CPU: {'; '.join(failures)}. See what "
            "`python -m flex_model doctor` says",
            RuntimeWarning,
            stacklevel=2,
        )
    host_gather = None
    if wanted not in NAMES and not failures and all(rank.gpu for rank in ranks):
        host_gather = connect_host_gather(on_cpu, device, reasons)
    means = [(name, partial(_MEANS[name], on_cpu, wait, device)) for name in names]
    untried = Untried(means, reasons, wanted if wanted in NAMES else "")
    on_gpu = untried.connect()
    first = why if on_gpu is None else "the ranks' GPUs reach each other"
    why = "; ".join([first, *reasons])
    if on_gpu is None and host_gather is None:
        return on_cpu, why
    return ByDevice(on_cpu, on_gpu, host_gather, untried), why


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
    texts = exchange_texts(on_cpu, gather.try_locking())
    reasons.append("collected shards go from each GPU to host memory that the ranks share")
    refused = [f"rank {rank}: {other}" for rank, other in enumerate(texts) if other]
    if refused:
        reasons.append(f"host_copies: staged through other memory on {', '.join(refused)}")
    return gather


def _ranks(on_cpu: Transport, device: torch.device) -> list[Rank]:
    """Gather the capabilities of all ranks. Collective."""
    local = _rank(device)
    numbers = torch.tensor([local.gpu, local.has_nccl], dtype=torch.int64, device="cpu")
    rows = on_cpu.exchange(numbers).tolist()
    texts = exchange_texts(on_cpu, local.why_no_kernels)
    return [Rank(gpu, bool(has_nccl), text) for (gpu, has_nccl), text in zip(rows, texts)]


def _rank(device: torch.device) -> Rank:
    """Determine the capabilities of this rank."""
    if device.type != "cuda":
        return Rank(0, False)
    return Rank(number_of(device), nccl.is_available(), kernels.why_unusable(device))


def _peer_memory(on_cpu: Transport, wait: Wait, device: torch.device) -> GpuTransport:
    peers = CudaIpc(on_cpu, wait, device)
    try:
        peers.allocate(1 << 20)
    except UnavailableError:
        peers.close()
        raise
    return PeerMemory(on_cpu.group, peers)


_MEANS: dict[str, Callable[[Transport, Wait, torch.device], GpuTransport]] = {
    "peer_memory": _peer_memory,
    "nccl": nccl.Nccl,
}
