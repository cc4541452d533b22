"""Tracks tensors that forwards keep as plain attributes of modules, such as a moving average or the
last features: which attributes hold them, and their placements when a forward begins.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from flex_model.layouts.kept import KeptTensors
from flex_model.layouts.sources import Constants

_MAX_DEPTH = 3
_OF_TORCH = frozenset(vars(nn.Module()))  # such as parameters and buffers
Name = tuple[int, int]


class Attributes:
    """Tracks the attributes of one model that have ever held a tensor of a forward. Local."""

    def __init__(self, root: nn.Module, constants: Constants, kept: KeptTensors) -> None:
        self._root, self._constants, self._kept = root, constants, kept
        self._seen: dict[tuple[int, str], weakref.ref[nn.Module]] = {}

    def scan(self) -> None:
        """Find such attributes after a followed forward."""
        self._seen = {key: module for key, module in self._seen.items() if module() is not None}
        for module in self._root.modules():
            for name, value in vars(module).items():
                if name in _OF_TORCH or (id(module), name) in self._seen:
                    continue
                if any(tensor not in self._constants for tensor in _tensors(value)):
                    self._seen[id(module), name] = weakref.ref(module)

    def _values(self) -> Iterator[Any]:
        for (_, name), reference in self._seen.items():
            yield vars(reference()).get(name) if reference() is not None else None

    def tensors(self) -> dict[Name, Tensor]:
        """Return their tensors, by number of the attribute and of the tensor in it."""
        return {
            (i, j): tensor
            for i, value in enumerate(self._values())
            for j, tensor in enumerate(_tensors(value))
        }

    def describe(self, parts: list[Any], sizes: list[int]) -> None:
        """Append a description of all of them except for sizes to ``parts``, and the sizes."""
        for value in self._values():
            tensors = list(_tensors(value))
            parts.append(f"{type(value).__name__} {len(tensors)}")
            for tensor in tensors:
                source = self._kept.source(tensor)
                placed: Any = "constant" if tensor in self._constants else source and source[1]
                parts.append(f"{tensor.dtype} {tensor.dim()} {tensor.requires_grad} {placed}")
                sizes.extend(tensor.shape)


def _tensors(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a value, except for parameters, which DDP lists and which have entries
    of their own.
    """
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif depth and isinstance(value, (list, tuple, deque, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, depth - 1)
