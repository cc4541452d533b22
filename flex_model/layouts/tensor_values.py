"""Finds the value of each tensor, by the tensor's object, or by its storage and its place there,
since autograd makes new objects for views. If several values share one place (a transpose of a
tensor with one row), only the object identifies the value; without it all are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flex_model.integrations.torch_private import DisableTorchFunction
from flex_model.layouts import logged, memory_map
from flex_model.layouts.active import all_paused
from flex_model.layouts.logged import Value
from flex_model.layouts.memory_map import Geometry, Reference, reference_to
from flex_model.layouts.operation_log import hash_of

# A tensor object, its storage, its place there, and its value at that time.
_Known = tuple[Reference, int, Geometry, Value]


class _OfSparse(NamedTuple):
    """The type in the geometry of a sparse tensor, which its values alone don't have."""

    itemsize: int
    dtype: torch.dtype


def place(tensor: Tensor) -> tuple[Any, Geometry]:
    """Return the storage, and the tensor's place in it: for a sparse tensor, its values'. None for
    other tensors that are not plain memory.
    """
    if tensor.layout != torch.sparse_coo:
        return memory_map.place(tensor)
    with all_paused(), torch.no_grad():
        storage, geometry = memory_map.place(tensor._values())
    if storage is None:
        return None, ()
    *at, dtype = geometry
    return storage, (*at, _OfSparse(dtype.itemsize, dtype))


def without_function_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method without torch's function modes: the model does not call what the method calls,
    so sizes are plain numbers in it.
    """

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return method(*args, **kwargs)

    return run


@dataclass
class _Storage:
    """One storage: its values by their place, and the parts of it without writes.

    Attributes:
        reference: Holds no data, but keeps the storage's number from being used again.
        blank: For ``torch.empty``: the elements to which nothing was written.
    """

    reference: StorageWeakRef
    values: dict[Geometry, list[Value]] = field(default_factory=dict)
    blank: memory_map.Blank | None = None

    def note_blank(self, tensor: Tensor) -> None:
        """Note that nothing was written to it; ``tensor`` is all of it."""
        self.blank = memory_map.all_blank(tensor)

    def note_write(self, geometry: Geometry) -> bool:
        """Note a write; return whether all of it is written since."""
        if self.blank is None or not self.blank.write(geometry):
            return False
        self.blank = None
        return True


class TensorValues:
    """Finds the values of all tensors of one followed forward. Local."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._objects: dict[int, _Known] = {}
        self._weights: dict[int, _Known] = {}
        self._by_name: dict[str, Value] = {}  # weights
        self._replaced: dict[Value, Value] = {}

    def latest(self, value: Value) -> Value:
        """Return the value that last replaced this one by a write; the value itself if none did."""
        while value in self._replaced:
            value = self._replaced[value]
        return value

    @staticmethod
    def is_memory(tensor: Tensor) -> bool:
        """Whether the tensor has plain memory, or its values have it, so that it is followed."""
        return place(tensor)[0] is not None

    def of_weight(self, tensor: Tensor) -> Value | None:
        """Return the value of a weight that was used as this object and in this memory."""
        # A DTensor may be known by its local tensor.
        return self._of_object(self._weights, tensor, memory_map.plain(tensor))

    def of(self, tensor: Tensor) -> Value | tuple[Value, ...] | None:
        """Return the value of a tensor; a tuple if its object is not known and several values share
        its place.
        """
        value = self._of_object(self._objects, tensor, memory_map.plain(tensor))
        if value is not None:
            return value
        entry, geometry = self._known_storage(tensor)
        values = entry.values.get(geometry, []) if entry is not None else []
        return (values[0] if len(values) == 1 else tuple(values)) if values else None

    def _known_storage(self, tensor: Tensor) -> tuple[_Storage | None, Geometry]:
        """Return what is known of the tensor's storage, and the tensor's place in it."""
        storage, geometry = place(tensor)
        return None if storage is None else self._storages.get(storage._cdata), geometry

    def _of_object(self, table: dict[int, _Known], *objects: Tensor) -> Value | None:
        """Return the value of the first of these objects, which have one place, that is known."""
        storage, geometry = place(objects[0])
        at = storage._cdata, geometry
        for one in objects:
            known = table.get(id(one))
            if known is not None and known[0]() is one and known[1:3] == at:
                return self.latest(known[3])
        return None

    def weight(self, tensor: Tensor, name: str) -> Value | None:
        """Return the value of a weight that was used: as this object, or in a form that a framework
        makes of it for the forward.
        """
        known = self._weights.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[3]
        return self._by_name.get(name)

    def note_weight(self, tensor: Tensor, name: str, value: Value) -> None:
        """Note the value of a weight of this clean name at its first use."""
        storage, geometry = place(tensor)
        self._by_name[name] = value
        self._weights[id(tensor)] = (reference_to(tensor), storage._cdata, geometry, value)

    @without_function_mode
    def note(self, tensor: Tensor, value: Value) -> None:
        """Set the value of the tensor's place and of its object."""
        storage, geometry = place(tensor)
        if storage is None:
            return
        values = self._entry(storage).values.setdefault(geometry, [])
        if value not in values:
            values.append(value)
        self.bind(tensor, value)

    def bind(self, tensor: Tensor, value: Value) -> None:
        """Set the value of the tensor's object, which its place already has."""
        storage, geometry = place(tensor)
        self._objects[id(tensor)] = (reference_to(tensor), storage._cdata, geometry, value)

    @without_function_mode
    def bind_result(self, tensor: Tensor) -> None:
        """Note an object that a call returned: it has the newest of the values at its place."""
        entry, geometry = self._known_storage(tensor)
        values = None if entry is None else entry.values.get(geometry)
        if values and self._of_object(self._objects, tensor) is None:
            self.bind(tensor, values[-1])

    def replace(self, tensor: Tensor, before: Value, value: Value) -> None:
        """Replace a value of the tensor's memory."""
        storage, geometry = place(tensor)
        if storage is not None:
            self._replaced[before] = value
            values = self._entry(storage).values.setdefault(geometry, [])
            values[:] = [value if old == before else old for old in values]

    def live(self) -> set[Value]:
        """Return the values of the tensors that still exist."""
        return {self.latest(one[3]) for one in list(self._objects.values()) if one[0]() is not None}

    def live_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that still exist, without weights."""
        for reference, _, _, _ in list(self._objects.values()):
            tensor = reference()
            weight = self._weights.get(id(tensor))  # or one that is gone: ids are used again
            if tensor is not None and (weight is None or weight[0]() is not tensor):
                yield tensor

    @staticmethod
    def are_same(first: Tensor, second: Tensor) -> bool:
        """Whether they have the same memory, shape and strides."""
        (storage, geometry), (other, other_geometry) = place(first), place(second)
        if storage is None or other is None:
            return False
        return geometry == other_geometry and bool(storage._cdata == other._cdata)

    def invalidate(self, tensor: Tensor) -> list[tuple[Value, Value]] | None:
        """Replace all values in the tensor's memory by unknown ones; return old and new values;
        None if nothing is known of it.
        """
        entry, _ = self._known_storage(tensor)
        if entry is None:
            return None
        lost = []
        for values in entry.values.values():
            for i, value in enumerate(values):
                values[i] = self._replaced[value] = hash_of("lost", value)
                lost.append((value, values[i]))
        return lost

    # Writes.

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether nothing was written to any of its elements."""
        entry, geometry = self._known_storage(tensor)
        return entry is not None and entry.blank is not None and entry.blank.has(geometry)

    def note_blank(self, tensor: Tensor) -> None:
        """Note that nothing was written to the tensor's memory."""
        plain = memory_map.plain(tensor)
        storage = memory_map.storage_of(plain)
        if storage is not None:
            self._entry(storage).note_blank(plain)

    def write(self, tensor: Tensor, before: Value, value: Value) -> logged.Write:
        """Note that the value ``before`` in the tensor's memory was overwritten by another."""
        storage, geometry = place(tensor)
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
        self.bind(tensor, value)
        return logged.Write(before, tuple(others), entry.note_write(geometry))

    def _entry(self, storage: Any) -> _Storage:
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = _Storage(StorageWeakRef(storage))
        return entry
