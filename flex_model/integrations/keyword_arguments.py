"""Finds the names of a module's arguments: which keywords it takes, also those that it passes on to
a module inside, and which names a call's positional arguments have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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


def arguments_by_name(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of a module by their names, in the order in which they are
    passed: those of ``*args`` together, as a tuple.
    """
    named: dict[str, Any] = {}
    parameters = inspect.signature(module.forward).parameters.values() if args else ()
    for parameter, value in zip(parameters, args):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named[parameter.name] = tuple(args[len(named) :])
            break
        named[parameter.name] = value
    return {**named, **kwargs}
