"""Traces the modules around a model's targets into a ``torch.fx`` graph.

The tracer keeps a sample of every value that the traced code computes: the model runs on the sample
input while it is traced. So any question of that code about sizes (a length, a branch) has an
answer. An answer that holds for the sample only makes a graph that is wrong for other inputs:
`trace_check` finds out. Functions that don't lead to a target (masks, caches, features of images)
are single nodes, which are called again with real values when the graph runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch import Tensor, nn

from flex_model.errors import TraceError
from flex_model.integrations.torch_private import restored, tree_flatten, tree_unflatten
from flex_model.sequential.traced.trace_check import IS_FIXED, Runner, Structures, is_plain

# Factories of tensors: torch does not dispatch on the type of their arguments, which may be sizes.
_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "full_like", "linspace"),
    *("ones", "rand", "randn", "tensor", "zeros"),
)
# Settings of torch that code may branch on.
_SETTINGS = (
    *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
    *("get_autocast_dtype", "get_default_dtype"),
)
# What begins a mode of torch.
_BEGINS = (
    *((torch.no_grad, "__enter__"), (torch.enable_grad, "__enter__")),
    *((torch.inference_mode, "__enter__"), (torch.autocast, "__enter__")),
    (torch.set_grad_enabled, "__init__"),
)


class SampledProxy(torch.fx.Proxy):
    """A proxy with its value for the sample. Sizes stay proxies; devices are taken to be the same
    for all inputs. What Python must have (a truth, an index, a length, a tensor's value) is the
    sample's, and fixed in the graph.
    """

    @property
    def sample(self) -> Any:
        return self.tracer.samples[self.node]  # type: ignore[attr-defined]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The sample's class, if that is a container: code that asks takes the sample's branch. Not
        a tensor's: torch takes what says so for one.
        """
        kind = type(self.sample)
        return kind if issubclass(kind, (tuple, list, dict)) else type(self)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.sample, name)
        if callable(value):
            return torch.fx.proxy.Attribute(self, name)
        if isinstance(value, torch.device) or (is_plain(value) and _asked_by_torch()):
            return value
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def keys(self) -> Any:
        """Return the sample's keys, as ``**`` asks for them."""
        self.tracer.create_node("call_function", _text_of_keys, (self.node,), {})
        return self.sample.keys()

    def _fixed(self, question: Callable[..., Any]) -> Any:
        """Return the answer for the sample, a node of the graph that checks that it is the same."""
        tracer: Any = self.tracer
        node = tracer.create_node("call_function", question, (self.node,), {})
        node.meta[IS_FIXED] = True
        return tracer.samples[node]

    def __bool__(self) -> bool:
        return bool(self._fixed(bool))

    def __len__(self) -> int:
        return int(self._fixed(len))

    def __index__(self) -> int:
        return int(self._fixed(operator.index))

    def __int__(self) -> int:
        return int(self._fixed(int))

    def __float__(self) -> float:
        return float(self._fixed(float))

    def __contains__(self, item: Any) -> bool:
        return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sample, dict):
            return iter(self.keys())
        return iter([operator.getitem(self, i) for i in range(len(self))])


def _text_of_keys(value: Any) -> str:
    return str(list(value))


def _asked_by_torch() -> bool:
    """Whether the caller of the function that asks this is torch's code."""
    return str(sys._getframe(2).f_globals.get("__name__")).split(".")[0] == "torch"


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
            this is a plain ``torch.fx.Tracer``.
        samples: The value of each node for ``sample_input``.
        optional: Names of nodes that are None for the sample, and not for all inputs: traced code
            gets a proxy.
    """

    proxy_buffer_attributes = True

    def __init__(self, ancestors: set[nn.Module], offloaded: set[nn.Module]) -> None:
        super().__init__()
        self.ancestors = set(ancestors)
        self.offloaded = set(offloaded) - self.ancestors
        self.sample_input: dict[str, Any] | None = None
        self.samples: dict[torch.fx.Node, Any] = {}
        self.optional: set[str] = set()
        self._num_calls = 0  # of functions in progress that get no value of the graph
        self._is_sampling = False

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._is_sampling:
            return forward(*args, **kwargs)
        if self.sample_input is None or not self.is_leaf_module(m, ""):
            return super().call_module(m, forward, args, kwargs)
        # Hooks of transformers, which collect outputs, are of the traced code: they get proxies.
        hooks = list(m._forward_hooks.values())
        with restored([m._forward_hooks]):
            m._forward_hooks.clear()
            output = super().call_module(m, forward, args, kwargs)
        for hook in hooks:
            hook(m, args, output)
        return output

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._is_sampling:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.ancestors or m in self.offloaded

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return super().proxy(node) if self.sample_input is None else SampledProxy(node, self)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return the model's call, with a proxy for each argument of the sample, and the concrete
        arguments.
        """
        if self.sample_input is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        self._runner = Runner(self.root, self.graph, Structures())
        self.samples = self._runner.env
        proxies = {
            name: self.create_proxy("placeholder", name, (), {}) for name in self.sample_input
        }
        root: Any = self.root
        concrete = keyword_arguments(root, concrete_args or {})
        return (lambda: root.forward(**proxies, **concrete)), []

    def create_node(self, kind: str, *args: Any, **settings: Any) -> torch.fx.Node:
        node = super().create_node(kind, *args, **settings)
        if self.sample_input is not None and kind != "output":
            self._is_sampling = True
            try:
                with torch.no_grad():
                    self.samples[node] = (
                        self.sample_input[str(node.target)]
                        if kind == "placeholder"
                        else self._runner.run_node(node)
                    )
            finally:
                self._is_sampling = False
        return node

    def create_proxy(self, *args: Any, **settings: Any) -> Any:
        """Return a proxy; None, a truth, a text or a dtype itself: Python code may branch on it in
        ways that no proxy sees (``is``), and it is checked when the graph runs.
        """
        proxy = super().create_proxy(*args, **settings)
        if self.sample_input is None or proxy.node.name in self.optional:
            return proxy
        value = self.samples[proxy.node]
        if not is_plain(value):
            return proxy
        proxy.node.meta[IS_FIXED] = True
        return value

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.fx.Proxy):
            return a.node
        if isinstance(a, Tensor) and not self._is_of_model(a):
            return self.create_node("call_function", _constant(a), (), {})
        if _is_model_output(a):
            names = [*a, *(f.name for f in dataclasses.fields(a) if f.name not in a)]
            given = {one: getattr(a, one) for one in names if getattr(a, one) is not None}
            fields = {name: self.create_arg(value) for name, value in given.items()}
            return self.create_node("call_function", _model_output(type(a)), (), fields)
        if isinstance(a, torch.Size):
            return tuple(self.create_arg(size) for size in a)
        return super().create_arg(a)

    def _is_of_model(self, tensor: Tensor) -> bool:
        own = (*self.root.parameters(), *torch.nn.Module.buffers(self.root))
        return any(tensor is one for one in own)

    @contextlib.contextmanager
    def leaf_functions(self, path: CodePath, ignore: set[str]) -> Iterator[None]:
        """A context in which functions and methods that the path's code calls become single nodes
        if their arguments hold proxies: those that don't lead to a target, or are in ``ignore``.
        """
        own = vars(torch)
        tables = [(own, name, self._as_node(own[name])) for name in _FACTORIES]
        tables += [(own, name, self._as_setting(own[name])) for name in _SETTINGS]
        tables += [(t, name, self._as_node(t[name])) for t, name in leaf_functions(path, ignore)]
        methods = leaf_methods(path, self.ancestors, ignore)
        tables += [(vars(one), name, self._as_node(getattr(one, name))) for one, name in methods]
        with contextlib.ExitStack() as undo:
            for table, name, function in tables:
                if name in table:
                    undo.callback(table.__setitem__, name, table[name])
                else:
                    undo.callback(table.__delitem__, name)
                table[name] = function
            for mode, name in _BEGINS:
                begin = self._refusing(getattr(mode, name))
                undo.enter_context(mock.patch.object(mode, name, begin))
            yield

    def _as_setting(self, read: Callable[[], Any]) -> Callable[..., Any]:
        """Return a function that reads a setting of torch as a node, where traced code does."""

        @functools.wraps(read)
        def setting(*args: Any) -> Any:
            if self._is_sampling or self._num_calls or _asked_by_torch():
                return read(*args)
            return self.create_proxy("call_function", read, args, {})

        return setting

    def _refusing(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return what begins a mode of torch in place of ``begin``: the graph would run without the
        mode.
        """

        @functools.wraps(begin)
        def refuse(mode: Any, *args: Any, **settings: Any) -> Any:
            if not self._is_sampling and not self._num_calls:
                raise TraceError(
                    f"the code around the targets changes a mode of torch ({type(mode).__name__})"
                )
            return begin(mode, *args, **settings)

        return refuse

    def _as_node(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_leaf)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Proxy)]
            if not places:
                self._num_calls += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self._num_calls -= 1

            # Only the proxies are values of a graph; configurations and flags are kept here.
            @functools.wraps(function, ("__name__", "__qualname__"), ())
            def bound(*values: Any) -> Any:
                filled = list(leaves)
                for place, value in zip(places, values):
                    filled[place] = value
                args, kwargs = tree_unflatten(filled, spec)
                result = function(*args, **kwargs)
                given = set(map(id, values))
                after, spec_after = tree_flatten(
                    (args, kwargs), is_leaf=lambda one: _is_leaf(one) or id(one) in given
                )
                # These containers are copies: the graph's later nodes would not see the change.
                if spec_after != spec or any(a is not b for a, b in zip(after, filled)):
                    raise TraceError(
                        f"{function.__qualname__} changes a list or dict that it is given in place"
                    )
                return result

            proxies = tuple(leaves[place] for place in places)
            return self.create_proxy("call_function", bound, proxies, {})

        return call


def keyword_arguments(model: nn.Module, concrete_args: dict[str, Any]) -> dict[str, Any]:
    """Return concrete arguments as the model is called with them: variadic ones by name."""
    arguments = dict(concrete_args)
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            arguments.pop(parameter.name, None)
        elif parameter.kind == inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def _is_leaf(value: Any) -> bool:
    return type(value) not in (tuple, list, dict) and not _is_model_output(value)


def _is_model_output(value: Any) -> bool:
    """Whether a value is a ``ModelOutput`` of transformers, which torch's pytrees flatten."""
    return dataclasses.is_dataclass(value) and issubclass(type(value), dict)


def _model_output(kind: type) -> Callable[..., Any]:
    """Return a function that makes a ``ModelOutput`` whose fields are in the order they are given
    in, not in the class's: that is the order of its tuple.
    """

    @functools.wraps(kind, updated=())
    def made(**fields: Any) -> Any:
        output = kind(**fields)
        for name in fields:
            output.move_to_end(name)
        return output

    return made


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns a tensor, of neither inputs nor weights. The graph holds it:
    the model gets no attribute.
    """

    def constant() -> Tensor:
        return tensor

    return constant


@dataclass
class CodePath:
    """Which code leads to a call of a target, for one input.

    Attributes:
        functions: The functions that were running when a target was called, without decorators:
            those that ancestors have as methods, or that these name.
        decorators: Functions around them that were running, too.
    """

    functions: set[types.FunctionType] = field(default_factory=set)
    decorators: list[types.FunctionType] = field(default_factory=list)

    @property
    def traced(self) -> list[types.FunctionType]:
        """All functions whose code is traced."""
        return [*self.functions, *self.decorators]

    def leads_to_target(self, function: Any) -> bool:
        """Whether a function, without its decorators, was running when a target was called."""
        return inspect.unwrap(function) in self.functions


def follow(
    ancestors: set[nn.Module], targets: set[nn.Module], run: Callable[[], Any]
) -> tuple[CodePath, Any]:
    """Return the path of what ``run()`` calls, and its result."""
    running: set[types.CodeType] = set()
    here = sys._getframe()

    def note(*_: Any) -> None:
        frame = sys._getframe(1)
        while frame is not here and frame.f_back is not None:
            running.add(frame.f_code)
            frame = frame.f_back

    with contextlib.ExitStack() as handles:
        for target in targets:
            handles.enter_context(target.register_forward_pre_hook(note))
        result = run()
    return _path_of(running, ancestors), result


def _path_of(running: set[types.CodeType], ancestors: set[nn.Module]) -> CodePath:
    """Return the functions that have this code: methods of the ancestors, and functions that they
    name in turn.
    """
    path = CodePath()
    remaining = [
        method
        for kind in _classes(ancestors)
        for method in vars(kind).values()
        if isinstance(method, types.FunctionType)
    ]
    while remaining:
        around: list[Any] = [remaining.pop()]
        while hasattr(around[-1], "__wrapped__"):
            around.append(around[-1].__wrapped__)
        function = around.pop()
        if function in path.functions or function.__code__ not in running:
            continue
        path.functions.add(function)
        path.decorators += [
            one for one in around if isinstance(one, types.FunctionType) and one.__code__ in running
        ]
        named = (function.__globals__.get(name) for name in names_in(function.__code__))
        remaining += [one for one in named if isinstance(one, types.FunctionType)]
    return path


def _classes(modules: Iterable[nn.Module]) -> set[type]:
    """Return the classes of modules, and those that they inherit from, without torch's."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    return {kind for kind in kinds if not kind.__module__.startswith(("torch.", "builtins"))}


def leaf_functions(path: CodePath, ignore: set[str]) -> list[tuple[dict[str, Any], str]]:
    """Return the Python functions that the path's functions name and that don't lead to a target,
    or are in ``ignore``: the tables that hold them, and their names.
    """
    return [
        (function.__globals__, name)
        for function in path.functions
        for name in names_in(function.__code__)
        if isinstance(named := function.__globals__.get(name), types.FunctionType)
        and (name in ignore or not path.leads_to_target(named))
    ]


def leaf_methods(
    path: CodePath, ancestors: set[nn.Module], ignore: set[str]
) -> list[tuple[nn.Module, str]]:
    """Return the same of the ancestors' methods: the modules, and the methods' names."""
    names = {name for function in path.functions for name in names_in(function.__code__)}
    return [
        (module, name)
        for module in ancestors
        for name in names | ignore
        if _is_own_method(module, name)
        and (name in ignore or not path.leads_to_target(getattr(type(module), name)))
    ]


def _is_own_method(module: nn.Module, name: str) -> bool:
    """Whether a module has a method of that name that torch's own classes don't define."""
    if name == "forward" or name.startswith("__"):
        return False
    kind: Any = next((kind for kind in type(module).__mro__ if name in vars(kind)), object)
    is_method = isinstance(vars(kind).get(name), types.FunctionType)
    return is_method and not kind.__module__.startswith("torch.")


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in code, and in the functions inside it."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)
