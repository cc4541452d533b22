"""Records calls of torch's functions, for what the operations inside them don't show."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flex_model.integrations import dtensor
from flex_model.layouts import composites, memory_map
from flex_model.layouts.call_sizes import CallSizes
from flex_model.layouts.callers import MASKS, RECORDERS, is_called_by_model, is_run_by_model
from flex_model.layouts.expressions import Expression
from flex_model.layouts.literals import with_literals
from flex_model.layouts.propagation import rules
from flex_model.layouts.sizes import Size, expression_of, expressions_of, plain, tagged

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder

_SIZES = {"__get__", "size", "numel", "nelement"}
# They are made of sizes, as attributes such as ``nbytes`` are.
_MADE_OF_SIZES = {"stride", "storage_offset", "untyped_storage", "storage"}
_COUNTS_BYTES = {Tensor.nbytes.__get__}  # type: ignore[attr-defined]
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_NUMBERS = {"item", "__int__", "__float__", "__index__", "__complex__"}
_OPAQUE = {torch.broadcast_tensors}  # they read sizes that no call shows
_CONDITIONS = {"__bool__", "is_nonzero", "equal", "allclose", "__contains__"}
_INSPECTIONS = {"__len__", *_NUMBERS, *_CONDITIONS, *_MADE_OF_SIZES}
_READS = {"numpy", "__array__", "__dlpack__", "tolist"}
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
        if name in _INSPECTIONS and not is_called_by_model(through=RECORDERS):
            return func(*args, **kwargs)
        if name == "__len__":
            length = func(*args, **kwargs)
            recorder.log.add("number", length, ("dim", recorder.one_value(args[0]), 0), "__int__")
            return length
        if name in _NUMBERS and isinstance(args[0], Tensor):
            return self._read_number(func, args[0], args, kwargs)
        if name in _CONDITIONS:
            answer = func(*args, **kwargs)
            for tensor in filter(lambda one: isinstance(one, Tensor), args):
                self._note_condition(recorder.one_value(tensor), answer)
            return answer
        if name in _SIZES:
            return self._read(func, args, kwargs)
        if name in _MADE_OF_SIZES:
            recorder.log.add("read", recorder.value(args[0]))
            return func(*args, **kwargs)
        if name in _READS and isinstance(args[0], Tensor):
            recorder.log.add("read", recorder.value(args[0]))
            if name != "tolist":
                recorder.invalidate(args[0])
            return func(*args, **kwargs)
        if func in _OPAQUE:
            with recorder.paused():
                result = func(*args, **kwargs)
            for made in result:
                recorder.values.note(made, recorder.log.new_value())  # nothing is known of it
            return result
        if name == "register_hook" and isinstance(args[0], Tensor):
            hook = recorder.nodes.wrap_hook(args[0], args[1] if len(args) > 1 else kwargs["hook"])
            return func(args[0], hook)
        if name in _LIKE_OTHER and len(args) == 2 and isinstance(args[1], Tensor):
            func, name = _LIKE_OTHER[name]
            args = args[0], self._read(torch.Tensor.size, args[1:], {})
        if name in ("__getitem__", "__setitem__") and len(args) > 1 and is_run_by_model():
            args = args[0], self._with_numbers(args[1]), *args[2:]
            self._note_whole_slices(args[0], args[1])
        args, kwargs = with_literals(name, args, kwargs)
        reduction = composites.reduction_of(func, kwargs)
        with recorder.in_call(CallSizes(recorder.key, name, args, kwargs), reduction):
            bound = composites.bind(func, types, args, kwargs)
            if bound is not None and rules.has_rule(bound.name):
                encoded = recorder.encode(bound.schema, bound.args, bound.kwargs)
                with recorder.paused():
                    result = func(*args, **kwargs)
                schema = bound.schema
                name, overload = schema.name, schema.overload_name
                recorder.add_operation(name, overload, encoded, (), {}, result, None)
                recorder.record_results(result)
                return result
            result = self._run(func, types, args, kwargs)
        if isinstance(result, Tensor):
            recorder.values.bind_result(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
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

    def _with_numbers(self, index: Any) -> Any:
        """Return a subscript in which bounds of slices that are tensors are the numbers in them."""
        if isinstance(index, tuple):
            return tuple(map(self._with_numbers, index))
        if not isinstance(index, slice):
            return index
        bounds = (index.start, index.stop, index.step)
        return slice(*(self._number_in(one) if _is_number(one) else one for one in bounds))

    def _number_in(self, tensor: Tensor) -> Any:
        return self._read_number(Tensor.item, tensor, (tensor,), {})

    def _note_whole_slices(self, tensor: Any, index: Any) -> None:
        """Log the comparisons by which torch omits slices that take all of a dim: the unsharded
        program's sizes decide whether they do there.
        """
        value, shape = self._recorder.one_value(tensor), memory_map.shape_of(tensor)
        for dim, one in _slices_by_dim(index, len(shape)):
            start, stop, step = one.start, one.stop, one.step
            is_whole = start in (None, 0) and step in (None, 1) and stop in (None, shape[dim])
            if not is_whole:
                continue
            pairs = [(start, ("number", 0)), (step, ("number", 1)), (stop, ("dim", value, dim))]
            for number, other in pairs:
                own = expression_of(number, self._recorder.key)
                if own is not None or (number is stop is not None and value):
                    own = ("number", plain(number)) if own is None else own
                    self._recorder.log.add("compared", "eq", own, other, True, True)

    def _read_number(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        """Return the tensor's only element, tagged with the tensor's value."""
        recorder = self._recorder
        of, number = recorder.one_value(tensor), func(*args, **kwargs)
        if isinstance(number, bool):
            self._note_condition(of, number)
        elif func is Tensor.item:
            read = {recorder.key: ("read", of, plain(number))}
            return tagged(number, expressions_of(number) | read)
        else:
            recorder.log.add("read", of)
        return number

    def _note_condition(self, value: Any, answer: Any) -> None:
        of_mask = not is_called_by_model(but_for=MASKS, through=RECORDERS)
        self._recorder.log.add("condition", value, answer, of_mask)

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
            if name == "__get__" and type(result) is int and func in _COUNTS_BYTES:
                recorder.log.add("read", recorder.value(args[0]))
            return result
        dims = dtensor.unsplit_dims(tensor)
        of = recorder.one_value(tensor)

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


def _is_number(bound: Any) -> bool:
    """Whether the bound of a slice is a tensor that torch takes for an integer."""
    return isinstance(bound, Tensor) and bound.numel() == 1 and not bound.is_floating_point()


def _slices_by_dim(index: Any, ndim: int) -> Iterator[tuple[int, slice]]:
    """Yield the slices of a subscript, with the dims of the tensor that they index."""
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
    """Return the number of tensor dims that an item of a subscript indexes."""
    if item is None or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1
