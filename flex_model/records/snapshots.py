"""Copies of a rank's shards from the time when their hooks ran, kept until the run ends.

Shards on a GPU are cloned there, so neither the host nor the model waits. When the clones take too
much of its memory, the oldest are moved to the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model.distributed import kernels, memory, values
from flex_model.distributed.transports import host_copies
from flex_model.distributed.transports.host_gather import to_host
from flex_model.hooks import cuda_graphs

MAX_GPU_BYTES = 1 << 30  # of the clones on a rank's GPUs, together


@dataclass(eq=False)
class Snapshot:
    """A copy that nothing else can change: no alias, no inference tensor.

    Attributes:
        tensor: Contiguous, on its GPU or on the CPU.
        ready: For a tensor on a GPU: the event after which its values are there.
        is_of_gpu: Whether the hook's tensor was on a GPU.
    """

    tensor: Tensor
    ready: host_copies.Ready | None = None
    is_of_gpu: bool = False

    def hash(self) -> Tensor:
        """Return an int64 hash of the values, on the tensor's device, after ``wait``."""
        return values.hashed(self.tensor, self.is_of_gpu)

    def wait(self) -> None:
        """Make the current stream wait for its values; see ``Ready.wait``."""
        if self.ready is not None:
            self.ready.wait(self.tensor)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by the function's result, after ``wait``."""
        with torch.inference_mode(False), torch.no_grad():
            changed = function(self.tensor).contiguous()
        if changed is not self.tensor and self.ready is not None:
            self.ready = host_copies.ready_now(changed)
        self.tensor = changed

    def replace_by(self, tensor: Tensor) -> None:
        """Replace the tensor by one whose values are there."""
        self.tensor, self.ready = tensor, None


class Snapshots:
    """The snapshots of a wrapped model's hooks. All methods are local, so ranks may have the shards
    of one tensor on several kinds of devices.

    Args:
        max_gpu_bytes: The most bytes of snapshots on this rank's GPUs, together.
    """

    def __init__(self, max_gpu_bytes: int = MAX_GPU_BYTES) -> None:
        self._max_gpu_bytes = max_gpu_bytes
        self._on_gpu: deque[Snapshot] = deque()  # the oldest first
        self._gpu_bytes = 0

    def take(self, tensor: Tensor) -> Snapshot:
        """Copy a tensor, in the order of the current stream."""
        if not torch.is_inference_mode_enabled():
            return self._take(tensor)
        with torch.inference_mode(False):  # entering takes longer than a small copy
            return self._take(tensor)

    def _take(self, tensor: Tensor) -> Snapshot:
        if not host_copies.is_on_gpu(tensor):
            return Snapshot(memory.copy(tensor))
        try:
            clone = tensor.detach().clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:  # the model needs the memory
            return Snapshot(memory.copy(tensor), is_of_gpu=True)
        # Nothing can wait for an event of a capture after the capture has ended; and during it,
        # nothing can be moved to the CPU.
        is_captured = cuda_graphs.is_captured(clone)
        ready = None if is_captured else host_copies.ready_now(clone)
        snapshot = Snapshot(clone, ready, is_of_gpu=True)
        self._on_gpu.append(snapshot)
        self._gpu_bytes += clone.nbytes
        oldest = []
        while self._gpu_bytes > self._max_gpu_bytes and not is_captured:
            oldest.append(self._on_gpu.popleft())
            self._gpu_bytes -= oldest[-1].tensor.nbytes
        self.to_cpu(oldest)
        return snapshot

    def to_cpu(self, snapshots: list[Snapshot]) -> None:
        """Move those that are on a GPU to the CPU."""
        fast = []
        for snapshot in snapshots:
            if not host_copies.is_on_gpu(snapshot.tensor):
                continue
            if kernels.why_unusable(snapshot.tensor.device):  # the devices of one model may differ
                snapshot.wait()
                snapshot.replace_by(memory.copy(snapshot.tensor))
            else:
                fast.append(snapshot)
        if not fast:
            return
        for snapshot, copy in zip(fast, to_host([(s.tensor, s.ready) for s in fast])):
            snapshot.replace_by(copy)

    def drop(self, snapshots: list[Snapshot]) -> None:
        """Free snapshots."""
        if not self._on_gpu:
            return
        dropped = set(map(id, snapshots))
        self._on_gpu = deque(s for s in self._on_gpu if id(s) not in dropped)
        self._gpu_bytes = sum(s.tensor.nbytes for s in self._on_gpu)
