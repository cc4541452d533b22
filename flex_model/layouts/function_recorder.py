"""Records calls of torch's functions, where they show what the operations below them don't."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flex_model.integrations import dtensor
from flex_model.layouts import composites, memory_map
from flex_model.layouts.callers import is_asked_by_model, is_run_by_model
from flex_model.layouts.propagation import rules
from flex_model.layouts.sizes import (
    CallSizes,
    Expression,
    Size,
    expression_of,
    plain,
    tagged,
)

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder

_SIZES = {"__get__", "size", "numel", "nelement"}
# And attributes such as ``nbytes``.
_MADE_OF_SIZES = {"stride", "storage_offset", "untyped_storage", "storage"}
_COUNTS_BYTES = {Tensor.nbytes.__get__}  # type: ignore[attr-defined]
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_NUMBERS = {"item", "__int__", "__float__", "__index__", "__complex__"}
_UNSEEN = {torch.broadcast_tensors}  # whose steps have sizes of tensors that nothing shows
_QUESTIONS = {"__bool__", "is_nonzero", "equal", "allclose", "__contains__"}
_ASKS = {"__len__", *_NUMBERS, *_QUESTIONS, *_MADE_OF_SIZES}
_READS = {"numpy", "__array__", "__dlpack__", "tolist"}
# Calls that take their sizes from another tensor, as those that are given them.
_AS = {
    "view_as": (torch.Tensor.view, "view"),
    "reshape_as": (torch.Tensor.reshape, "reshape"),
    "expand_as": (torch.Tensor.expand, "expand"),
}


class FunctionRecorder(TorchFunctionMode):
    """What calls of torch's functions show and the operations below them don't: sizes that are read
    from tensors, products of more than two dims before they are flattened, -1 in ``reshape``.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._running: list[Any] = []  # by steps; parts of some ask once more whether they are to

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _ASKS and not is_asked_by_model():
            return func(*args, **kwargs)
        if name == "__len__":
            length = func(*args, **kwargs)
            recorder.log.add("number", length, ("dim", recorder.one_value(args[0]), 0), "__int__")
            return length
        if name in _NUMBERS and isinstance(args[0], Tensor):
            return self._read_number(func, args[0], args, kwargs)
        if name in _QUESTIONS:
            answer = func(*args, **kwargs)
            for tensor in filter(lambda one: isinstance(one, Tensor), args):
                recorder.log.add("asked", recorder.one_value(tensor), answer)
            return answer
        if name in _SIZES:
            return self._read(func, args, kwargs)
        if name in _MADE_OF_SIZES:
            recorder.log.add("read", recorder.value(args[0]))
            return func(*args, **kwargs)
        if name in _READS and isinstance(args[0], Tensor):
            recorder.log.add("read", recorder.value(args[0]))
            if name != "tolist":
                recorder.lose(args[0])
            return func(*args, **kwargs)
        if func in _UNSEEN:
            with recorder.paused():
                result = func(*args, **kwargs)
            for made in result:
                recorder.values.note(made, recorder.log.new_value())  # of which nothing is known
            return result
        if name == "register_hook" and isinstance(args[0], Tensor):
            hook = recorder.nodes.watched(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            return func(args[0], hook)
        if name in _AS and len(args) == 2 and isinstance(args[1], Tensor):
            func, name = _AS[name]
            args = args[0], self._read(torch.Tensor.size, args[1:], {})
        if name in ("__getitem__", "__setitem__") and len(args) > 1 and is_run_by_model():
            self._note_whole_slices(args[0], args[1])
        reduction = composites.reduction_of(func, kwargs)
        with recorder.in_call(CallSizes(name, args, kwargs), reduction):
            bound = composites.bind(func, types, args, kwargs)
            if bound is not None and rules.has_rule(bound.name):
                encoded = recorder.encode(bound.schema, bound.args, bound.kwargs)
                with recorder.paused():
                    result = func(*args, **kwargs)
                schema = bound.schema
                name, overload = schema.name, schema.overload_name
                recorder.add_operation(name, overload, encoded, (), {}, result, None)
                recorder.meet(result)
                return result
            result = self._run(func, types, args, kwargs)
        if isinstance(result, Tensor):
            recorder.values.know_object(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    recorder.values.know_object(item)
        recorder.meet(result)
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run the function, by its steps where those show what is lost in it."""
        is_part = func in self._running and func not in composites.RUN_NODES
        steps = None if is_part else composites.steps_of(func, types)
        if steps is None:
            return func(*args, **kwargs)
        self._running.append(func)
        try:
            with self:
                return steps(*args, **kwargs)
        finally:
            self._running.pop()

    def _note_whole_slices(self, tensor: Any, index: Any) -> None:
        """Slices that torch leaves out, since they take all of a dim: whether they do in the
        unsharded program is for its sizes to tell.
        """
        value, shape = self._recorder.one_value(tensor), memory_map.shape_of(tensor)
        for dim, one in _slices_by_dim(index, len(shape)):
            start, stop, step = one.start, one.stop, one.step
            is_whole = start in (None, 0) and step in (None, 1) and stop in (None, shape[dim])
            if not is_whole:
                continue
            pairs = [(start, ("number", 0)), (step, ("number", 1)), (stop, ("dim", value, dim))]
            for number, other in pairs:
                own = expression_of(number)
                if own is not None or (number is stop is not None and value):
                    own = ("number", plain(number)) if own is None else own
                    self._recorder.log.add("compared", "eq", own, other, True, True)

    def _read_number(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        """The tensor's only element, that remembers of which tensor."""
        recorder = self._recorder
        of, number = recorder.one_value(tensor), func(*args, **kwargs)
        if isinstance(number, bool):
            recorder.log.add("asked", of, number)
        elif func is Tensor.item:
            return tagged(number, ("read", of, number))
        else:
            recorder.log.add("read", of)
        return number

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A shape, or one size of it, that remembers of what it is; or another attribute."""
        recorder = self._recorder
        name = getattr(func, "__name__", "")
        with recorder.in_call(CallSizes(name), recorder.reduction):
            result = func(*args, **kwargs)
        tensor = args[0] if args else None
        if func == _DATA:
            recorder.note_same(args[0], result)
        is_count = name in ("numel", "nelement")
        is_size = isinstance(result, int) and (name == "size" or is_count)
        if not isinstance(tensor, Tensor) or not (is_size or isinstance(result, torch.Size)):
            if name == "__get__" and type(result) is int and func in _COUNTS_BYTES:
                recorder.log.add("read", recorder.value(args[0]))
            return result
        dims = dtensor.unsplit_dims(tensor)
        of = recorder.one_value(tensor)
        if is_count:
            expressions: list[Expression] = [("dim", of, dim) for dim in range(tensor.dim())]
            is_whole = len(dims) == len(expressions) > 0
            return (
                Size(result, reduce(lambda a, b: ("mul", a, b), expressions))
                if is_whole
                else result
            )
        if not is_size:
            return torch.Size(
                [Size(n, ("dim", of, dim)) if dim in dims else n for dim, n in enumerate(result)]
            )
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        is_whole = isinstance(dim, int) and dim % tensor.dim() in dims
        return Size(result, ("dim", of, dim % tensor.dim())) if is_whole else result


def _slices_by_dim(index: Any, ndim: int) -> Iterator[tuple[int, slice]]:
    """The slices of a subscript, with the dims of the tensor that they are of."""
    items = index if isinstance(index, tuple) else (index,)
    widths = [_num_dims(item) for item in items if item is not Ellipsis]
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += ndim - sum(widths)
            continue
        if isinstance(item, slice) and dim < ndim:
            yield dim, item
        dim += _num_dims(item)


def _num_dims(item: Any) -> int:
    """How many dims of a tensor an item of a subscript is for."""
    if item is None or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1
