"""Handles the calls of one FlexModel's hooks by torch: in a forward, in its recomputation, with a
gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.failure import ERROR, FAILED, RankState
from flex_model.errors import HookError, agreed, is_agreed, see
from flex_model.hooks.edit_path import copy_for_model
from flex_model.hooks.evidence import Evidence
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.hook_executor import HookExecutor
from flex_model.hooks.registration import Registration
from flex_model.hooks.settled_gather import Gathered
from flex_model.hooks.tracking import Tracking
from flex_model.hooks.user_function import Before, changed, late_draws
from flex_model.integrations.torch_private import current_transform, uncounted
from flex_model.layouts import follow
from flex_model.runs import remembered_runs
from flex_model.runs.backward_passes import BackwardPasses
from flex_model.runs.graphs import Graphs, is_in_checkpoint
from flex_model.runs.lifecycle import Runs
from flex_model.runs.remembered_runs import in_backward
from flex_model.runs.run import Run
from flex_model.runs.step import MicrobatchState

# The exception by which torch's checkpointing ends a recomputation early.
_STOPS_RECOMPUTATION = "_StopRecomputationError"


class HookHandlers:
    """Finds the run of each call of a hook, calls it, and handles its errors.

    Attributes:
        model: The wrapped model.
        runs: The runs of the FlexModel.
        communicator: Its communicator.
    """

    def __init__(
        self,
        model: nn.Module,
        runs: Runs,
        backwards: BackwardPasses,
        graphs: Graphs,
        communicator: Communicator,
        tracking: Tracking,
        executor: HookExecutor,
        step: MicrobatchState | None,
        on_failure: Callable[[Registration, Exception], None] | None,
    ) -> None:
        self.model, self.runs, self._backwards, self._graphs = model, runs, backwards, graphs
        self.communicator, self._tracking, self._executor = communicator, tracking, executor
        self._step, self._on_failure = step, on_failure
        self._backward_lock = BackwardLock(communicator.timeout_s, communicator.is_local)

    # ---- Forward ---------------------------------------------------------------------------------

    def forward(self, registration: Registration, module: nn.Module, tree: Any) -> Any:
        """Run a forward or forward-pre hook; return the tree that the model continues with."""
        if self._is_silent():
            return tree
        if in_backward():
            with self._backward_lock:
                self.runs.check_entry()
                return self._replay(registration, module, tree)
        self.runs.check_entry()
        if registration.hook.replays:
            return tree  # it is installed for a backward that runs in another thread
        run = self.runs.current or self.runs.begin_deferred()
        if run is not None:
            return self._call(run, registration, module, tree)
        with self.runs.of_hook(registration) as run:  # see `RootHooks.install`
            after = self._call(run, registration, module, tree)
            if registration.edits and torch.is_grad_enabled():
                self._graphs.watch(run, after)
            return after

    def _call(self, run: Run, registration: Registration, module: nn.Module, tree: Any) -> Any:
        if registration.edits and not run.is_recomputed and is_in_checkpoint():
            run.note_recomputation()
        try:
            number = self._tracking.number(registration)
            with follow.paused():
                leaf = registration.leaf(tree)
                evidence = self._tracking.evidence(registration, leaf, number)
                positions = registration.positions_of_forward()
                call = HookCall(
                    registration, module, run, False, number, evidence, positions=positions
                )
                after = self._executor.activation(call, leaf, tree)
            self._settle(registration, run)
            return after
        except Exception as error:
            self.hook_failed(registration, error)
            return tree

    def _settle(self, registration: Registration, run: Run) -> None:
        """Let the dispatcher call a function that draws no random numbers by itself from now on."""
        has_settled = self._executor.settles and run.save_ctx is None
        is_there = registration.is_registered and registration.edits  # it may take itself off
        # Until an edit is compared over ranks, the path in Python runs the function.
        has_settled &= self.communicator.is_local or registration.is_compared
        if has_settled and is_there and registration.draws is False:
            self._executor.function.settle(registration)
            self.runs.settle_edits(run)

    def edit_whole(
        self, registration: Registration, module: nn.Module, leaf: Tensor, full: Tensor
    ) -> Tensor | None:
        """Edit a tensor that this process alone holds, in a run; ``full`` is its copy. Return the
        tensor that the model continues with; None: its own. A function that draws no random numbers
        is called by the dispatcher itself from then on.
        """
        runs, run = self.runs, self.runs.current
        if not registration.edits:  # the user has taken the function off
            return None
        try:
            runs.check_entry()
            assert run is not None
            if not run.is_recomputed and is_in_checkpoint():
                run.note_recomputation()
            call = HookCall(registration, module, run)
            with follow.paused():
                (edited,) = self._executor.function.run(call, (full,), leaf, {})
            self._settle(registration, run)
            return None if edited is None else copy_for_model(edited, leaf)
        except Exception as error:
            self.hook_failed(registration, error)
            return None

    def gather_settled(
        self, registration: Registration, leaf: Tensor
    ) -> Gathered | tuple[()] | None:
        """Gather the tensor of an edit, in a forward whose layouts are known; None where
        ``forward`` must run the hook, empty where the hook has failed.
        """
        run, forward = self.runs.current, self._tracking.forward
        if run is None or forward.layouts is None or forward.key is None:
            return None
        number = forward.numbers.get(registration.index, 0)
        settled = forward.layouts.settled.get((registration.index, number))
        if settled is None or torch.is_grad_enabled():
            return None
        try:
            found: Gathered | None = settled.gather(run, leaf)
        except Exception as error:
            self.hook_failed(registration, error)
            return ()
        if found is not None:
            forward.number(registration.index)
            run.keys.add(forward.key.forward)
        return found

    def finish_edit(
        self,
        registration: Registration,
        leaf: Tensor,
        full: Tensor,
        before: Before,
        result: object,
        is_kept: bool,
    ) -> Tensor | None:
        """Check what a function returned to the dispatcher, as ``edit_whole`` does."""
        try:
            edited = changed(registration, full, before, result, is_kept)
            return None if edited is None else copy_for_model(edited, leaf)
        except Exception as error:
            self.hook_failed(registration, error)
            return None

    def edit_drew(self, registration: Registration) -> None:
        """Handle that a function drew random numbers that the dispatcher called."""
        self.hook_failed(registration, late_draws(registration))

    def _replay(self, registration: Registration, module: nn.Module, tree: Any) -> Any:
        """Run an edit again while the model is recomputed during backward (activation
        checkpointing): those that its forward ran, without records.
        """
        if not registration.edits:
            return tree
        if self._step is None:
            self.runs.watch.watch()
        run = self._backwards.run_of_current()
        try:
            if run is None:
                raise HookError(
                    f"{registration.describe()}: the model is recomputed in backward, the backward "
                    "began inside the model, and its forward is not among the last "
                    f"{remembered_runs.MOST} runs, so its edit can't be repeated; "
                    "begin backward at the model's output, run it sooner, or do without "
                    "checkpointing"
                )
            if registration.index not in run.active:
                return tree
            with follow.paused():
                leaf = registration.leaf(tree)
                evidence = self._tracking.evidence_of_replay(registration, run.keys)
                positions = registration.positions_of_forward()
                call = HookCall(
                    registration, module, run, True, None, evidence, positions=positions
                )
                return self._executor.activation(call, leaf, tree)
        except Exception as error:
            if type(error).__name__ == _STOPS_RECOMPUTATION or self.communicator.is_local:
                raise
            if run is not None:
                self._backwards.begin(run)
            # The graph differs from those of ranks that edit, so it can't be run to its end.
            self.hook_failed(registration, error, FAILED)
            return tree

    def note_calls(self, registrations: Sequence[Registration], leaf: Tensor) -> list[int | None]:
        """Return the number of this call of each gradient hook, None in a recomputation; collect
        evidence of its activation. Calls that need no gradient count, too: a checkpoint may
        recompute them, or a later forward with inputs of the same key train them. Local.
        """
        tracking, run = self._tracking, self.runs.current
        if in_backward():
            return [None] * len(registrations)
        if run is not None and not torch.is_grad_enabled():
            run.note_recomputation()
            if tracking.key is not None:
                run.keys.add(tracking.key)
        numbers: list[int | None] = []
        for registration in registrations:
            numbers.append(number := tracking.number(registration))
            if tracking.is_following:
                with follow.paused():
                    tracking.evidence(registration, leaf, number)
        return numbers

    def active_in_replay(self, registrations: Sequence[Registration]) -> Sequence[Registration]:
        """Return the active hooks; in a recomputation, those that its forward had, too."""
        if self._is_silent():
            return ()
        if not in_backward():
            return registrations
        run = self._backwards.run_of_current()
        return [r for r in registrations if run is None or r.index in run.active]

    # ---- Gradients -------------------------------------------------------------------------------

    def put_edge(
        self,
        registrations: Sequence[Registration],
        numbers: Sequence[int | None],
        module: nn.Module,
        leaf: Tensor,
        passes_through: bool,
    ) -> Tensor:
        """Return the tensor that replaces ``leaf``, whose gradient the hooks get in their calls of
        these numbers.
        """
        if current_transform() is not None:
            raise agreed(
                HookError(
                    f"{registrations[0].describe()}: transforms of torch.func (vmap, grad, jvp) "
                    "have no gradient that a hook could get; use torch.autograd, or leave the hook "
                    f"out of the run with groups= ({see('a-transform-of-functions')})"
                )
            )
        tracking = self._tracking
        run = self._backwards.run_of_current() if in_backward() else None
        run = run or self.runs.current or self.runs.lone_run()
        with follow.paused():
            evidences = [
                tracking.evidence_of_replay(registration, run.keys)
                if number is None
                else tracking.evidence(registration, leaf, number)
                for registration, number in zip(registrations, numbers)
            ]
        module_ref = weakref.ref(module)
        graph = self._graphs.add(run)

        def handle(grad: Tensor | None) -> Tensor | None:
            module = module_ref()
            if grad is None or module is None or self._is_silent():
                return grad
            with self._backward_lock:
                graph.enter()
                self._backwards.begin(run)
                for registration, number, evidence in zip(registrations, numbers, evidences):
                    if self.communicator.failure.held is not None:
                        break
                    call = HookCall(registration, module, run, False, number, evidence)
                    grad = self._gradient(call, grad, run.batch)
                return grad

        with uncounted():
            edge: Tensor = _Edge.apply(leaf, handle, passes_through)
        with follow.paused():
            for evidence in evidences:
                evidence.move_to(edge)
        return edge

    def run_parameter_hooks(
        self, registrations: Sequence[Registration], grad: Tensor | None
    ) -> Tensor | None:
        """Run the hooks on a parameter's gradient; return the gradient that replaces it. Without a
        gradient they are not called; ranks that have one find this one at the end of the backward.
        """
        with self._backward_lock:
            run = self.runs.of_parameters()
            self._backwards.begin(run)
            if grad is None:
                return None
            for registration in registrations:
                if self.communicator.failure.held is not None:
                    break
                evidence = Evidence(key=self._tracking.num_followed)
                call = HookCall(registration, None, run, evidence=evidence)
                grad = self._gradient(call, grad, None)
            return grad

    def refuse_parameter_hooks(self, registration: Registration, error: Exception) -> None:
        """Fail with an error that all ranks raise, instead of ``run_parameter_hooks``."""
        self._backwards.begin(self.runs.of_parameters())
        self.hook_failed(registration, agreed(error))

    def _gradient(self, call: HookCall, grad: Tensor, batch: int | None) -> Tensor:
        """Run one hook on a gradient; return the gradient that the backward continues with."""
        name, order = call.registration.hook_function.record_name, self._backwards.order
        position = order.position(name)
        try:
            self._backwards.check_open(call.run)
            self._backwards.check_is_of_loss(call.registration)
            with follow.paused():  # FSDP2 has its hooks run by a node of the model
                grad = self._executor.summed(grad)  # returned where the next line raises
                grad = self._executor.gradient(call, grad)
            order.add(name, position, batch)
        except Exception as error:
            if self.communicator.is_local and self._step is None:  # else the backward's end does
                self.runs.drop_gradients(call.run)
            self.hook_failed(call.registration, error)
        return grad

    # ---- Errors ----------------------------------------------------------------------------------

    def hook_failed(
        self, registration: Registration, error: Exception, state: RankState = ERROR
    ) -> None:
        """Handle an error of one hook. One rank: raise it. Several: continue without the edit, and
        all raise at the next exchange; in a backward at its end, for an aborted backward leaves the
        state of FSDP2 and DDP unfinished. In a step of a pipeline: when it is over.
        """
        if self._on_failure is not None:
            self._on_failure(registration, error)
            return
        self._tracking.forget()
        text = registration.failure(error)
        if self._step is not None:
            self._fail_in_step(self._step, text, error)
            return
        if is_agreed(error):
            if isinstance(error, HookError) or not self.communicator.failure.hold(error):
                self.communicator.failure.agree()
                try:
                    raise error
                finally:
                    del error  # else it keeps its own traceback, and the frames in that, alive
            return
        self.communicator.fail(text, error, state)

    def _fail_in_step(self, step: MicrobatchState, text: str, error: BaseException) -> None:
        """Keep an error until the step ends: the schedule continues, without edits on all ranks of
        the stage from the same exchange on. Raising it now would leave other stages waiting.
        """
        if self.communicator.is_local or is_agreed(error):
            step.silence()
            step.fail(text, error)
        else:
            self.communicator.fail(f"{text} ({step.where})", error)

    def _is_silent(self) -> bool:
        return self._step is not None and not self._step.calls_hooks()


class _Edge(Function):
    """Identity; its backward passes the gradient to ``handler`` and returns the handler's result.

    The result is not a view for autograd, so a subsequent in-place operation works as on the tensor
    itself. Where the tensor remains in use beside it (``passes_through``: a module that returns its
    input), it stays a view, and such an operation raises.
    """

    @staticmethod
    def forward(ctx, tensor, handler, passes_through):
        ctx.handler = handler
        ctx.set_materialize_grads(False)
        return tensor if passes_through else tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.handler(grad), None, None


_of_process = threading.RLock()


class BackwardLock:
    """A lock for the hooks of a backward: autograd has a thread for each device, so a backward
    through a model on several devices calls hooks of two of them at the same time. They share the
    runs, the records, and the process's random numbers on the CPU. Local.

    Args:
        timeout_s: The deadline of a wait, in seconds.
        is_local: All hooks of this process take turns, also those of other FlexModels; where they
            wait for other ranks, only those of one FlexModel, for two FlexModels could wait for
            each other.
    """

    def __init__(self, timeout_s: float, is_local: bool) -> None:
        self._lock = _of_process if is_local else threading.RLock()
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)

    def __enter__(self) -> None:
        """Wait for the hooks of other threads; HookError after the deadline."""
        if self._lock.acquire(blocking=False) or self._lock.acquire(timeout=self._timeout_s):
            return
        raise HookError(
            f"a gradient hook waited {self._timeout_s:g} s for one in the thread of another "
            "device; an editing function there takes longer, or waits for a backward through the "
            "hooked model, which it must not run; give FlexModel a longer timeout= if it is slow"
        )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
