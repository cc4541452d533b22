"""Tracks what a model's buffers contain after its forwards: running statistics, counters, caches.

A buffer holds its initial or loaded content until it is written to. The placement of what a
followed forward wrote is proven by its operations; what was written at any other time is not known,
since nothing shows whether a forward or the user wrote it. Versions show that there was a write,
and hashes that it changed nothing, as when DDP broadcasts rank 0's buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.header import site_hash
from flex_model.distributed.placement import Partial
from flex_model.distributed.plain import kind_of
from flex_model.layouts.placement_encoding import UNKNOWN, Pair, encode
from flex_model.names import clean

Mark = tuple[int | None, ...]  # changes with each write to a buffer


@dataclass(frozen=True)
class State:
    """The state of a buffer after the last forward.

    Attributes:
        pair: Its placements; None for initial or loaded content, which is placed as the model's
            other weights.
        content: A hash of a partial sum.
    """

    tensor: weakref.ref[Tensor]
    mark: Mark
    pair: Pair | None
    content: int | None = None

    def is_of(self, tensor: Tensor, mark: Mark) -> bool:
        """Whether the tensor is this buffer, and was not written to since."""
        return self.tensor() is tensor and self.mark == mark


class Buffers:
    """Tracks the buffers of one model, by clean name. Local."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._tables: list[tuple[str, Mapping[str, Tensor | None]]] = []
        self._states: dict[str, State] = {}
        self._own: dict[str, int | None] = {}  # hashes of initial or loaded content
        self._scan()
        for name, buffer, mark in self._named():
            self._note_own(name, buffer, mark)
        handles = ExitStack()
        for module in root.modules():
            if module._buffers:
                hook = module.register_load_state_dict_post_hook(_Loaded(self))
                handles.callback(hook.remove)
        weakref.finalize(self, handles.close).atexit = False

    def _scan(self) -> None:
        self._tables = [
            (f"{clean(self._root, name)}.".lstrip("."), module._buffers)
            for name, module in self._root.named_modules()
        ]

    def _named(self) -> Iterator[tuple[str, Tensor, Mark]]:
        for prefix, table in self._tables:
            for leaf, buffer in table.items():
                if buffer is not None:
                    yield prefix + leaf, buffer, _mark(table, leaf, buffer)

    def _note_own(self, name: str, buffer: Tensor, mark: Mark) -> None:
        self._states[name] = State(weakref.ref(buffer), mark, None)
        self._own[name] = _hash(buffer)

    def note_loaded(self, module: nn.Module, missing: list[str]) -> None:
        """Note that a state dict was loaded into the module's own buffers, except for the missing
        names.
        """
        loaded = {
            id(buffer)
            for leaf, buffer in module._buffers.items()
            if buffer is not None
            and leaf not in module._non_persistent_buffers_set
            and not any(name.rpartition(".")[2] == leaf for name in missing)
        }
        for name, buffer, mark in self._named():
            if id(buffer) in loaded:
                self._note_own(name, buffer, mark)

    def observe(self) -> None:
        """Detect writes since the last forward, as a forward of the model begins."""
        for name, buffer, mark in self._named():
            known = self._states.get(name)
            is_known = known is not None and known.is_of(buffer, mark)
            if known and is_known and (known.content is None or known.content == _hash(buffer)):
                continue
            own = self._own.get(name)
            is_own = own is not None and own == _hash(buffer)
            pair = None if is_own else UNKNOWN
            self._states[name] = State(weakref.ref(buffer), mark, pair)

    def state(self, name: str, tensor: Tensor) -> State | None:
        """Return the state of the buffer of this name, if it is this tensor; None for one that was
        made since the forward began.
        """
        known = self._states.get(name)
        return known if known is not None and known.tensor() is tensor else None

    def written(self, is_seen: Callable[[Tensor], bool]) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the name, the buffer, and whether it is still the same tensor, for buffers that
        were written to or made since the forward began.

        Args:
            is_seen: Whether a write to the buffer was recorded, even if its version shows none.
        """
        self._scan()
        for name, buffer, mark in self._named():
            known = self._states.get(name)
            if known is None or not known.is_of(buffer, mark) or is_seen(buffer):
                yield name, buffer, known is not None and known.tensor() is buffer

    def note(self, pairs: Mapping[str, Pair]) -> None:
        """Note the placements of buffers after a forward."""
        if not pairs:
            return
        for name, buffer, mark in self._named():
            if name in pairs:
                # A collective of the user's, which completes a sum, raises no version.
                is_sum = any(isinstance(one, Partial) for one in pairs[name])
                content = _hash(buffer) if is_sum else None
                self._states[name] = State(weakref.ref(buffer), mark, pairs[name], content)

    @property
    def digest(self) -> int:
        """A hash of the placements of all of them."""
        states = sorted(self._states.items(), key=lambda one: one[0])
        found = [(name, *map(encode, state.pair)) for name, state in states if state.pair]
        return site_hash(*found) if found else 0


class _Loaded:
    """A hook that torch calls after a module was loaded; in copies of the module it does
    nothing.
    """

    def __init__(self, buffers: Buffers | None = None) -> None:
        self._buffers = None if buffers is None else weakref.ref(buffers)

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        buffers = None if self._buffers is None else self._buffers()
        if buffers is not None:
            buffers.note_loaded(module, incompatible_keys.missing_keys)

    def __reduce__(self) -> Any:
        return _Loaded, ()


def _mark(table: Mapping[str, Tensor | None], leaf: str, buffer: Tensor) -> Mark:
    """Return a mark that changes with each write. Kernels of batch norms write statistics without a
    new version, but the module counts the batches.
    """
    counter = table.get("num_batches_tracked") if leaf.startswith("running_") else None
    return _version(buffer), None if counter is None else _version(counter)


def _version(tensor: Tensor) -> int | None:
    """Return the version, which changes with every write; for inference tensors, which have none, a
    hash of the values.
    """
    return _hash(tensor) if tensor.is_inference() else tensor._version


def _hash(tensor: Tensor) -> int | None:
    """Return a hash of dtype, shape and values; None if the values can't be read."""
    if kind_of(tensor):
        return None
    with torch.no_grad():
        content = values.fingerprint(tensor) if tensor.numel() else 0
    return site_hash(str(tensor.dtype), *tensor.shape, content)
