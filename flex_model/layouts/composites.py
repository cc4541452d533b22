"""Functions of torch that are followed as a whole, not by the operations that they are made of.

The steps inside lose what the call says: a product of four-dimensional tensors flattens batch and
heads into one dim and takes them apart again, ``reshape`` replaces -1 by a number,
``repeat_interleave`` joins the copies with the dim that they are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flex_model.integrations import dtensor

_MATMUL = torch.ops.aten.matmul.default
_RESHAPE = torch.ops.aten.reshape.default
_FLATTEN = torch.ops.aten.flatten.using_ints
_UNFLATTEN = torch.ops.aten.unflatten.int
_EINSUM = torch.ops.aten.einsum.default
_REPEAT_INTERLEAVE = torch.ops.aten.repeat_interleave.self_int

_FOLLOWED = {
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    F.linear: torch.ops.aten.linear.default,
    torch.reshape: _RESHAPE,
    Tensor.reshape: _RESHAPE,
    torch.flatten: _FLATTEN,
    Tensor.flatten: _FLATTEN,
    torch.unflatten: _UNFLATTEN,
    Tensor.unflatten: _UNFLATTEN,
    torch.einsum: _EINSUM,
    torch.repeat_interleave: _REPEAT_INTERLEAVE,
    Tensor.repeat_interleave: _REPEAT_INTERLEAVE,
    F.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default,
}


@dataclass(frozen=True)
class Bound:
    """A call in the form of an ATen operation's schema."""

    name: str
    schema: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | None:
    """The call as that of an ATen operation; None if it is followed by its steps."""
    operation = _FOLLOWED.get(func)
    if operation is None or not args:  # torch.matmul(input=..., other=...)
        return None
    if operation is _RESHAPE and len(args) > 1 and isinstance(args[1], int):
        args = (args[0], tuple(args[1:]))  # reshape(2, 3)
    elif operation is _EINSUM:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        if not isinstance(args[0], str):
            return None
        args = (args[0], tuple(operands))
    elif operation is _UNFLATTEN and (len(args) > 3 or isinstance(args[1], str)):
        return None
    elif operation is _REPEAT_INTERLEAVE:
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        if not isinstance(repeats, int):
            return None
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if operation is _EINSUM:
        tensors = list(args[1])
    if any(dtensor.is_dtensor(tensor) or tensor.layout != torch.strided for tensor in tensors):
        return None
    schema = operation._schema
    return Bound(schema.name.removeprefix("aten::"), schema, args, kwargs)
