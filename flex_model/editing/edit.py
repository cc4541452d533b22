"""Edit: an editing function that composes with others and names the full weights it needs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

from torch import Tensor, nn

from flex_model.hooks.function import HookFunction, name_of
from flex_model.selection.selectors import is_int, show


@dataclass(frozen=True)
class Scope:
    """The arguments of an edit besides its tensor.

    Attributes:
        site: The hook's module name; None if the edit was not registered by ``at``.
        parameters: The full weights that the edit named.
    """

    module: nn.Module | None
    save_ctx: Namespace
    modules: Mapping[str, nn.Module]
    site: str | None = None
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def trainable(self, name: str, what: str) -> nn.Module:
        """Return the registered trainable module of this name.

        Raises:
            KeyError: no module is registered under it.
        """
        if name not in self.modules:
            raise KeyError(
                f"{what}: no trainable module is named {name!r}, there are {list(self.modules)}; "
                "flex.register_trainable_module adds one"
            )
        return self.modules[name]


def input_of(module: nn.Module, part: Tensor) -> Tensor:
    """Return the part of an activation where a trainable module computes: on the device of its
    parameters. The activation moves, not the module, which may be used by layers of several
    devices, and whose weights are larger.
    """
    parameter = next(module.parameters(), part)
    # accelerate loads weights on the meta device when the module runs, and moves the input.
    return part if parameter.is_meta else part.to(parameter.device)


class Edit:
    """An editing function, ``edit(current_module, inputs, save_ctx, modules) -> Tensor``.

    Example::

        edit = editing.zero(heads=3, num_heads=32) | editing.scale(2.0, positions="last")
        flex.register_forward_pre_hook(edit.at("model.layers.5.self_attn.o_proj"))

    The result depends on the tensor alone, so every rank computes the same; an edit calls no
    collective. It may write the tensor in place. ``a | b`` applies ``a``, then ``b``; ``b`` may be
    any editing function.

    Args:
        text: The ``repr``.
        apply: ``(full, scope) -> Tensor | None``.
        parameters: Names of the model's weights that it needs in full.
    """

    def __init__(
        self,
        text: str,
        apply: Callable[[Tensor, Scope], Tensor | None],
        parameters: Iterable[str] = (),
    ) -> None:
        self._text = text
        self._apply = apply
        self.parameters = tuple(dict.fromkeys(parameters))

    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        if self.parameters:
            raise RuntimeError(
                f"{self!r} needs the full weights {list(self.parameters)}; register it with "
                "edit.at(module_name), which makes the HookFunction that names them"
            )
        return self.apply(inputs, Scope(current_module, save_ctx, modules))

    def apply(self, full: Tensor, scope: Scope) -> Tensor:
        """Return the edited tensor; ``full`` itself if nothing changes. Local."""
        edited = self._apply(full, scope)
        return full if edited is None else edited

    def at(self, module_name: str, **settings: Any) -> HookFunction:
        """Return the HookFunction of this edit at a module, to be registered as any other.

        Args:
            settings: Further arguments of HookFunction.
        """
        if {"editing_function", "parameters"} & set(settings):
            raise TypeError("at: editing_function and parameters are set by the edit")
        hook = HookFunction(
            module_name, editing_function=self, parameters=self.parameters, **settings
        )
        if hook.members:
            raise TypeError(
                f"at: {self!r} edits one tensor, got unpack_idx={hook.unpack_idx}; give it one "
                "HookFunction for each"
            )
        hook.editing_function = AtSite(self, hook)
        return hook

    def assign(self, name: str, value: Any) -> None:
        """Set an attribute, as an assignment does. Every rank must do the same."""
        setattr(self, name, value)

    def __or__(self, other: Any) -> Edit:
        return chain(self, other) if callable(other) else NotImplemented

    def __ror__(self, other: Any) -> Edit:
        return chain(other, self) if callable(other) else NotImplemented

    def __repr__(self) -> str:
        return self._text


class AtSite:
    """The editing function of a HookFunction made by ``Edit.at``: it passes the hook's weights."""

    def __init__(self, edit: Edit, hook: HookFunction) -> None:
        self.edit, self._hook = edit, hook

    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        hook = self._hook
        scope = Scope(current_module, save_ctx, modules, hook.module_name, hook.parameters)
        return self.edit.apply(inputs, scope)

    def __repr__(self) -> str:
        return repr(self.edit)


def chain(*edits: Callable[..., Tensor | None]) -> Edit:
    """Compose edits: each is applied to the result of the one before.

    Example::

        chain(zero(units=3), my_function, noise(0.1))

    ``my_function`` is any ``(current_module, inputs, save_ctx, modules) -> Tensor | None``.
    """
    if not edits:
        raise ValueError("chain: give at least one edit")
    for edit in edits:
        if not callable(edit):
            raise TypeError(f"chain: expected editing functions, got {edit!r}")

    def apply(full: Tensor, scope: Scope) -> Tensor:
        for edit in edits:
            edited: Tensor | None
            if isinstance(edit, Edit):
                named = {name: scope.parameters[name] for name in edit.parameters}
                edited = edit.apply(full, replace(scope, parameters=named))
            else:
                edited = edit(scope.module, full, scope.save_ctx, scope.modules)
            full = full if edited is None else edited
        return full

    needed = [name for edit in edits if isinstance(edit, Edit) for name in edit.parameters]
    return Edit(" | ".join(map(name_of, edits)), apply, needed)


def format_call(name: str, *values: object, **named: object) -> str:
    """Return ``name(value, key=value)`` for ``repr``, without values that are None."""
    parts = [show(value) for value in values]
    for key, value in named.items():
        if key == "where":
            parts.append(repr(value))
        elif value is not None:
            parts.append(f"{key}={show(value)}")
    return f"{name}({', '.join(part for part in parts if part)})"


def check_number(value: object, what: str) -> None:
    """Raise TypeError unless the value is a number or a tensor of one element."""
    is_number = isinstance(value, Number) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
        got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{what} must be a number, got {got}")


def check_seed(seed: object, what: str) -> None:
    """Raise TypeError unless the value is an int or None."""
    if seed is not None and not is_int(seed):
        raise TypeError(f"{what}: seed must be an int or None, got {seed!r}")
