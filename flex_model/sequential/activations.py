"""Offloads the activations of a suspended batch: the inputs of the target that it waits at.

Only memory that no other tensor shares is moved, and the tensor objects stay the same ones, since
the suspended functions hold them too. A tensor on disk is a memory-mapped file meanwhile: another
batch that reads it all the same, such as a cached mask that both share, reads the right values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.integrations import torch_private
from flex_model.sequential.engine import Batch

_OWN = 2  # references to the storage of a single tensor: its own, and that of the reader


class ActivationOffloader:
    """Moves the activations of one run's waiting batches away, and back.

    Args:
        where: ``"cpu"`` or ``"disk"``.
        folder: For ``"disk"``: the folder whose disk is used (default: the system's for temporary
            files).

    Attributes:
        bytes_moved: Bytes that were moved away.
    """

    def __init__(self, model: nn.Module, where: str, folder: str | Path | None) -> None:
        self.bytes_moved = 0
        self._model = model
        self._moved: dict[int, list[tuple[Tensor, torch.device]]] = {}  # with where each one was
        self._folder: Path | None = None
        if where == "disk":
            self._folder = Path(tempfile.gettempdir() if folder is None else folder)
            self._folder.mkdir(parents=True, exist_ok=True)

    def offload(self, batch: Batch) -> None:
        """Move the inputs that the batch waits with."""
        moved = [(tensor, tensor.device) for tensor in self._movable(batch)]
        contents = [_memory_of(tensor) for tensor, _ in moved]
        self.bytes_moved += sum(content.nbytes for content in contents)
        contents = [content.cpu() for content in contents]
        if self._folder is not None:
            contents = _on_disk(contents, self._folder)
        for (tensor, _), content in zip(moved, contents):
            _set_memory(tensor, content)
        self._moved[batch.index] = moved

    def bring_back(self, batch: Batch) -> None:
        """Move them to where they were: to memory of their own, aligned as torch aligns it, on
        which the bits of later results may depend.
        """
        for tensor, device in self._moved.pop(batch.index, ()):
            content = _memory_of(tensor)
            is_there = content.device == device
            _set_memory(tensor, content.clone() if is_there else content.to(device))

    def _movable(self, batch: Batch) -> Iterator[Tensor]:
        """Tensors that only the batch's functions hold, as far as can be seen."""
        theirs = {id(tensor) for tensor in self._tensors_of_model()}
        theirs |= {id(tensor) for tensor in _C.flatten(batch.arguments)[0]}
        for tensor in _C.flatten(batch.inputs)[0]:
            if type(tensor) is not Tensor or id(tensor) in theirs or tensor.requires_grad:
                continue
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            if self._folder is None and tensor.device.type == "cpu":
                continue
            if torch_private.num_references(tensor.untyped_storage()) == _OWN:
                theirs.add(id(tensor))
                yield tensor

    def _tensors_of_model(self) -> Iterator[Tensor]:
        """Yield parameters, buffers, and tensors in attributes of modules: caches, tables."""
        for module in self._model.modules():
            for value in vars(module).values():
                items = value.values() if isinstance(value, dict) else value
                items = items if isinstance(value, (dict, list, tuple)) else (value,)
                yield from (item for item in items if isinstance(item, Tensor))


def _on_disk(contents: list[Tensor], folder: Path) -> list[Tensor]:
    """Write tensors to disk; return them memory-mapped. The file has no name: the system deletes it
    with the last mapping, also after a kill.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        torch.save(contents, file)
        file.flush()
        mapped: list[Tensor] = torch.load(
            f"/proc/self/fd/{file.fileno()}", mmap=True, weights_only=True
        )
    return mapped


def _memory_of(tensor: Tensor) -> Tensor:
    """Return all bytes of its storage."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return made.set_(tensor.untyped_storage())


def _set_memory(tensor: Tensor, content: Tensor) -> None:
    """Make the tensor a view of these bytes, with its own offset, sizes and strides."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        made: Any = torch.empty(0, dtype=tensor.dtype, device=content.device)
        made.set_(
            content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        tensor.data = made
