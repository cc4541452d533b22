"""Ends a forward early: when all the modules that are needed were called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

#: Modules, the first call of any of which counts, and "forward" or "forward_pre".
Site = tuple[Sequence[nn.Module], str]


class CutError(Exception):
    """Leaves the forward early; not a failure. An ``Exception``: for no other does torch call the
    hooks that end a module's forward, those of other FlexModels, too.
    """


class Until:
    """Ends a forward when the last of these sites was computed for the first time.

    Its torch hooks run after those of the hook core, which must be registered before.

    Attributes:
        is_reached: Whether this forward has computed all sites.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._missing: set[int] = set()
        self.is_reached = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which forwards end early."""
        handles: list[Any] = []
        try:
            for number, (modules, kind) in enumerate(self._sites):
                for module in modules:
                    register = (
                        module.register_forward_pre_hook
                        if kind == "forward_pre"
                        else module.register_forward_hook
                    )
                    handles.append(register(lambda *_, number=number: self._reach(number)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def one_forward(self) -> Iterator[None]:
        """A context for one forward, which may end early."""
        self.is_reached = False
        self._missing = set(range(len(self._sites)))
        try:
            yield
        except Exception as error:  # of torch's stages, too, which raise one of their own from it
            is_cut = isinstance(error.__cause__ or error, CutError)
            if not is_cut or not self.is_reached:  # raised by another Until
                raise

    def _reach(self, number: int) -> None:
        self._missing.discard(number)
        if not self._missing and not self.is_reached:
            self.is_reached = True
            raise CutError
