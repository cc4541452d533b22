"""The runs of a FlexModel whose graphs may still run backward, and be recomputed there (activation
checkpointing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from flex_model.integrations import torch_private
from flex_model.integrations.torch_private import current_graph_task as backward_task
from flex_model.runs.run import OPEN, Run

MOST = 64  # they are small: their records are delivered and dropped


class RememberedRuns:
    """The last ``MOST`` runs; the sequence number of an autograd node identifies its run."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque(maxlen=MOST)
        self._served: list[Run] = []  # those whose graphs a backward pass has reached
        self._replayed: tuple[int, Run] | None = None  # backward pass, recomputed run

    def add(self, run: Run) -> None:
        self._runs.append(run)

    def begin(self, run: Run) -> None:
        """Add a run that begins, outside of any backward pass."""
        self._runs.append(run)
        self._replayed = None

    def serve(self, run: Run) -> None:
        """Keep a run, however old, while a backward pass computes its graph."""
        self._served.append(run)

    def unserve(self, run: Run) -> None:
        """End ``serve``: the pass is over."""
        self._served.remove(run)

    def forget(self) -> None:
        self._runs.clear()
        self._replayed = None

    @property
    def reached(self) -> Run | None:
        """The run whose graph a backward pass has reached; of several, whose gradients a parameter
        gets as one sum, the first in the store, whose batch may have ended.
        """
        runs = (run for run in self._served if run.save_ctx is None)
        return min(runs, key=lambda run: run.entry, default=None)

    @property
    def last(self) -> Run | None:
        """The last run of this FlexModel, except batches of sequential runs."""
        return next((run for run in reversed(self._runs) if run.save_ctx is None), None)

    @property
    def last_node(self) -> int:
        """The number after that of the last node of all runs that are over."""
        return max((run.last_node for run in self._runs if run.last_node < OPEN), default=0)

    def of_backward(self, is_in_run: bool, lone_run: Callable[[], Run]) -> Run | None:
        """Return the run whose graph is being computed; None if it is not remembered.

        Args:
            lone_run: Makes a run for a part of the model that was called on its own.
        """
        node = torch_private.current_node()
        if node is None:
            return self._runs[-1] if self._runs else None
        # First those that the pass is known to reach: each thread numbers its own nodes.
        held = (run for run in self._served if run.holds(node))
        run = max(held, key=lambda run: run.first_node, default=None)
        if run is None:
            run = next((run for run in reversed(self._runs) if run.holds(node)), None)
        if run is not None:
            self._note_replay(run)
            return run
        if is_in_run or not self._runs or node._sequence_nr() < self.last_node:
            return None
        if self._replayed is not None and self._replayed[0] != backward_task():
            return self._replayed[1]  # a checkpoint nested in one that is being recomputed
        return lone_run()

    def _note_replay(self, run: Run) -> None:
        """Note that the running backward pass recomputes a part of ``run``. Reentrant checkpointing
        makes new nodes there, and runs a nested backward pass on them.
        """
        task = backward_task()
        if self._replayed is None or self._replayed[0] != task:

            def end() -> None:
                if self._replayed is not None and self._replayed[0] == task:
                    self._replayed = None

            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._replayed = task, run


def in_backward() -> bool:
    """Return whether a backward pass is running."""
    return backward_task() != -1
