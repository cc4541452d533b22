"""Finds nodes of autograd's graph that are not ATen's operations: ``autograd.Function``s, and
operations of other libraries. Such a node is found at the first use of its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from flex_model.layouts import logged
from flex_model.layouts.contracts import functions
from flex_model.layouts.logged import Value

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder

# Their hooks gather weights, reduce gradients of weights, or are FlexModel's: they return the
# gradient that they receive.
_FRAMEWORKS = (
    *(f"torch.distributed.{name}." for name in ("fsdp", "_composable", "tensor.debug", "_tools")),
    "torch.distributed.tensor.parallel.", "fairscale.nn.data_parallel.",
    "flex_model.hooks.", "flex_model.integrations.", "flex_model.runs.",
)  # fmt: skip
# The identities at which FlexModel's gradient hooks run, and of what has the memory of an input.
_EDGES = "_EdgeBackward", "_InputsMemoryBackward"
_OF_CPP = "torch::autograd::CppNode<"
_OF_MODULE = "BackwardHookFunctionBackward"  # where torch runs a module's backward hooks


class GraphNodes:
    """Tracks the nodes of one recorded forward.

    Attributes:
        linked: Values whose gradients are passed on by the operations that made them, as rules say,
            or at which gradients end.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._has_module_hooks = any(map(has_backward_hooks, recorder.owner.root.modules()))
        self.linked: set[Value] = set()
        self._values: dict[tuple[int, int], Value] = {}  # by node and output
        self._unread: dict[tuple[int, int], Value] = {}  # of tensors whose use is not recorded
        self._numbers: dict[int, Value] = {}  # by node

    def link(self, outputs: Sequence[logged.Made], writes: Sequence[logged.Write]) -> None:
        """Note that an ATen operation that carries gradients made these outputs."""
        self.linked.update(output.value for output in outputs)
        for write in writes:
            self.linked.update(value for _, value, _ in write.others)

    def note_use(self, tensor: Tensor, value: Value | tuple[Value, ...]) -> Any:
        """Note the use of a tensor that requires a gradient, as an output of its node; return its
        value. That is a new one where a hook gets the tensor's gradient, or where the tensor may
        have one of several values.
        """
        node = tensor.grad_fn
        if node is None:
            return value
        key = (_number_of(node), tensor.output_nr)
        if key not in self._values and node.name() in (*_EDGES, _OF_MODULE):
            # If a module returns its input, the edge is on the tensor that goes into it.
            place = key[1] if node.name() == _OF_MODULE else 0
            source = self._source(*node.next_functions[place])
            if isinstance(value, tuple) and source in value:
                value = source  # of the values at its place, that of the tensor that goes into it
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
        is_cpp = node.name().startswith(_OF_CPP)
        if value in self._recorder.received and not (_is_function(node) or is_cpp):
            return value  # a collective wrote to the node's output
        if tensor.numel() == 0:
            return value
        self._add(node, key[1], value)
        unread = self._unread.pop(key, None)
        if unread is not None:
            self._recorder.log.add(logged.Named(unread, value, value))
        return value

    def _add(self, node: Any, place: int, value: Value) -> None:
        key, inputs = _number_of(node), ()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._recorder.log.new_value()
            inputs = tuple(self._source(*edge) for edge in node.next_functions)
        name, contract = functions.gradient_of(node)
        self._recorder.log.add(logged.Node(number, name, contract, inputs, place, value))

    def separate(self, inputs: Sequence[Any], result: Any) -> None:
        """Give results that are aliases of a Function's inputs values of their own: their gradients
        are others.
        """
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and self._recorder.values.is_memory(leaf):
                value = self._recorder.values.of(leaf)
                if value in inputs:
                    self._named(leaf, value, ())

    def add_function(
        self, name: str, contract: str | None, inputs: Sequence[Any], result: Any
    ) -> None:
        """Add a node that torch's graph does not show, since it runs in a part that is
        recomputed.
        """
        number = self._recorder.log.new_value()
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        for place, tensor in enumerate(made):
            value = self._recorder.value(tensor)
            self.linked.add(value)
            self._recorder.log.add(logged.Node(number, name, contract, tuple(inputs), place, value))
            inputs = ()

    def _named(self, tensor: Tensor, values: Any, source: Any) -> Value:
        """Give a tensor that has one of these values a value of its own; ``source``: the value that
        has the same gradient, None where the tensor's node shows it.
        """
        value = self._recorder.log.new_value()
        self._recorder.log.add(logged.Named(value, values, source))
        self._recorder.values.note(tensor, value)
        return value

    def _source(self, node: Any, output: int) -> Any:
        """Return the value to which an edge leads. If no use of it is recorded, return a new value
        for the output of a ``Function``, which another ``Function`` has read; else the recorded
        values behind it, with a None among them.
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

    # Hooks of the model's own on gradients.

    def note_hook_on(self, tensor: Tensor, hook: Any) -> None:
        """Note a hook that the model registers on a tensor's gradient. (Hooks that torch calls
        after a gradient was accumulated run after those of FlexModel; under FSDP2 before them, see
        `Tracking`.)
        """
        value = None if is_framework_hook(hook) else self._recorder.value(tensor)
        if value is not None:
            self.note_hook(value)

    def note_module_hook(self, value: Any) -> None:
        """Note that torch runs a module's backward hooks before it passes this value its
        gradient.
        """
        if self._has_module_hooks:
            self.note_hook(value)

    def note_hook(self, value: Any) -> None:
        """Note that a hook may change the gradient of a value."""
        self._recorder.log.add(logged.Hooked(value))


def _is_function(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _number_of(node: Any) -> int:
    return node._sequence_nr()


def is_framework_hook(hook: Any) -> bool:
    """Whether a hook on a tensor's gradient is a framework's, or FlexModel's own."""
    modules = [getattr(function, "__module__", None) or "" for function in _functions_of(hook)]
    return bool(modules) and all(f"{name}.".startswith(_FRAMEWORKS) for name in modules)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the module has backward hooks other than those of a framework."""
    hooks = (*module._backward_pre_hooks.values(), *module._backward_hooks.values())
    return not all(map(is_framework_hook, hooks))


def _functions_of(hook: Any) -> Iterator[Any]:
    """Yield the functions that a hook calls, as far as they are known: torch wraps hooks in its
    own.
    """
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
