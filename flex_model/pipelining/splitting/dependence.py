"""Tracking of the tensors that depend on marked ones, through the operations of a run."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flex_model.integrations.torch_private import storage_key

_active: ContextVar[Dependence | None] = ContextVar("flex_model_dependence", default=None)


def mark_absent(tree: Any, name: str, sources: Any = ()) -> None:
    """Label the placeholder of a value, computed from ``sources``, if this run is tracked."""
    dependence = _active.get()
    if dependence is not None:
        dependence.mark(tree, {name} | dependence.labels_of(sources))


def read_tensor(tensor: Tensor) -> Tensor:
    """The tensor that Python reads as a whole (``tolist``), which is no operation of torch."""
    dependence = _active.get()
    return tensor if dependence is None else dependence.read_tensor(tensor)


class Dependence(TorchDispatchMode):
    """Tracks which tensors depend on marked ones, by their memory.

    Operations that only take sizes and dtypes from a tensor (``zeros_like``, ``new_ones``) do not
    make their result depend on it. What Python does with a value that it reads can't be followed.

    Args:
        lie: By how much numbers that Python reads are off, where they depend on marked values;
            then booleans are the opposite.

    Attributes:
        read: Labels of what Python has read (``.item()``, ``if tensor:``, ``.tolist()``).
    """

    _SIZES_ONLY = re.compile(r"(^new_.*)|(.*_like$)|(^sym_.*)|(^resize_$)")

    def __init__(self, *, lie: int = 0) -> None:
        super().__init__()
        self.read: set[str] = set()
        self._lie = lie
        self._labels: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []  # no memory is allocated again

    def __enter__(self) -> Any:
        self._token = _active.set(self)
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        _active.reset(self._token)

    def mark(self, tree: Any, labels: set[str]) -> None:
        """Add labels to the tensors of a tree."""
        for leaf in _pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and labels:
                self._alive.append(leaf)
                self._labels[storage_key(leaf)] = self.labels_of(leaf) | labels

    def labels_of(self, tree: Any) -> set[str]:
        """Labels of what the tensors of a tree depend on."""
        leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        return {label for leaf in leaves for label in self._labels.get(storage_key(leaf), ())}

    def read_tensor(self, tensor: Tensor) -> Tensor:
        labels = self.labels_of(tensor)
        self.read |= labels
        if not labels or not self._lie:
            return tensor
        return ~tensor if tensor.dtype == torch.bool else (tensor + self._lie).nan_to_num()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        labels = self.labels_of((args, kwargs))
        result = func(*args, **kwargs)
        if not labels:
            return result
        if isinstance(result, (bool, int, float)):
            self.read |= labels
            return self._change(result) if self._lie else result
        if not self._SIZES_ONLY.match(func.overloadpacket.__name__):
            given = {**dict(enumerate(args)), **kwargs}
            arguments = enumerate(func._schema.arguments)
            written = [given.get(i, given.get(a.name)) for i, a in arguments if a.is_write]
            self.mark((result, written), labels)
        return result

    def _change(self, value: bool | int | float) -> bool | int | float:
        if isinstance(value, bool):
            return not value
        return value + self._lie if value == value else 0.0
