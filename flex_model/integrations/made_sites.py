"""Modules that flex_model puts into a model, so that hooks can be on what no module returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.hooks.function import HookFunction
from flex_model.integrations.torch_private import FakeTensor

# Rounding errors of kernels, of the largest value of a result.
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def is_hooked(site: nn.Module) -> bool:
    """Whether hooks that are active now get what the module is given or returns."""
    return bool(site._forward_hooks or site._forward_pre_hooks)


def beyond_rounding(made: Tensor, own: Tensor) -> str:
    """Return how far a rebuilt result is from a module's own one; empty where it is rounding, or
    where there are no values.
    """
    if isinstance(own, FakeTensor) or own.is_meta or not own.numel():
        return ""
    finite = own.isfinite()  # not padding
    found = [one.abs()[finite] for one in (made - own, own)]
    largest, scale = (float(one.max()) if len(one) else 0.0 for one in found)
    is_close = largest <= _ROUNDING.get(own.dtype, 1e-4) * scale
    return "" if is_close else f"they differ by {largest:.3g} of {scale:.3g}"


class MadeSites(nn.Module):
    """A child that several FlexModels may use: it is there until the last one has ended its use."""

    def __init__(self) -> None:
        super().__init__()
        self._num_users = 0
        self._hooks: list[weakref.ref[HookFunction]] = []

    @property
    def has_hooks(self) -> bool:
        """Whether a hook is registered here, by any FlexModel and in any group."""
        return any(hook is not None and hook._registrations for hook in (r() for r in self._hooks))

    def admit(self, hook: HookFunction) -> None:
        """Note a hook that is being registered here."""
        self._hooks = [one for one in self._hooks if one() is not None] + [weakref.ref(hook)]

    def use(self, undo: Callable[[], None]) -> Callable[[], None]:
        """Count a user; return what ends its use. The last end calls its ``undo``."""
        self._num_users += 1

        def end() -> None:
            self._num_users -= 1
            if self._num_users == 0:
                undo()

        return end

    def install_in(self, layer: nn.Module, name: str) -> Callable[[], None]:
        """Make such a child in another model's layer; return what undoes it.

        Raises:
            ValueError: the layer can't have one.
        """
        raise NotImplementedError


class MadeSiteHook(HookFunction):
    """A hook on such a module, with settings on which ranks must agree.

    Args:
        settings: In words, which messages show.
        arguments, others: Those of HookFunction.
    """

    def __init__(self, site: str, settings: str, *arguments: Any, **others: Any) -> None:
        super().__init__(site, *arguments, **others)
        self._settings = settings

    @property
    def settings_of_module(self) -> tuple[str, ...]:
        return (self._settings,)

    def __repr__(self) -> str:
        return f"{super().__repr__().removesuffix(')')}, {self._settings})"
