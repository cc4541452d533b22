"""Finds the names of a module's arguments: which keywords it takes, also those that it passes on to
a module inside, and which names a call's positional arguments have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

from torch import nn


def takes_keyword(model: nn.Module, name: str) -> bool:
    """Whether a model's forward has an argument of that name, or passes any keyword arguments on
    and a module in it has one.
    """
    own = inspect.signature(model.forward).parameters
    if name in own:
        return True
    if not any(one.kind == inspect.Parameter.VAR_KEYWORD for one in own.values()):
        return False
    return any(name in inspect.signature(module.forward).parameters for module in model.modules())


def positional_names(function: Any) -> tuple[tuple[str, ...], str]:
    """Return the names of a function's positional arguments, and that of its ``*args`` (empty:
    none). Of a wrapper they are those of the function inside, as of ``inspect.signature``, which
    takes longer than all else that is done in a forward.
    """
    skipped = 0
    while True:
        if isinstance(function, MethodType):
            function, skipped = function.__func__, 1
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    code = getattr(function, "__code__", None)
    if code is None:  # a functools.partial, or another object
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # of a builtin
            return (), ""
        named = [one.name for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD]
        others = [one.name for one in parameters if one.kind == one.VAR_POSITIONAL]
        return tuple(named[skipped:]), "".join(others)
    has_rest = code.co_flags & inspect.CO_VARARGS
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if has_rest else ""
    return code.co_varnames[skipped : code.co_argcount], rest


def arguments_by_name(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names, in the order in which they are
    passed: those of ``*args``, and those without a name, together, as a tuple.
    """
    names, rest = positional_names(module.forward)
    more = {rest or "*args": tuple(args[len(names) :])} if len(args) > len(names) else {}
    return {**dict(zip(names, args)), **more, **kwargs}
