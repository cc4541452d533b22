"""A progress bar for slow commands."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
_is_watched = False


def watch() -> None:
    """Show all bars of this process from now on: its stderr is shown in a notebook."""
    global _is_watched
    _is_watched = True


def progress(items: Sequence[T], what: str, is_shown: bool) -> Iterable[T]:
    """Iterate over items, with a bar on stderr if ``is_shown``, stderr is a terminal and tqdm is
    installed; always while a notebook watches.

    Example::

        for transport in progress(transports, "transports", is_shown=True):
            ...
    """
    is_wanted = _is_watched or (is_shown and sys.stderr.isatty())
    if not is_wanted or importlib.util.find_spec("tqdm") is None:
        return items
    tqdm = importlib.import_module("tqdm").tqdm
    return tqdm(items, desc=what, leave=False, dynamic_ncols=True)
