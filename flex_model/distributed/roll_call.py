"""Finds the ranks of a group that are gone, by the store: gloo does not report whom it has lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from flex_model.distributed.bounded_store import BoundedStore

_ANSWER_S = 2.0  # how long the others may take to answer; they look every second at least
_PAUSE_S = 0.02  # between looks at their answers


class RollCall:
    """Asks the ranks of a group which of them live, and answers another rank that asks. Local.

    Raises:
        RuntimeError: the store is lost.
    """

    def __init__(self, store: BoundedStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._has_answered = False

    def answer(self) -> None:
        """Answer a rank that asks, if there is one; to be called now and then in long waits."""
        if not self._has_answered and self._store.read("lost") is not None:
            self._present()

    def ask(self, reported: Callable[[], str | None], waits: bool = True) -> str | list[int]:
        """Return what a rank that failed has ``reported()``; if none has within 2 s, or all answer,
        the ranks that don't answer. ``waits=False``: those that have not answered yet.
        """
        reason = reported()
        if reason is not None:
            return reason
        self._store.set("lost", "")
        self._present()
        until = time.monotonic() + _ANSWER_S
        while True:
            present = set((self._store.read("lives") or "").split())
            silent = [rank for rank in range(self._size) if str(rank) not in present]
            is_over = not silent or not waits or time.monotonic() > until
            reason = reported()
            if reason is not None:
                return reason
            if is_over:
                return silent
            time.sleep(_PAUSE_S)

    def _present(self) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._store.append("lives", f"{self._rank} ")
