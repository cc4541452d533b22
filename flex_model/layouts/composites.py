"""Lists the functions of torch that are followed as one operation, not through their component
operations; and those written in Python that are followed through their steps.

The component operations lose what the call shows: a product of four-dimensional tensors flattens
batch and heads into one dim and divides it again, ``reshape`` replaces -1 by a number,
``repeat_interleave`` joins the copies with the dim that they repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_iter

from flex_model.integrations.torch_private import is_functorch_tensor

_MATMUL = torch.ops.aten.matmul.default
_RESHAPE = torch.ops.aten.reshape.default
_FLATTEN = torch.ops.aten.flatten.using_ints
_UNFLATTEN = torch.ops.aten.unflatten.int
_EINSUM = torch.ops.aten.einsum.default
_NARROW = torch.ops.aten.narrow.default
_REPEAT_INTERLEAVE = torch.ops.aten.repeat_interleave.self_int
_INSTANCE_NORM = torch.ops.aten.instance_norm.default
_TENSOR_SPLIT = torch.ops.aten.tensor_split

_OF_BOTH = {  # functions of torch, and methods of tensors
    "matmul": _MATMUL,
    "reshape": _RESHAPE,
    "flatten": _FLATTEN,
    "unflatten": _UNFLATTEN,
    "repeat_interleave": _REPEAT_INTERLEAVE,
    "tensor_split": _TENSOR_SPLIT.sections,
    "narrow": _NARROW,
    "chunk": torch.ops.aten.chunk.default,
}
_RECURRENT = {getattr(torch, name): name for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
_FOLLOWED = {
    **{getattr(of, name): op for name, op in _OF_BOTH.items() for of in (torch, Tensor)},
    **{function: getattr(torch.ops.aten, name).input for function, name in _RECURRENT.items()},
    Tensor.__matmul__: _MATMUL,
    F.linear: torch.ops.aten.linear.default,
    F.one_hot: torch.ops.aten.one_hot.default,
    torch.einsum: _EINSUM,
    torch.instance_norm: _INSTANCE_NORM,
    torch._C._nn.pad_sequence: torch.ops.aten.pad_sequence.default,
    torch._VF._pad_packed_sequence: torch.ops.aten._pad_packed_sequence.default,
    F.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default,
}

_REDUCTIONS = {dist.all_reduce, dist.reduce_scatter_tensor} if dist.is_available() else set()

# The methods of Tensor and Parameter, which are not overrides.
_OF_TENSORS = (vars(Tensor)["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)
_WRITTEN_IN_PYTHON = {"torch.nn.functional", "torch.functional"}
#: They run the nodes of the model's graph, and may call themselves there.
BACKWARD_CALLS = {torch.autograd.backward, torch.autograd.grad, Tensor.backward}
_NOT_OVERRIDDEN = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


@dataclass(frozen=True)
class Bound:
    """A call in the form of an ATen operation's schema."""

    name: str
    schema: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def reduction_of(func: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the reduction of a call of torch.distributed, such as "sum"; "" for all other
    calls.
    """
    if func not in _REDUCTIONS or "op" not in kwargs:
        return ""
    op = kwargs["op"]
    return getattr(getattr(op, "op", op), "name", "other").lower()


def steps_of(func: Any, types: Iterable[Any]) -> Callable[..., Any] | None:
    """Return a function of torch that is written in Python, such as
    ``F.multi_head_attention_forward``, without its dispatch to ``__torch_function__``, so that the
    mode sees the functions it calls. None for all other functions, and if a type of the arguments
    has its own ``__torch_function__``.
    """
    if not isinstance(func, FunctionType):
        return None  # F.max_pool1d is built elsewhere, of two functions that dispatch
    if func.__globals__["__name__"] not in _WRITTEN_IN_PYTHON and func not in BACKWARD_CALLS:
        return None
    if _is_overridden(types):
        return None
    names = {**func.__globals__, **_NOT_OVERRIDDEN}
    steps = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    steps.__kwdefaults__ = func.__kwdefaults__
    return steps


def _is_overridden(types: Iterable[Any]) -> bool:
    """Whether a type of the arguments has its own ``__torch_function__``."""
    overrides = (getattr(t.__torch_function__, "__func__", t.__torch_function__) for t in types)
    return any(override not in _OF_TENSORS for override in overrides)


def bind(
    func: Any, types: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Bound | None:
    """Return the call as that of an ATen operation; None if it is followed through its steps."""
    operation = _FOLLOWED.get(func)
    if operation is None or _is_overridden(types):
        return None
    if not args or "out" in kwargs:  # torch.matmul(input=..., other=...)
        return None
    if operation is _RESHAPE and len(args) > 1 and isinstance(args[1], int):
        args = (args[0], tuple(args[1:]))  # reshape(2, 3)
    elif operation is _NARROW and any(isinstance(argument, Tensor) for argument in args[1:]):
        return None
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
    elif operation is _TENSOR_SPLIT.sections:
        if len(args) < 2 or isinstance(args[1], Tensor):
            return None
        if not isinstance(args[1], int):
            operation = _TENSOR_SPLIT.indices
    elif operation is _INSTANCE_NORM and (len(args) < 4 or args[3] is not None):
        return None  # running statistics
    elif func in _RECURRENT and (len(args) != 9 or isinstance(args[2], Tensor)):
        return None  # packed sequences
    tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
    if any(tensor.layout != torch.strided or is_functorch_tensor(tensor) for tensor in tensors):
        return None
    schema = operation._schema
    return Bound(schema.name.removeprefix("aten::"), schema, args, kwargs)
