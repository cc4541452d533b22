"""The hook core of one wrapped model: which hooks there are, when a run begins and ends, what runs
in between.

It never refers to the FlexModel, so that dropping the last reference to that takes all hooks off
the model.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.channel import Channel, agreed, is_agreed
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.mesh import Mesh
from flex_model.errors import HookError
from flex_model.hooks.call import HookCaller
from flex_model.hooks.context import Call, RunContext, advance_generator, next_sequence
from flex_model.hooks.function import KINDS, HookFunction
from flex_model.hooks.groups import ALL, HookGroups, as_names
from flex_model.hooks.registration import Registration
from flex_model.hooks.site import ModuleSite, ParameterSite
from flex_model.outputs import Records

_REMEMBERED_RUNS = 64  # for recomputation: light, since what they collected is gone from them


@dataclass
class _Deferred:
    run: RunContext | None = None


Choice = tuple[tuple[str, ...], bool]
EVERYTHING: Choice = ((ALL,), False)


class HookCore:
    """See the module. ``module`` is the wrapped model; all else is shared with the FlexModel that
    made it.
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
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.channel = Channel(mesh, timeout_s)
        self.records = Records(output_ptr, self.channel, output_ranks)
        self.groups = HookGroups()
        self.full_parameter: Callable[[str], Tensor] = lambda name: torch.empty(
            0
        )  # set by FlexModel
        self.caller = HookCaller(
            self.channel,
            self.records,
            save_ctx,
            modules,
            edit_on,
            lambda name: self.full_parameter(name),
        )
        self.save_ctx, self.modules = save_ctx, modules
        make = (output_ptr, self._run_hook, torch.Tensor, torch._C._current_graph_task_id)
        self.dispatcher = _C.Dispatcher(*make)
        self.parameter_dispatcher = _C.Dispatcher(
            *make
        )  # keeps the choice of the last run: gradients come after it
        self.run: RunContext | None = None
        self._active: frozenset[int] = frozenset()
        self.num_active = 0
        self._sites: dict[int, ModuleSite] = {}
        self._parameter_sites: dict[int, ParameterSite] = {}
        self._runs: deque[RunContext] = deque(maxlen=_REMEMBERED_RUNS)
        self._choice = self._parameter_choice = EVERYTHING
        self._next_index = 0
        self._agreed_hooks = site_hash()
        self._root_handles: list[Any] = []
        self._thread: int | None = None
        self._deferred: _Deferred | None = None  # a run that begins with the first module it runs
        self.is_closed = False
        self._activate(EVERYTHING, EVERYTHING)

    # Registration.

    def register(
        self,
        function: HookFunction,
        kind: str,
        target: nn.Module | nn.Parameter,
        groups: Iterable[str] = (),
        after_accumulation: bool = False,
    ) -> Registration:
        """Put a hook at a module, or at a parameter for kind "tensor"."""
        assert kind in KINDS
        if function._registration is not None:
            raise ValueError(
                f"{function!r} is registered already; remove it first (handle.remove()), or make "
                "another HookFunction"
            )
        self._check_record_name(function, kind)
        module_ref = weakref.ref(target) if isinstance(target, nn.Module) else None
        registration = Registration(function, kind, self._next_index, module_ref)
        self._next_index += 1
        registration.hook = _C.Hook(
            registration,
            function.unpack_idx,
            function.record_name,
            self._records_in_dispatcher(registration),
        )
        if isinstance(target, nn.Module):
            module_site = self._sites.setdefault(id(target), ModuleSite(self, target))
            module_site.site(kind).add(registration.hook)
        else:
            parameter_site = self._parameter_sites.get(id(target))
            if parameter_site is None:
                parameter_site = ParameterSite(
                    self, function.module_name, target, after_accumulation
                )
                self._parameter_sites[id(target)] = parameter_site
            parameter_site.site.add(registration.hook)
        self.groups.add(registration, groups)
        function._registration = registration
        function.save_ctx, function.modules = self.save_ctx, self.modules
        self._activate(self._choice, self._parameter_choice)
        return registration

    def _records_in_dispatcher(self, registration: Registration) -> bool:
        """Whether the compiled dispatcher can serve it alone: one rank, nothing to edit, nothing to
        check.
        """
        function = registration.hook_function
        return (
            self.channel.is_local
            and self.records.keeps
            and registration.kind in ("forward", "forward_pre")
            and function.editing_function is None
            and function.expected_shape is None
        )

    def _check_record_name(self, function: HookFunction, kind: str) -> None:
        for other in self.groups.registrations:
            if other.hook_function.record_name == function.record_name and other.kind != kind:
                raise ValueError(
                    f"a {kind} hook on {function.module_name!r} would write its records to "
                    f"output_ptr[{function.record_name!r}], as the {other.describe()} does; give "
                    "one of them an "
                    "output_name"
                )

    def unregister(self, registration: Registration) -> None:
        """Take a hook off; nothing if it is off already."""
        function = registration.hook_function
        if function._registration is not registration:
            return
        function._registration = None
        function.save_ctx = function.modules = None
        self.groups.discard(registration)
        tables: list[dict[int, Any]] = [self._sites, self._parameter_sites]
        for table in tables:
            for key, place in list(table.items()):
                for site in place.all_sites:
                    site.remove(registration.hook)
                    site.refresh()
                if not any(site.hooks for site in place.all_sites):
                    place.remove()
                    del table[key]
        # It holds the registration, and no garbage collector would see the cycle.
        del registration.hook
        if not self.is_closed:
            self._activate(self._choice, self._parameter_choice)

    def _activate(self, choice: Choice, parameter_choice: Choice) -> None:
        """Choose groups: torch hooks come and go with them. A parameter's gradient comes after the
        run that chose.
        """
        for dispatcher, sites, (groups, complement) in (
            (self.dispatcher, self._sites, choice),
            (self.parameter_dispatcher, self._parameter_sites, parameter_choice),
        ):
            dispatcher.activate(self.groups.ids(groups, strict=False), complement)
            for site in sites.values():
                site.install()
        self._choice, self._parameter_choice = choice, parameter_choice
        self._active = frozenset(
            registration.index
            for place in self._places()
            for site in place.all_sites
            for registration in site.active
        )
        self.num_active = len(self._active)
        self._install_root()

    def _install_root(self) -> None:
        """Brackets around a direct call of the wrapped module, while anything is active."""
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()
        if not self.num_active or self.is_closed:
            return
        core = self

        def begin(module, args):
            if module is not core.module or _in_backward():
                return
            if core.run is None:
                run = core.begin(EVERYTHING, direct=core._deferred is None)
                run.outer_error = sys.exc_info()[1]
                if core._deferred is not None:
                    core._deferred.run = run
            elif core.run.direct_depth:
                core.run.direct_depth += 1

        def end(module, args, output):
            run = core.run
            if module is not core.module or run is None or not run.direct_depth or _in_backward():
                return
            run.direct_depth -= 1
            if not run.direct_depth:
                error = sys.exc_info()[1]
                core.end(run, None if error is run.outer_error else error)

        # `begin` before all other hooks of the root, `end` after them: a hook on the root itself is
        # inside
        self._root_handles = [
            self.module.register_forward_pre_hook(begin, prepend=True),
            self.module.register_forward_hook(end, always_call=True),
        ]

    def _places(self) -> list[ModuleSite | ParameterSite]:
        return [*self._sites.values(), *self._parameter_sites.values()]

    # Runs.

    def choice(self, groups: str | Iterable[str], complement: bool) -> Choice:
        """A choice of hooks. ValueError for an unknown group."""
        names = tuple(as_names(groups))
        self.groups.ids(names)
        return names, bool(complement)

    def begin(self, choice: Choice, direct: bool = False) -> RunContext:
        """Start an outermost run: choose hooks, agree on them where they are new, start their lists
        afresh.
        """
        if not choice == self._choice == self._parameter_choice:
            self._activate(choice, choice)
        run = RunContext(self._active, int(direct), first_node=next_sequence())
        self._thread = threading.get_ident()
        self.run = run
        self._runs.append(run)
        if self.num_active:
            self.dispatcher.clear_records()
            self.parameter_dispatcher.clear_records()
            self.dispatcher.in_run = True
            if not self.channel.is_local:
                try:
                    self._agree_on_hooks()
                except BaseException:
                    self._close_run(run)
                    raise
        return run

    def _agree_on_hooks(self) -> None:
        registrations = self.groups.registrations
        digest = site_hash(*(registration.site for registration in registrations))
        if digest == self._agreed_hooks:
            return
        names = "; ".join(registration.describe() for registration in registrations)
        self.channel.agree(
            Header("registered hooks", site=digest), f"the start of a run with these hooks: {names}"
        )
        self._agreed_hooks = digest

    def end(self, run: RunContext, error: BaseException | None) -> None:
        """Finish an outermost run: deliver its records, tell and hear of errors. Collective where
        hooks were active.
        """
        if self.run is not run:
            return
        try:
            if error is not None:
                self._fail_run(run, error)
            elif run.active and not self.channel.is_local:
                self._join(run, "end of the run")
            elif run.consumed:
                run.consumed = False
                advance_generator()
        finally:
            self._close_run(run)

    def _close_run(self, run: RunContext) -> None:
        run.last_node = next_sequence()
        if run.pending:
            self.records.forget(run)
        run.parameters.clear()
        run.outer_error = None
        self.run = None
        self.dispatcher.in_run = False
        if self._choice != EVERYTHING:
            self._activate(EVERYTHING, self._parameter_choice)

    def _fail_run(self, run: RunContext, error: BaseException) -> None:
        self.records.forget(run)
        for site in self._sites.values():
            site.forget_calls()
        if (
            self.channel.is_local
            or not run.active
            or is_agreed(error)
            or not isinstance(error, Exception)
        ):
            return
        self.channel.tell_failure(
            f"the model's own forward failed: {type(error).__name__}: {error}",
            error,
            "end of the run",
        )

    def _join(self, run: RunContext, kind: str) -> None:
        consumed = self.records.join(run, kind, self.caller.move)
        run.consumed = False
        if consumed:
            advance_generator()

    @contextlib.contextmanager
    def chosen(self, choice: Choice) -> Iterator[None]:
        """Another choice of hooks inside a run that goes on; its own choice where none is made."""
        before = self._choice, self._parameter_choice
        if choice in (EVERYTHING, before[0]):
            yield
            return
        self._activate(choice, choice)
        try:
            yield
        finally:
            self._activate(*before)

    @contextlib.contextmanager
    def one_run_at_most(self) -> Iterator[None]:
        """All that the model runs inside is one run, which begins with the first of it."""
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

    def refresh(self) -> None:
        """After groups have changed."""
        self._activate(self._choice, self._parameter_choice)

    # What torch's hooks call.

    def _run_hook(self, registration: Registration, module: nn.Module, tree: Any) -> Any:
        """A forward or forward-pre hook: the tree of tensors that the model goes on with."""
        if _in_backward():
            return self._replay(registration, module, tree)
        if self.run is None and self._deferred is not None:
            self._deferred.run = self.begin(EVERYTHING)
        run = self.run
        if run is None:  # a part of the model is called on its own
            run = self.run = RunContext(self._active, first_node=next_sequence())
            self._runs.append(run)
            self.records.output_ptr.pop(registration.hook_function.record_name, None)
            failure = None
            try:
                return self._run_in(run, registration, module, tree)
            except BaseException as error:
                failure = error
                raise
            finally:
                self.end(run, failure)
        return self._run_in(run, registration, module, tree)

    def _run_in(
        self, run: RunContext, registration: Registration, module: nn.Module, tree: Any
    ) -> Any:
        try:
            self._check_thread(registration)
            leaf = registration.leaf(tree)
            result = self.caller.activation(Call(registration, module, run), leaf)
        except Exception as error:
            self.hook_failed(registration, error)
            return tree
        return (
            tree
            if result is leaf
            else _C.replace_leaf(tree, registration.hook_function.unpack_idx, result)
        )

    def _replay(self, registration: Registration, module: nn.Module, tree: Any) -> Any:
        """The model is computed once more during backward (activation checkpointing): the edits
        that its forward had, and no record.
        """
        run = self._run_of_backward()
        if not registration.edits or registration.index not in run.active:
            return tree
        index = registration.hook_function.unpack_idx
        leaf = registration.leaf(tree)
        result = self.caller.activation(Call(registration, module, run, is_replay=True), leaf)
        return tree if result is leaf else _C.replace_leaf(tree, index, result)

    def _run_of_backward(self) -> RunContext:
        node = torch._C._current_autograd_node()
        if node is not None:
            for run in reversed(self._runs):
                if run.holds(node):
                    return run
        return self._runs[-1] if self._runs else RunContext()

    def _check_thread(self, registration: Registration) -> None:
        if (
            self._thread is not None
            and self._thread != threading.get_ident()
            and self.run is not None
        ):
            raise HookError(
                f"{registration.describe()}: called from a second thread while a run of this "
                "FlexModel goes on in another; "
                "run the model from one thread at a time, or wrap it once per thread"
            )

    def hook_failed(self, registration: Registration, error: Exception) -> None:
        """An error of one hook. One rank: raise it. Several: go on as if unedited, all raise at the
        next exchange.
        """
        if is_agreed(error):
            raise error
        text = registration.failure(error)
        if self.channel.is_local:
            raise agreed(HookError(text)) from error
        self.channel.set_error(text, error)

    # Backward.

    def backward_handler(self, registrations: Sequence[Registration], module: nn.Module):
        """What an edge at the module calls with a gradient."""
        run = (
            self.run
            if self.run is not None
            else self._run_of_backward()
            if _in_backward()
            else self._lone_run()
        )
        module_ref = weakref.ref(module)

        def handler(grad: Tensor | None) -> Tensor | None:
            module = module_ref()
            if grad is None or self.is_closed or module is None:
                return grad
            self._expect_end_of_backward(run)
            for registration in registrations:
                try:
                    grad = self.caller.gradient(Call(registration, module, run), grad)
                except Exception as error:
                    self.hook_failed(registration, error)
            return grad

        return handler

    def _lone_run(self) -> RunContext:
        run = RunContext(self._active, first_node=next_sequence())
        self._runs.append(run)
        return run

    def run_parameter_hooks(self, registrations: Sequence[Registration], grad: Tensor) -> Tensor:
        """The hooks on a parameter's gradient; the gradient that goes on."""
        if self.is_closed:
            return grad
        run = (
            self.run if self.run is not None else self._runs[-1] if self._runs else self._lone_run()
        )
        self._expect_end_of_backward(run)
        for registration in registrations:
            try:
                grad = self.caller.parameter_gradient(Call(registration, None, run), grad)
            except Exception as error:
                self.hook_failed(registration, error)
        return grad

    def _expect_end_of_backward(self, run: RunContext) -> None:
        """Deliver what this backward collects when it ends, once."""
        task = torch._C._current_graph_task_id()
        if run.backward_task == task or task == -1:
            return
        run.backward_task = task
        core = self

        def end() -> None:
            run.backward_task = -1
            if core.is_closed:
                return
            if core.channel.is_local:
                if run.consumed:
                    run.consumed = False
                    advance_generator()
                return
            core._join(run, "end of the backward")

        torch.autograd.Variable._execution_engine.queue_callback(end)

    # The end.

    def close(self) -> None:
        """Take every hook off and give back groups and lists. Local; as often as one likes."""
        if self.is_closed:
            return
        self.is_closed = True
        for registration in self.groups.registrations:
            self.unregister(registration)
        for place in self._places():
            place.remove()
        self._sites.clear()
        self._parameter_sites.clear()
        self.num_active = 0
        self._install_root()
        self._runs.clear()
        self.run = None
        self.dispatcher.close()
        self.parameter_dispatcher.close()
        self.channel.close()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
