"""The context of an outermost run."""

from __future__ import annotations

from collections.abc import Callable

from flex_model.errors import HookError
from flex_model.integrations.compiled import (
    HOOKS_BREAK_GRAPHS,
    outside_graphs,
    stopped_at_fullgraph,
)
from flex_model.runs.run import Run


class OutermostRun:
    """A context manager for one outermost run. Not a generator's: a Ctrl-C between its entry and
    the body would leave the run open.
    """

    __slots__ = ("_begin", "_end", "_run")

    def __init__(
        self, begin: Callable[[], Run], end: Callable[[Run, BaseException | None], None]
    ) -> None:
        self._begin, self._end = begin, end

    @outside_graphs
    def __enter__(self) -> Run:
        self._run = self._begin()
        return self._run

    @outside_graphs
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(self._run, error)
        if error is not None and stopped_at_fullgraph(error):
            raise HookError(f"torch.compile: {HOOKS_BREAK_GRAPHS}") from error
