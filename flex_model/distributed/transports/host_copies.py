"""Shards from GPUs into full tensors in host memory that the ranks of a host share.

Each rank copies its own shard to where it belongs, over its own bus: no full tensor is on any GPU,
and none travels between GPUs. The model computes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.polling import sleeps

_FIRST_PAUSE_S, _MAX_PAUSE_S = 2e-5, 0.0005  # between polls


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@dataclass(frozen=True)
class Ready:
    """When what a stream of a GPU was given so far is done."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Let the current stream of the GPU wait for it. The host does not."""
        self.event.wait(torch.cuda.current_stream(self.device))


def ready_now(tensor: Tensor) -> Ready:
    """When what the current stream of a tensor's GPU was given so far is done."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return Ready(event, tensor.device)


class SideStream:
    """A stream of a GPU that runs beside the model's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, start: Callable[[], None], ready: Ready | None) -> None:
        """Start copies when ``ready``; None: when the current stream comes here."""
        if ready is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(ready.event)
        with torch.cuda.stream(self._stream):
            start()

    def is_done(self) -> bool:
        return self._stream.query()


class HostCopies:
    """Copies of one rank's shards to host memory, on streams of their own, one for each GPU that
    has some. All methods are local.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}
        self._shards: list[Tensor] = []  # of copies under way: their memory is not for others yet

    def start(
        self,
        shard: Tensor,
        address: int,
        plan: GatherPlan,
        rank: int,
        ready: Ready | None = None,
    ) -> None:
        """Start the copy of rank ``rank``'s shard into the full tensor at ``address``, contiguous
        and page-locked. The shard must not change until it is done.

        Args:
            ready: When the shard's values are there; None: when the current stream comes here.
        """
        shard = shard.detach()
        if shard.is_conj() or shard.is_neg() or not shard.is_contiguous():
            if ready is not None:
                ready.wait()
            shard, ready = shard.resolve_conj().resolve_neg().contiguous(), None
        self._shards.append(shard)
        code = plan.code
        copy = torch.ops.flex_model.copy_to_host
        if shard.device not in self._streams:
            self._streams[shard.device] = SideStream(shard.device)
        stream = self._streams[shard.device]
        stream.run(lambda: copy(shard, address, code, rank, "auto"), ready)

    def is_completed(self) -> bool:
        """Whether all copies are done. What they wrote may be read then, by this process, and by
        others that are told so.
        """
        if self._shards and all(stream.is_done() for stream in self._streams.values()):
            self._shards.clear()
        return not self._shards

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Return when all copies are done, or ``stop`` says so. Ctrl-C ends it; it has no deadline,
        for the GPU may have much of the model before it.
        """
        for _ in sleeps(lambda: self.is_completed() or stop(), _FIRST_PAUSE_S, _MAX_PAUSE_S):
            pass
