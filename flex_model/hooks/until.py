"""Ends a forward early: when all that is wanted of it was computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

#: Modules of which the first one called counts, and whether "forward" or "forward_pre" is meant.
Site = tuple[Sequence[nn.Module], str]


class CutError(BaseException):
    """Leaves the forward; no failure."""


class Until:
    """Cuts a forward after the last of these sites to be computed for the first time.

    Torch's hooks of it come after those of the hook core, which must be there before.

    Attributes:
        is_reached: Whether all sites of this forward were.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._missing: set[int] = set()
        self.is_reached = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, forwards are cut."""
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
        """Inside, one forward is run, which may be cut."""
        self.is_reached = False
        self._missing = set(range(len(self._sites)))
        try:
            yield
        except CutError:
            if not self.is_reached:  # it is another one's
                raise

    def _reach(self, number: int) -> None:
        self._missing.discard(number)
        if not self._missing and not self.is_reached:
            self.is_reached = True
            raise CutError
