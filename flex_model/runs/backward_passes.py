"""The backward passes through the graphs of a FlexModel's runs: which run a pass belongs to, and
the delivery of records at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.errors import HookError, agreed, is_agreed
from flex_model.hooks.registration import Registration
from flex_model.hooks.tracking import Tracking
from flex_model.layouts import follow
from flex_model.records.records import Records
from flex_model.runs.lifecycle import Runs
from flex_model.runs.remembered_runs import backward_task
from flex_model.runs.run import Run

if TYPE_CHECKING:
    from flex_model.runs.step import MicrobatchState


class BackwardPasses:
    """The backward passes of one FlexModel.

    Attributes:
        order: Puts the records of several batches in order.
    """

    def __init__(
        self,
        runs: Runs,
        communicator: Communicator,
        records: Records,
        tracking: Tracking,
        step: MicrobatchState | None,
    ) -> None:
        self.order = BackwardOrder(records.output_ptr)
        self._runs, self._step = runs, step
        self._communicator, self._records, self._tracking = communicator, records, tracking

    def run_of_current(self) -> Run | None:
        """Return the run whose graph is being computed; None if it is not remembered."""
        runs = self._runs
        return runs.remembered.of_backward(runs.current is not None, runs.lone_run)

    def check_open(self, run: Run) -> None:
        """HookError where records of a backward would be added to another batch, or to a store
        that is closed.
        """
        runs = self._runs
        if runs.had_store:
            raise HookError(
                "the backward of a graph comes after restore(), when the store that its records "
                "belong to is closed; run backward before restore()"
            )
        if runs.session is not None:
            current = None if runs.current is None else runs.current.entry
            runs.session.check_open(run.entry, current)

    def check_is_of_loss(self, registration: Registration) -> None:
        """ValueError where the backward runs inside the model's forward."""
        if self._tracking.forward.depth > 0 and self._communicator.mesh.dp_size > 1:
            raise agreed(
                ValueError(
                    f"{registration.describe()}: a backward that begins inside the model's forward "
                    "(torch.autograd.grad, as of an energy) reaches it; under data parallelism "
                    "hooks assume that a backward begins at a loss that is averaged over ranks; "
                    "hook the forward's tensors, or run the backward outside of the forward"
                )
            )

    def begin(self, run: Run) -> None:
        """Deliver this backward's records when it ends, once; in a pipeline, the step does."""
        if self._step is not None:
            return
        task = backward_task()
        if task == -1 or not run.begin_backward(task):
            return
        communicator, session, has_begun = self._communicator, self._runs.session, False
        if not communicator.is_local:
            communicator.failure.begin_backward(task)
        if session is not None:
            session.begin_backward(run.entry)
        self.order.begin(task)
        self._runs.watch.watch()

        def forget() -> None:
            if self._runs.current is not run:  # else the forward goes on, or forgets them as well
                self._records.forget(run)

        aborted = _C.Finalizer(forget)  # of a pass that fails autograd drops `end`, which holds it

        def end() -> None:
            nonlocal has_begun
            try:
                has_begun = True
                aborted.cancel()
                run.end_backward()
                held = communicator.failure.end_backward(task)
                if held is not None:  # on all ranks
                    self._records.forget(run)
                    raise held
                self._runs.deliver(run, "end of the backward")
                self.order.end()
                if session is not None:
                    session.end_backward(run.entry)
            except BaseException as error:
                self._tracking.forget()
                if isinstance(error, HookError) or is_agreed(error):
                    self._runs.drop_gradients(run)
                self._runs.interrupted(error)
                raise

        def end_apart() -> None:
            with follow.paused():  # in a forward that begins a backward
                end()

        self._runs.watch.at_end(end_apart, lambda: has_begun)


class BackwardOrder:
    """The order of a FlexModel's backward records. A backward calls ``begin`` and ``end`` once for
    each run that it reaches.
    """

    def __init__(self, output_ptr: dict[str, list[Any]]) -> None:
        self._output_ptr = output_ptr
        self._task = -1
        self._num_open = 0
        self._positions: dict[str, list[tuple[int, int]]] = {}  # by name: batch, position

    def begin(self, task: int) -> None:
        """Count a run that this backward reaches."""
        if task != self._task:  # the previous backward may have failed
            self._task, self._num_open, self._positions = task, 0, {}
        self._num_open += 1

    def position(self, name: str) -> int:
        """Return the index of the next record of this name."""
        return len(self._output_ptr.get(name, ()))

    def add(self, name: str, position: int, batch: int | None) -> None:
        """Assign the records from ``position`` on, which a hook has just made, to a batch."""
        if batch is not None:
            new = range(position, self.position(name))
            self._positions.setdefault(name, []).extend((batch, place) for place in new)

    def end(self) -> None:
        """The records of a run are delivered. After the last run, sort them by batch."""
        self._num_open -= 1
        if self._num_open:
            return
        for name, positions in self._positions.items():
            records = self._output_ptr.get(name, [])
            places = sorted(place for _, place in positions)
            if places and places[-1] < len(records):
                values = [records[place] for _, place in sorted(positions)]
                for place, value in zip(places, values):
                    records[place] = value
        self._positions = {}
