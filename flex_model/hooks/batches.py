"""The runs of several batches of a sequential run, of which one is computed at a time.

A suspended batch keeps the state of its run: the hook calls in progress, the numbers of its calls,
the followed forward, ``save_ctx``, and its records, which are appended to the user's in the order
of the batches. Random edits draw the same numbers as in a plain loop over the batches.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flex_model.hooks.context import RunContext, Turns, renew_seed, seed_of_state
from flex_model.hooks.core import HookCore
from flex_model.hooks.evidence import Forward
from flex_model.hooks.table import EVERYTHING, Choice


@dataclass(eq=False)
class BatchRun:
    """The state of one batch that the hook core replaces while it serves another one.

    Attributes:
        save_ctx: The batch's own ``save_ctx``, passed to its editing functions.
        seed: None where no hook edits.
        records: By name, those that wait for the batches before this one.
    """

    index: int
    save_ctx: Namespace
    seed: int | None
    choice: tuple[Choice, Choice]
    records: dict[str, list[Tensor]] = field(default_factory=dict)
    run: RunContext | None = None
    in_run: bool = False
    forward: Forward = field(default_factory=Forward)
    calls: dict[int, list[Any]] = field(default_factory=dict)


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
        self._num_made = self._num_consumed = 0
        self._turns = Turns()
        self.communicator = core.communicator

    def __enter__(self) -> BatchRuns:
        core = self._core
        if core.run is not None or core.default_groups != EVERYTHING:
            raise RuntimeError(
                "sequential.run: a run of this FlexModel is going on; call it outside of forward, "
                "active() and other sequential runs"
            )
        if core.session is not None:
            core.session.begin_run()
            core.session.in_run = False
        core.default_groups = self._choice
        parameters = core.table.choices[1] if not torch.is_grad_enabled() else self._choice
        core.table.keeps_installed = True  # what batches that wait have chosen, others may not
        core.table.choose(EVERYTHING, parameters)
        core.table.choose(self._choice, parameters)
        core.table.clear_records(core.table.active)
        self._generator.set_state(torch.default_generator.get_state())
        self._has_edits = any(r.edits for r in core.active_registrations())
        return self

    def __exit__(self, *exc_info: object) -> None:
        core = self._core
        core.default_groups = EVERYTHING
        core.table.keeps_installed = False
        core.table.choose(EVERYTHING, core.table.choices[1])
        core.table.refresh()
        for _ in range(self._num_consumed):
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

    @contextlib.contextmanager
    def run(self, batch: BatchRun) -> Iterator[None]:
        """A context inside which the batch runs. Use it once, after ``resume``. Collective where
        hooks are active.
        """
        run = self._core.begin(self._choice)
        run.save_ctx, run.seed = batch.save_ctx, batch.seed
        run.batch, run.turns = batch.index, self._turns
        try:
            yield
        except BaseException as error:
            self._core.end(run, error)
            raise
        before = torch.default_generator.get_state()
        self._core.end(run, None)
        if self._has_edits and not torch.equal(before, torch.default_generator.get_state()):
            self._num_consumed += 1  # an edit drew, on some rank
            torch.default_generator.set_state(before)  # undo the renewed seed: not a model's draw

    def resume(self, batch: BatchRun) -> None:
        """Make this batch the one that the core serves, until it is suspended."""
        core = self._core
        self._turns.begin(batch.index)
        core.run = batch.run
        core.tracking.forward, batch.forward = batch.forward, core.tracking.forward
        if core.table.registrations:
            core.table.dispatcher.in_run = batch.in_run
            batch.calls = core.table.exchange_calls(batch.calls)
            batch.records = self._exchange_records(batch.records)
        core.table.choose(*batch.choice)

    def caller_went_on(self) -> None:
        """Between two batches."""
        self._turns.begin(None)

    def suspend(self, batch: BatchRun) -> None:
        """Keep what is the batch's; what was there before is there again."""
        core = self._core
        batch.choice = core.table.choices
        if core.table.registrations:
            batch.records = self._exchange_records(batch.records)
            batch.calls = core.table.exchange_calls(batch.calls)
        batch.in_run, core.table.dispatcher.in_run = core.table.dispatcher.in_run, False
        core.tracking.forward, batch.forward = batch.forward, core.tracking.forward
        batch.run, core.run = core.run, None
        core.table.choose(self._choice, core.table.choices[1])

    def delivered(self, batch: BatchRun) -> None:
        """Append its records to the user's. Called in the order of the batches, after all ran."""
        output_ptr = self._core.records.output_ptr
        for name, records in batch.records.items():
            output_ptr.setdefault(name, []).extend(records)
        batch.records = {}

    def _exchange_records(self, records: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Replace the lists in ``output_ptr`` by a batch's; return those that were there."""
        output_ptr = self._core.records.output_ptr
        found = {}
        for registration in self._core.table.registrations:
            name = registration.hook_function.record_name
            if name in output_ptr:
                found[name] = output_ptr.pop(name)
        output_ptr.update(records)
        return found


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
