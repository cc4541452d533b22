"""The recorders that are entered now, of all FlexModels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder

active_recorders: list[Recorder] = []


@contextmanager
def all_paused(*others: Recorder) -> Iterator[None]:
    """Exclude what runs inside from the logs of all recorders that are entered, and of others."""
    with ExitStack() as stack:
        for recorder in {*others, *active_recorders}:
            stack.enter_context(recorder.paused())
        yield
