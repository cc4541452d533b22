"""The hash of a batch: by it a store knows its inputs again, and a run those that were changed."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flex_model import _C
from flex_model.distributed import values
from flex_model.layouts.sources import leaves

_PLAIN = (bool, int, float, str, bytes, torch.dtype)


def hash_of(inputs: Any) -> str:
    """Return the hash of a batch: of its structure, the values of its tensors and arrays, plain
    numbers, strings, dtypes and enums, the names of functions and classes, and of objects of other
    kinds the name of the class and the values in their attributes.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, inputs)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {tuple(value.shape)} {value.dtype}".encode())
        if value.layout == torch.strided and not value.is_meta:
            with contextlib.suppress(TypeError):  # a class that has its values elsewhere
                digest.update(str(values.fingerprint(value)).encode())
        elif value.layout == torch.sparse_coo and not value.is_meta:
            value = value.detach().coalesce()
            _add(digest, [value.indices(), value.values()])
    elif isinstance(value, Mapping):
        digest.update(f"{len(value)} keys".encode())
        for key, item in value.items():
            digest.update(f"key {key!r}".encode())
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, (set, frozenset)):
        _add(digest, sorted(map(hash_of, value)))
    elif isinstance(value, Namespace):
        _add(digest, vars(value))
    elif isinstance(value, enum.Enum):  # whose repr may have an address
        digest.update(f"{type(value).__qualname__}.{value.name};".encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(digest, {one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        digest.update(f"array {value.shape} {value.dtype}".encode())
        if value.dtype.hasobject:
            _add(digest, value.tolist())
        else:
            digest.update(value.tobytes())
    else:
        is_plain = value is None or isinstance(value, _PLAIN)
        text = repr(value) if is_plain else getattr(value, "__qualname__", type(value).__qualname__)
        digest.update(f"{text};".encode())  # [1, 23] is not [12, 3]
        if not is_plain:  # what it holds, as far as that is seen
            tensors = _C.flatten(value)[0]
            seen = set(map(id, tensors))
            _add(digest, [*tensors, *(one for one in leaves(value, 3) if id(one) not in seen)])
