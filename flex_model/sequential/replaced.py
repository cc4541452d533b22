"""Which batches run with other parameters than the model's own (``functional_call``): torch tells
nobody, so its function that puts them into a module is watched while sequential runs go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.nn.utils import stateless


class Replacing(Protocol):
    """A batch; ``num_replacing`` is how many such calls it is inside of."""

    num_replacing: int


_lock = threading.Lock()
_runs: list[Callable[[], Replacing | None]] = []
_replace = stateless._reparametrize_module


@contextlib.contextmanager
def noted(batch_here: Callable[[], Replacing | None]) -> Iterator[None]:
    """Inside, ``num_replacing`` is kept.

    Args:
        batch_here: The batch of a run that it is called in; None outside of one.
    """
    with _lock:
        _runs.append(batch_here)
        stateless._reparametrize_module = _noted_replace
    try:
        yield
    finally:
        with _lock:
            _runs.remove(batch_here)
            if not _runs:
                stateless._reparametrize_module = _replace


@contextlib.contextmanager
def _noted_replace(*args: Any, **kwargs: Any) -> Iterator[None]:
    batches = [batch for here in tuple(_runs) if (batch := here()) is not None]
    with _replace(*args, **kwargs):
        for batch in batches:
            batch.num_replacing += 1
        try:
            yield
        finally:
            for batch in batches:
                batch.num_replacing -= 1
