"""Records calls of torch's functions, for what the operations inside them don't show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from flex_model.integrations import dtensor
from flex_model.integrations.torch_private import is_functorch_tensor
from flex_model.layouts.sizes import CallSizes, Expression, Size, expressions_of, from_numpy

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder

_SIZES = {"__get__", "size", "numel", "nelement"}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SHARES = {"numpy", "__array__", "__dlpack__"}  # their memory may be written to unrecorded
_READS = _SHARES | {"tolist", "__float__", "__int__"}  # others dispatch an operation
_MAKERS = {"tensor", "as_tensor", "asarray", "new_tensor"}  # of numbers, or of tensors in lists
# Calls that take their sizes from another tensor, with the call that takes the sizes themselves.
_LIKE_OTHER = {
    "view_as": (torch.Tensor.view, "view"),
    "reshape_as": (torch.Tensor.reshape, "reshape"),
    "expand_as": (torch.Tensor.expand, "expand"),
}

# Followed as one operation: the operations inside lose what the call shows. A product of
# four-dimensional tensors flattens batch and heads into one dim and divides it again, ``reshape``
# replaces -1 by a number, ``repeat_interleave`` joins the copies with the dim that they repeat.
_MATMUL = torch.ops.aten.matmul.default
_RESHAPE = torch.ops.aten.reshape.default
_UNFLATTEN = torch.ops.aten.unflatten.int
_EINSUM = torch.ops.aten.einsum.default
_NARROW = torch.ops.aten.narrow.default
_REPEAT_INTERLEAVE = torch.ops.aten.repeat_interleave.self_int
_INSTANCE_NORM = torch.ops.aten.instance_norm.default
_TENSOR_SPLIT = torch.ops.aten.tensor_split

_OF_BOTH = {  # functions of torch, and methods of tensors
    "matmul": _MATMUL,
    "inner": torch.ops.aten.inner.default,
    "reshape": _RESHAPE,
    "flatten": torch.ops.aten.flatten.using_ints,
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
    torch._VF.tensordot: torch.ops.aten.tensordot.default,  # type: ignore[attr-defined]
    torch._C._nn.cross_entropy_loss: torch.ops.aten.cross_entropy_loss.default,
    torch._C._nn.nll_loss_nd: torch.ops.aten.nll_loss_nd.default,
    torch.bilinear: torch.ops.aten.bilinear.default,
    torch._VF.stft: torch.ops.aten.stft.default,  # type: ignore[attr-defined]
    torch.istft: torch.ops.aten.istft.default,
    torch.instance_norm: _INSTANCE_NORM,
    torch._C._nn.pad: torch.ops.aten.pad.default,
    torch._C._nn.pad_sequence: torch.ops.aten.pad_sequence.default,
    torch._VF._pad_packed_sequence: torch.ops.aten._pad_packed_sequence.default,
    F.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default,
}
#: Their names: under ``inference_mode`` they arrive as operations, too.
FOLLOWED_AS_ONE = {operation._schema.name for operation in _FOLLOWED.values()}

_REDUCTIONS = {dist.all_reduce, dist.reduce_scatter_tensor} if dist.is_available() else set()

# The methods of Tensor and Parameter, which are not overrides.
_OF_TENSORS = (vars(Tensor)["__torch_function__"].__func__, torch.nn.Parameter.__torch_function__)
_WRITTEN_IN_PYTHON = {"torch.nn.functional", "torch.functional"}
# They run the nodes of the model's graph, and may call themselves there.
_BACKWARD_CALLS = {torch.autograd.backward, torch.autograd.grad, Tensor.backward}
_NOT_OVERRIDDEN = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


class FunctionRecorder(TorchFunctionMode):
    """A function mode that records what the operations inside a call don't show: sizes that are
    read from tensors, products of more than two dims before they are flattened, -1 in ``reshape``.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._running: list[Any] = []  # that run by steps: some dispatch to the mode again

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _SIZES:
            return self._read(func, args, kwargs)
        if name == "__len__":
            return int(self._read(torch.Tensor.size, (args[0], 0), {}))
        if name in _READS and isinstance(args[0], Tensor):
            recorder.note_read(args[0], name in _SHARES)
        if name in _MAKERS:
            lists = [one for one in (*args, *kwargs.values()) if isinstance(one, (list, tuple))]
            for leaf in tree_iter(lists):
                if isinstance(leaf, Tensor):
                    recorder.note_read(leaf, False)
        if name == "register_hook" and isinstance(args[0], Tensor):
            recorder.nodes.note_hook_on(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            return func(*args, **kwargs)
        if name in _LIKE_OTHER and len(args) == 2 and isinstance(args[1], Tensor):
            func, name = _LIKE_OTHER[name]
            args = args[0], self._read(torch.Tensor.size, args[1:], {})
        bound = _bind(func, types, args, kwargs)
        given, named = (args, kwargs) if bound is None else _with_numbers(*bound, kwargs)
        sizes = CallSizes(recorder.key, name, given, named)
        with recorder.during(sizes=sizes, reduction=_reduction_of(func, kwargs)):
            if bound is not None:
                schema = bound[0]
                encoded = recorder.encode(schema, given, named)
                with recorder.paused():
                    result = func(*args, **kwargs)
                recorder.add_operation(schema.name, encoded, result, schema)
                recorder.record_results(result)
                return result
            result = self._run(func, types, args, kwargs)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                recorder.values.bind_result(item)
        recorder.record_results(result)
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run the function; by its steps, where those show what the call alone does not."""
        is_part = func in self._running and func not in _BACKWARD_CALLS
        steps = None if is_part else _steps_of(func, types)
        if steps is None:
            return func(*args, **kwargs)
        self._running.append(func)
        try:
            with self:
                return steps(*args, **kwargs)
        finally:
            self._running.pop()

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a shape, or one size of it, tagged with the tensor's value and dims; or another
        attribute as it is.
        """
        recorder = self._recorder
        name = getattr(func, "__name__", "")
        with recorder.during(sizes=CallSizes(recorder.key, name)):
            result = func(*args, **kwargs)
        tensor = args[0] if args else None
        if func == _DATA:
            recorder.note_same(args[0], result)
        is_count = name in ("numel", "nelement")
        is_size = isinstance(result, int) and (name == "size" or is_count)
        if not isinstance(tensor, Tensor) or not (is_size or isinstance(result, torch.Size)):
            return result
        dims = dtensor.unsplit_dims(tensor)
        value = recorder.value(tensor)
        of = value if isinstance(value, int) else 0  # no counterpart in the unsharded program

        def size(number: int, expression: Expression) -> Size:
            return Size(number, expressions_of(number) | {recorder.key: expression})

        if is_count:
            expressions: list[Expression] = [("dim", of, dim) for dim in range(tensor.dim())]
            is_whole = len(dims) == len(expressions) > 0
            if not is_whole:
                return result
            return size(result, reduce(lambda a, b: ("mul", a, b), expressions))
        if not is_size:
            return torch.Size(
                [size(n, ("dim", of, dim)) if dim in dims else n for dim, n in enumerate(result)]
            )
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        is_whole = isinstance(dim, int) and dim % tensor.dim() in dims
        return size(result, ("dim", of, dim % tensor.dim())) if is_whole else result


def _reduction_of(func: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the reduction of a call of torch.distributed, such as "sum"; "" for all other
    calls.
    """
    if func not in _REDUCTIONS or "op" not in kwargs:
        return ""
    op = kwargs["op"]
    return getattr(getattr(op, "op", op), "name", "other").lower()


def _steps_of(func: Any, types: Iterable[Any]) -> Callable[..., Any] | None:
    """Return a function of torch that is written in Python, such as
    ``F.multi_head_attention_forward``, without its dispatch to ``__torch_function__``, so that the
    mode sees the functions it calls. None for all other functions, and if a type of the arguments
    has its own ``__torch_function__``.
    """
    if not isinstance(func, FunctionType):
        return None  # F.max_pool1d is built elsewhere, of two functions that dispatch
    if func.__globals__["__name__"] not in _WRITTEN_IN_PYTHON and func not in _BACKWARD_CALLS:
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


def _with_numbers(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the elements of tensors that are passed where the operation takes
    numbers: ``F.pad(x, (amount, 0))``. Each is a read of Python's that is recorded, as torch reads
    it inside of the call.
    """
    names, of_numbers = [one.name for one in schema.arguments], _names_of_numbers(schema)

    def of(name: str, value: Any) -> Any:
        if name not in of_numbers:
            return value
        return tree_map_only(Tensor, lambda one: one.item() if one.numel() == 1 else one, value)

    positional = tuple(map(of, [*names, *[""] * len(args)], args))
    return positional, {name: of(name, one) for name, one in kwargs.items()}


@cache
def _names_of_numbers(schema: Any) -> set[str]:
    """Return the names of an operation's arguments that are no tensors."""
    return {one.name for one in schema.arguments if "Tensor" not in str(one.type)}


def _bind(
    func: Any, types: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Return the schema of the ATen operation that is called, and the positional arguments in its
    form; None if the call is followed through its steps.
    """
    operation = _FOLLOWED.get(func)
    if operation is None or _is_overridden(types):
        return None
    if not args or "out" in kwargs:  # torch.matmul(input=..., other=...)
        return None
    args = tuple(map(from_numpy, args))
    if operation is _RESHAPE and len(args) > 1 and isinstance(args[1], (int, Tensor)):
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
        repeats = args[1] if len(args) > 1 else from_numpy(kwargs.get("repeats"))
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
    return operation._schema, args
