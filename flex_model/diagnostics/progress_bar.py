"""A progress bar for slow commands."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], what: str, is_shown: bool) -> Iterable[T]:
    """Iterate over items, with a bar on stderr if ``is_shown``, stderr is a terminal and tqdm is
    installed.

    Example::

        for transport in progress(transports, "transports", is_shown=True):
            ...
    """
    if not is_shown or not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return items
    tqdm = importlib.import_module("tqdm").tqdm
    return tqdm(items, desc=what, leave=False, dynamic_ncols=True)
