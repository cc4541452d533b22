"""Describes a forward's arguments for its key: all that the path of the forward may depend on,
except for the values of tensors.

Equal arguments have equal descriptions in every call, even functions that each call creates anew.
Ranks may describe equal arguments differently.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed.header import site_hash
from flex_model.integrations import dtensor

_MAX_DEPTH = 12
_BUILTIN = (tuple, list, dict)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)

_counter = itertools.count()
_codes: dict[types.CodeType, int] = {}  # equal for functions with the same source
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of modules, classes


def describe(values: Iterable[Any], parts: list[Any], sizes: list[int]) -> None:
    """Append hashable values that identify trees of arguments to ``parts``, and the sizes of their
    tensors to ``sizes``.
    """
    description = _Description(parts, sizes)
    for value in values:
        description.add(value)


class _Description:
    def __init__(self, parts: list[Any], sizes: list[int]) -> None:
        self._parts, self._sizes = parts, sizes
        self._within: list[int] = []  # objects that contain the current one
        self._tensors: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Append a description of the value."""
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif type(value) in _PLAIN:
            self._parts.append(repr(value))
        elif isinstance(value, (type, nn.Module)):
            self._parts.append(f"{type(value).__name__} {_number(value)}")
            if isinstance(value, nn.Module):
                self._parts.append(tuple(module.training for module in value.modules()))
        elif len(self._within) >= _MAX_DEPTH or id(value) in self._within:
            self._parts.append(f"{type(value).__qualname__} within itself")
        else:
            self._within.append(id(value))
            if type(value) in _BUILTIN:
                self._add_builtin(value)
            else:
                self._add_parts(value)
            self._within.pop()

    def _add_tensor(self, tensor: Tensor) -> None:
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        part = tensor.dtype, tensor.dim(), tensor.requires_grad, tensor.device, number
        self._parts.append(part)
        if dtensor.is_dtensor(tensor):
            self._parts.append(str(tensor.placements))  # type: ignore[attr-defined]
        self._sizes.extend(tensor.shape)

    def _add_builtin(self, value: Any) -> None:
        """Add a container that can have no attributes of its own."""
        self._parts.append(f"builtin {type(value).__name__} of {len(value)}")
        for item in value:
            self.add(item)
            if type(value) is dict:
                self.add(value[item])

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self._add_all("method", value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, _FUNCTIONS):
            owner = getattr(value, "__self__", None)
            name = f"{value.__qualname__} {getattr(value, '__module__', '')}"
            self._add_all(name, None if isinstance(owner, types.ModuleType) else owner)
        elif isinstance(value, functools.partial):
            self._add_all("partial", value.func, value.args, value.keywords)
        else:
            self._parts.append(f"{type(value).__qualname__} {_number(type(value))}")
            is_described = self._add_content(value)
            is_described |= self._add_attributes(value)
            if not is_described:
                text = repr(value)  # such as a date
                self._parts.append("" if " at 0x" in text else text)

    def _add_all(self, text: str, *values: Any) -> None:
        self._parts.append(f"{text} {len(values)}")
        for value in values:
            self.add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        number = _codes.setdefault(function.__code__, len(_codes))
        cells = [_content(cell) for cell in function.__closure__ or ()]
        text = f"{function.__module__} {function.__qualname__} {number}"
        kept = (function.__defaults__, function.__kwdefaults__, function.__dict__ or None)
        self._add_all(text, *kept, *cells)

    def _add_content(self, value: Any) -> bool:
        """Add the content of a container or of a plain value, including subclasses; return whether
        it is one.
        """
        if isinstance(value, Mapping):
            self._add_all("", *(part for item in value.items() for part in item))
        elif isinstance(value, (list, tuple, deque)):
            self._add_all("", *value)
        elif isinstance(value, (set, frozenset)):
            texts = []
            for item in value:
                before, self._parts = self._parts, []
                self.add(item)
                texts.append(" ".join(map(str, self._parts)))
                self._parts = before
            self._parts.append(tuple(sorted(texts)))
        elif isinstance(value, (range, slice, enum.Enum, *_PLAIN)):
            self._parts.append(repr(value))
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._parts.append(f"{value.dtype} {value.shape}")
            if value.dtype.hasobject:
                self.add(value.tolist())
            else:
                self._parts.append(site_hash(value.tobytes().hex()))
        else:
            return False
        return True

    def _add_attributes(self, value: Any) -> bool:
        """Add the attributes in its dict and slots; return whether it has any."""
        if isinstance(value, enum.Enum):
            return True
        found = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name.startswith("__") and not name.endswith("__"):
                    name = f"_{kind.__name__.lstrip('_')}{name}"
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    found[name] = getattr(value, name)
        for name, item in found.items():
            self._parts.append(name)
            self.add(item)
        return bool(found)


def _number(value: Any) -> int:
    """Return a number that identifies a module or class as long as it exists."""
    return _numbers.setdefault(value, next(_counter))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
