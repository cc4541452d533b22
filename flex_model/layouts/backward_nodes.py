"""Nodes of autograd's graph whose backward no rule tells from the forward: ``autograd.Function``s,
custom operations, and whatever else is not one of ATen's own operations.

Such a node is met at the first use of what it made. Its backward is recorded when it runs,
operation by operation, in the log of the forward that it belongs to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.layouts import memory_map
from flex_model.layouts.log import Log, Value

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder

# Its backward computes a part of the model once more, with a backward inside: what hands gradients
# to its inputs are the operations of that.
RECOMPUTES = "CheckpointFunctionBackward"
# Their hooks gather weights and reduce gradients of weights, or are hooks of ours: what they get is
# what they hand on.
_HANDING_ON = ("torch.distributed.", "fairscale.", "flex_model.")
_EDGE = "_EdgeBackward"  # where hooks on gradients are: an identity
_OF_MODULE = "BackwardHookFunctionBackward"  # likewise, where torch calls backward hooks of modules


class BackwardNodes:
    """Of one recorded forward.

    Attributes:
        linked: Values whose gradients go on by the operations that made them, as rules have it, or
            at which gradients end.
    """

    def __init__(self, recorder: Recorder, has_module_hooks: bool) -> None:
        self._recorder, self._has_module_hooks = recorder, has_module_hooks
        self.linked: set[Value] = set()
        self._values: dict[tuple[int, int], Value] = {}  # by node and output of it
        self._unread: dict[tuple[int, int], Value] = {}  # likewise, of tensors that were not met
        self._numbers: dict[int, Value] = {}  # by node

    def link(self, outputs: Sequence[Any], writes: Sequence[Any]) -> None:
        """An operation of ATen's that carries gradients has made these."""
        self.linked.update(output[0] for output in outputs)
        for write in writes:
            self.linked.update(value for _, value, _ in write[1])

    def meet(self, tensor: Tensor, value: Value | tuple[Value, ...]) -> Any:
        """A tensor that requires a gradient is read, which is this output of its node; its value,
        which is another one where a hook looks at its gradient, and one of its own where it may be
        one of several.
        """
        node = tensor.grad_fn
        if node is None:
            return value
        key = (_number_of(node), tensor.output_nr)
        if key not in self._values and node.name() in (_EDGE, _OF_MODULE):
            # A module that returns its input has the edge on the tensor that goes in.
            place = key[1] if node.name() == _OF_MODULE else 0
            source = self._source(*node.next_functions[place])
            value = self._named(tensor, value, source)
            self.linked.add(value)
            if node.name() == _OF_MODULE:
                self.note_module_hook(source)
        elif isinstance(value, tuple) and key in self._values:
            value = self._recorder.values.latest(self._values[key])
        elif isinstance(value, tuple):
            value = self._named(tensor, value, None)
        self._values[key] = value
        if value in self.linked:
            return value
        self.linked.add(value)
        if self._recorder.is_received(value) and not _is_function(node):
            return value  # a collective has written to what the node had made
        if tensor.numel() == 0:
            return value
        self._add(node, key[1], value)
        unread = self._unread.pop(key, None)
        if unread is not None:
            self._recorder.log.add("named", unread, value, value)
        return value

    def _add(self, node: Any, place: int, value: Value) -> None:
        key, inputs = _number_of(node), ()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._recorder.log.new_value()
            inputs = tuple(self._source(*edge) for edge in node.next_functions)
            self._follow(node, number)
        self._recorder.log.add("node", number, node.name(), inputs, place, value)

    def _named(self, tensor: Tensor, values: Any, source: Any) -> Value:
        """A value of its own for a tensor that has one of these; ``source``: whose gradient is its
        gradient, None where its node says that.
        """
        value = self._recorder.log.new_value()
        self._recorder.log.add("named", value, values, source)
        self._recorder.values.note(tensor, value)
        return value

    def _source(self, node: Any, output: int) -> Any:
        """The value that an edge leads to; of one that was not met: one of its own where a
        ``Function`` has made it, which another one has read; else those that are met behind it,
        with a None among them.
        """
        if node is None:
            return ()
        known = self._known(node, output)
        if known is not None:
            return known
        if _is_function(node):
            value = self._unread[_number_of(node), output] = self._recorder.log.new_value()
            self._add(node, output, value)
            return value
        found: list[Any] = [None]
        seen, pending = {node}, [node]
        while pending:
            for behind, place in pending.pop().next_functions:
                if behind is None or behind in seen:
                    continue
                known = self._known(behind, place)
                if known is None:
                    seen.add(behind)
                    pending.append(behind)
                else:
                    found.append(known)
        return tuple(found)

    def _known(self, node: Any, output: int) -> Any:
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._recorder.value(node.variable) or ()
        key = (_number_of(node), output)
        value = self._values.get(key, self._unread.get(key))
        return None if value is None else self._recorder.values.latest(value)

    def _follow(self, node: Any, number: Value) -> None:
        recorder, paths = self._recorder, []

        def begin(gradients: Any) -> None:
            if recorder.pauses:
                return
            paths.append(recorder.log.enter(node_name))
            given = []
            for place, gradient in enumerate(gradients):
                if isinstance(gradient, Tensor):
                    value = recorder.log.new_value()
                    recorder.values.note(gradient, value)
                    shape, stated = memory_map.shape_of(gradient), recorder.stated(gradient)
                    given.append((place, value, shape, stated))
            recorder.log.add("backward", number, tuple(given))
            recorder.__enter__()

        def end(made: Any, gradients: Any) -> None:
            if not paths:
                return
            recorder.__exit__(None, None, None)
            values = tuple(
                recorder.value(tensor) if isinstance(tensor, Tensor) else () for tensor in made
            )
            stated = tuple(
                recorder.stated(tensor) if isinstance(tensor, Tensor) else None for tensor in made
            )
            recorder.log.add("gradients", number, values, stated)
            recorder.log.exit(paths.pop())

        node_name = f"backward of {node.name()}"
        node.register_prehook(begin)
        node.register_hook(end)

    # Hooks of the model's own on gradients.

    def watched(self, tensor: Tensor, hook: Any) -> Any:
        """A hook that the model puts on a tensor's gradient, which may change that unseen, until it
        has run and left it as it was. (Those that torch calls once a gradient was accumulated come
        after what FlexModel's hooks see.)
        """
        value = None if hands_on(hook) else self._recorder.value(tensor)
        if value is None:
            return hook
        number = self.note_hook(value)

        @functools.wraps(hook)
        def watching(grad: Tensor) -> Any:
            version = grad._version
            made = hook(grad)
            if (made is None or made is grad) and grad._version == version:
                self._recorder.log.add("looked", number)
            else:  # also where it has only looked in a backward before
                self.note_hook(value, number)
            return made

        return watching

    def note_module_hook(self, value: Any) -> None:
        """Torch calls hooks on a module's gradients before it passes this value its gradient."""
        if self._has_module_hooks:
            self.note_hook(value)

    def note_hook(self, value: Any, number: Value | None = None) -> Value:
        """A hook may change the gradient of a value; its number."""
        number = self._recorder.log.new_value() if number is None else number
        self._recorder.log.add("hooked", value, "a hook of the model's own on gradients", number)
        return number


def _is_function(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _number_of(node: Any) -> int:
    return node._sequence_nr()


def hands_on(hook: Any) -> bool:
    """Whether a hook on a tensor's gradient is a framework's, or FlexModel's own."""
    modules = [getattr(function, "__module__", None) or "" for function in _functions_of(hook)]
    return bool(modules) and all(f"{name}.".startswith(_HANDING_ON) for name in modules)


def _functions_of(hook: Any) -> Iterator[Any]:
    """What a hook calls, as far as that is known: torch puts functions of its own around."""
    hook = getattr(hook, "__func__", hook)
    if isinstance(hook, functools.partial):
        yield from _functions_of(hook.func)
    elif hasattr(hook, "__wrapped__"):
        yield from _functions_of(hook.__wrapped__)
    elif (getattr(hook, "__module__", None) or "") == "torch.autograd.graph":
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        yield from (one for cell in cells if callable(cell) for one in _functions_of(cell))
    else:
        yield hook


class Unsettled:
    """Results of an operation of which it is not known yet whether they carry gradients: autograd
    says so once the operation is over. Those that don't are there for its backward, such as a
    norm's mean.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pending: list[tuple[weakref.ref[Tensor], Value]] = []

    def note(self, schema: Any, tensors: Sequence[Tensor], values: Sequence[Value]) -> None:
        """An operation of ATen's has made several."""
        is_view = any(made.alias_info is not None for made in schema.returns)
        if len(tensors) > 1 and not is_view:
            self._pending += [(weakref.ref(one), value) for one, value in zip(tensors, values)]

    def settle(self) -> None:
        """The operation is over."""
        if not self._pending:
            return
        found = [(reference(), value) for reference, value in self._pending]
        self._pending = []
        idle = tuple(value for one, value in found if one is not None and not one.requires_grad)
        if idle:
            self._log.add("idle", idle)
