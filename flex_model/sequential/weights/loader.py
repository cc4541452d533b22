"""Brings the weights of each step into the model, reads those of the next one meanwhile, and leaves
the model as it was.

Weights are copied into a few flat buffers, each large enough for the largest step, which are used
again and again: memory that is freed and taken anew for every step would pile up in the heap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from flex_model.sequential.interrupts import deferred
from flex_model.sequential.targets import Target
from flex_model.sequential.weights.absent import absent
from flex_model.sequential.weights.inventory import Inventory, Weight
from flex_model.sequential.weights.shards import local_of, part_of, with_local
from flex_model.sequential.weights.source import WeightSource

_ALIGNMENT = 64  # bytes, as torch's own allocator: kernels' results may depend on it
_OWN = 2  # references to the storage of a lone tensor: the tensor's, and that of who asks


class WeightLoader:
    """Of one run. ``close()`` puts back what the modules had.

    Args:
        prefetch: How many steps are read ahead; 0: none, and there is no thread.

    Attributes:
        loads: By target name, how often its weights were brought in.
        bytes_read: Bytes that the source gave, in its own dtype.
    """

    def __init__(
        self,
        source: WeightSource | None,
        inventory: Inventory,
        targets: list[Target],
        device: torch.device,
        prefetch: int,
    ) -> None:
        self.prefetch = prefetch
        self.loads: Counter[str] = Counter()
        self.bytes_read = 0
        self._source, self._inventory, self._device = source, inventory, device
        self._names: dict[int, list[str]] = {}
        for target in targets:
            self._names.setdefault(target.step, []).append(target.name)
        self._buffer_bytes = max(map(_size_of, inventory.steps.values()), default=0)
        self._free: list[_Buffer] = []
        self._loaded: dict[int, _Buffer] = {}
        self._ahead: dict[int, Future[_Buffer]] = {}
        self._reader = ThreadPoolExecutor(1, "flex_model weights") if prefetch else None

    def load_resident(self) -> None:
        """What stays for the whole run: embeddings, norms, heads, weights that targets share. All
        else is absent until it is acquired.
        """
        for weights in self._inventory.steps.values():
            for weight in weights:
                weight.put(absent(weight))
        for weight in self._inventory.resident:
            if weight.given_as is None and weight.tensor.device == self._device:
                continue
            local = torch.empty_like(local_of(weight.tensor), device=self._device)
            self._read_into(local.detach(), weight)
            weight.put(_as_weight(local, weight))

    def acquire(self, steps: set[int]) -> None:
        """Have the weights of exactly these steps in the model."""
        for step in [step for step in self._loaded if step not in steps]:
            self._release(step)
        for step in sorted(steps - self._loaded.keys()):
            read = self._ahead.pop(step, None)
            buffer = self._read(step) if read is None else read.result()
            for weight, local in buffer.parts:
                weight.put(_as_weight(local, weight))
            self._loaded[step] = buffer
            self.loads.update(self._names[step])

    def read_ahead(self, steps: Iterable[int]) -> None:
        """Begin to read what will probably be acquired next; what was read in vain is dropped."""
        if self._reader is None:
            return
        wanted = [step for step in steps if step not in self._loaded][: self.prefetch]
        for step in [step for step in self._ahead if step not in wanted]:
            self._free.append(self._ahead.pop(step).result())
        for step in wanted:
            if step not in self._ahead:
                self._ahead[step] = self._submitted(step)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a step's weights, which others will take."""
        local = local_of(tensor)
        if type(local) is not Tensor:  # what a collective will have made
            return False
        place = local.untyped_storage().data_ptr()
        return any(buffer.memory.data_ptr() == place for buffer in self._loaded.values())

    def close(self) -> None:
        """Put back what the modules had, and end the reading thread."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
        for weights in (self._inventory.resident, *self._inventory.steps.values()):
            for weight in weights:  # all: what was being loaded may have been interrupted
                weight.put(weight.tensor)
        self._loaded.clear()
        self._ahead.clear()
        self._free.clear()

    def _release(self, step: int) -> None:
        buffer = self._loaded.pop(step)
        for weight in [part[0] for part in buffer.parts]:
            weight.put(absent(weight))
        buffer.parts = []
        if buffer.is_held:
            return  # by what a target kept of its weights: theirs for good
        if self._device.type == "cuda":
            buffer.is_free_after = torch.cuda.Event()
            buffer.is_free_after.record(torch.cuda.current_stream(self._device))
        self._free.append(buffer)

    def _buffer(self) -> _Buffer:
        return self._free.pop() if self._free else _Buffer(self._buffer_bytes, self._device)

    def _read(self, step: int) -> _Buffer:
        """Read now; in the reading thread where there is one, after what it is at."""
        if self._reader is None:
            return self._fill(step, self._buffer())
        return self._submitted(step).result()

    def _submitted(self, step: int) -> Future[_Buffer]:
        assert self._reader is not None
        with deferred():  # the first one starts the thread, which the reader must know of
            return self._reader.submit(self._fill, step, self._buffer())

    def _fill(self, step: int, buffer: _Buffer) -> _Buffer:
        with torch.no_grad():
            buffer.parts = buffer.cut(self._inventory.steps.get(step, []))
            buffer.begin()
            for weight, local in buffer.parts:
                self._read_into(buffer.staged(local), weight)
            buffer.finish()
        return buffer

    def _read_into(self, local: Tensor, weight: Weight) -> None:
        """Copy this rank's part of what the source, or the model itself, has; casts the dtype."""
        if weight.given_as is None:
            local.copy_(local_of(weight.tensor))
            return
        assert self._source is not None
        full = self._source.read(weight.given_as)
        if not isinstance(full, Tensor):
            raise TypeError(
                f"sequential.run: the weights give a {type(full).__name__} for "
                f"{weight.given_as!r}; read() must return a torch.Tensor"
            )
        if full.shape != weight.tensor.shape:
            raise ValueError(
                f"sequential.run: {weight.names[0]!r} has shape {tuple(weight.tensor.shape)} in "
                f"the model, but {tuple(full.shape)} in the weights; give the weights of this "
                "model, or build it with their configuration"
            )
        self.bytes_read += full.nbytes
        local.copy_(part_of(full, weight.tensor))


class _Buffer:
    """Memory for the weights of one step. On a CUDA device they are read into pinned memory, and
    copied from there on a stream of their own.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.parts: list[tuple[Weight, Tensor]] = []
        self.is_free_after: torch.cuda.Event | None = None
        self._staging: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_held(self) -> bool:
        """Whether other tensors lie in this memory."""
        return torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata) > _OWN

    def cut(self, weights: list[Weight]) -> list[tuple[Weight, Tensor]]:
        """A part for each weight, of its local shape and dtype."""
        parts, start = [], 0
        for weight in weights:
            local = local_of(weight.tensor)
            parts.append((weight, _part(self.memory, start, local)))
            start += _aligned(local.nbytes)
        return parts

    def begin(self) -> None:
        if self.memory.device.type == "cuda" and self._staging is None:
            self._staging = torch.empty(self.memory.shape, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(self.memory.device)

    def staged(self, local: Tensor) -> Tensor:
        """Where to write a part."""
        if self._staging is None:
            return local
        start = local.data_ptr() - self.memory.data_ptr()
        return _part(self._staging, start, local)

    def finish(self) -> None:
        if self._staging is None or self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            if self.is_free_after is not None:
                self._stream.wait_event(self.is_free_after)
            self.memory.copy_(self._staging, non_blocking=True)
        self._stream.synchronize()


def _part(memory: Tensor, start: int, like: Tensor) -> Tensor:
    flat = memory[start : start + like.nbytes]
    return flat.view(like.dtype).view(like.shape)


def _as_weight(local: Tensor, weight: Weight) -> Tensor:
    tensor = with_local(weight.tensor, local)
    return nn.Parameter(tensor, requires_grad=False) if weight.is_parameter else tensor


def _size_of(weights: list[Weight]) -> int:
    return sum(_aligned(local_of(weight.tensor).nbytes) for weight in weights)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
