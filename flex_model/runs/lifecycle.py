"""The runs of one FlexModel: when a run begins, which hooks it has, and what happens at its end."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.failure import FAILED, STOPPED
from flex_model.errors import (
    Control,
    HookError,
    HookNotCalledWarning,
    agreed,
    is_agreed,
    see,
    text_of,
)
from flex_model.hooks.digests import HookDigests
from flex_model.hooks.hook_executor import HookExecutor
from flex_model.hooks.random_state import renew_seed
from flex_model.hooks.registration import Registration
from flex_model.hooks.replaced_targets import Targets, refusal
from flex_model.hooks.table import EVERYTHING, Choice, HookTable
from flex_model.hooks.tracking import Tracking
from flex_model.integrations import refused, transformers_private
from flex_model.integrations.compiled import (
    HOOKS_BREAK_GRAPHS,
    HookGuards,
    between_graphs,
    outside_graphs,
    stopped_at_fullgraph,
)
from flex_model.integrations.divide_factors import DivideFactors
from flex_model.integrations.torch_private import is_profiling, uncounted
from flex_model.parameters.trainable import Replicas
from flex_model.records.records import Records
from flex_model.records.store.activation_store import ActivationStore
from flex_model.records.store.session import Session
from flex_model.runs.backward_watch import BackwardWatch
from flex_model.runs.remembered_runs import RememberedRuns, backward_task, in_backward
from flex_model.runs.run import Run, next_sequence
from flex_model.runs.step import MicrobatchState
from flex_model.runs.stop_request import STOP_REQUEST

_GRADIENTS = ("full_backward", "full_backward_pre", "tensor")


class Runs:
    """Begins and ends the runs of one FlexModel, and delivers their records.

    Args:
        replicas: Checks trainable modules, where every rank runs editing functions.
        warns: Whether a hook whose module is not called is reported.

    Attributes:
        current: The run in progress; None between runs.
        number: Counts outermost runs.
        thread: The thread that runs the model in the current or last run.
        default_choice: The choice of hooks between runs.
        remembered: The last runs, whose graphs may still run backward.
        watch: Detects backward passes that are aborted.
        session: Where records go to a store; ``had_store``: whether they did until it was closed.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        table: HookTable,
        records: Records,
        tracking: Tracking,
        digests: HookDigests,
        executor: HookExecutor,
        replicas: Replicas,
        step: MicrobatchState | None,
        warns: bool,
    ) -> None:
        self._module, self._communicator, self._table = module, communicator, table
        self._records, self._tracking, self._digests = records, tracking, digests
        self._executor, self._step = executor, step
        self._replicas = replicas if executor.edits_on_all else None
        self.remembered, self.watch = RememberedRuns(), BackwardWatch(communicator)
        self.current: Run | None = None
        self.number = 0
        self.thread: int | None = None
        self.default_choice: Choice = EVERYTHING
        self.session: Session | None = None
        self.had_store = False
        self._guards = HookGuards(module)
        self._targets = Targets(module)
        self._not_called_yet: list[weakref.ref[Registration]] = []
        self._warns = warns and step is None
        # Inside of `one_run_at_most`: True, and its run once that has begun.
        self._is_deferred = False
        self._deferred_run: Run | None = None

    # ---- Hooks -----------------------------------------------------------------------------------

    def hooks_registered(self, registrations: Sequence[Registration]) -> None:
        """Note new hooks: compiled code must call them, and a run should."""
        self._guards.renew(has_new_hooks=False)
        if registrations[0].kind != "tensor":
            self._not_called_yet += map(weakref.ref, registrations)

    def hooks_changed(self) -> None:
        """Include hooks that have become active in the current run. Collective in a run."""
        if self.current is not None:
            self.current.activate(self._table.active)
            self._include(self.current)

    # ---- Begin -----------------------------------------------------------------------------------

    def begin(
        self, choice: Choice, direct: bool = False, beside: Iterable[int] = (), **of_batch: Any
    ) -> Run:
        """Begin an outermost run: choose hooks, check them on all ranks where they are new, empty
        their record lists, but not those of the hooks ``beside``.
        ``of_batch``: what a batch of a sequential run has of its own in the ``Run``.
        """
        self.check_entry()
        self._guards.renew(self._digests.take_new())
        has_graph, communicator = torch.is_grad_enabled(), self._communicator
        # A run without gradients leaves parameters to the graph of the run before it.
        self._table.choose(choice, choice if has_graph else self._table.choices[1], in_run=True)
        self.thread = threading.get_ident()
        if not communicator.is_local:
            self.note_forward()
            self.watch.begin_run(self.thread)
            communicator.begin_run()
        self._tracking.reset()
        run = Run(
            self._table.active_hooks.indices,
            set(beside),
            direct_depth=int(direct),
            frame=next(calls_of_modules(), None) if direct else None,
            outer_error=sys.exc_info()[1],
            is_recomputed=not has_graph,  # a checkpoint's forward has no graph either
            first_node=next_sequence(),
            num_contexts=refused.num_contexts(),
            **of_batch,
        )
        self.current = run
        self.number += 1
        self._table.number_run(self.number)
        self.remembered.begin(run)
        try:
            if self.session is not None:
                run.enter_store(self.session.begin_run())
            self._include(run)
        except BaseException:
            self._batch_failed(run)
            self._close(run)
            raise
        return run

    def begin_direct(self, beside: Iterable[int] = ()) -> None:
        """Begin a run at a direct call of the wrapped module, or of a part that lacks the hooks
        ``beside``, or continue the one that it is in. Collective where a run begins.
        """
        run = self.current
        if run is not None:
            if run.direct_depth:
                run.enter_call()
            if not self._communicator.is_local:
                if self._communicator.has_skipped:
                    self.note_forward()
                self._heed_stop_request()
        elif self.begin_deferred() is None:
            self.begin(EVERYTHING, direct=True, beside=beside)

    def begin_deferred(self) -> Run | None:
        """Begin the run of ``one_run_at_most`` if one is expected; return it."""
        if self._is_deferred and self._deferred_run is None:
            self._deferred_run = self.begin(EVERYTHING)
            return self._deferred_run
        return None

    def of_hook(self, registration: Registration) -> OutermostRun:
        """Return a run of the one hook of a module that is called on its own, as a context."""
        beside = self._table.active - {registration.index}
        return OutermostRun(partial(self.begin, EVERYTHING, beside=beside), self.end)

    def lone_run(self) -> Run:
        """Make a run for a part of the model that is called on its own; it includes the autograd
        nodes made since the last run.
        """
        run = Run(
            self._table.active,
            set(self._table.active),
            first_node=self.remembered.last_node,
            last_node=next_sequence() + 1,
            entry=0 if self.session is None else self.session.number,
        )
        self.remembered.add(run)
        return run

    def of_parameters(self) -> Run:
        """Return the run that a parameter's gradient is recorded in."""
        remembered = self.remembered
        return remembered.reached or self.current or remembered.last or self.lone_run()

    def _include(self, run: Run) -> None:
        """Include newly chosen hooks in an outermost run: empty their lists, check on all ranks."""
        new = run.active - run.hooks_seen
        if not new:
            return
        communicator = self._communicator
        for registration in self._targets.gone(self._table.registrations):
            if registration.index in new:
                text = refusal(registration)
                communicator.fail(text, HookError(text))
        if not communicator.is_local:
            refused.check_context_parallel_run(run.num_contexts)
        names = run.take_names(self._table.record_names(new))
        run.hooks_seen.update(new)
        # Observers, and profilers, see only the hooks that Python runs, not the dispatcher.
        self._table.set_in_run(not self._executor.observers and not is_profiling())
        if run.save_ctx is None:  # else a batch's, which has records of its own
            self._records.clear(names)
            self._table.settle_edits(run.is_recomputed)  # which save_ctx is a part of
        if not communicator.is_local:
            hooks = self._table.active_hooks
            skipped = communicator.is_after_skipped
            communicator.publish_run(hooks.digest, hooks.choice, self._mode, skipped=skipped)
            if hooks.acts_in_backward:
                self._read_divide_factor()
            self._digests.check()
            edited = any(r.edits for r in hooks.registrations)
            if self._replicas and self._step is None and edited:
                self._replicas.check()
        if self.session is not None and not self.session.is_sequential:
            self.session.check_hooks(self._digests.described())

    @cached_property
    def _divide_factors(self) -> DivideFactors:
        return DivideFactors(self._module, self._communicator.mesh)

    def _read_divide_factor(self) -> None:
        """Take the number by which the ranks' summed gradients of parameters are divided now."""
        communicator, (factor, problem) = self._communicator, self._divide_factors.read()
        if problem:
            communicator.fail(problem, HookError(problem))
        elif factor not in (None, communicator.divisor):
            communicator.divide_by(factor)
            self._digests.set("gradient divide factor", factor)

    def settle_edits(self, run: Run) -> None:
        """Let the dispatcher call settled editing functions itself, in the rest of the run."""
        self._table.settle_edits(run.is_recomputed)

    def note_forward(self) -> None:
        """Publish that a forward begins with the current choice. Local."""
        if self._communicator.is_local or not self._digests.has_hooks:
            return
        hooks, has_hooks = self._table.active_hooks, bool(self._table.active)
        self._communicator.note_forward(has_hooks, self._mode, hooks.digest, hooks.choice)
        self._heed_stop_request()

    def _heed_stop_request(self) -> None:
        """Have a forward that begins fail at its next exchange if this process must stop. Local."""
        if self._table.active_hooks.indices and self._step is None:
            STOP_REQUEST.follow(self._communicator.fail)

    @property
    def _mode(self) -> int:
        """The mode of forwards that begin now, as ``Communicator.note_forward`` compares it."""
        return 2 * self._module.training + torch.is_grad_enabled()

    # ---- Inside a run ----------------------------------------------------------------------------

    def check_entry(self) -> None:
        """HookError where the model must not run now."""
        if self.thread != threading.get_ident() or self._communicator.edit_of:
            refusal = self.refusal()
            if refusal:
                raise HookError(refusal)

    @property
    def is_inside(self) -> bool:
        """Whether a run or a backward pass is in progress. Ends a call that Ctrl-C has left."""
        self.end_left()
        return self.current is not None or backward_task() != -1

    def refusal(self) -> str:
        """Return why the model must not run now; empty where it may."""
        if (
            self.current is not None
            and self.thread not in (None, threading.get_ident())
            and not in_backward()
        ):
            or_wrap = ", or make a FlexModel per thread" if self._communicator.is_local else ""
            return (
                "the model is called from a second thread while a run of this FlexModel goes on in "
                f"another; run the model from one thread at a time{or_wrap} ({see('two-threads')})"
            )
        if self._communicator.edit_of:
            return (
                f"{self._communicator.edit_of}: the hooked model, or a hooked part of it, is run "
                "inside an editing function; compute there with plain tensors, with "
                "HookFunction(parameters=...) or with modules of register_trainable_module "
                f"({see('inside-an-editing-function')})"
            )
        return ""

    @outside_graphs
    def active(self, choice: Choice) -> AbstractContextManager[object]:
        """Return a context in which all calls of the model are one run with these hooks, or a part
        of the run in progress.
        """
        self.end_left()
        if self.is_inside:
            return self._chosen(choice)
        return OutermostRun(partial(self.begin, choice), self.end)

    @contextlib.contextmanager
    @between_graphs
    def _chosen(self, choice: Choice) -> Iterator[None]:
        """A context with another choice of hooks inside a run; the run's own, if none is made."""
        self.check_entry()
        before, parent = self._table.choices, self.current
        in_recomputation = parent is None or in_backward()
        is_stand_in = not self._tracking.has_rows and self._communicator.mesh.dp_size == 1
        if in_recomputation or is_stand_in or choice in (EVERYTHING, before[0]):
            if not in_recomputation:
                self.note_forward()
            yield
            return
        assert parent is not None
        # A part of the run with its own choice; recomputation will find it by its nodes.
        part = parent.part()
        self.current = part
        self.remembered.add(part)
        try:
            self._table.choose(choice, choice, in_run=True)
            self.note_forward()
            part.activate(self._table.active)
            self._include(part)
            yield
        finally:
            parent.add_part(part)
            self.current = None
            self._table.choose(*before, in_run=True)
            self.current = parent

    @contextlib.contextmanager
    def one_run_at_most(self) -> Iterator[None]:
        """A context in which all calls of the model are one run, which begins with the first."""
        if self.current is not None or self._is_deferred or in_backward():
            yield
            return
        self._is_deferred = True
        try:
            yield
        except BaseException as error:
            self._end_deferred(error)
            raise
        self._end_deferred(None)

    def _end_deferred(self, error: BaseException | None) -> None:
        run, self._deferred_run, self._is_deferred = self._deferred_run, None, False
        if run is not None:
            self.end(run, error)

    def exchange(self, run: Run | None) -> Run | None:
        """Make another batch's run the current one; return the former."""
        before, self.current = self.current, run
        return before

    def choose_by_default(self, choice: Choice) -> None:
        """Set the choice of hooks between runs."""
        self.default_choice = choice

    # ---- End -------------------------------------------------------------------------------------

    def end(self, run: Run, error: BaseException | None) -> None:
        """Finish an outermost run: deliver its records, exchange errors. Collective where hooks
        were active.
        """
        if self.current is not run:
            return
        try:
            if error is not None:
                self._fail(run, error)
            elif run.hooks_seen:
                if not self._communicator.is_local:
                    refused.check_context_parallel_run(run.num_contexts)
                self.deliver(run, "end of the run")
                if self.session is not None and not self.session.is_sequential:
                    # All records of the run; gradients may follow.
                    has_gradients = any(r.kind in _GRADIENTS for r in self._table.registrations)
                    self.session.end_run(not has_gradients, run.rows)
        except BaseException as raised:
            self._batch_failed(run)
            self._drop_records(run, raised)
            raise
        finally:
            self._close(run)
        if error is None and self._not_called_yet and self._warns:
            self._warn_of_hooks_not_called(run)

    def end_direct(self, error: BaseException | None, is_part: bool) -> None:
        """Leave the module that was called, and end the run if it began there: collective then."""
        run = self.current
        if run is not None and run.leave_call(is_part):
            self.end(run, error)

    def end_left(self) -> None:
        """End a direct call that Ctrl-C, or another exception of which torch does not tell the
        hooks that end a forward, has left. Local.
        """
        run = self.current
        if run is None or run.frame is None or self.thread != threading.get_ident():
            return
        if not any(frame is run.frame for frame in calls_of_modules()):
            self.end(run, KeyboardInterrupt("it left the forward"))

    def deliver(self, run: Run, kind: str) -> None:
        """Deliver the records; renew the seed if an edit drew random numbers on any rank."""
        has_drawn = run.has_drawn
        if self._communicator.is_local:
            if run.pending_fulls:
                self._records.finish(run)
        else:
            self._communicator.finish_transfers()
            if not (in_backward() and self._tracking.forward.depth):  # a backward in the forward
                self._tracking.finish()
            has_drawn = self._records.join(run, kind, self._executor.layouts.lookup)
        if has_drawn:
            run.take_draws()
            renew_seed()
        if self._executor.sent_to_all is not None:
            self._executor.sent_to_all.send(self._executor.function.context_of(run))

    def _batch_failed(self, run: Run) -> None:
        """Drop the pending records of a run that failed, and the layouts that it showed."""
        self._tracking.forget()
        self._records.forget(run)
        if self.session is not None:
            self.session.fail_run()

    def _close(self, run: Run) -> None:
        self._tracking.reset()
        if not self._communicator.is_local:
            self._communicator.forget_forward()
        run.end()
        self.current = None
        if self.session is not None:
            self.session.leave_run()
        self._table.set_in_run(False)
        self._table.choose(self.default_choice, self._table.choices[1])

    def _drop_records(self, run: Run, error: BaseException) -> None:
        """Drop the records of a run in which a hook failed. The model's own failure leaves those
        that are complete.
        """
        if isinstance(error, HookError) or is_agreed(error):
            self._records.clear(run.names)

    def drop_gradients(self, run: Run) -> None:
        """Drop the records of a run's gradients, where a hook failed in its backward. Local."""
        gradients = {r.index for r in self._table.registrations if r.kind in _GRADIENTS}
        self._records.clear(self._table.record_names(run.active & gradients))

    def _fail(self, run: Run, error: BaseException) -> None:
        self._batch_failed(run)
        self._drop_records(run, error)
        self._table.forget_calls()
        if self._communicator.is_local or not run.hooks_seen or is_agreed(error):
            return
        if not isinstance(error, Exception):
            self._abort(error)
            return
        state, what = FAILED, "the model's own forward"
        if not self._tracking.has_failed:
            state, what = STOPPED, "code in active() or generate(), outside of the model's forward,"
        self._communicator.report_failure(
            f"{what} failed: {text_of(error)}", error, "end of the run", state=state
        )

    def interrupted(self, error: BaseException) -> None:
        """Report a Ctrl-C or the like on this rank to the ranks that may wait for it. Local."""
        if self._table.active:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        if not isinstance(error, (Exception, Control)):
            self._communicator.abort_on(error)

    def _warn_of_hooks_not_called(self, run: Run) -> None:
        """Warn once per hook: it may be registered at a module that the model never calls.

        Raises:
            HookError: in each run, of hooks inside of a block of experts that is a kernel.
        """
        if not run.ran_model or run.was_cut:
            return
        found = [r for reference in self._not_called_yet if (r := reference()) is not None]
        self._not_called_yet = [weakref.ref(r) for r in found if r.index not in run.hooks_seen]
        chosen = [r for r in found if r.index in run.hooks_seen]
        missing = [r for r in chosen if r.places and not r.was_called(self.number)]
        if missing:
            self._refuse_kernels(missing)
        missing = [r for r in missing if not r.is_backward]
        if missing:
            names = [r.describe() for r in missing[:5]]
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            warnings.warn(
                f"{', '.join(names)}{more}: not called in this run, since the model did not call "
                "the module; flex.explain() shows this for each run. Hook a module that this "
                "forward calls (a container, such as a ModuleList, is never called itself), or "
                "leave the hook out of the run with groups=",
                HookNotCalledWarning,
                stacklevel=3,
            )

    def _refuse_kernels(self, missing: Sequence[Registration]) -> None:
        for name, block in self._module.named_modules():
            if not transformers_private.may_be_a_kernel(block):
                continue
            inside = [r for r in missing if any(one in r.living_targets for one in block.modules())]
            if inside:
                self._not_called_yet += map(weakref.ref, missing)
                raise agreed(
                    HookError(
                        f"{inside[0].describe()}: not called, since the forward of {name!r} is a "
                        "kernel that computes gate and experts without these modules; load the "
                        "model with use_kernels=False and experts_implementation='grouped_mm' "
                        "(mxfp4: quantization_config=Mxfp4Config(dequantize=True)), or hook "
                        f"{name!r}"
                    )
                )

    # ---- Stores ----------------------------------------------------------------------------------

    def open_store(self, store: ActivationStore, config: str | None) -> None:
        """Send records to the store from now on. Collective."""
        batch_dim = self._tracking.batch_dim
        self.session = Session(store, self._communicator, config, self._records.take, batch_dim)
        self._records.keep_parts(not self._communicator.is_local)

    def close_store(self) -> None:
        """Send records to ``output_ptr`` again. Local; what was not flushed is lost."""
        self._records.keep_parts(False)
        if self.session is not None:
            session, self.session = self.session, None
            session.abandon()

    def close(self) -> None:
        """Forget the current run, and close the store. Local."""
        self.had_store = self.session is not None
        self.close_store()
        self.current = None


def calls_of_modules() -> Iterator[FrameType]:
    """Yield the frames in which torch calls modules, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == nn.Module.__module__:
            yield frame
        frame = frame.f_back


class OutermostRun:
    """A context manager for one outermost run. Not a generator's: a Ctrl-C between its entry and
    the body would leave the run open.
    """

    __slots__ = ("_begin", "_end", "_run")

    def __init__(
        self, begin: Callable[[], Run], end: Callable[[Run, BaseException | None], None]
    ) -> None:
        self._begin, self._end = begin, end

    @outside_graphs
    def __enter__(self) -> Run:
        with uncounted():
            self._run = self._begin()
        return self._run

    @outside_graphs
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with uncounted():
            self._end(self._run, error)
        if error is not None and stopped_at_fullgraph(error):
            raise HookError(f"torch.compile: {HOOKS_BREAK_GRAPHS}") from error
