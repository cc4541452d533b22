"""The recorders that this thread has entered, of all FlexModels. Calls that are replaced while a
forward is followed are also made by other threads, such as those that load weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flex_model.layouts.recorder import Recorder


_thread = threading.local()


def active_recorders() -> list[Recorder]:
    """Return the recorders that this thread has entered, the outermost first. Local."""
    return vars(_thread).setdefault("recorders", [])


@contextmanager
def all_paused(*others: Recorder) -> Iterator[None]:
    """Exclude what runs inside from the logs of all recorders that are entered, and of others."""
    with ExitStack() as stack:
        for recorder in {*others, *active_recorders()}:
            stack.enter_context(recorder.paused())
        yield
