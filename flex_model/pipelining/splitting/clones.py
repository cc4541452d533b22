"""A second module tree over the same parameters and buffers, in which modules can be exchanged."""

from __future__ import annotations

import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_REGISTRIES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def clone_tree(
    module: nn.Module, exchange: Mapping[int, Any] | None = None, *, with_hooks: bool
) -> nn.Module:
    """A module tree of the same types, names and plain attributes, over the same tensors.

    Example::

        twin = clone_tree(model, {id(model.head): PassThrough()}, with_hooks=False)
        twin.body.weight is model.body.weight  # True
        twin.head = nn.Identity()  # model.head is still there

    What modules keep outside of nn.Module's registries is shared, except for lists, tuples, dicts,
    bound methods, partials and weak references that lead to modules: these lead to the clones.

    Args:
        exchange: What takes the place of an object, by the object's id: mostly modules.
        with_hooks: False leaves out users' hooks. Those of torch and transformers are always kept:
            they are part of what the model computes (weight norm, captured outputs).
    """
    return _Cloning(dict(exchange or {}), with_hooks).module(module)


class _Cloning:
    def __init__(self, clones: dict[int, Any], with_hooks: bool) -> None:
        self._clones = clones
        self._with_hooks = with_hooks

    def module(self, module: nn.Module) -> Any:
        if id(module) in self._clones:
            return self._clones[id(module)]
        if isinstance(module, torch.jit.ScriptModule):  # its state is not in Python
            return module
        clone = module.__class__.__new__(module.__class__)
        self._clones[id(module)] = clone
        # Children first: attributes may refer to them.
        children = {
            name: None if child is None else self.module(child)
            for name, child in module._modules.items()
        }
        for name, value in module.__dict__.items():
            if name == "_modules":
                clone.__dict__[name] = children
            elif name in _REGISTRIES:
                clone.__dict__[name] = value.copy()
            elif is_hook_registry(name, value):
                clone.__dict__[name] = OrderedDict(
                    (key, self._value(hook))
                    for key, hook in value.items()
                    if self._with_hooks or not is_users_hook(hook)
                )
            else:
                clone.__dict__[name] = self._value(value)
        return clone

    def _value(self, value: Any) -> Any:
        """``value``, leading to clones where it leads to modules; itself where it does not."""
        if id(value) in self._clones:
            return self._clones[id(value)]
        parts, join = _take_apart(value)
        changed = [self._value(part) for part in parts]
        return value if all(map(operator.is_, parts, changed)) else join(changed)


def _take_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What a value leads to, and how to make another that leads elsewhere."""
    kind = type(value)
    if kind in (list, tuple):
        return list(value), kind
    if kind in (dict, OrderedDict):
        return list(value.values()), lambda parts: kind(zip(value, parts))
    if kind is types.MethodType:
        return [value.__self__], lambda parts: types.MethodType(value.__func__, *parts)
    if kind is partial:
        parts = [value.func, value.args, value.keywords]
        return parts, lambda parts: partial(parts[0], *parts[1], **parts[2])
    if kind is weakref.ref:
        return [value()], lambda parts: weakref.ref(*parts)
    return [], lambda parts: value


def is_hook_registry(name: str, value: Any) -> bool:
    """Whether this attribute is one of the dicts in which nn.Module keeps hooks."""
    return name.startswith("_") and "_hooks" in name and isinstance(value, dict)


def is_users_hook(hook: Any) -> bool:
    """Whether it is neither torch's nor transformers'; the side tables of flags (with_kwargs,
    always_called) hold booleans.
    """
    return callable(hook) and _home(hook).split(".")[0] not in ("torch", "transformers")


def users_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names of modules and parameters, and the users' hooks on them."""
    for name, child in module.named_modules():
        for attribute, registry in child.__dict__.items():
            # Those of state dicts do not run when the model does.
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


def tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    return [*module.parameters(), *module.buffers()]
