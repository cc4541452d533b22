"""The hook core of one wrapped model: begins and ends its runs, and calls its hooks.

It never refers to the FlexModel, so that dropping the last reference to that removes all hooks
from the model.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import warnings
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import ERROR, FAILED, Header, site_hash, sites_hash
from flex_model.distributed.mesh import Mesh
from flex_model.errors import (
    HookError,
    HookNotCalledWarning,
    UnpackIndexError,
    agreed,
    is_agreed,
    see,
)
from flex_model.hooks import remembered_runs
from flex_model.hooks.backward_order import BackwardOrder
from flex_model.hooks.backward_watch import BackwardWatch
from flex_model.hooks.call import HookCaller
from flex_model.hooks.context import Call, RunContext, next_sequence, renew_seed
from flex_model.hooks.evidence import Evidence
from flex_model.hooks.function import HookFunction
from flex_model.hooks.graphs import Graphs, is_in_checkpoint
from flex_model.hooks.registration import Registration
from flex_model.hooks.remembered_runs import RememberedRuns, backward_task
from flex_model.hooks.save_ctx import SentToAll
from flex_model.hooks.step import MicrobatchState
from flex_model.hooks.table import EVERYTHING, Choice, HookTable, describe_choice
from flex_model.hooks.tracking import Follow, Tracking
from flex_model.integrations import compiled, context_parallel
from flex_model.layouts import follow
from flex_model.layouts.sources import BatchDim
from flex_model.layouts.statements import Statements
from flex_model.names import clean
from flex_model.parameters.full import Parameters
from flex_model.parameters.trainable import Replicas
from flex_model.records.records import Records
from flex_model.records.store.activation_store import ActivationStore
from flex_model.records.store.session import Session

# The exception by which torch's checkpointing ends a recomputation early.
_STOPS_RECOMPUTATION = "_StopRecomputationError"


@dataclass
class _Deferred:
    run: RunContext | None = None


class HookCore:
    """The engine of one FlexModel: its runs, hooks, records and layouts. ``module`` is the wrapped
    model; the other arguments are shared with the FlexModel that made it.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        output_ptr: dict[str, list[Tensor]],
        save_ctx: Namespace,
        modules: nn.ModuleDict,
        edit_on: str,
        output_ranks: str,
        timeout_s: float,
        step: MicrobatchState | None = None,
        save_ctx_on: str = "rank0",
        batch_dim: BatchDim = 0,
        follow: Follow = "new",
        make_parameters: Callable[[Any, Communicator, Statements], Any] = Parameters,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.step = step
        self.communicator = Communicator(mesh, timeout_s, _device_of(module))
        self.records = Records(output_ptr, self.communicator, output_ranks, step)
        self.backward_order = BackwardOrder(output_ptr)
        self.backward_watch = BackwardWatch(self.communicator)
        self.tracking = Tracking(module, self.communicator, batch_dim, follow)
        self.parameters = make_parameters(module, self.communicator, self.tracking.statements)
        is_sent = save_ctx_on == "all" and edit_on == "rank0" and step is None
        self._sent_to_all: SentToAll | None = None
        if is_sent and not self.communicator.is_local:
            self._sent_to_all = SentToAll(self.communicator, _device_of(module))
        self.caller = HookCaller(
            self.communicator,
            self.records,
            save_ctx,
            modules,
            edit_on,
            self.parameters.get,
            self.tracking,
            checks_edits=step is not None,
            sent_to_all=self._sent_to_all,
        )
        self.save_ctx, self.modules = save_ctx, modules
        # These must be equal on all ranks.
        self._settings = (edit_on, output_ranks, mesh.describe(), save_ctx_on, batch_dim, follow)
        self.replicas = Replicas(self.communicator, modules)
        self.run: RunContext | None = None
        self.num_runs = 0
        self._not_called_yet: weakref.WeakValueDictionary[int, Registration]
        self._not_called_yet = weakref.WeakValueDictionary()
        self.num_active = 0
        self._runs = RememberedRuns()
        self._agreed_hooks = site_hash()
        self._num_published, self._published = 0, site_hash()
        self._active: int | None = None  # a digest of the active hooks, computed when needed
        self._num_compiled, self._has_new_hooks = 0, False
        self._root_handles: list[Any] = []
        self.thread: int | None = None  # the one that runs the model now
        self.default_groups: Choice = EVERYTHING  # the choice between runs
        self._deferred: _Deferred | None = None  # a run that begins when a module first runs
        self.is_closed, self._had_store = False, False
        self.session: Session | None = None  # where records go to a store
        serves_records = self.communicator.is_local and step is None
        self.table = HookTable(
            self,
            self._run_hook,
            output_ptr,
            serves_records,
            self._active_hooks_changed,
            lambda registrations: self.graphs.keep(registrations),
            partial(clean, module),
        )
        self.graphs = Graphs(self.table, self._runs, self._free)

    def open_store(self, store: ActivationStore, config: str | None) -> None:
        """Send records to the store from now on. Collective."""
        self.session = Session(store, self.communicator, config, self.records.take)
        self.records.keeps_parts = not self.communicator.is_local

    def close_store(self) -> None:
        """Send records to ``output_ptr`` again. Local; what was not flushed is lost."""
        self.records.keeps_parts = False
        if self.session is not None:
            session, self.session = self.session, None
            session.abandon()

    def register(
        self, function: HookFunction, kind: str, targets: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Sequence[Registration]:
        """Register as ``HookTable.register`` does; set the function's ``save_ctx``, ``modules``."""
        if compiled.num_compiled() != self._num_compiled:
            self._look_for_compiled()
        registrations = self.table.register(function, kind, targets, *args, **kwargs)
        if kind in ("forward", "forward_pre"):
            self._not_called_yet.update((r.index, r) for r in registrations)
        if kind == "tensor":
            for _ in targets:
                registrations[0].parameter = self.parameters.sources_of(function.module_name)
        function.save_ctx, function.modules = self.save_ctx, self.modules
        return registrations

    def _active_hooks_changed(self) -> None:
        self._publish_hooks()
        self._active = None
        self.num_active = len(self.table.active)
        self._install_root()
        if self.run is not None:
            self.run.active |= self.table.active
            self._include(self.run)

    def _publish_hooks(self) -> None:
        """Publish which hooks are registered here to the other ranks, whether or not this rank runs
        the model.
        """
        sites = [registration.site for registration in self.table.registrations]
        if len(sites) == self._num_published or self.is_closed:
            return
        new = sites[-1:] if len(sites) == self._num_published + 1 else sites
        digest = self._published if len(new) < len(sites) else site_hash()
        for site in new:
            digest = site_hash(digest, site)
        self._num_published, self._published = len(sites), digest
        self._has_new_hooks = True
        self.communicator.publish_hooks(f"{digest:x}" if sites else "")

    def _look_for_compiled(self) -> None:
        """Make compiled code call the hooks: the model's own, and what others compiled around."""
        number = compiled.num_compiled()
        if number == self._num_compiled and not self._has_new_hooks:
            return
        if number or compiled.is_compiled(self.module):
            compiled.see_hooks()
        self._num_compiled = compiled.num_compiled()

    def _install_root(self) -> None:
        """Hook the begin and end of direct calls of the wrapped module, while a hook is active."""
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()
        if not self.num_active or self.is_closed:
            return
        core = self

        def begin(module, args, kwargs):
            if module is not core.module:
                return
            core.check_entry()
            if _in_backward():
                return
            if core.run is None:
                run = core.begin(EVERYTHING, direct=core._deferred is None)
                run.outer_error = sys.exc_info()[1]
                if core._deferred is not None:
                    core._deferred.run = run
            else:
                core.run.direct_depth += bool(core.run.direct_depth)
                if core.communicator.has_skipped:
                    core._note_forward()
            core.tracking.begin(args, kwargs, core.active_registrations())

        def end(module, args, output):
            run = core.run
            if module is not core.module or run is None or _in_backward() or core._refusal():
                return
            error = sys.exc_info()[1]
            error = None if error is run.outer_error else error
            core.tracking.end(output, failed=error is not None)
            run.ran_model = True
            if core.table.acts_in_backward and core.step is None:
                core.graphs.watch(run, output)
                core.backward_watch.watch_from(output)
            if not run.direct_depth:
                return
            run.direct_depth -= 1
            if not run.direct_depth:
                core.end(run, error)

        begin.begins_runs_of = core  # type: ignore[attr-defined]
        begin, end = compiled.outside_graphs(begin), compiled.outside_graphs(end)
        # `begin` runs before all other hooks of the root, `end` after them: hooks on the root
        # itself run inside
        self._root_handles = [
            self.module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(end, always_call=True),
        ]

    def begin(self, choice: Choice, direct: bool = False) -> RunContext:
        """Begin an outermost run: choose hooks, check them on all ranks where they are new, empty
        their record lists.
        """
        self.check_entry()
        self._look_for_compiled()
        self._has_new_hooks = False
        # A run without gradients leaves parameters to the graph of the run before it.
        keeps = not torch.is_grad_enabled()
        self.table.choose(choice, self.table.choices[1] if keeps else choice)
        self._note_forward()
        run = RunContext(self.table.active, direct_depth=int(direct), first_node=next_sequence())
        self.thread = threading.get_ident()
        self.backward_watch.thread = self.thread
        self.backward_watch.report_deferred()
        self.communicator.backwards.clear()
        self.communicator.held = None
        self.tracking.reset()
        self.communicator.meter.clear()
        self.run = run
        self.num_runs += 1
        self._runs.begin(run)
        try:
            if self.session is not None:
                run.entry = self.session.begin_run()
            self._include(run)
        except BaseException:
            self._batch_failed()
            self._close_run(run)
            raise
        return run

    def _include(self, run: RunContext) -> None:
        """Include newly chosen hooks in an outermost run: empty their lists, check on all ranks."""
        new = run.active - run.hooks_seen
        if not new:
            return
        if not self.communicator.is_local:
            context_parallel.check_run()
        self.table.clear_records(new)
        run.hooks_seen |= new
        # Observers see only the hooks that Python runs, not those that the dispatcher runs.
        self.table.dispatcher.in_run = not self.caller.observers
        if not self.communicator.is_local:
            active, choice = self._active_digest, describe_choice(self.table.choices[0])
            self.communicator.publish_run(active, choice, self._mode)
            self._agree_on_hooks(active)
            if self.caller.edits_on_all and self.step is None:
                edits = any(r.edits for r in self.active_registrations())
                self.replicas.check(edits)
        if self.session is not None and not self.session.is_sequential:
            self.session.check_hooks(self.described_hooks())

    def _note_forward(self) -> None:
        """Publish that a forward begins with the current choice. Local."""
        if self.communicator.is_local or not self._num_published:
            return
        choice = describe_choice(self.table.choices[0])
        has_hooks = bool(self.table.active)
        self.communicator.note_forward(has_hooks, self._mode, self._active_digest, choice)

    @property
    def _mode(self) -> int:
        """The mode of forwards that begin now, as ``Communicator.note_forward`` compares it."""
        return 2 * self.module.training + torch.is_grad_enabled()

    @property
    def _active_digest(self) -> int:
        if self._active is None:
            self._active = site_hash(*(r.site for r in self.active_registrations()))
        return self._active

    def described_hooks(self, only_active: bool = False) -> list[Any]:
        """Describe what records depend on, as JSON."""
        return [
            {
                "kind": r.kind,
                "module": r.name,
                "tensor": r.hook_function.unpack_idx,
                "record": r.hook_function.record_name if r.hook_function.record else None,
                "edits": r.edits,
                "select": None if r.select is None else repr(r.select),
            }
            for r in self.table.registrations
            if not only_active or r.index in self.table.active
        ]

    def _agree_on_hooks(self, active: int) -> None:
        registrations = self.table.registrations
        digest = site_hash(
            sites_hash(*(registration.site for registration in registrations)),
            *self._settings,
            self.tracking.statements.digest,
        )
        if digest == self._agreed_hooks:
            return
        names = "; ".join(
            f"{registration.kind} {registration.hook_function!r}" for registration in registrations
        )
        self.communicator.check_hooks(
            Header("registered hooks", site=site_hash(digest, active)),
            f"the start of a run of {describe_choice(self.table.choices[0])} (edit_on, "
            f"output_ranks, mesh, save_ctx_on: {self._settings}) with these hooks: {names}",
        )
        self._agreed_hooks = digest

    def end(self, run: RunContext, error: BaseException | None) -> None:
        """Finish an outermost run: deliver its records, exchange errors. Collective where hooks
        were active.
        """
        if self.run is not run:
            return
        try:
            if error is not None:
                self._fail_run(run, error)
            elif run.hooks_seen:
                self._deliver(run, "end of the run")
                self._batch_ended()
        except BaseException:
            self._batch_failed()
            raise
        finally:
            self._close_run(run)
        if error is None and self._not_called_yet:
            self.warn_of_hooks_not_called(run)

    def warn_of_hooks_not_called(self, run: RunContext) -> None:
        """Warn once per hook: it may be registered at a module that the model never calls."""
        if not run.ran_model or run.was_cut or self.step is not None:
            return
        chosen = [r for index, r in self._not_called_yet.items() if index in run.hooks_seen]
        for registration in chosen:
            del self._not_called_yet[registration.index]
        missing = [r for r in chosen if r.places and not r.was_called(self.num_runs)]
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

    @property
    def runs_edits(self) -> bool:
        """Whether this rank runs editing functions, and so uses trainable modules."""
        return self.caller.edits_on_all or self.mesh.group_rank == 0

    def _batch_ended(self) -> None:
        """Pass all records of the run to the store; gradients may follow. Collective."""
        if self.session is not None and not self.session.is_sequential:
            gradients = ("full_backward", "full_backward_pre", "tensor")
            self.session.end_run(all(r.kind not in gradients for r in self.table.registrations))

    def _batch_failed(self) -> None:
        """Drop the records of a run that failed, and the layouts that it showed."""
        self.tracking.forget()
        if self.session is not None:
            self.session.fail_run()

    def active_registrations(self) -> Iterator[Registration]:
        return (r for r in self.table.registrations if r.index in self.table.active)

    def _close_run(self, run: RunContext) -> None:
        self.tracking.reset()
        self.communicator.forget_forward()
        run.last_node = next_sequence()
        if run.pending:
            self.records.forget(run)
        run.outer_error = None
        self.run = None
        if self.session is not None:
            self.session.in_run = False
        self.table.dispatcher.in_run = False
        self.table.choose(self.default_groups, self.table.choices[1])

    def _fail_run(self, run: RunContext, error: BaseException) -> None:
        self._batch_failed()
        self.records.forget(run)
        self.table.forget_calls()
        if self._sent_to_all is not None:
            self._sent_to_all.forget()
        if self.communicator.is_local or not run.hooks_seen or is_agreed(error):
            return
        if not isinstance(error, Exception):
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                self.communicator.abort_on(error)
            return  # a batch that a sequential run aborts, as on all ranks
        self.communicator.report_failure(
            f"the model's own forward failed: {type(error).__name__}: {error}",
            error,
            "end of the run",
        )

    def interrupted(self, error: BaseException) -> None:
        """Report a Ctrl-C on this rank to the ranks that may wait for it. Local."""
        if self.num_active and isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.communicator.abort_on(error)

    def _deliver(self, run: RunContext, kind: str) -> None:
        """Deliver the records; renew the seed if an edit drew random numbers on any rank."""
        consumed = run.consumed
        if not self.communicator.is_local:
            self.tracking.finish()
            consumed = self.records.join(run, kind, self.caller.layouts.lookup)
        run.consumed = False
        if consumed:
            renew_seed()
        if self._sent_to_all is not None:
            self._sent_to_all.send(self.save_ctx if run.save_ctx is None else run.save_ctx)

    def check_entry(self) -> None:
        """HookError where the model must not run now."""
        refusal = self._refusal()
        if refusal:
            raise HookError(refusal)

    def _refusal(self) -> str:
        if (
            self.run is not None
            and self.thread not in (None, threading.get_ident())
            and not _in_backward()
        ):
            or_wrap = ", or make a FlexModel per thread" if self.communicator.is_local else ""
            return (
                "the model is called from a second thread while a run of this FlexModel goes on in "
                f"another; run the model from one thread at a time{or_wrap} ({see('two-threads')})"
            )
        if self.communicator.edit_of:
            return (
                f"{self.communicator.edit_of}: the hooked model, or a hooked part of it, is run "
                "inside an editing function; compute there with plain tensors, with "
                "HookFunction(parameters=...) or with modules of register_trainable_module "
                f"({see('inside-an-editing-function')})"
            )
        return ""

    @contextlib.contextmanager
    def chosen(self, choice: Choice) -> Iterator[None]:
        """A context with another choice of hooks inside a run; the run's own, if none is made."""
        self.check_entry()
        before, parent = self.table.choices, self.run
        in_recomputation = parent is None or _in_backward()
        if in_recomputation or choice in (EVERYTHING, before[0]):
            if not in_recomputation:
                self._note_forward()
            yield
            return
        assert parent is not None
        # A part of the run with its own choice; recomputation will find it by its nodes.
        part = replace(parent, active=frozenset(), direct_depth=0, first_node=next_sequence())
        self.run = part
        self._runs.add(part)
        try:
            self.table.choose(choice, choice)
            self._note_forward()
            part.active = self.table.active
            self._include(part)
            yield
        finally:
            part.last_node = next_sequence()
            parent.seed, parent.consumed = part.seed, part.consumed
            self.run = None
            self.table.choose(*before)
            self.run = parent

    @contextlib.contextmanager
    def one_run_at_most(self) -> Iterator[None]:
        """A context in which all calls of the model are one run, which begins with the first."""
        if self.run is not None or self._deferred is not None or _in_backward():
            yield
            return
        self._deferred = deferred = _Deferred()
        try:
            yield
        except BaseException as error:
            self._deferred = None
            if deferred.run is not None:
                self.end(deferred.run, error)
            raise
        self._deferred = None
        if deferred.run is not None:
            self.end(deferred.run, None)

    def in_backward(self) -> bool:
        return _in_backward()

    def _run_hook(self, registration: Registration, module: nn.Module, tree: Any) -> Any:
        """Run a forward or forward-pre hook; return the tree that the model continues with."""
        if self._is_silent():
            return tree
        self.check_entry()
        if _in_backward():
            return self._replay(registration, module, tree)
        if self.table.is_put_back(registration):
            return tree  # it is installed for a backward that runs in another thread
        if self.run is None and self._deferred is not None:
            self._deferred.run = self.begin(EVERYTHING)
        run = self.run
        if run is None:  # a part of the model is called on its own
            if self.session is not None:
                self.session.begin_run()
            run = self.run = self._lone_run()
            self.thread = threading.get_ident()
            self.records.output_ptr.pop(registration.hook_function.record_name, None)
            failure = None
            try:
                after = self._run_in(run, registration, module, tree)
                if registration.edits:
                    self.graphs.watch(run, after)
                return after
            except BaseException as error:
                failure = error
                raise
            finally:
                self.end(run, failure)
        return self._run_in(run, registration, module, tree)

    def _run_in(
        self, run: RunContext, registration: Registration, module: nn.Module, tree: Any
    ) -> Any:
        run.is_recomputed |= registration.edits and is_in_checkpoint()
        try:
            number = self.tracking.number(registration)
            with follow.paused():
                leaf = registration.leaf(tree)
                evidence = self.tracking.evidence(registration, leaf, number)
                call = Call(registration, module, run, number=number, evidence=evidence)
                return self._tree_after(call, leaf, tree)
        except Exception as error:
            self.hook_failed(registration, error)
            return tree

    def _tree_after(self, call: Call, leaf: Tensor, tree: Any) -> Any:
        for index, edited in self.caller.activation(call, leaf):
            tree = _C.replace_leaf(tree, index, edited)
        return tree

    def _replay(self, registration: Registration, module: nn.Module, tree: Any) -> Any:
        """Run an edit again while the model is recomputed during backward (activation
        checkpointing): those that its forward ran, without records.
        """
        if not registration.edits:
            return tree
        if self.step is None:
            self.backward_watch.watch()
        run = self._run_of_backward()
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
                evidence = self.tracking.evidence_of_replay(registration, leaf, ())
                call = Call(
                    registration, module, run, is_replay=True, number=None, evidence=evidence
                )
                return self._tree_after(call, leaf, tree)
        except Exception as error:
            if type(error).__name__ == _STOPS_RECOMPUTATION or self.communicator.is_local:
                raise
            if run is not None:
                self._expect_end_of_backward(run)
            # The graph differs from those of ranks that edit, so it can't be run to its end.
            self.hook_failed(registration, error, FAILED)
            return tree

    def _run_of_backward(self) -> RunContext | None:
        """Return the run whose graph is being computed; None if it is not remembered."""
        return self._runs.of_backward(self.run is not None, self._lone_run)

    def active_in_replay(self, registrations: Sequence[Registration]) -> Sequence[Registration]:
        """Return the active hooks; in a recomputation, those that its forward had, too."""
        if self._is_silent():
            return ()
        if not _in_backward():
            return registrations
        run = self._run_of_backward()
        return [r for r in registrations if run is None or r.index in run.active]

    def hook_failed(self, registration: Registration, error: Exception, state: int = ERROR) -> None:
        """Handle an error of one hook. One rank: raise it. Several: continue without the edit, and
        all raise at the next exchange; in a backward at its end, for an aborted backward leaves the
        state of FSDP2 and DDP unfinished. In a step of a pipeline: when it is over.
        """
        self.tracking.forget()
        text = registration.failure(error)
        if self.step is not None:
            self._fail_in_step(self.step, text, error)
            return
        if is_agreed(error):
            if isinstance(error, HookError) or not self.communicator.may_hold:
                try:
                    raise error
                finally:
                    del error  # else it keeps its own traceback, and the frames in that, alive
            self.communicator.held = self.communicator.held or error
            return
        if self.communicator.is_local:
            kind = UnpackIndexError if isinstance(error, UnpackIndexError) else HookError
            raise agreed(kind(text)) from error
        self.communicator.set_error(text, error, state)

    def _fail_in_step(self, step: MicrobatchState, text: str, error: BaseException) -> None:
        """Keep an error until the step ends: the schedule continues, without edits on all ranks of
        the stage from the same exchange on. Raising it now would leave other stages waiting.
        """
        if self.communicator.is_local or is_agreed(error):
            step.silence()
        else:
            text = f"{text} ({step.where})"
            self.communicator.set_error(text, error)
            return
        step.fail(text, error)

    def _is_silent(self) -> bool:
        return self.step is not None and not self.step.calls_hooks()

    def backward_handler(
        self, registrations: Sequence[Registration], module: nn.Module, leaf: Tensor
    ):
        """Return the function that an edge at the module calls with the gradient of ``leaf``."""
        run = (
            self.run
            if self.run is not None
            else (self._run_of_backward() if _in_backward() else None) or self._lone_run()
        )
        module_ref = weakref.ref(module)
        graph = self.graphs.add(run)
        numbers = [
            None if _in_backward() else self.tracking.number(registration)
            for registration in registrations
        ]
        with follow.paused():
            evidences = [
                self.tracking.evidence_of_replay(registration, leaf, run.keys)
                if number is None
                else self.tracking.evidence(registration, leaf, number)
                for registration, number in zip(registrations, numbers)
            ]

        def handler(grad: Tensor | None) -> Tensor | None:
            module = module_ref()
            if grad is None or module is None or self._is_silent():
                return grad
            graph.enter()
            self._expect_end_of_backward(run)
            for registration, number, evidence in zip(registrations, numbers, evidences):
                if self.communicator.held is not None:
                    break
                call = Call(registration, module, run, number=number, evidence=evidence)
                name = registration.hook_function.record_name
                position = self.backward_order.position(name)
                try:
                    self._check_batch_open(run)
                    self._check_is_of_loss(registration)
                    with follow.paused():
                        grad = self.caller.summed(grad)
                        grad = self.caller.gradient(call, grad)
                    self.backward_order.add(name, position, run.batch)
                except Exception as error:
                    self.hook_failed(registration, error)
            return grad

        def at(edge: Tensor) -> None:
            with follow.paused():
                for evidence in evidences:
                    evidence.move_to(edge)

        handler.at = at  # type: ignore[attr-defined]
        return handler

    def note_activations(self, registrations: Sequence[Registration], tree: Any) -> None:
        """Collect evidence of the activations of gradient hooks in a forward without gradients,
        whose recomputation may call those hooks. Local.
        """
        if self.run is not None and not _in_backward():
            self.run.is_recomputed = True
        if not self.tracking.is_following or _in_backward():
            return
        with follow.paused():
            for registration in registrations:
                with contextlib.suppress(HookError):  # no tensor there, so no gradient either
                    leaf = registration.leaf(tree)
                    number = self.tracking.number(registration)
                    self.tracking.evidence(registration, leaf, number)

    def _lone_run(self) -> RunContext:
        """Make a run for a part of the model that is called on its own; it includes the autograd
        nodes made since the last run.
        """
        run = RunContext(
            self.table.active,
            set(self.table.active),
            first_node=self._runs.last_node,
            entry=0 if self.session is None else self.session.number,
        )
        run.last_node = next_sequence() + 1
        self._runs.add(run)
        return run

    def run_parameter_hooks(
        self, registrations: Sequence[Registration], grad: Tensor | None
    ) -> Tensor | None:
        """Run the hooks on a parameter's gradient; return the gradient that replaces it. Without a
        gradient they are not called; ranks that have one find this one at the end of the backward.
        """
        run = self.run or self._runs.last or self._lone_run()
        self._expect_end_of_backward(run)
        if grad is None:
            return None
        for registration in registrations:
            if self.communicator.held is not None:
                break
            try:
                self._check_batch_open(run)
                self._check_is_of_loss(registration)
                evidence = Evidence(key=self.tracking.num_followed)
                call = Call(registration, None, run, evidence=evidence)
                with follow.paused():  # FSDP2 has its hooks run by a node of the model
                    grad = self.caller.gradient(call, self.caller.summed(grad))
            except Exception as error:
                self.hook_failed(registration, error)
        return grad

    def refuse_parameter_hooks(self, registration: Registration, error: Exception) -> None:
        """Fail with an error that all ranks raise, instead of ``run_parameter_hooks``."""
        self._expect_end_of_backward(self.run or self._runs.last or self._lone_run())
        self.hook_failed(registration, agreed(error))

    def _check_batch_open(self, run: RunContext) -> None:
        """HookError where records of a backward would be added to another batch, or to a store
        that is closed.
        """
        if self._had_store:
            raise HookError(
                "the backward of a graph comes after restore(), when the store that its records "
                "belong to is closed; run backward before restore()"
            )
        if self.session is not None:
            self.session.check_open(run.entry, None if self.run is None else self.run.entry)

    def _check_is_of_loss(self, registration: Registration) -> None:
        """ValueError where the backward runs inside the model's forward."""
        if self.tracking.forward.depth > 0 and self.communicator.mesh.dp_size > 1:
            raise agreed(
                ValueError(
                    f"{registration.describe()}: a backward that begins inside the model's forward "
                    "(torch.autograd.grad, as of an energy) reaches it; under data parallelism "
                    "hooks assume that a backward begins at a loss that is averaged over ranks; "
                    "hook the forward's tensors, or run the backward outside of the forward"
                )
            )

    def _expect_end_of_backward(self, run: RunContext) -> None:
        """Deliver this backward's records when it ends, once; in a pipeline, the step does."""
        if self.step is not None:
            return
        task = backward_task()
        if run.backward_task == task or task == -1:
            return
        run.backward_task = task
        if not self.communicator.is_local:
            self.communicator.backwards.add(task)
        session = self.session
        if session is not None:
            session.begin_backward(run.entry)
        self.backward_order.begin(task)
        self.backward_watch.watch()
        core, has_begun = self, False

        def end() -> None:
            nonlocal has_begun
            try:
                has_begun = True
                run.backward_task = -1
                core.communicator.backwards.discard(task)
                core._raise_held(run)
                core._deliver(run, "end of the backward")
                core.backward_order.end()
                if session is not None:
                    session.end_backward(run.entry)
            except BaseException as error:
                core.tracking.forget()
                core.interrupted(error)
                raise

        self.backward_watch.at_end(end, lambda: has_begun)

    def _raise_held(self, run: RunContext) -> None:
        """Raise an error that was held during the backward. Local: all ranks hold one."""
        held, self.communicator.held = self.communicator.held, None
        if held is not None:
            self.records.forget(run)
            raise held

    def close(self) -> None:
        """Remove all hooks; free process groups and lists when no graph needs them. Local; repeated
        calls do nothing.
        """
        if self.is_closed:
            return
        self.is_closed, self._had_store = True, self.session is not None
        self.close_store()
        self.table.close()
        self._install_root()
        self.run = None
        self.graphs.leave(self)

    def _free(self) -> None:
        """Free what the backward of a graph may have needed. Local."""
        self.backward_watch.is_closed = True
        self._runs.forget()
        self.communicator.close()


def _device_of(module: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _in_backward() -> bool:
    return backward_task() != -1
