"""Records calls of torch's functions, for what the operations inside them don't show."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from flex_model.integrations import dtensor
from flex_model.layouts import composites
from flex_model.layouts.sizes import CallSizes, Expression, Size, expressions_of

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
        reduction = composites.reduction_of(func, kwargs)
        with recorder.in_call(CallSizes(recorder.key, name, args, kwargs), reduction):
            bound = composites.bind(func, types, args, kwargs)
            if bound is not None:
                encoded = recorder.encode(bound.schema, bound.args, bound.kwargs)
                with recorder.paused():
                    result = func(*args, **kwargs)
                recorder.add_operation(bound.schema.name, encoded, result, bound.schema)
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
        is_part = func in self._running and func not in composites.BACKWARD_CALLS
        steps = None if is_part else composites.steps_of(func, types)
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
        with recorder.in_call(CallSizes(recorder.key, name), recorder.reduction):
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
