"""A second module tree over the same parameters and buffers, in which modules can be exchanged."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

_REGISTRIES = ("_parameters", "_buffers")


def clone_tree(module: nn.Module, exchange: Mapping[int, Any] | None = None) -> nn.Module:
    """A module tree of the same types, names and plain attributes, over the same tensors.

    Example::

        twin = clone_tree(model, {id(model.head): PassThrough()})
        twin.body.weight is model.body.weight  # True
        twin.head = nn.Identity()  # model.head is still there

    What modules keep outside of nn.Module's registries is shared, except for lists, tuples, dicts,
    bound methods and partials that lead to modules: these lead to the clones.

    Args:
        exchange: What takes the place of an object, by the object's id: mostly modules.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        for name, value in vars(child).items():
            if name in _REGISTRIES or is_hook_registry(name, value):
                for item in value.values():
                    _leads_to_modules(item, memo)
            elif name not in ("_modules", "_non_persistent_buffers_set"):
                _leads_to_modules(value, memo)
    return copy.deepcopy(module, {**memo, **(exchange or {})})


def _leads_to_modules(value: Any, shared: dict[int, Any]) -> bool:
    """Whether a value leads to modules. What does not is added to ``shared``, by its id."""
    kind = type(value)
    parts: Iterable[Any] = ()
    if kind in (list, tuple):
        parts = value
    elif kind in (dict, OrderedDict):
        parts = value.values()
    elif kind is types.MethodType:
        parts = [value.__self__]
    elif kind is partial:
        parts = [value.func, value.args, value.keywords]
    is_module = isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule)
    found = [_leads_to_modules(part, shared) for part in parts]
    if is_module or any(found):
        return True
    shared[id(value)] = value
    return False


def is_hook_registry(name: str, value: Any) -> bool:
    """Whether this attribute is one of the dicts in which nn.Module keeps hooks."""
    return name.startswith("_") and "_hooks" in name and isinstance(value, dict)


def is_users_hook(hook: Any) -> bool:
    """Whether it is neither torch's nor transformers', whose hooks are part of what a model
    computes (weight norm, captured outputs); the side tables of flags (with_kwargs, always_called)
    hold booleans.
    """
    return callable(hook) and _home(hook).split(".")[0] not in ("torch", "transformers")


def users_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names of modules and parameters, and the users' hooks on them."""
    for name, child in module.named_modules():
        for attribute, registry in child.__dict__.items():
            # Hooks of state dicts do not run when the model does.
            if is_hook_registry(attribute, registry) and "state_dict" not in attribute:
                for hook in registry.values():
                    if is_users_hook(hook):
                        yield name, hook
    for name, parameter in module.named_parameters():
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, attribute, None) or {}).values():
                if is_users_hook(hook):
                    yield name, hook


def is_hook_of_flex_model(hook: Any) -> bool:
    """Whether a FlexModel put it there."""
    return _home(hook).startswith("flex_model.hooks.")


def _home(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
