"""Runs a model target by target: every batch of a window is suspended at the entry of a target
until that target's turn comes.

Batches take turns, one at a time, in their order. Of all targets that batches wait at, the first in
the model's order is served first, so those that are behind (a skipped block, a loop) catch up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.autograd import forward_ad

from flex_model import _C
from flex_model.runs.batches import BatchRun, BatchRuns
from flex_model.sequential import replaced
from flex_model.sequential.interrupts import Deferral, NoDeferral, deferrable
from flex_model.sequential.suspension import SuspendedCall
from flex_model.sequential.targets import Target
from flex_model.sequential.thread_state import ProcessState, ThreadState


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
        process: What the process was like when its last turn ended.
        num_replacing: How many calls of ``functional_call`` it is inside of.
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
        self.num_replacing = 0


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
    on_step: Callable[[], None] | None
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
        self._cuda_device = cuda_device
        self._deferral: Deferral | NoDeferral = NoDeferral()
        self._ends_matter = loader is not None or reports.on_target_end is not None
        self._ended_from: ThreadState | None = None
        self._away = contextlib.ExitStack()
        self._is_away = False
        self._current: Batch | None = None
        self._step: int | None = None
        self._left: dict[Target, set[int]] = {}
        self._are_several = False
        self._changes_thread = False
        self._safe_depths: set[int] = set()  # of calls that could be stopped
        self._followers: dict[int, int] = {}  # the step that came after a step, as last seen
        self.has_drawn = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """For copies of the model that are made meanwhile: its hooks are copied with it."""
        return self

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
        self._caller = ThreadState.now()
        source = self._drawn(iter(batches))
        begins_with = ProcessState.now(self._cuda_device)
        reads_ahead = self._loader is not None and self._loader.prefetch > 0
        with self._suspending():
            following = list(itertools.islice(source, window))
            while following:
                self._caller = self._ended_from or ThreadState.now()
                self._are_several = len(following) > 1
                window_batches = [
                    self._made(first + i, batch, call, begins_with)
                    for i, batch in enumerate(following)
                ]
                first += len(following)
                failure: Exception | None = None
                following = []
                if reads_ahead:
                    try:  # so that the first weights of the next window are read ahead
                        following += itertools.islice(source, 1)
                    except Exception as error:  # it is not this window's
                        failure = error
                self._run_window(window_batches, bool(following))
                if not self.has_drawn:
                    states = [(batch.begins_with, batch.process) for batch in window_batches]
                    self.has_drawn = ProcessState.differ(states)
                with self._deferral.released():
                    self._reports.on_window()
                if failure is not None:
                    raise failure
                if window is not None:
                    following += itertools.islice(source, window - len(following))

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        end, before = object(), self._caller
        while True:
            if not before.is_now:
                before = ThreadState.now()
            with self._deferral.released():
                batch = next(batches, end)
            if batch is end:
                if not before.is_now:  # a generator's contexts, which its batches are run in
                    self._ended_from = before
                return
            yield batch

    def _made(
        self,
        index: int,
        arguments: Any,
        call: Callable[[Any], Any],
        begins_with: ProcessState,
    ) -> Batch:
        hooks = None if self._hooks is None else self._hooks.made()

        def function() -> Any:
            if hooks is None or self._hooks is None:
                return call(arguments)
            with self._hooks.run(hooks):
                return call(arguments)

        batch = Batch(index, arguments, hooks, begins_with.of_batch(index))
        batch.call = SuspendedCall(function, self._caller, self._deferral)
        return batch

    def _run_window(self, batches: list[Batch], is_followed: bool) -> None:
        todo = list(batches)
        try:
            self._go_on(batches)
            self._deliver_done(todo)
            while waiting := [batch for batch in todo if batch.waits_at is not None]:
                self._take_step(waiting, is_followed)
                self._deliver_done(todo)
        except BaseException as error:
            self._abandon(todo)
            if not isinstance(error, Exception):
                # Ctrl-C may have come at the first line of a context's end. Torch's guards in it,
                # which end with its frame, would bring back the batch's state, some time later.
                traceback.clear_frames(error.__traceback__)
                self._caller.restore()
            raise
        finally:
            self._return_to_caller()

    def _deliver_done(self, todo: list[Batch]) -> None:
        while todo and todo[0].call.is_done:
            self._return_to_caller()
            with self._deferral.released():
                self._reports.deliver(todo.pop(0))

    def _take_step(self, waiting: list[Batch], is_followed: bool) -> None:
        """Let all that wait at the first target go on, beyond the targets of its step."""
        steps = [batch.waits_at.step for batch in waiting if batch.waits_at]
        step = min(steps)
        going = [batch for batch, its in zip(waiting, steps) if its == step]
        self._step = step
        try:
            if self._loader is not None:
                self._return_to_caller()
                entered = {target.step for batch in waiting for target in batch.path[:-1]}
                others = [batch for batch in waiting if batch not in going]
                ahead = self._steps_after(step, others, is_followed)
                with self._deferral.released():
                    self._loader.acquire(entered | {step})
                    self._loader.read_ahead(ahead)
            self._go_on(going)
        finally:
            self._step = None
        if self._loader is not None:
            for batch in going:
                if batch.waits_at is not None:
                    self._followers[step] = batch.waits_at.step
        if self._reports.on_target_end is not None:
            left, self._left = self._left, {}
            self._return_to_caller()
            for target, indices in left.items():  # the inner ones first
                with self._deferral.released():
                    self._reports.on_target_end(target.name, sorted(indices))
        if self._reports.on_step is not None:
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
        self._leave_caller()
        for batch in batches:
            if self._keeper is not None:
                self._keeper.bring_back(batch)
            self._take_turn(batch, batch.call.resume)
            if self._keeper is not None and batch.waits_at is not None:
                self._keeper.put_away(batch)

    def _take_turn(self, batch: Batch, go_on: Callable[[], None]) -> None:
        """Have it ``go_on``: meanwhile all is as the batch left it."""
        try:
            batch.waits_at = batch.inputs = None
            batch.process.restore()
            self._current = batch
            if self._hooks is not None and batch.hooks is not None:
                self._hooks.resume(batch.hooks)
            go_on()
        except BaseException as error:
            with contextlib.suppress(AttributeError):
                error.batch_index = batch.index  # type: ignore[attr-defined]
            raise
        finally:
            if self._hooks is not None and batch.hooks is not None:
                self._hooks.suspend(batch.hooks)
            self._current = None
            batch.process = ProcessState.now(self._cuda_device)
            self._changes_thread |= batch.call.has_changed_thread
            if batch.call.is_done:
                self._caller.restore()
                if self._changes_thread and not self._caller.has_autocast:
                    torch.clear_autocast_cache()  # as the end of the last autocast would

    def _leave_caller(self) -> None:
        """The thread is as it was when the window began, until ``_return_to_caller``, before any
        code of the user's but the batches' own.
        """
        if not self._is_away:
            self._is_away = True
            if self._hooks is not None:
                self._hooks.caller_went_on()
            self._away.callback(ProcessState.now(self._cuda_device).restore)
            self._away.enter_context(self._caller.during())

    def _return_to_caller(self) -> None:
        if self._is_away:
            self._is_away = False
            self._away.close()

    def _abandon(self, batches: list[Batch]) -> None:
        """End all that are under way; the last begun first, as they would be in one stack."""
        for batch in reversed(batches):
            while not batch.call.is_done:
                # What it raises on its way out is nobody's: the first error is raised.
                with contextlib.suppress(BaseException):
                    self._leave_caller()
                    self._take_turn(batch, batch.call.abandon)

    # What torch's hooks call.

    @contextlib.contextmanager
    def _suspending(self) -> Iterator[None]:
        """Inside, batches can wait, and Ctrl-C does where no code of the user's is run."""
        handles = []
        with (
            deferrable() as self._deferral,
            self._deferral.held(),
            replaced.noted(self._batch_here),
        ):
            try:
                for module in self._targets:
                    enter = module.register_forward_pre_hook(
                        self._enter, prepend=True, with_kwargs=True
                    )
                    handles.append(enter)
                    if self._ends_matter:
                        leave = module.register_forward_hook(self._leave, always_call=True)
                        handles.append(leave)
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _batch_here(self) -> Batch | None:
        """The batch that the code which asks belongs to."""
        batch = self._current
        return batch if batch is not None and getcurrent() is batch.call.greenlet else None

    def _is_outside(self, batch: Batch) -> bool:
        """Not the run's business: another thread, a recomputation in backward, an editing
        function's own computation.
        """
        return (
            getcurrent() is not batch.call.greenlet
            or torch._C._current_graph_task_id() != -1
            or (self._hooks is not None and self._hooks.communicator.edit_of != "")
        )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        batch, target = self._current, self._targets.get(module)
        if batch is None or target is None or self._is_outside(batch):
            if self._loader is not None:
                self._check_is_loaded(target)
            return
        if self._ends_matter:
            batch.path.append(target)
        if target.step == self._step:
            return  # of one step with the target before, or that one again: its weights are there
        if batch.num_replacing or forward_ad._current_level >= 0:
            self._check_shares_nothing(batch, target)
        depth = batch.call.depth()
        if depth not in self._safe_depths:
            self._check_can_stop(batch, target)
            self._safe_depths.add(depth)
        batch.waits_at, batch.inputs = target, (args, kwargs)
        batch.call.stop()

    def _check_is_loaded(self, target: Target | None) -> None:
        if target is None or target.step == self._step:
            return
        if self._hooks is not None and self._hooks.communicator.edit_of:
            raise RuntimeError(
                f"sequential.run: an editing function calls the target {target.name!r}, whose "
                "weights are not there now; compute with HookFunction(parameters=[...]), whose "
                "weights are kept, or with modules of register_trainable_module"
            )
        raise RuntimeError(
            f"sequential.run: the target {target.name!r}, whose weights are not there now, is "
            "called where no batch can wait for them: in another thread, in a backward, in a run "
            "inside the run or in a callback of the run; call it in the batch's own forward"
        )

    def _check_shares_nothing(self, batch: Batch, target: Target) -> None:
        shared = ""
        if batch.num_replacing:
            shared = "with functional_call, whose parameters for the model"
        elif forward_ad._current_level != self._caller.dual_level:
            shared = "in forward-mode differentiation, whose tangents"
        if shared and self._are_several:
            raise RuntimeError(
                f"sequential.run: the target {target.name!r} is called {shared} are one for the "
                "whole process: other batches would change them; run one batch at a time, window=1"
            )

    def _check_can_stop(self, batch: Batch, target: Target) -> None:
        hinderer = batch.call.hinderer
        if hinderer:
            raise RuntimeError(
                f"sequential.run: the target {target.name!r} is called by way of compiled code, a "
                f"function of {os.path.basename(hinderer)} (an operator of torch.library, say), "
                "inside of which a batch can't wait; choose a target that holds that call, "
                "targets=[...]"
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        batch, target = self._current, self._targets.get(module)
        if batch is None or target is None or self._is_outside(batch):  # a copy, say
            return None
        batch.path.pop()
        if self._reports.on_target_end is not None:
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
