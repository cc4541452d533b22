"""The runs of one wrap whose graphs may yet be run backward, and computed once more there
(activation checkpointing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from flex_model.hooks.context import OPEN, RunContext

MOST = 64  # light ones: what they collected is gone from them


class RememberedRuns:
    """The last ``MOST`` runs, of which the number of an autograd node tells whose it is."""

    def __init__(self) -> None:
        self._runs: deque[RunContext] = deque(maxlen=MOST)
        self._served: list[RunContext] = []  # those whose graphs a backward pass came to
        self._replayed: tuple[int, RunContext] | None = None  # in which backward pass, and what

    def add(self, run: RunContext) -> None:
        self._runs.append(run)

    def begin(self, run: RunContext) -> None:
        """As ``add``, of one that no backward pass is about."""
        self.add(run)
        self._replayed = None

    def serve(self, run: RunContext) -> None:
        """A backward pass came to a graph of this run, however long that is ago."""
        self._served.append(run)

    def unserve(self, run: RunContext) -> None:
        """That pass is over."""
        self._served.remove(run)

    def forget(self) -> None:
        self._runs.clear()
        self._replayed = None

    @property
    def last(self) -> RunContext | None:
        """The last one of this wrap; not that of a batch, of which there are several."""
        return next((run for run in reversed(self._runs) if run.save_ctx is None), None)

    @property
    def last_node(self) -> int:
        """Of the runs that are over: the number after that of their last node."""
        return max((run.last_node for run in self._runs if run.last_node < OPEN), default=0)

    def of_backward(self, is_in_run: bool, lone_run: Callable[[], RunContext]) -> RunContext | None:
        """The run whose graph is being computed; None if it is not remembered.

        Args:
            lone_run: Makes one for a part of the model that was called on its own.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return self._runs[-1] if self._runs else None
        run = next((run for run in reversed(self._runs) if run.holds(node)), None)
        if run is None:
            held = (run for run in self._served if run.holds(node))
            run = max(held, key=lambda run: run.first_node, default=None)
        if run is not None:
            self._note_replay(run)
            return run
        if is_in_run or not self._runs or node._sequence_nr() < self.last_node:
            return None
        if self._replayed is not None and self._replayed[0] != backward_task():
            return self._replayed[1]  # a checkpoint inside one that is being computed once more
        return lone_run()

    def _note_replay(self, run: RunContext) -> None:
        """A part of ``run`` is computed once more in the backward pass that goes on. Reentrant
        checkpointing makes new nodes there, and runs a backward pass of theirs inside this one.
        """
        task = backward_task()
        if self._replayed is None or self._replayed[0] != task:

            def end() -> None:
                if self._replayed is not None and self._replayed[0] == task:
                    self._replayed = None

            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._replayed = task, run


def backward_task() -> int:
    """The number of the backward pass that goes on; -1 if there is none."""
    return torch._C._current_graph_task_id()
