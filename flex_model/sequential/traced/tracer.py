"""Traces the modules around a model's targets into a ``torch.fx`` graph.

Every value that the traced code meets has a sample beside it: the model is run, on the sample,
while it is traced. So any question that code asks (a length, a truth, an index) has an answer, and
functions that the tracer can't look into (masks, caches) become single nodes, which are called
again with real values when the graph is run. What was true of the sample only, makes a graph that
is wrong for others: `trace_check` finds out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx.node import map_arg

from flex_model.errors import TraceError

# Factories of tensors: torch does not ask their arguments, which may be sizes, for their type.
_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "full_like", "linspace"),
    *("ones", "rand", "randn", "tensor", "zeros"),
)
# What gives Python values of tensors.
_READERS = ("item", "tolist", "equal", "allclose", torch.equal, torch.allclose, torch.is_nonzero)
_NO_SAMPLE = object()


class SampledProxy(torch.fx.Proxy):
    """A proxy that knows what it is for the sample. Sizes stay proxies; dtypes, devices and the
    like are taken to be the same for all inputs, and so are lengths, truths and indices. Python is
    not told the values in a tensor of the input: no comparison could tell what others would do.
    """

    @property
    def sample(self) -> Any:
        return self.tracer.samples.get(self.node, _NO_SAMPLE)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if self.sample is _NO_SAMPLE:
            return super().__getattr__(name)
        value = getattr(self.sample, name)
        if callable(value):
            return torch.fx.proxy.Attribute(self, name)
        if isinstance(value, (Tensor, torch.Size, int)) and not isinstance(value, bool):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return value

    def _answer(self) -> Any:
        """The sample, where no value of the input decides what it is."""
        if self.tracer.reads_values(self.node):  # type: ignore[attr-defined]
            raise TraceError(
                f"the code around the targets asks in Python for the values of {self.node.name!r}, "
                "a tensor (an if, .item(), bool(), int())"
            )
        return self.sample

    def __bool__(self) -> bool:
        return super().__bool__() if self.sample is _NO_SAMPLE else bool(self._answer())

    def __len__(self) -> int:
        return super().__len__() if self.sample is _NO_SAMPLE else len(self.sample)

    def __index__(self) -> int:
        return operator.index(self._answer())

    def __int__(self) -> int:
        return int(self._answer())

    def __float__(self) -> float:
        return float(self._answer())

    def __contains__(self, item: Any) -> bool:
        return _sample_of(item) in self._answer()

    def __iter__(self) -> Iterator[Any]:
        if self.sample is _NO_SAMPLE:
            return super().__iter__()
        if isinstance(self.sample, dict):
            return iter(self.sample)
        return iter([operator.getitem(self, i) for i in range(len(self.sample))])


def _sample_of(value: Any) -> Any:
    return value.sample if isinstance(value, SampledProxy) else value


class SequentialTracer(torch.fx.Tracer):
    """Traces through the ancestors of targets; targets and all other modules are single nodes.

    Example::

        targets = match_modules(model, ["LlamaDecoderLayer"])
        tracer = SequentialTracer(get_sequential_ancestors(model, targets), set())
        tracer.sample_input = {"input_ids": ids}
        graph = tracer.trace(model, concrete_args=populate_concrete_args(model, {"input_ids": ids}))

    Args:
        ancestors: Modules to trace through.
        offloaded: Modules that are never traced through, since their weights are elsewhere.

    Attributes:
        sample_input: Arguments of the model by name. They become the graph's inputs. Without them
            it is a plain ``torch.fx.Tracer``.
        samples: By node, what it is for ``sample_input``.
    """

    def __init__(self, ancestors: set[nn.Module], offloaded: set[nn.Module]) -> None:
        super().__init__()
        self.ancestors = set(ancestors)
        self.offloaded = set(offloaded) - self.ancestors
        self.sample_input: dict[str, Any] | None = None
        self.samples: dict[torch.fx.Node, Any] = {}
        self._is_sampling = False

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._is_sampling:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._is_sampling:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.ancestors or m in self.offloaded

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return SampledProxy(node, self)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The model's call, with a proxy for each argument of the sample and the concrete ones."""
        if self.sample_input is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        self.samples = {}
        proxies = {
            name: self.create_proxy("placeholder", name, (), {}) for name in self.sample_input
        }
        parameters = inspect.signature(self.root.forward).parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        concrete = {
            name: value
            for name, value in (concrete_args or {}).items()
            if kinds.get(name)
            not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        }
        root: Any = self.root
        return (lambda: root.forward(**proxies, **concrete)), []

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **settings: Any
    ) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **settings)
        node = proxy.node
        if self.sample_input is not None:
            self._is_sampling = True
            try:
                with torch.no_grad():
                    self.samples[node] = self._run(node)
            finally:
                self._is_sampling = False
        return proxy

    def _run(self, node: torch.fx.Node) -> Any:
        assert self.sample_input is not None
        args, kwargs = map_arg((node.args, node.kwargs), self._sample_of)
        target: Any = node.target
        if node.op == "placeholder":
            return self.sample_input[target]
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def _sample_of(self, node: torch.fx.Node) -> Any:
        if node not in self.samples:  # made for an argument: a weight, a constant
            self.samples[node] = self._run(node)
        return self.samples[node]

    def reads_values(self, node: torch.fx.Node) -> bool:
        """Whether what a node is for the sample follows from values in tensors of the input: not
        from sizes, and not from weights alone.
        """
        todo = [node]
        while todo:
            node = todo.pop()
            is_tensor = isinstance(self.samples.get(node), Tensor)
            if (is_tensor or _gives_values(node)) and _is_of_inputs(node):
                return True
            if not is_tensor:
                todo += (
                    one
                    for one in node.all_input_nodes
                    if not isinstance(self.samples.get(one), Tensor)
                )
        return False

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not self._is_of_model(a):
            return self.create_node("call_function", _constant(a), (), {})
        if dataclasses.is_dataclass(a) and isinstance(a, dict):  # transformers' ModelOutput
            fields = {f.name: getattr(a, f.name) for f in dataclasses.fields(a)}
            given = {name: self.create_arg(v) for name, v in fields.items() if v is not None}
            return self.create_node("call_function", type(a), (), given)
        if isinstance(a, torch.Size):
            return tuple(self.create_arg(size) for size in a)
        return super().create_arg(a)

    def _is_of_model(self, tensor: Tensor) -> bool:
        own = (*self.root.parameters(), *self.root.buffers())
        return any(tensor is one for one in own)

    @contextlib.contextmanager
    def leaf_functions(self, ignore: set[str]) -> Iterator[None]:
        """Inside, functions that the ancestors' code calls, and methods in ``ignore``, are single
        nodes where they are given proxies.
        """
        with contextlib.ExitStack() as stack:
            for name in _FACTORIES:
                stack.enter_context(_set(torch.__dict__, name, self._as_node(getattr(torch, name))))
            for table, name in _functions_of(self.ancestors):
                stack.enter_context(_set(table, name, self._as_node(table[name])))
            for module in self.ancestors:
                for name in ignore:
                    method = getattr(module, name, None)
                    if isinstance(method, types.MethodType):
                        stack.enter_context(_set(module.__dict__, name, self._as_node(method)))
            yield

    def _as_node(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found: list[Any] = []
            template = _with_slots((args, kwargs), found)
            if not found:
                return function(*args, **kwargs)
            return self.create_proxy("call_function", _bound(function, template), tuple(found), {})

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call


def _gives_values(node: torch.fx.Node) -> bool:
    return node.op in ("call_method", "call_function") and node.target in _READERS


def _is_of_inputs(node: torch.fx.Node) -> bool:
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return True
        new = set(node.all_input_nodes) - seen
        seen |= new
        todo += new
    return False


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    """A tensor of neither inputs nor weights. The graph holds it: the model gets no attribute."""

    def constant() -> Tensor:
        return tensor

    return constant


@dataclasses.dataclass(frozen=True)
class _Slot:
    index: int


def _with_slots(value: Any, found: list[Any]) -> Any:
    """The value with a slot for each proxy in it; the proxies go to ``found``."""
    if isinstance(value, torch.fx.Proxy):
        found.append(value)
        return _Slot(len(found) - 1)
    if type(value) in (tuple, list):
        return type(value)(_with_slots(item, found) for item in value)
    if type(value) is dict:
        return {key: _with_slots(item, found) for key, item in value.items()}
    return value


def _filled(template: Any, values: tuple[Any, ...]) -> Any:
    if isinstance(template, _Slot):
        return values[template.index]
    if type(template) in (tuple, list):
        return type(template)(_filled(item, values) for item in template)
    if type(template) is dict:
        return {key: _filled(item, values) for key, item in template.items()}
    return template


def _bound(function: Callable[..., Any], template: Any) -> Callable[..., Any]:
    """``function`` of what fills the slots. All else (configurations, flags) is no value of a
    graph, and is kept here.
    """

    def bound(*values: Any) -> Any:
        args, kwargs = _filled(template, values)
        return function(*args, **kwargs)

    bound.__name__ = bound.__qualname__ = getattr(function, "__name__", "function")
    return bound


@contextlib.contextmanager
def _set(table: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = table.get(name, missing)
    table[name] = value
    try:
        yield
    finally:
        if before is missing:
            del table[name]
        else:
            table[name] = before


def _functions_of(ancestors: set[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Python functions that the methods of these modules name, and the tables they are found in."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for module in ancestors:
        for kind in type(module).__mro__:
            if kind.__module__.startswith("torch."):
                continue
            for method in vars(kind).values():
                function = inspect.unwrap(method) if callable(method) else None
                if not isinstance(function, types.FunctionType):
                    continue
                table = function.__globals__
                for name in _names_in(function.__code__):
                    if isinstance(table.get(name), types.FunctionType):
                        found[id(table), name] = table, name
    return list(found.values())


def _names_in(code: types.CodeType) -> set[str]:
    inner = [_names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)
