"""Tensors, numbers, text and containers of them as JSON and tensors; nothing is pickled."""

from __future__ import annotations

import builtins
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.plain import kind_of, plain
from flex_model.integrations import dtensor

PLAIN = (bool, int, float, str, type(None))
_DICTS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Encode a value as JSON; its tensors are appended to the list.

    Raises:
        TypeError: a part of the value is not a dense tensor, number, str or container of these.
    """
    if isinstance(value, Tensor):
        kind = "DTensor" if dtensor.is_dtensor(value) else kind_of(value)
        if kind:
            raise TypeError(f"a {kind}")
        tensors.append(plain(value.detach()))
        return {"tensor": len(tensors) - 1}
    numpy = sys.modules.get("numpy")
    # Before floats, of which numpy.float64 is a subclass.
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
        native = value.dtype.newbyteorder("=")
        return {"numpy": encode(torch.from_numpy(numpy.array(value, native)), tensors)}
    if isinstance(value, PLAIN):
        if isinstance(value, float) and value - value != 0:  # no JSON
            return {"float": str(value)}
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value) in (list, tuple, set, torch.Size):
        kind = "tuple" if isinstance(value, tuple) else type(value).__name__
        items = sorted(value, key=repr) if kind == "set" else value  # as on other ranks
        return {kind: [encode(item, tensors) for item in items]}
    if isinstance(value, defaultdict):
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not (name and getattr(builtins, name, None)):
            raise TypeError(
                "a collections.defaultdict of something other than list, int or the like"
            )
        return {"defaultdict": [name, encode(dict(value), tensors)]}
    if isinstance(value, dict):
        kind = type(value).__name__ if type(value) in _DICTS.values() else "dict"
        return {kind: [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, Namespace):
        return {"namespace": encode(vars(value), tensors)}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """Decode the result of ``encode``."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    if kind == "defaultdict":
        name, items = content
        return defaultdict(name and getattr(builtins, name), decode(items, tensors))
    if kind in _DICTS:
        return _DICTS[kind]({decode(k, tensors): decode(v, tensors) for k, v in content})
    if kind == "namespace":
        return Namespace(**decode(content, tensors))
    if kind == "numpy":
        array = decode(content, tensors).numpy()
        return array if array.ndim else array[()]
    items = [decode(item, tensors) for item in content]
    return items if kind == "list" else (set if kind == "set" else tuple)(items)
