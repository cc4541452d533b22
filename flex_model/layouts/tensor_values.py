"""Which value each tensor has: known by the tensor's object, and beside that by its storage and its
place in it, since autograd makes new objects for views. Where several values share one place (a
transpose of a tensor with one row), the object tells which is meant; without it all are named.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flex_model.layouts import memory_map
from flex_model.layouts.log import Value, hash_of
from flex_model.layouts.memory_map import Geometry

# A tensor object: itself, its storage, its place in that, and the value that it had.
_Known = tuple["weakref.ref[Tensor]", int, Geometry, Value]


def without_function_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method without torch's function modes: the model has not asked what it asks of tensors,
    so sizes are plain numbers in it.
    """

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return run


@dataclass
class _Storage:
    """What is known of one storage: its values by their place, and what of it is not written yet.

    Attributes:
        blank: For ``torch.empty``: which of its elements nothing has been written to.
    """

    reference: StorageWeakRef
    values: dict[Geometry, list[Value]] = field(default_factory=dict)
    blank: memory_map.Blank | None = None


class TensorValues:
    """The values of all tensors that one followed forward has met. Local."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._objects: dict[int, _Known] = {}
        self._weights: dict[int, _Known] = {}
        self._by_name: dict[str, Value] = {}  # likewise
        self._replaced: dict[Value, Value] = {}

    def latest(self, value: Value) -> Value:
        """The value that was written in its place last; itself where none was."""
        while value in self._replaced:
            value = self._replaced[value]
        return value

    @staticmethod
    def is_memory(tensor: Tensor) -> bool:
        """Whether the tensor has memory of its own that can be followed."""
        return memory_map.storage_of(memory_map.plain(tensor)) is not None

    def of_weight(self, tensor: Tensor) -> Value | None:
        """The value of a weight that was met, as this object and in this memory."""
        return self._of_object(self._weights, tensor)

    def of(self, tensor: Tensor) -> Value | tuple[Value, ...] | None:
        """The value of a tensor; several where its object is not known and its place is that of
        several.
        """
        value = self._of_object(self._objects, tensor)
        if value is not None:
            return value
        storage, geometry = _place(tensor)
        entry = self._storages.get(storage._cdata)
        values = entry.values.get(geometry, []) if entry is not None else []
        return (values[0] if len(values) == 1 else tuple(values)) if values else None

    def _of_object(self, table: dict[int, _Known], tensor: Tensor) -> Value | None:
        storage, geometry = _place(tensor)
        place = storage._cdata, geometry
        for one in (tensor, memory_map.plain(tensor)):  # a DTensor may be known by its local tensor
            known = table.get(id(one))
            if known is not None and known[0]() is one and known[1:3] == place:
                return self.latest(known[3])
        return None

    def weight(self, tensor: Tensor, name: str) -> Value | None:
        """The value of a weight that was met: as this object, or in a form that a framework makes
        of it for the forward.
        """
        known = self._weights.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[3]
        return self._by_name.get(name)

    def note_weight(self, tensor: Tensor, name: str, value: Value) -> None:
        """A weight of this clean name was met."""
        storage, geometry = _place(tensor)
        self._by_name[name] = value
        self._weights[id(tensor)] = (weakref.ref(tensor), storage._cdata, geometry, value)

    @without_function_mode
    def note(self, tensor: Tensor, value: Value) -> None:
        """The tensor has this value from now on, and so has its object."""
        storage, geometry = _place(tensor)
        if storage is None:
            return
        values = self._entry(storage).values.setdefault(geometry, [])
        if value not in values:
            values.append(value)
        self.remember(tensor, value)

    def remember(self, tensor: Tensor, value: Value) -> None:
        """The tensor's object has this value, which its place has already."""
        storage, geometry = _place(tensor)
        self._objects[id(tensor)] = (weakref.ref(tensor), storage._cdata, geometry, value)

    @without_function_mode
    def know_object(self, tensor: Tensor) -> None:
        """A call has returned this object: of several values at its place it has the newest."""
        storage, geometry = _place(tensor)
        entry = None if storage is None else self._storages.get(storage._cdata)
        if entry is None:
            return
        known = self._objects.get(id(tensor))
        place = storage._cdata, geometry
        is_known = known is not None and known[0]() is tensor and known[1:3] == place
        values = entry.values.get(geometry)
        if values and not is_known:
            self.remember(tensor, values[-1])

    def replace(self, tensor: Tensor, before: Value, value: Value) -> None:
        """A value of the tensor's memory is another one from now on."""
        storage, geometry = _place(tensor)
        if storage is not None:
            self._replaced[before] = value
            values = self._entry(storage).values.setdefault(geometry, [])
            values[:] = [value if old == before else old for old in values]

    def living(self) -> Iterator[Tensor]:
        """The tensors that are still there, without weights."""
        for reference, _, _, _ in list(self._objects.values()):
            tensor = reference()
            if tensor is not None and self._weights.get(id(tensor)) is None:
                yield tensor

    @staticmethod
    def are_same(first: Tensor, second: Tensor) -> bool:
        """Whether they show the same memory in the same form."""
        (storage, geometry), (other, other_geometry) = _place(first), _place(second)
        if storage is None or other is None or geometry != other_geometry:
            return False
        return bool(storage._cdata == other._cdata)

    def lose(self, tensor: Tensor) -> list[tuple[Value, Value]] | None:
        """Forget what the tensor's memory holds: old and new values; None where nothing is known of
        it.
        """
        storage = memory_map.storage_of(memory_map.plain(tensor))
        entry = None if storage is None else self._storages.get(storage._cdata)
        if entry is None:
            return None
        lost = []
        for values in entry.values.values():
            for i, value in enumerate(values):
                values[i] = self._replaced[value] = hash_of("lost", value)
                lost.append((value, values[i]))
        return lost

    # Memory that is written to.

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether nothing has been written to any of its elements."""
        storage, geometry = _place(tensor)
        entry = None if storage is None else self._storages.get(storage._cdata)
        if entry is None or entry.blank is None:
            return False
        return memory_map.is_blank(entry.blank, geometry)

    def note_blank(self, tensor: Tensor) -> None:
        """Nothing has been written to the tensor's memory."""
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        if storage is not None:
            self._entry(storage).blank = memory_map.all_blank(plain)

    def write(self, tensor: Tensor, before: Value, value: Value) -> tuple[Any, ...]:
        """A value was written over the one before, to the tensor's memory.

        Returns:
            The value before; for each value that overlaps it: old and new value, and by dim of the
            written tensor the dim that it is there; whether all of the storage is written.
        """
        storage, geometry = _place(tensor)
        entry = self._entry(storage)
        others = []
        for other, values in entry.values.items():
            if not memory_map.overlap(geometry, other):
                continue
            dims = memory_map.same_dims(geometry, other)
            for i, old in enumerate(values):
                if old == before:
                    continue
                values[i] = self._replaced[old] = hash_of("written", old, value)
                others.append((old, values[i], dims))
        values = entry.values.setdefault(geometry, [])
        self._replaced[before] = value
        entry.values[geometry] = [value if old == before else old for old in values] or [value]
        self.remember(tensor, value)
        is_complete = False
        if entry.blank is not None:
            is_complete = memory_map.write(entry.blank, geometry)
            if is_complete:
                entry.blank = None
        return before, tuple(others), is_complete

    def _entry(self, storage: Any) -> _Storage:
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = _Storage(StorageWeakRef(storage))
            if len(self._storages) % 4096 == 0:
                self._sweep()
        return entry

    def _sweep(self) -> None:
        gone = [key for key, entry in self._storages.items() if entry.reference.expired()]
        for key in gone:
            del self._storages[key]
        self._objects = {k: known for k, known in self._objects.items() if known[0]() is not None}


def _place(tensor: Tensor) -> tuple[Any, Geometry]:
    """The storage, and where in it the tensor lies; nothing for one that is no plain memory."""
    plain = memory_map.plain(tensor)
    storage = memory_map.storage_of(plain)
    return (None, ()) if storage is None else (storage, memory_map.geometry(plain))
