"""Modules that flex_model puts into a model, so that hooks can be on what no module returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from flex_model.hooks.function import HookFunction


def is_hooked(site: nn.Module) -> bool:
    """Whether hooks that are active now get what the module is given or returns."""
    return bool(site._forward_hooks or site._forward_pre_hooks)


class MadeSites(nn.Module):
    """A child that several FlexModels may use: it is there until the last one has ended its use."""

    def __init__(self) -> None:
        super().__init__()
        self._num_users = 0

    def use(self, undo: Callable[[], None]) -> Callable[[], None]:
        """Count a user; return what ends its use. The last end calls its ``undo``."""
        self._num_users += 1

        def end() -> None:
            self._num_users -= 1
            if self._num_users == 0:
                undo()

        return end


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
