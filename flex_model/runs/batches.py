"""The runs of several batches of a sequential run, of which one is computed at a time.

A suspended batch keeps the state of its run: the hook calls in progress, the numbers of its calls,
the followed forward, ``save_ctx``, and its records, which are appended to the user's in the order
of the batches. Random edits draw the same numbers as in a plain loop over the batches.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flex_model.distributed.padding import RankRows
from flex_model.hooks.core import HookCore
from flex_model.hooks.evidence import Forward
from flex_model.hooks.random_state import renew_seed, seed_of_state
from flex_model.hooks.table import EVERYTHING, Choice
from flex_model.runs.lifecycle import OutermostRun
from flex_model.runs.run import NodesByBatch, Run

T = TypeVar("T")


@dataclass(eq=False)
class BatchRun:
    """The state of one batch that the hook core replaces while it serves another one.

    Attributes:
        save_ctx: The batch's own ``save_ctx``, passed to its editing functions.
        seed: None where no hook edits.
        records: By name, those that wait for the batches before this one.
        rows: As of ``Run``, after it has run.
    """

    index: int
    save_ctx: Namespace
    seed: int | None
    choice: tuple[Choice, Choice]
    records: dict[str, list[Tensor]] = field(default_factory=dict)
    run: Run | None = None
    is_in_run: bool = False
    forward: Forward = field(default_factory=Forward)
    calls: dict[Any, list[Any]] = field(default_factory=dict)
    rows: Sequence[RankRows] = ()

    def exchange(self, core: HookCore) -> None:
        """Exchange the state of this batch with the core's, at its begin and end."""
        self.run = core.runs.exchange(self.run)
        self.forward = core.tracking.exchange(self.forward)
        if core.table.registrations:
            self.is_in_run = core.table.set_in_run(self.is_in_run)
            self.calls = core.table.exchange_calls(self.calls)
            names = [r.hook_function.record_name for r in core.table.registrations]
            self.records = core.records.exchange(names, self.records)

    def note_rows(self, rows: Sequence[RankRows]) -> None:
        """Keep the rows of the batch."""
        self.rows = rows

    def choose(self, choice: tuple[Choice, Choice]) -> None:
        """Keep the choice of hooks that the batch has made."""
        self.choice = choice


class BatchRuns:
    """A context manager for the runs of a sequential run's batches. Inside, each batch is ``made``,
    resumed and suspended any number of times, ``run`` in between, and ``delivered``.

    Attributes:
        communicator: The FlexModel's, which records whether an editing function is running.
    """

    def __init__(self, core: HookCore, choice: Choice) -> None:
        self._core = core
        self._choice = choice
        self._generator = torch.Generator()
        self._num_made = self._num_drawn = 0
        self._nodes = NodesByBatch()
        self.communicator = core.communicator

    def __enter__(self) -> BatchRuns:
        runs, table = self._core.runs, self._core.table
        if runs.current is not None or runs.default_choice != EVERYTHING:
            raise RuntimeError(
                "sequential.run: a run of this FlexModel is going on; call it outside of forward, "
                "active() and other sequential runs"
            )
        if runs.session is not None:
            runs.session.begin_run()
            runs.session.leave_run()
        runs.choose_by_default(self._choice)
        parameters = table.choices[1] if not torch.is_grad_enabled() else self._choice
        table.keep_installed(True)  # what batches that wait have chosen, others may not
        table.choose(EVERYTHING, parameters)
        table.choose(self._choice, parameters)
        self._core.records.clear(table.active_hooks.names)
        self._generator.set_state(torch.default_generator.get_state())
        self._has_edits = any(r.edits for r in table.active_hooks.registrations)
        return self

    def __exit__(self, *exc_info: object) -> None:
        runs, table = self._core.runs, self._core.table
        runs.choose_by_default(EVERYTHING)
        table.keep_installed(False)
        table.choose(EVERYTHING, table.choices[1])
        table.refresh(table.registrations)
        for _ in range(self._num_drawn):
            renew_seed()

    def made(self) -> BatchRun:
        """A batch that has not begun."""
        core = self._core
        save_ctx = Namespace(**vars(core.save_ctx))
        index, seed = self._num_made, self._next_seed()
        return BatchRun(index, save_ctx, seed, core.table.choices)

    def skip(self, num_batches: int) -> None:
        """Draw the seeds of this many batches, which are not run here."""
        for _ in range(num_batches):
            self._next_seed()

    def _next_seed(self) -> int | None:
        self._num_made += 1
        if not self._has_edits:
            return None
        with _default_state(self._generator):
            seed = seed_of_state()
            renew_seed()  # as if the edits of every batch drew numbers
        return seed

    def run(self, batch: BatchRun, call: Callable[[], T]) -> T:
        """Run ``call`` as this batch. Use it once, after ``resume``. Collective where hooks are
        active.
        """
        runs, of_batch = self._core.runs, dict[str, Any](batch=batch.index, nodes=self._nodes)
        of_batch |= {"save_ctx": batch.save_ctx, "seed": batch.seed}
        with OutermostRun(partial(runs.begin, self._choice, **of_batch), runs.end) as run:
            result = call()
            batch.note_rows(run.rows)
            before = torch.default_generator.get_state()
        if self._has_edits and not torch.equal(before, torch.default_generator.get_state()):
            self._num_drawn += 1  # an edit drew, on some rank
            torch.default_generator.set_state(before)  # undo the renewed seed: not a model's draw
        return result

    def resume(self, batch: BatchRun) -> None:
        """Make this batch the one that the core serves, until it is suspended."""
        self._nodes.begin(batch.index)
        batch.exchange(self._core)
        self._core.table.choose(*batch.choice)

    def caller_went_on(self) -> None:
        """Between two batches."""
        self._nodes.begin(None)

    def suspend(self, batch: BatchRun) -> None:
        """Keep what is the batch's; what was there before is there again."""
        table = self._core.table
        batch.choose(table.choices)
        batch.exchange(self._core)
        table.choose(self._choice, table.choices[1])

    def delivered(self, batch: BatchRun) -> None:
        """Append its records to the user's. Called in the order of the batches, after all ran."""
        self._core.records.extend(batch.records)
        batch.records.clear()


@contextlib.contextmanager
def _default_state(generator: torch.Generator) -> Iterator[None]:
    """A context in which torch's CPU generator has ``generator``'s state, and advances it."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)
