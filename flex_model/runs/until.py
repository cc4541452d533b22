"""Ends a forward early: when all the modules that are needed were called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from flex_model.integrations import cut

#: Modules, the first call of any of which counts, and "forward" or "forward_pre".
Site = tuple[Sequence[nn.Module], str]


class CutError(Exception):
    """Leaves the forward early; not a failure. An ``Exception``: for no other does torch call the
    hooks that end a module's forward, those of other FlexModels, too.
    """


@contextlib.contextmanager
def ended_at(
    sites: Sequence[Site] | None, root: nn.Module, module_name: str | None = None
) -> Iterator[None]:
    """A context for one forward, which ends when the last of these sites was computed for the first
    time; without sites, at its end. Its torch hooks run after those of the hook core, which must be
    registered before.
    """
    if sites is None:
        yield
        return
    missing, handles = set(range(len(sites))), []

    def reach(number: int) -> None:
        if missing:
            missing.discard(number)
            if not missing:
                raise CutError

    try:
        for number, (modules, kind) in enumerate(sites):
            for module in modules:
                register: Any = getattr(module, f"register_{kind}_hook")
                handles.append(register(lambda *_, number=number: reach(number)))
        yield
    except Exception as error:  # of torch's stages, too, which raise one of their own from it
        if missing or not isinstance(error.__cause__ or error, CutError):  # another forward's
            raise
    finally:
        for handle in handles:
            handle.remove()
    cut.clean_up(root)
    if missing:
        raise RuntimeError(cut.not_reached(module_name))
