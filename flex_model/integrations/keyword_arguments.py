"""Finds which keyword arguments a model takes, also those that it passes on to a module inside."""

from __future__ import annotations

import inspect

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
