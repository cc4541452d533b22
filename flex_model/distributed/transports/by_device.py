"""Combines a transport of CPU tensors and one of GPU tensors of the same ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.transport import Gathered, TensorTransport, Transport


class GpuTransport(TensorTransport, Protocol):
    """A transport of tensors on GPUs, in the order of the current stream: the host waits for none
    of its transfers, and their results are right only if ``finish`` does not raise. What follows is
    local.
    """

    def check(self) -> None:
        """TransferError if a transfer has failed so far; no wait."""

    def finish(self) -> None:
        """Wait until the GPU has done the transfers so far, with a deadline; then ``check``."""

    def abort(self) -> None:
        """End the transfers that wait for other ranks; there will be no others."""

    def close(self) -> None:
        """Free the resources."""


class ByDevice:
    """See ``Transport``.

    A tensor is on the same type of device on all ranks. That includes ``Gathered.shard`` of ranks
    that hold none: their empty tensor must be on that type of device.

    Args:
        on_cpu: The transport of CPU tensors, and of exchanges of a few bytes.
        on_gpu: The transport of GPU tensors; None: ``on_cpu`` stages them.
        host_gather: Gathers on rank 0, where it is available; it takes shards of any device, which
            may differ by rank.
    """

    def __init__(
        self,
        on_cpu: Transport,
        on_gpu: GpuTransport | None,
        host_gather: HostGather | None = None,
    ) -> None:
        self.name = on_cpu.name if on_gpu is None else on_gpu.name
        self.group = on_cpu.group
        self.host_gather = host_gather
        self._on_cpu, self._on_gpu = on_cpu, on_gpu

    def _of(self, tensor: Tensor) -> Transport | GpuTransport:
        return self._on_gpu if tensor.is_cuda and self._on_gpu is not None else self._on_cpu

    def changes(self, why: str) -> str:
        """What has changed on this rank since the choice, which ``why`` explains. Local."""
        refused = "" if self.host_gather is None else self.host_gather.why_not_locked()
        return f"; host_copies: staged in part on this rank: {refused}" * (refused not in why)

    def host_gather_of(self, tensors: list[Gathered]) -> HostGather | None:
        """Return ``host_gather`` if it gathers these tensors. Local."""
        stay = self._on_gpu is not None and any(tensor.stays for tensor in tensors)
        return None if stay else self.host_gather

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        return self._on_cpu.exchange_bytes(data)

    def exchange(self, tensor: Tensor) -> Tensor:
        return self._on_cpu.exchange(tensor)

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        return self._of(shard).all_gather(shard, plan, num_copies, num_read)

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        host_gather = self.host_gather_of(tensors)
        if host_gather is not None:
            return host_gather.gather_to_first(tensors)
        if self._on_gpu is None:
            return self._on_cpu.gather_to_first(tensors)
        transports: list[Transport | GpuTransport] = [self._on_cpu, self._on_gpu]
        sides = [[t for t in tensors if t.shard.is_cuda is on_gpu] for on_gpu in (False, True)]
        fulls = [
            iter(to.gather_to_first(side) or []) for to, side in zip(transports, sides) if side
        ]
        if self.group.rank != 0:
            return None
        if not all(sides):
            return [full for side in fulls for full in side]
        return [next(fulls[t.shard.is_cuda]) for t in tensors for _ in range(t.num_copies)]

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        return self._of(like).scatter_from_first(full, like, plan)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        return self._of(like).broadcast(tensor, like)

    def check(self) -> None:
        """See ``GpuTransport``. Local, as what follows."""
        if self._on_gpu is not None:
            self._on_gpu.check()

    def finish(self) -> None:
        """See ``GpuTransport``."""
        if self._on_gpu is not None:
            self._on_gpu.finish()

    def abort(self) -> None:
        """See ``GpuTransport``."""
        if self._on_gpu is not None:
            self._on_gpu.abort()

    def close(self) -> None:
        """Free the resources of the GPU transport."""
        if self._on_gpu is not None:
            self._on_gpu.close()
