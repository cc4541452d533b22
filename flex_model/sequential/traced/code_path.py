"""Finds the code around a model's targets: the functions that are running when a target is called.
Only these are traced; what else they call becomes single nodes.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


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

    handles = [target.register_forward_pre_hook(note) for target in targets]
    try:
        result = run()
    finally:
        for handle in handles:
            handle.remove()
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
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for function in path.functions:
        table = function.__globals__
        for name in names_in(function.__code__):
            named = table.get(name)
            if isinstance(named, types.FunctionType) and (
                name in ignore or not path.leads_to_target(named)
            ):
                found[id(table), name] = table, name
    return list(found.values())


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
    for kind in type(module).__mro__:
        if name in vars(kind):
            is_method = isinstance(vars(kind)[name], types.FunctionType)
            return is_method and not kind.__module__.startswith("torch.")
    return False


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in code, and in the functions inside it."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)
