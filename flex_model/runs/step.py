"""The state of one step of a pipeline's schedule: the stage and micro-batch being computed, and the
first failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flex_model.distributed.failure import ERROR, FAILED, Failure, RankState
from flex_model.errors import HookError, is_agreed, see, text_of

_under_way: list[MicrobatchState] = []  # the innermost last


@dataclass(eq=False)
class MicrobatchState:
    """The state of a pipeline's step, reused by each step of a FlexModel.

    Attributes:
        is_running: Whether a step runs; hooked stages must not run outside of one.
        stage, microbatch: Those being computed; -1 in between.
        is_silent: Whether no hook is called: shapes are being inferred, or a hook failed, and the
            step is finished without edits so that no other stage waits for this one.
        failure: The error to report to the other ranks when the step is over.
        rows: By data-parallel rank: its number of rows in each micro-batch.
        number: Counts steps.
    """

    is_running: bool = False
    stage: int = -1
    microbatch: int = -1
    is_silent: bool = False
    failure: Failure = field(default_factory=Failure)
    rows: Sequence[Sequence[int]] = ()
    number: int = 0

    @contextlib.contextmanager
    def running(self, rows: Sequence[Sequence[int]]) -> Iterator[None]:
        """A context for one step."""
        self.is_running, self.is_silent, self.rows = True, False, rows
        self.number += 1
        self.failure.clear()
        try:
            yield
        finally:
            self.is_running = self.is_silent = False

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """A context in which no hook is called."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False

    def silence(self) -> None:
        """Call no hook until the step ends."""
        self.is_silent = True

    def calls_hooks(self) -> bool:
        """Return whether a hook that is reached now is called.

        Raises:
            HookError: the stage is run, but its schedule is not.
        """
        if not self.is_running:
            raise HookError(
                "a hooked pipeline stage is run outside of a step of its schedule, where it has a "
                "part of the batch only; call flex(...) or schedule.step(...), or restore() first "
                f"({see('a-stage-is-run-on-its-own')})"
            )
        return not self.is_silent

    def fail(self, text: str, cause: BaseException, state: RankState = ERROR) -> None:
        """Keep an error to report; the first one counts."""
        first, newline, rest = text.partition("\n")
        self.failure.set_error(f"{first} ({self.where}){newline}{rest}", cause, state)

    def fail_in_model(self, cause: BaseException, what: str = "stage") -> None:
        """Keep an error that no hook raised. No hook is called after one that all ranks raise."""
        self.is_silent |= is_agreed(cause)
        if isinstance(cause, HookError):
            self.fail(str(cause), cause)
        elif not self.failure.has_error:
            text = f"the model's own {what} failed: {text_of(cause)}"
            self.fail(text, cause, FAILED)

    @property
    def where(self) -> str:
        """The stage and micro-batch, for messages."""
        if self.stage < 0:
            return "at the end of the step"
        return f"micro-batch {self.microbatch} of stage {self.stage}"

    @property
    def section(self) -> tuple[int, int] | None:
        """The key of the part of the records that hooks append to now; None outside of steps."""
        return (self.stage, self.microbatch) if self.is_running else None

    @contextlib.contextmanager
    def at(self, stage: int, microbatch: int) -> Iterator[None]:
        """A context in which this micro-batch of this stage is computed."""
        before = self.stage, self.microbatch
        self.stage, self.microbatch = stage, microbatch
        _under_way.append(self)
        try:
            yield
        finally:
            _under_way.pop()
            self.stage, self.microbatch = before


def current_microbatch() -> int | None:
    """Index of the micro-batch that a pipeline computes now in this process; None outside of one.

    Example::

        def edit(current_module, inputs, save_ctx, modules):
            save_ctx.norms[current_microbatch()] = inputs.norm()
    """
    return _under_way[-1].microbatch if _under_way else None


def current_step() -> int:
    """Return the number of a pipeline's step that is computed now in this process; 0 outside."""
    return _under_way[-1].number if _under_way else 0


def current_rows() -> tuple[list[int], int] | None:
    """Return the rows of the whole batch that are being computed, in the order in which an editing
    function gets them, and the batch's number of rows; None outside of a pipeline.

    Under data parallelism a micro-batch has some rows of each rank's part of the batch.
    """
    if not _under_way or _under_way[-1].microbatch < 0:
        return None
    step, start = _under_way[-1], 0
    rows: list[int] = []
    for of_rank in step.rows:
        first = start + sum(of_rank[: step.microbatch])
        rows += range(first, first + of_rank[step.microbatch])
        start += sum(of_rank)
    return rows, start
