"""The failure of a rank: an error that the next exchange reports to the others, or one that all
ranks have exchanged and raise at the end of their backward.
"""

from __future__ import annotations

from enum import IntEnum

from flex_model.integrations.torch_private import current_graph_task


class RankState(IntEnum):
    """The state of a rank as its header reports it; the values are the header's codes."""

    OK = 0
    ERROR = 1  # an editing function or hook failed here
    FAILED = 2  # the model itself failed here
    STOPPED = 3  # code of a run failed here, outside of the model's forwards, which are complete


OK, ERROR, FAILED, STOPPED = RankState


class Failure:
    """The failure of one rank in its transfers, or in a step of a pipeline. All methods are local.

    An error of this rank is pending until the next exchange, at which all ranks get it and raise
    it. Inside a backward that can continue, they hold it until the end; since a further error may
    become pending meanwhile, the two are kept apart. A failed wait is not kept here: it breaks the
    private groups, which FlexModels share, so each group keeps the reason (``GroupPool.broken``).

    Attributes:
        state: What failed here, of the pending error; OK if there is none.
        text: The message of the pending error.
        cause: The exception behind it.
        held: The error that all ranks hold.
        num_agreed: The number of errors raised on all ranks.
    """

    def __init__(self) -> None:
        self.cause: BaseException | None
        self.held: Exception | None = None
        self.num_agreed = 0
        self._backwards: set[int] = set()  # graph tasks at whose end ``held`` is raised
        self.clear()

    @property
    def has_error(self) -> bool:
        """Whether an error is pending."""
        return self.state is not OK

    def set_error(self, text: str, cause: BaseException | None, state: RankState = ERROR) -> None:
        """Set the pending error. The first one is kept, unless the model fails after it."""
        if not self.has_error or state >= FAILED:
            self.state, self.text, self.cause = state, text, cause

    def clear(self) -> None:
        """Forget the pending error."""
        self.state, self.text, self.cause = OK, "", None

    def agree(self) -> None:
        """Count an error that all ranks raise now; it replaces the pending ones, and in a backward,
        which it ends, the one held.
        """
        self.clear()
        self.held = None
        self.num_agreed += 1

    def hold(self, error: Exception) -> bool:
        """Hold an error that all ranks have exchanged, if it is inside a backward whose end raises
        it; return whether it is. The first one is kept.
        """
        is_inside = current_graph_task() in self._backwards
        if is_inside:
            self.held = self.held or error
        return is_inside

    def begin_run(self) -> None:
        """Forget the backward passes of the run before, which may have been aborted."""
        self._backwards.clear()
        self.held = None

    def begin_backward(self, task: int) -> None:
        self._backwards.add(task)

    def end_backward(self, task: int) -> Exception | None:
        """Return the error that was held during the backward, for the caller to raise."""
        self._backwards.discard(task)
        held, self.held = self.held, None
        return held
