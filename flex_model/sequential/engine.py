"""Runs a model target by target: every batch of a window is suspended at the entry of a target
until that target's turn comes.

Batches take turns, one at a time, in their order, each giving the turn to the next. Of all targets
that batches wait at, the first in the model's order is served first, so those that are behind (a
skipped block, a loop) catch up.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.hooks.batches import BatchRun, BatchRuns
from flex_model.sequential.interrupts import deferred
from flex_model.sequential.suspension import SuspendedCall, Threads
from flex_model.sequential.targets import Target
from flex_model.sequential.thread_state import CallerState, ProcessState


class Loader(Protocol):
    """Brings weights into the model."""

    prefetch: int

    def acquire(self, steps: set[int]) -> None:
        """Have the weights of exactly these steps in the model."""

    def read_ahead(self, steps: list[int]) -> None:
        """Begin to read what will probably be acquired next."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that other weights will take."""


class Keeper(Protocol):
    """Keeps what a suspended batch was given."""

    def put_away(self, batch: Batch) -> None: ...
    def bring_back(self, batch: Batch) -> None: ...


class Batch:
    """One batch on its way through the model.

    Attributes:
        waits_at: The target at whose entry it is suspended; None before the first and at the end.
        inputs: What that target was called with.
        path: The targets that it is inside of, outermost first.
        hooks: What the hook core keeps of it; None without hooks.
        turn: What is undone when its turn is over.
    """

    call: SuspendedCall

    def __init__(
        self, index: int, arguments: Any, hooks: BatchRun | None, process: ProcessState
    ) -> None:
        self.index = index
        self.arguments = arguments
        self.hooks = hooks
        self.waits_at: Target | None = None
        self.inputs: tuple[Any, Any] | None = None
        self.path: list[Target] = []
        self.begins_with = self.process = process
        self.put_away: Any = None
        self.turn = contextlib.ExitStack()


@dataclass(frozen=True)
class Reports:
    """Whom the engine tells.

    Attributes:
        deliver: Gets the batches that are done, in their order.
        on_target_end: Gets a target's name and the batches that left it in a step.
        on_step: Called after each step.
        on_window: Called when all batches of a window are done.
    """

    deliver: Callable[[Batch], None]
    on_target_end: Callable[[str, list[int]], Any] | None
    on_step: Callable[[], None]
    on_window: Callable[[], None]


class Engine:
    """One sequential run.

    Args:
        hooks: The hook core's part; None for a module without hooks.
        loader, keeper: None where there is nothing to load, or to keep elsewhere.

    Attributes:
        has_drawn: Whether a batch drew random numbers.
    """

    def __init__(
        self,
        targets: list[Target],
        hooks: BatchRuns | None,
        loader: Loader | None,
        keeper: Keeper | None,
        reports: Reports,
        cuda_device: int | None,
    ) -> None:
        self._targets = {target.module: target for target in targets}
        self._num_steps = max(target.step for target in targets) + 1
        self._hooks, self._loader, self._keeper = hooks, loader, keeper
        self._reports = reports
        self._threads = Threads()
        self._cuda_device = cuda_device
        self._current: Batch | None = None
        self._latest: Batch | None = None
        self._following: deque[Batch] = deque()  # whose turns are next, in this step
        self._step: int | None = None
        self._left: dict[Target, set[int]] = {}
        self._followers: dict[int, int] = {}  # the step that came after a step, as last seen
        self.has_drawn = False

    def run(
        self,
        batches: Iterable[Any],
        window: int | None,
        call: Callable[[Any], Any],
        first: int = 0,
    ) -> None:
        """Run ``call(batch)`` for all of them, numbered from ``first``. An exception of a batch has
        its ``batch_index``.
        """
        source = iter(batches)
        caller = CallerState()
        begins_with = ProcessState.now(self._cuda_device)
        with self._suspending():
            following = list(itertools.islice(source, window))
            while following:
                window_batches = [
                    self._made(first + i, batch, call, caller, begins_with)
                    for i, batch in enumerate(following)
                ]
                first += len(following)
                failure: Exception | None = None
                try:  # so that the first weights of the next window are read ahead
                    following = list(itertools.islice(source, 1))
                except Exception as error:  # it is not this window's
                    failure, following = error, []
                self._run_window(window_batches, bool(following))
                self._reports.on_window()
                if failure is not None:
                    raise failure
                following += itertools.islice(source, window - 1 if window else 0)

    def _made(
        self,
        index: int,
        arguments: Any,
        call: Callable[[Any], Any],
        caller: CallerState,
        begins_with: ProcessState,
    ) -> Batch:
        hooks = None if self._hooks is None else self._hooks.made()

        def function() -> Any:
            if hooks is None or self._hooks is None:
                return call(arguments)
            with self._hooks.run(hooks):
                return call(arguments)

        batch = Batch(index, arguments, hooks, begins_with.of_batch(index))
        following = functools.partial(self._turn_ends, batch)
        batch.call = SuspendedCall(function, caller, self._threads, following)
        return batch

    def _run_window(self, batches: list[Batch], is_followed: bool) -> None:
        todo = list(batches)
        try:
            with self._callers_state_kept():
                for batch in batches:
                    batch.call.start()
                self._go_on(batches)
            self._deliver_done(todo)
            while waiting := [batch for batch in todo if batch.waits_at is not None]:
                self._take_step(waiting, is_followed)
                self._deliver_done(todo)
        except BaseException:
            with deferred():
                self._abandon(todo)
            raise

    def _deliver_done(self, todo: list[Batch]) -> None:
        while todo and todo[0].call.is_done:
            self._reports.deliver(todo.pop(0))

    def _take_step(self, waiting: list[Batch], is_followed: bool) -> None:
        """Let all that wait at the first target go on, beyond the targets of its step."""
        step = min(batch.waits_at.step for batch in waiting if batch.waits_at)
        going = [batch for batch in waiting if batch.waits_at and batch.waits_at.step == step]
        self._step = step
        try:
            if self._loader is not None:
                entered = {target.step for batch in waiting for target in batch.path[:-1]}
                self._loader.acquire(entered | {step})
                others = [batch for batch in waiting if batch not in going]
                self._loader.read_ahead(self._steps_after(step, others, is_followed))
            with self._callers_state_kept():
                self._go_on(going)
        finally:
            self._step = None
        for batch in going:
            if batch.waits_at is not None:
                self._followers[step] = batch.waits_at.step
        left, self._left = self._left, {}
        for target, indices in left.items():  # the inner ones first
            if self._reports.on_target_end is not None:
                self._reports.on_target_end(target.name, sorted(indices))
        self._reports.on_step()

    def _steps_after(self, step: int, others: list[Batch], is_followed: bool) -> list[int]:
        """The steps that will probably be next: those seen to follow, or that others wait at."""
        waited_for = {batch.waits_at.step for batch in others if batch.waits_at}
        ahead: list[int] = []
        while len(ahead) < (0 if self._loader is None else self._loader.prefetch):
            candidates = waited_for - set(ahead)
            following = self._followers.get(step, step + 1)
            if following < self._num_steps:
                candidates.add(following)
            elif is_followed:
                candidates.add(0)
            if not candidates:
                break
            step = min(candidates)
            ahead.append(step)
        return ahead

    def _go_on(self, batches: list[Batch]) -> None:
        """Let them go on, one after the other, each until it waits at a target of another step or
        is done.
        """
        if self._keeper is None:
            self._take_turns(batches)
            return
        for batch in batches:  # what it does takes longer than a turn's way through this thread
            self._keeper.bring_back(batch)
            self._take_turns([batch])
            if batch.waits_at is not None:
                self._keeper.put_away(batch)

    def _take_turns(self, batches: list[Batch]) -> None:
        self._following.extend(batches)
        interruption: BaseException | None = None
        try:
            self._begin_turn(self._following.popleft()).resume()
        except BaseException as error:
            interruption = error
        finally:
            self._following.clear()
            if self._current is not None:  # interrupted before it went on
                self._end_turn(self._current)
        failed = next((batch for batch in batches if batch.call.error is not None), self._latest)
        assert failed is not None
        raised, failed.call.error = failed.call.error or interruption, None
        # The one that the caller's handler made, rather than its copy in the thread.
        raised = interruption if type(interruption) is type(raised) else raised
        if raised is not None:
            with contextlib.suppress(AttributeError):
                raised.batch_index = failed.index  # type: ignore[attr-defined]
            raise raised
        for batch in batches:
            if batch.call.is_done:
                batch.call.give_back_thread()

    def _turn_ends(self, batch: Batch) -> SuspendedCall | None:
        """Called in a batch's thread where it stops or is done: whose turn is next."""
        if self._current is batch:
            self._end_turn(batch)
        if self._threads.turns.is_interrupted or batch.call.error or not self._following:
            return None
        return self._begin_turn(self._following.popleft())

    def _begin_turn(self, batch: Batch) -> SuspendedCall:
        """All is as the batch left it."""
        batch.waits_at = batch.inputs = None
        batch.process.restore()
        self._current = self._latest = batch
        if self._hooks is not None and batch.hooks is not None:
            batch.turn.enter_context(self._hooks.goes_on(batch.hooks))
        return batch.call

    def _end_turn(self, batch: Batch) -> None:
        try:
            batch.turn.close()
        finally:
            self._current = None
            batch.process = ProcessState.now(self._cuda_device)
            if batch.call.is_done:
                self.has_drawn |= batch.process.has_drawn_since(batch.begins_with)

    @contextlib.contextmanager
    def _callers_state_kept(self) -> Iterator[None]:
        before = ProcessState.now(self._cuda_device)
        try:
            yield
        finally:
            before.restore()

    def _abandon(self, batches: list[Batch]) -> None:
        """End all that are under way; the last begun first, as they would be in one stack."""
        for batch in reversed(batches):
            while not batch.call.is_done:
                try:
                    with self._callers_state_kept():
                        self._begin_turn(batch).abandon()
                except BaseException:  # a second Ctrl-C: the first one is raised, after all ended
                    continue
                finally:
                    if self._current is not None:
                        self._end_turn(self._current)

    # What torch's hooks call.

    @contextlib.contextmanager
    def _suspending(self) -> Iterator[None]:
        handles = []
        try:
            with deferred():
                for module in self._targets:
                    enter = module.register_forward_pre_hook(
                        self._enter, prepend=True, with_kwargs=True
                    )
                    leave = module.register_forward_hook(self._leave, always_call=True)
                    handles += [enter, leave]
            yield
        finally:
            with deferred():
                for handle in handles:
                    handle.remove()
                self._threads.close()

    def _is_outside(self, module: nn.Module) -> bool:
        """Not the run's business: a copy, another thread, a recomputation in backward."""
        return (
            self._current is None
            or module not in self._targets
            or not self._current.call.is_here
            or torch._C._current_graph_task_id() != -1
        )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_outside(module):
            return
        batch, target = self._current, self._targets[module]
        assert batch is not None
        batch.path.append(target)
        if target.step == self._step:
            return  # of one step with the target before, or that one again: its weights are there
        batch.waits_at, batch.inputs = target, (args, kwargs)
        batch.call.stop()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._is_outside(module):
            return None
        batch, target = self._current, self._targets[module]
        assert batch is not None
        batch.path.pop()
        self._left.setdefault(target, set()).add(batch.index)
        return self._owned(output) if self._loader is not None else None

    def _owned(self, output: Any) -> Any:
        """A target may return a part of a weight of its own, whose memory the next ones take."""
        assert self._loader is not None
        if output is None:  # it raised
            return None
        for index, leaf in enumerate(_C.flatten(output)[0]):
            if self._loader.holds(leaf):
                output = _C.replace_leaf(output, index, leaf.clone())
        return output
