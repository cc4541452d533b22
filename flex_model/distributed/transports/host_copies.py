"""Shards from GPUs into full tensors in host memory that the ranks of a host share.

Each rank copies its own shard to where it belongs, over its own bus: no full tensor is on any GPU,
and none travels between GPUs. The model computes on meanwhile.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from flex_model._C import GatherPlan

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def register(address: int, num_bytes: int) -> None:
    """Page-lock host memory of this process, so that GPUs can write to it. Local.

    Every process that shares it must do so itself. RuntimeError if CUDA refuses: the limit on
    locked memory, for one.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))
    if error:
        raise RuntimeError(
            f"{num_bytes} bytes of host memory can't be page-locked (cudaHostRegister: error "
            f"{error}); is the limit on locked memory (ulimit -l) too low?"
        )


def unregister(address: int) -> None:
    """Undo ``register``, before the memory is unmapped; its copies must be done. Local."""
    error = int(torch.cuda.cudart().cudaHostUnregister(address))
    if error:
        raise RuntimeError(f"page-locked host memory can't be released (error {error})")


class HostCopies:
    """Copies of one rank's shards to host memory, on a stream of their own. All methods are local.

    What is copied is the shard as it is when the current stream comes here: it is cloned on the
    GPU first, for the model may overwrite it long before the bus has taken it.

    Args:
        device: This rank's GPU.
        max_pending_bytes: Of clones that are held; a further copy waits for the oldest.
    """

    def __init__(self, device: torch.device, max_pending_bytes: int = 1 << 30) -> None:
        self._device = device
        self._max_pending_bytes = max_pending_bytes
        self._stream = torch.cuda.Stream(device)
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._pending_bytes = 0

    def start(self, shard: Tensor, address: int, plan: GatherPlan, rank: int) -> None:
        """Start the copy of rank ``rank``'s shard into the full tensor at ``address``, contiguous
        and page-locked (``register``).
        """
        self._drop_finished()
        while self._pending and self._pending_bytes + shard.nbytes > self._max_pending_bytes:
            self._pending[0][0].synchronize()
            self._drop_finished()
        snapshot = shard.detach().clone(memory_format=torch.contiguous_format)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch.ops.flex_model.copy_to_host(snapshot, address, plan.code, rank, "auto")
            event = torch.cuda.Event()
            event.record(self._stream)
        # Kept until the copy is done, so that its memory is not given to others before.
        self._pending.append((event, snapshot))
        self._pending_bytes += snapshot.nbytes

    def _drop_finished(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._pending_bytes -= self._pending.popleft()[1].nbytes

    def is_completed(self) -> bool:
        """Whether all copies are done: they may be waited for like a torch.distributed work."""
        self._drop_finished()
        return not self._pending

    def wait(self) -> None:
        """Block until all copies are done: what they wrote may be read then, by this process, and
        by others that are told so.
        """
        self._stream.synchronize()
        self._drop_finished()
