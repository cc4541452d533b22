"""Combines a transport of CPU tensors and one of GPU tensors of the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.diagnostics import logger
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.transport import (
    Gathered,
    TensorTransport,
    Transport,
    UnavailableError,
)
from flex_model.errors import HookError, agreed

Result = TypeVar("Result")


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


class Untried:
    """The transports of GPU tensors that the ranks of a group have not tried yet.

    Args:
        means: The name of each, the best first, and a collective function that connects the ranks.
        reasons: Why others are not used.
        wanted: The one that the environment requests; empty: any.
    """

    def __init__(
        self,
        means: Sequence[tuple[str, Callable[[], GpuTransport]]],
        reasons: list[str],
        wanted: str,
    ) -> None:
        self.reasons = reasons
        self._means, self._wanted = list(means), wanted

    def connect(self) -> GpuTransport | None:
        """Connect the ranks by the best one that works on all of them; None if there is none.
        Collective.

        Raises:
            HookError: the environment requests one that does not work; on every rank.
        """
        while self._means:
            name, connect = self._means.pop(0)
            try:
                return connect()
            except UnavailableError as error:
                self.reasons.append(f"{name}: {error}")
        if self._wanted:
            why = "; ".join(self.reasons)
            raise agreed(HookError(f"FLEX_MODEL_TRANSPORT={self._wanted} is not available: {why}"))
        return None


class ByDevice:
    """See ``Transport``.

    A tensor is on the same type of device on all ranks. That includes ``Gathered.shard`` of ranks
    that hold none: their empty tensor must be on that type of device.

    Args:
        on_cpu: The transport of CPU tensors, and of exchanges of a few bytes.
        on_gpu: The transport of GPU tensors; None: ``on_cpu`` stages them.
        host_gather: Gathers on rank 0, where it is available; it takes shards of any device, which
            may differ by rank.
        untried: What replaces ``on_gpu`` if its memory can't grow.
    """

    def __init__(
        self,
        on_cpu: Transport,
        on_gpu: GpuTransport | None,
        host_gather: HostGather | None = None,
        untried: Untried | None = None,
    ) -> None:
        self.name = on_cpu.name if on_gpu is None else on_gpu.name
        self.group = on_cpu.group
        self.host_gather = host_gather
        self._on_cpu, self.on_gpu, self._untried = on_cpu, on_gpu, untried
        self.exchange_bytes, self.exchange = on_cpu.exchange_bytes, on_cpu.exchange

    def changes(self, why: str) -> str:
        """What has changed on this rank since the choice, which ``why`` explains. Local."""
        changes = [] if self._untried is None else [*self._untried.reasons]
        refused = "" if self.host_gather is None else self.host_gather.why_not_locked()
        if refused and refused not in why:
            changes.append(f"host_copies: staged in part on this rank: {refused}")
        return "".join(f"; {change}" for change in changes if change not in why)

    def _by(self, tensor: Tensor, transfer: Callable[[Transport | GpuTransport], Result]) -> Result:
        """Transfer by the transport of a tensor's device. If it refuses, on all ranks alike and
        before anything has moved, the next one replaces it.
        """
        while tensor.is_cuda and self.on_gpu is not None:
            try:
                return transfer(self.on_gpu)
            except UnavailableError as error:
                if self._untried is None:
                    raise
                reason = f"{self.on_gpu.name} can't be used any more: {error}"
            # Here nothing refers to the memory that the transfer allocated.
            if reason not in self._untried.reasons:
                self._untried.reasons.append(reason)
            before, self.on_gpu = self.on_gpu, self._untried.connect()
            before.close()
            self.name = self._on_cpu.name if self.on_gpu is None else self.on_gpu.name
            logger.warning("%s; GPU tensors go by %s now", reason, self.name)
        return transfer(self._on_cpu)

    def host_gather_of(self, tensors: list[Gathered]) -> HostGather | None:
        """Return ``host_gather`` if it gathers these tensors. Local."""
        stay = self.on_gpu is not None and any(tensor.stays for tensor in tensors)
        return None if stay else self.host_gather

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        return self._by(shard, lambda to: to.all_gather(shard, plan, num_copies, num_read))

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        host_gather = self.host_gather_of(tensors)
        if host_gather is not None:
            return host_gather.gather_to_first(tensors)
        sides = [[t for t in tensors if t.shard.is_cuda is on_gpu] for on_gpu in (False, True)]
        fulls = [iter(self._gather_to_first(side) or []) for side in sides if side]
        if self.group.rank != 0:
            return None
        if not all(sides):
            return [full for side in fulls for full in side]
        return [next(fulls[t.shard.is_cuda]) for t in tensors for _ in range(t.num_copies)]

    def _gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        """Gather tensors of one type of device."""
        return self._by(tensors[0].shard, lambda to: to.gather_to_first(tensors))

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        return self._by(like, lambda to: to.scatter_from_first(full, like, plan))

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        return self._by(like, lambda to: to.broadcast(tensor, like))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return self._by(tensor, lambda to: to.all_reduce_sum(tensor))
