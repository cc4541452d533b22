"""The state of one run of a model: one call, or everything inside one ``active()``."""

from __future__ import annotations

import bisect
from argparse import Namespace
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING

from flex_model.integrations.torch_private import next_sequence

if TYPE_CHECKING:
    from flex_model.distributed.padding import RankRows
    from flex_model.hooks.random_state import RandomCalls
    from flex_model.layouts.replicas import PendingReplica
    from flex_model.records.records import PendingRecord

OPEN = 2**63  # the last node of a run that has not ended


class NodesByBatch:
    """Records which of several batches made autograd's nodes, whose numbers are of one thread.

    Attributes:
        batch: Whose turn it is; None: the caller's.
    """

    def __init__(self) -> None:
        self.batch: int | None = None
        self._ends: list[int] = []  # numbers of the first nodes after each turn
        self._batches: list[int | None] = []

    def begin(self, batch: int | None) -> None:
        """End the current turn, and begin the turn of this batch."""
        number = next_sequence()
        if not self._ends or number != self._ends[-1]:
            self._ends.append(number)
            self._batches.append(self.batch)
        self.batch = batch

    def batch_of(self, node: int) -> int | None:
        """Return the batch in whose turn the node of this number was made."""
        place = bisect.bisect(self._ends, node)
        return self._batches[place] if place < len(self._ends) else self.batch


@dataclass(eq=False, slots=True)
class Run:
    """The state of one run. The graph of its forward holds it, so backward and recomputation find
    it.

    Attributes:
        active: Indices of the registrations that it chose, of any kind.
        hooks_seen: Indices of all registrations chosen during one outermost run, and of those
            outside of the part that it is of; ``names``: of the records that it has cleared.
        direct_depth: For a run begun by a direct call of the wrapped module: the depth of such
            calls inside each other.
        frame: That of the direct call which began it.
        seed: Random seed of the run, rank 0's; None until an edit needs it.
        has_drawn: Whether an edit drew random numbers.
        calls: By registration index: how often its editing function was called.
        random_calls: By registration index: the calls that drew random numbers.
        keys: The keys of its forwards (see ``layouts.cache``), for their recomputation.
        pending, pending_fulls: The records that its end delivers: shards to gather, and full
            tensors on this rank's GPU.
        pending_replicas: The tensors on GPUs that its end compares over the ranks that share them.
        outer_error: The exception that was being handled when the run began; a different one at the
            end is the run's own.
        ran_model: Whether the wrapped module was called in it.
        is_recomputed: Whether an edit, or a hook on gradients, may have run in a part of the model
            that a checkpoint recomputes.
        was_cut: Whether ``run_until`` ended one of its forwards early.
        first_node, last_node: Sequence numbers of the autograd nodes made during the run: from
            ``first_node`` to before ``last_node``.
        num_contexts: How often torch's ``context_parallel`` had been entered when it began.
        backward_task: The backward pass at whose end its records will be delivered; -1 if none
            runs.
        entry: Its number among the runs of a store.
        rows: Those of the inputs of each of its forwards that has some.
        save_ctx, batch, nodes: For a batch of a sequential run: its own ``save_ctx``, its index,
            and which batch made which nodes. None: the FlexModel's, no batch, one thread.
    """

    active: frozenset[int] = frozenset()
    hooks_seen: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    direct_depth: int = 0
    frame: FrameType | None = None
    seed: int | None = None
    has_drawn: bool = False
    calls: dict[int, int] = field(default_factory=dict)
    random_calls: dict[int, RandomCalls] = field(default_factory=dict)
    keys: set[int | None] = field(default_factory=set)
    pending: list[PendingRecord] = field(default_factory=list)
    pending_fulls: list[PendingRecord] = field(default_factory=list)
    pending_replicas: list[PendingReplica] = field(default_factory=list)
    outer_error: BaseException | None = None
    ran_model: bool = False
    is_recomputed: bool = False
    was_cut: bool = False
    first_node: int = 0
    last_node: int = OPEN
    num_contexts: int = 0
    backward_task: int = -1
    entry: int = 0
    rows: list[RankRows] = field(default_factory=list)
    save_ctx: Namespace | None = None
    batch: int | None = None
    nodes: NodesByBatch | None = None

    def holds(self, node: object) -> bool:
        """Whether an autograd node was made during this run."""
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return self.first_node <= number < self.last_node and (
            self.nodes is None or self.nodes.batch_of(number) == self.batch
        )

    def activate(self, active: frozenset[int]) -> None:
        """Add hooks that were chosen during the run."""
        self.active |= active

    def take_names(self, names: frozenset[str]) -> frozenset[str]:
        """Return those of these names whose records the run, or a part of it, has not cleared; it
        will.
        """
        new = names - self.names if self.names else names  # most runs have one choice of hooks
        self.names.update(new)
        return new

    def enter_call(self) -> None:
        """Enter the wrapped module again, inside a run that a direct call of it began."""
        self.direct_depth += 1

    def leave_call(self, is_part: bool) -> bool:
        """Leave the wrapped module, or a part of it; return whether the direct call that began the
        run is over.
        """
        self.ran_model |= not is_part
        if not self.direct_depth:
            return False
        self.direct_depth -= 1
        return not self.direct_depth

    def enter_store(self, entry: int) -> None:
        """Set the run's number among those of a store."""
        self.entry = entry

    def note_rows(self, rows: RankRows | None) -> None:
        """Note the rows of the inputs of a forward."""
        self.rows += [] if rows is None else [rows]

    def cut(self) -> None:
        """Note that ``run_until`` ended a forward early."""
        self.was_cut = True

    def note_recomputation(self) -> None:
        """Note that a checkpoint may recompute a part that hooks act on."""
        self.is_recomputed = True

    def use_seed(self, seed: int | None) -> None:
        """Set the seed of the run's edits: rank 0's, or that of a batch."""
        self.seed = seed

    def continue_draws(self, before: Run) -> None:
        """Go on with the random numbers of the step before, of the same call or ``active()``."""
        self.seed, self.calls = before.seed, before.calls

    def note_draws(self) -> None:
        """Note that an edit drew random numbers."""
        self.has_drawn = True

    def take_draws(self) -> bool:
        """Return whether edits drew random numbers since the last call of this."""
        has_drawn, self.has_drawn = self.has_drawn, False
        return has_drawn

    def begin_backward(self, task: int) -> bool:
        """Note that a backward pass reached the run; return whether it is the first time."""
        if self.backward_task == task:
            return False
        self.backward_task = task
        return True

    def end_backward(self) -> None:
        """End the backward pass: the next one delivers records of its own."""
        self.backward_task = -1

    def end(self) -> None:
        """End the run: nodes made from now on are not its own."""
        self.last_node = next_sequence()
        self.outer_error = self.frame = None

    def part(self) -> Run:
        """Return a part of the run with a choice of hooks of its own, which ``add_part`` ends."""
        return replace(self, active=frozenset(), direct_depth=0, first_node=next_sequence())

    def add_part(self, part: Run) -> None:
        """End a part: the run continues with its random state."""
        part.end()
        self.seed, self.has_drawn = part.seed, part.has_drawn
        self.is_recomputed |= part.is_recomputed
