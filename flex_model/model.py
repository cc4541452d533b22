"""FlexModel: wrap a model, register hooks, run it, restore it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flex_model import inspection, visualize
from flex_model.compat.parallel_state import ParallelState
from flex_model.diagnostics.timeline import Timeline, recorded
from flex_model.errors import nearest
from flex_model.fingerprints import Comparison, comparison, recorded_run
from flex_model.hooks.function import KINDS, EditingFunction, HookFunction
from flex_model.hooks.groups import Members, matches, pattern_text
from flex_model.hooks.groups import check_name as check_group_name
from flex_model.hooks.registration import HookHandle
from flex_model.hooks.tracking import Follow
from flex_model.inspection import DryRun, Explanation, Layouts, VerifyReport
from flex_model.integrations import (
    attention_patterns,
    expert_routing,
    expert_units,
    made_sites,
    refused,
    versions,
)
from flex_model.integrations.compiled import between_graphs
from flex_model.layouts.sources import BatchDim
from flex_model.layouts.statements import statement_of
from flex_model.names import find_module, module_names, wrapped_chain
from flex_model.parameters import checkpoint
from flex_model.parameters.trainable import check_name, send_from_rank_0
from flex_model.records.store import ActivationStore
from flex_model.runs import later_body
from flex_model.runs.module import ModuleRunner, check_open
from flex_model.runs.settings import CHOICES, Settings, check_choice
from flex_model.selection import Select
from flex_model.selection.selectors import Selector, is_everything

_FIXED = (
    "module", "schedule", "trainable_modules", "mesh", "tp_size", "pp_size", "dp_size",
    "process_group", "lengths",
)  # fmt: skip


def _step_setting(name: str) -> Any:
    """Return a property for a setting of a pipeline's next steps."""

    def read(flex: FlexModel) -> Any:
        return getattr(flex._runner.step_settings, name)

    def write(flex: FlexModel, value: Any) -> None:
        if name in CHOICES:
            check_choice(name, value)
        flex._runner.change(name, value)

    return property(read, write)


class FlexModel(nn.Module):
    """Wraps a model, sharded or not, to see and edit full activations, gradients and parameters.

    Example::

        activations = {}
        with FlexModel(model, activations, tensor_parallel_size=2) as flex:
            flex.register_forward_hook(HookFunction("layers.3.mlp", editing_function=halve))
            logits = flex(tokens)  # rank 0: activations["layers.3.mlp"][0] is the full tensor

    The same script runs on one process (no ``torchrun`` needed) and on many, and gives the same
    numbers. Every rank makes the same calls in the same order.

    Args:
        module: Any ``nn.Module``. It is not changed, and hooked only while a hook of an active
            group is registered. Or a schedule of ``torch.distributed.pipelining``, before its first
            step: see "Pipelines" below. A model that transformers has split
            (``DistributedConfig(pp_size=...)``) is a pipeline of one micro-batch without gradients,
            and is called as before.
        output_ptr: Dict that receives the records: ``name -> [tensor, ...]`` in call order, CPU
            copies of the full tensors as they were before the edit, on rank 0 (see
            ``output_ranks``). Complete when the forward (or backward) returns. Every run empties
            the lists of its hooks first, and so empties those of another FlexModel of the same
            dict and names. Or an ``ActivationStore``: a folder, into which each rank writes its
            shards.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: Their product is the
            number of ranks, in the order (pp, dp, tp), tp fastest. Those left at 1 are taken from
            the model's own groups, where it has some (DTensor, DDP, FSDP, Megatron, fairscale),
            and so is then the order of the ranks.
        process_group: The ranks that hold the model (default: the world, or, if no size is set
            either, the ranks of the model's own groups).
        device_mesh: A ``DeviceMesh`` with named dims, instead of sizes. Both are checked against
            the model's own groups.
        edit_on: ``"all"``: every rank runs the editing functions, on the same values with the same
            random state. ``"rank0"``: only rank 0 does, and its result is sent to the others;
            trainable modules then have gradients on rank 0 only (``sync_trainable_modules``).
        output_ranks: ``"rank0"`` or ``"all"``: the ranks that keep records.
        save_ctx_on: The ranks that receive what only some ranks wrote into ``save_ctx`` (with
            ``edit_on="rank0"``, and in pipelines), when a run or backward is over: ``"rank0"``, or
            ``"all"``. With ``edit_on="all"`` all ranks of a stage write it themselves. All choices
            across ranks: docs/strategies.md.
        timeout: Seconds that one wait for other ranks may take before it is an error that names the
            missing rank.
        batch_dim: The dim of the inputs that holds rows of the batch, different ones on each
            data-parallel rank. It applies to every tensor argument with the same size in that dim
            as the first one. Or a dict of it by argument name: None for an argument without rows, 0
            is the default. An argument with equal values on all data-parallel ranks whose shape
            does not show whether it holds rows is an error until it is named.
        follow: Which forwards are followed, operation by operation, to prove how tensors are
            sharded: ``"new"``: those whose inputs have new shapes, dtypes or modes. ``"always"``:
            every one, for models whose control flow depends on values. The layouts of a forward are
            remembered for forwards with inputs of the same kind, until a run fails.
        dp_batch: How hooks see batches of data-parallel ranks that differ in length. None:
            different lengths are an error. ``"global"``: in one tensor, padded at the end of each
            dim with ``pad_value``; what an edit writes to the padding is dropped, its gradient is
            zero, and the lengths are in ``lengths``. ``"local"``: each data-parallel rank has runs
            of its own, with its tensor-parallel ranks (and those of its pipeline) alone, as if
            there were no other: hooks see its rows, records are on the first of these ranks, and
            errors are raised on them. Gradients are those of this rank's own loss, not divided by
            ``data_parallel_size``: of activations at hooks, and of trainable modules, which DDP or
            you average over data-parallel ranks. ``get_module_parameter`` and its like stay
            collective over all ranks; what would need these during a run (hooks on gradients of
            parameters, ``HookFunction(parameters=...)``, stores) is for another FlexModel of the
            model, without ``dp_batch``. See "Ragged batches" in docs/frameworks.md.
        pad_value: The value of the padding; that of gradients is 0.
        batch_mode: For schedules. ``"micro"``: an editing function is called once per micro-batch,
            with its rows. ``"full"``: a step runs as one micro-batch, whatever the schedule: the
            function sees the whole batch. Can be set; each step reads it.
        return_on: For schedules. ``"last"``: ranks with the last stage get the output, the others
            None; ``"all"``: every rank gets it, detached. Can be set.
        microbatch_dim: For schedules: the dim along which the records of micro-batches are joined,
            or a dict of it by module name, with None for a tensor that has no rows of the batch and
            is kept once. Default: it is proven by the operations that made the tensor; where that
            fails, it is an error, unless it is stated here. Can be set.

    Pipelines::

        stage = PipelineStage(my_part, rank, 2, device)  # or pipe.build_stage(rank, device)
        flex = FlexModel(ScheduleGPipe(stage, 4, loss_fn=mse), activations := {})
        flex.register_forward_hook(HookFunction("layers.3.fc1", editing_function=halve))
        out = flex(x, target=y, losses=(losses := []))
        # rank 0: activations["layers.3.fc1"][0] is (batch, ...); out is on the last stage's rank

    Names are those of the unsplit model, as the stages have them; hooks are registered in the same
    order on every rank, also for modules of other ranks. Records are of the whole batch, on rank 0
    when the call returns. Gradients are those of the mean loss over micro-batches
    (``scale_grads=True``). After the step rank 0's ``save_ctx`` has what any stage wrote, or every
    rank's (``save_ctx_on="all"``). Sizes left at 1 come from the stages' group and from the
    modules' own mesh; ``process_group`` has the ranks of all stages.

    Attributes:
        module: The wrapped model; of a schedule, this rank's stages.
        schedule: The wrapped schedule.
        output_ptr: The dict, or store, that was passed.
        save_ctx: A ``Namespace`` in which editing functions keep values, from run to run; in a
            sequential run, the batch's own.
        shared_ctx: A ``Namespace`` that all batches of sequential runs share.
        trainable_modules: ``nn.ModuleDict`` of modules that editing functions can use and train.
        hook_functions: Registered hooks by module name.
        lengths: By record name, one dict for each record with ``dp_batch="global"``: by
            padded dim, the length of each row without padding; on every rank, and set before the
            editing function is called. Empty where nothing can be padded: with one data-parallel
            rank.
        tp_size, pp_size, dp_size: Sizes of the axes.

    Raises:
        ValueError: sizes that do not multiply to the number of ranks, or contradict the model's own
            mesh, or the stages' groups; stages that no rank has.
        TypeError: an argument of schedules, and the model is none.
        HookMismatchError: ranks pass different schedules or settings.

    Collective over the ranks of the model: the constructor, running the model while hooks are
    active (a pipeline: always), everything about parameters, and registering, sending, saving and
    loading trainable modules. All else is local, but every rank must make the same calls.
    """

    def __init__(
        self,
        module: nn.Module,
        output_ptr: dict[str, list[Tensor]] | ActivationStore | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        *,
        device_mesh: dist.DeviceMesh | None = None,
        edit_on: str = "all",
        output_ranks: str = "rank0",
        save_ctx_on: str = "rank0",
        timeout: float = 60.0,
        batch_dim: BatchDim = 0,
        follow: Follow = "new",
        dp_batch: str | None = None,
        pad_value: float = 0,
        batch_mode: str = "micro",
        return_on: str = "last",
        microbatch_dim: int | Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, FlexModel):
            raise TypeError("the module is a FlexModel already; wrap its .module")
        versions.warn_if_newer()
        runner_class: Any = ModuleRunner
        if _is_schedule(module):  # else torch's pipelining is not imported
            from flex_model.pipelining.schedule_runner import ScheduleRunner

            runner_class = ScheduleRunner
        elif "_pp_stage" in getattr(module, "__dict__", ()):  # transformers has split it
            from flex_model.pipelining.schedule_runner import ForwardRunner

            runner_class = ForwardRunner
        elif not isinstance(module, nn.Module):
            raise TypeError(f"FlexModel: expected an nn.Module, got {type(module).__name__}")
        settings = Settings(
            {} if output_ptr is None else output_ptr,
            (tensor_parallel_size, pipeline_parallel_size, data_parallel_size),
            process_group,
            device_mesh,
            edit_on,
            output_ranks,
            save_ctx_on,
            timeout,
            batch_dim,
            follow,
            batch_mode,
            return_on,
            microbatch_dim,
            dp_batch,
            pad_value,
        )
        runner = runner_class(module, settings)
        core = runner.core
        # In __dict__, where they are found before nn.Module's slower look-up.
        is_module = isinstance(module, nn.Module)
        vars(self).update(_runner=runner, _core=core, module=module if is_module else core.module)
        self._modules["module"] = self.module
        if not is_module:
            self.schedule = module
        self._output_ptr = records = settings.output_ptr
        self.trainable_modules = core.modules
        self.mesh = mesh = core.of_parameters.mesh
        self.tp_size, self.pp_size, self.dp_size = mesh.tp_size, mesh.pp_size, mesh.dp_size
        self._communicator, self.lengths = runner.everyone, core.records.lengths
        self._dict_records = records if isinstance(records, dict) else {}  # else a store has them
        self.process_group = process_group
        self.shared_ctx = Namespace()
        self._timeline: Timeline | None = None
        self._finalizer = weakref.finalize(self, runner.close)  # it doesn't refer to this object

    @property
    def training(self) -> bool:
        """Whether the wrapped model is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):  # else nn.Module's own __init__ sets it
            vars(self.module).update(training=mode)

    @property
    def output_ptr(self) -> dict[str, list[Tensor]] | ActivationStore:
        return self._output_ptr

    @property
    def save_ctx(self) -> Namespace:
        run = self._core.runs.current
        return self._core.save_ctx if run is None or run.save_ctx is None else run.save_ctx

    batch_mode = _step_setting("batch_mode")
    return_on = _step_setting("return_on")
    microbatch_dim = _step_setting("microbatch_dim")

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the indices of the stages of a pipeline that have a module of this name. Local.

        Raises:
            ValueError: there is none; the message has the nearest names.
            TypeError: there is no pipeline.
        """
        return self._runner.stages_of(name)

    @functools.cached_property
    def fmps(self) -> ParallelState:
        """This rank's coordinates and process groups, with release 0.1.0's names. Local."""
        return ParallelState(self.mesh, self.process_group, self._core.communicator.timeout_s)

    @property
    def hook_functions(self) -> dict[str, HookFunction]:
        """Registered hooks by module name; further hooks of a module are at ``name:kind``, then
        ``name:kind:number``.
        """
        functions: dict[str, HookFunction] = {}
        for r in self._core.table.registrations:
            keys = (r.name, f"{r.name}:{r.kind}", f"{r.name}:{r.kind}:{r.index}")
            functions[next(key for key in keys if key not in functions)] = r.hook_function
        return functions

    # Running.

    @between_graphs
    def __call__(
        self,
        *args: Any,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not self._core.table.active and groups == "all" and not complement:
            return self._runner.run_idle(*args, **kwargs)
        try:
            return super().__call__(*args, groups=groups, complement=complement, **kwargs)
        except BaseException as error:  # at any time: before the run began, for one
            self._runner.interrupted(error)
            raise

    @between_graphs
    def forward(
        self,
        *args: Any,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the wrapped model with the hooks of ``groups``; with ``complement``, with those in
        none of them.

        Example::

            flex(tokens, groups=["probe", "steer"])
            flex(tokens, groups=())                       # no hook at all
            flex(tokens, groups="probe", complement=True) # all others

        The choice holds for this call and the backward of its graph; for parameters' gradients,
        until the next call with gradients enabled. Inside ``active()`` a call without ``groups``
        keeps that choice. Collective over the ranks of the model while hooks are active.

        Over a schedule this is one step, collective over all ranks of the pipeline: forward and,
        with a ``loss_fn`` and gradients on, backward. ``args`` are inputs of the whole batch, used
        on the rank of the first stage; keyword arguments are passed on every rank, and each stage
        gets those that its forward takes. Further ones: ``target`` and ``losses`` (a list that
        receives one loss per micro-batch), used on the rank of the last stage;
        ``return_outputs=False``. It returns the merged output on the rank of the last stage, else
        None (see ``return_on``).

        Raises:
            ValueError: an unknown group; the message has the nearest names. Over a schedule, inputs
                that can't be split or run: on every rank, before anything is sent.
            HookError: an editing function failed on some rank; raised on every rank. Over a
                schedule after the step was finished without edits: gradients of that step mean
                nothing; the next step works.
            HookMismatchError: ranks differ in hooks, shapes or dtypes, or in how they call it.
        """
        return self._runner.run(args, kwargs, groups, complement)

    @contextlib.contextmanager
    def no_rows(self) -> Iterator[FlexModel]:
        """A context in which this rank has no rows of the batch: its data has ended before that of
        other data-parallel ranks, and it runs a stand-in, such as its last batch, since they need
        it to take part.

        Example::

            with contextlib.nullcontext() if batch is not None else flex.no_rows():
                output = flex(batch if batch is not None else last_batch)

        With ``dp_batch="global"`` hooks see none of its rows, and its forward is not edited; with
        ``"local"`` they are not called on this rank; without it they refuse to run. Leave its loss
        out of the gradient: multiply it by 0. Local.

        Raises:
            ValueError: there is one data-parallel rank.
            RuntimeError: inside a run.
        """
        self._check_open()
        if self.dp_size == 1:
            raise ValueError(
                "no_rows: there is one data-parallel rank, so no other one has rows; skip the run"
            )
        if self._runner.is_running:
            raise RuntimeError("no_rows: a run goes on; enter it before active()")
        core, context = self._core, contextlib.ExitStack()
        core.tracking.note_rows(False)
        context.callback(core.tracking.note_rows, True)
        with context:
            if core.mesh.dp_size == 1:  # this rank has runs of its own
                for registration in core.table.registrations:
                    self._dict_records.pop(registration.hook_function.record_name, None)
                context.enter_context(self.active(groups=()))
            yield self

    @contextlib.contextmanager
    def active(
        self, groups: str | Iterable[str] = "all", complement: bool = False
    ) -> Iterator[FlexModel]:
        """A context in which all calls (``generate``, a trainer's step, several forwards) are one
        run; their records append.

        Example::

            with flex.active("steer"):
                tokens = model.generate(prompt)

        With a store, the steps of a schedule in it are one batch, and its end is collective. It
        holds for all calls of the model, whoever makes them: tasks that take turns (asyncio) give
        ``groups=`` to each call instead.

        Raises:
            ValueError: an unknown group; the message has the nearest names.
        """
        with self._runner.active(groups, complement):
            yield self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped model's forward, as ``flex.module.compile`` does.

        Raises:
            RuntimeError: a schedule is wrapped.
        """
        self._runner.check_runs_whole_model("compile")
        self.module.compile(*args, **kwargs)

    def run_until(
        self,
        module_name: str | None,
        *args: Any,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> None:
        """Run the forward only as far as it is needed; nothing after that is computed.

        Example::

            flex.register_forward_hook(HookFunction("model.layers.5"))
            flex.run_until(None, tokens)  # layers 0 to 5
            activations = flex.output_ptr["model.layers.5"][0]

        Args:
            module_name: The forward ends after the first call of this module and its hooks; None:
                after the first calls of the modules of all active forward and forward-pre hooks.
            groups, complement: As of ``flex(...)``.

        It returns nothing: records are in ``output_ptr``, other values in ``save_ctx``. Collective
        as ``flex(...)``: every rank passes the same name. In a pipeline it is forward only, and
        stages after the last one that is needed compute nothing.

        Raises:
            ValueError: an unknown name or group, no hook to wait for, or a model whose forward
                can't be ended early (FSDP1, DeepSpeed ZeRO-3, ``torch.compile``).
            RuntimeError: the forward ran to its end without calling one of the modules. In a
                backward of what it computed, under DDP: gradients of parameters are not averaged.
        """
        self._check_open()
        self._runner.run_until(module_name, args, kwargs, groups, complement)

    def run_from(
        self,
        module_name: str,
        value: Any,
        *args: Any,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the forward from the output of a module on, and return what the model returns. The
        modules before it in its list (``model.layers``), and itself, are not computed.

        Example::

            flex.run_until("model.layers.5", tokens)  # with a hook there
            value = flex.output_ptr["model.layers.5"][0]
            logits = flex.run_from("model.layers.5", value, tokens, use_cache=False).logits

        What is outside of the list (embeddings, masks, rotary positions) runs as ever, on
        ``args``. Hooks on the module's output see ``value``. What is skipped gets no gradient: for
        a backward under DDP freeze it, or wrap with ``find_unused_parameters=True``.

        Args:
            value: What the module returns on this rank, a tensor or the tree that it returns: along
                dp this rank's rows, along tp what all ranks hold. Gradients reach it.
            groups, complement: As of ``flex(...)``.

        Collective as ``flex(...)``.

        Raises:
            ValueError: an unknown name, a module inside one of the list, an active hook on a
                skipped module, a skipped module that is passed a cache, a module that returns a
                part on each rank along tp (sequence parallelism; found by a run on shapes where no
                hook has seen it) or may do so, or a model whose forward can't run in part (FSDP1,
                DeepSpeed ZeRO-3, ``torch.compile``).
            RuntimeError: what the model returns, or a value or size that its code reads, depends
                on what a skipped module returns; a skipped module is called again after this one;
                or a pipeline, whose stages run by their schedule.
        """
        self._check_whole("run_from")
        return self._runner.run_from(module_name, value, args, kwargs, groups, complement)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if name in _FIXED and (name in own or name in own.get("_modules", ())):
            raise AttributeError(
                f"FlexModel: {name} can't be set, for its hooks would go on with the former; "
                "wrap the other model, or register the module (register_trainable_module)"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self._wrapped
            chain = wrapped_chain(wrapped) if isinstance(wrapped, nn.Module) else [wrapped]
            absent = object()
            # Read once: torch.nn.utils.parametrize computes a weight whenever it is read.
            found = (getattr(one, name, absent) for one in chain if one is not None)
            value = next((one for one in found if one is not absent), absent)
            if value is absent:
                raise AttributeError(
                    f"neither FlexModel nor the wrapped {type(wrapped).__name__} has an attribute "
                    f"{name!r}"
                ) from None
        if isinstance(value, types.MethodType) and any(value.__self__ is one for one in chain):
            return self._as_run(value)
        return value

    @property
    def _wrapped(self) -> Any:
        """The schedule or module that was passed; None before."""
        return vars(self).get("schedule", vars(self).get("module"))

    def _as_run(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Make a method of the wrapped model one run, begun when it first calls the model."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            has_hooks = bool(self._runner.core.table.active)
            refused.check_batching_method(method.__name__, has_hooks)
            is_inside = self._runner.is_running
            with self._runner.one_run_at_most():
                result = method(*args, **kwargs)
                if has_hooks and not is_inside:
                    later_body.check_result(result, method.__name__)
                return result

        return call

    # Hooks.

    def register_forward_hook(  # type: ignore[override]
        self, hook_function: HookFunction, **settings: Any
    ) -> HookHandle:
        """Record or edit a module's output. Returns a handle with ``remove()``.

        Raises:
            ValueError: an unknown module (the message has the nearest names), a hook that is
                registered already, or one with the same record name as another kind of hook.
        """
        return self._register(hook_function, "forward", settings=settings)

    def register_forward_pre_hook(  # type: ignore[override]
        self, hook_function: HookFunction, **settings: Any
    ) -> HookHandle:
        """Record or edit a module's input. ``unpack_idx`` counts positional, then keyword
        arguments. As ``register_forward_hook``.
        """
        return self._register(hook_function, "forward_pre", settings=settings)

    def register_full_backward_hook(  # type: ignore[override]
        self, hook_function: HookFunction, **settings: Any
    ) -> HookHandle:
        """Record or edit the gradient of a module's input. As ``register_forward_hook``.

        With data parallelism the loss is the mean over ranks, which DDP and FSDP average to: the
        values are gradients of that loss. If ranks have different numbers of rows, weight each
        rank's loss by ``dp_size * rows / all_rows``, and everything equals the unsharded run.
        Where weights are DTensors, replicated along dp, it is the sum over ranks, or the global
        loss of a DTensor.
        """
        return self._register(hook_function, "full_backward", settings=settings)

    def register_full_backward_pre_hook(  # type: ignore[override]
        self, hook_function: HookFunction, **settings: Any
    ) -> HookHandle:
        """Record or edit the gradient of a module's output. As ``register_full_backward_hook``."""
        return self._register(hook_function, "full_backward_pre", settings=settings)

    def register_backward_hook(self, hook: Any) -> Any:
        """Register a hook of torch. TypeError for a HookFunction."""
        if isinstance(hook, HookFunction):
            raise TypeError("register_backward_hook is torch's; call register_full_backward_hook")
        return super().register_backward_hook(hook)

    def register_hook(self, hook_function: HookFunction) -> HookHandle:
        """Record or edit a parameter's gradient, in full and averaged over data-parallel ranks.

        ``module_name`` is the parameter's name; the editing function's ``current_module`` is None.
        Once removed, it is not called in the backward of earlier forwards either.

        Raises:
            ValueError: an unknown parameter, one that needs no gradient, one that accelerate
                offloads, or one whose full averaged gradient is not available.
        """
        return self._register(hook_function, "tensor")

    def _register(
        self,
        hook_function: HookFunction,
        kind: str,
        groups: Iterable[str] = (),
        settings: dict[str, Any] | None = None,
    ) -> HookHandle:
        if settings is not None and _is_of_torch(hook_function):
            return getattr(nn.Module, f"register_{kind}_hook")(self, hook_function, **settings)
        if not isinstance(hook_function, HookFunction):
            raise TypeError(f"expected a HookFunction, got {type(hook_function).__name__}")
        self._check_open()
        targets, moment = self._runner.targets_of(hook_function, kind)
        targets = expert_units.rows_of_experts(hook_function, kind, targets)
        table = self._core.table
        registrations = self._core.register(hook_function, kind, targets, groups, moment)
        return HookHandle(functools.partial(table.unregister, registrations), hook_function)

    def attention(
        self,
        module_name: str,
        editing_function: EditingFunction | None = None,
        *,
        heads: Selector = None,
        queries: Selector = None,
        output_name: str | None = None,
        record: bool = True,
    ) -> HookFunction:
        """Return a HookFunction on an attention layer's pattern, to be registered as any other.

        Example::

            pattern = flex.attention("model.layers.3.self_attn", heads=[1, 5], queries="last")
            flex.register_forward_hook(pattern)
            flex(tokens)  # rank 0: output_ptr["model.layers.3.self_attn.attention_pattern"][0]

        Its tensor is ``softmax(scores)``, (rows, chosen heads, chosen queries, keys), rebuilt from
        queries, keys, scale, mask, soft cap and sinks, whatever computes the layer's attention:
        ``"eager"``, ``"sdpa"``, ``"flex_attention"`` or flash attention of transformers. The first
        call of a kind checks that it gives the layer's own result. Only the chosen queries'
        patterns are computed, while a hook on them is active; heads choose what is moved and
        recorded. An edit, or a hook on the gradient, makes this layer use the pattern: its result
        for these queries is ``pattern @ values``. A head's result is in the input of the projection
        after it: ``Select(heads=5, num_heads=32)``.

        Args:
            module_name: The module that computes attention.
            editing_function, output_name, record: As for `HookFunction`.
            heads: Of the query heads over all ranks: an int, a slice, ints or a mask.
            queries: Positions within one call, likewise, or ``"last"``. The same for all hooks on a
                layer.

        Raises:
            ValueError: the module computes no attention by a function of transformers, by another
                one, is compiled, or patterns of other queries are hooked already.
            HookError: in a run: attention dropout is active, the index of a query is out of range,
                or the rebuilt pattern gives another result than the layer.

        Local; the same on every rank. The layer's ``config`` is a copy until ``restore()``.
        """
        self._make_sites(
            "attention",
            module_name,
            lambda layer, name: (None, attention_patterns.install(layer, name, queries)),
        )
        select = None
        if not is_everything(heads):
            select = Select(heads=heads, dims={"heads": 1})
        return made_sites.MadeSiteHook(
            f"{module_name}.{attention_patterns.CHILD}",
            attention_patterns.settings(queries),
            editing_function=editing_function,
            output_name=output_name,
            select=select,
            record=record,
        )

    def routing(self, module_name: str) -> expert_routing.Routing:
        """Return the routing of a block of experts: modules that any hook can be on, ready edits.

        Example::

            routing = flex.routing("model.layers.3.mlp")
            flex.register_forward_hook(HookFunction(routing.indices))
            flex.register_forward_hook(routing.forbid([3, 17]))
            flex(tokens)  # rank 0: output_ptr["model.layers.3.mlp.routing.indices"][0]

        The block is one of transformers, with ``experts`` and a gate. Its tokens are those of all
        rows, one after another. In the order of a run, the modules below the block are:

        - ``routing.scores`` (tokens, experts): What the gate takes its top k of. An edit is as if
          the gate had computed it. Its gradient is that of the chosen experts' scores (of
          DeepSeek-V3 and its kind, which weigh by other scores, there is none).
        - ``routing.choice`` (tokens, experts): The same, only to choose by: an edit changes which
          experts are chosen, and each is weighted by its own score. It has no gradient.
        - ``routing.indices`` (tokens, k): The chosen experts; with an edit, the gate computes their
          weights as it does for its own.
        - ``routing.load`` (experts, experts), only to read: How many tokens go to both of two
          experts; in the diagonal, to each. The ranks' sum: no other payload moves.
        - ``routing.weights`` (tokens, k): What their results are multiplied by. With gradient.

        An edit of the gate's output of logits changes no route: the gate has chosen before.

        Args:
            module_name: The block, which has ``experts`` and ``gate`` (or ``router``) below it.

        Raises:
            ValueError: ``module_name`` is not such a block.
            HookError: in a run: the gate does not choose by one top k of its scores, or an edit
                leaves a token without experts.

        Local; the same on every rank. The gate's ``forward`` is replaced until ``restore()``.
        """
        return self._make_sites("routing", module_name, expert_routing.install)

    def experts(self, module_name: str) -> expert_units.Experts:
        """Return what the experts of a block compute inside: modules that hooks can be on.

        Example::

            experts = flex.experts("model.layers.3.mlp.experts")
            flex.register_forward_hook(HookFunction(experts.units, select=Select(experts=[3, 17])))
            flex.register_forward_hook(HookFunction(experts.indices))
            flex(tokens)
            rows = flex.output_ptr[experts.units][0]  # rank 0: (slots, units)
            of_tokens = experts.tokens_of([3, 17], flex.output_ptr[experts.indices][0])

        Each token has ``k`` slots, one for each of its experts, in the order of the gate's choice.
        In the order of a run, the modules below the experts are:

        - ``experts.indices`` (tokens, k), only to read: The chosen experts.
        - ``experts.weights`` (tokens, k): What their outputs are multiplied by. With gradient.
        - ``experts.units`` (tokens, k, units): What enters an expert's down projection,
          ``act(gate) * up``. With gradient.
        - ``experts.outputs`` (tokens, k, hidden): Each slot's output, without its weight.

        With ``Select(experts=...)`` only the slots that these experts serve are moved, as rows in
        the order of tokens; such hooks come after those without. While a hook is on one of them,
        the experts' projections run a second time, on one row for each slot, and each call checks
        that the slots' weighted outputs sum to the experts' output. The model continues with the
        experts' own output, unless a hook replaces a tensor or needs its gradient.

        Args:
            module_name: The module of experts of transformers, by the implementation
                ``"grouped_mm"`` or ``"eager"``, on any sharding.

        Raises:
            ValueError: it is none, has another implementation, or quantized weights.
            HookError: in a run: the slots don't sum to the output, or ``indices`` were edited.

        Local; the same on every rank. Until ``restore()``.
        """
        return self._make_sites("experts", module_name, expert_units.install)

    def _make_sites(
        self, what: str, name: str, install: Callable[[nn.Module, str], tuple[Any, Any]]
    ) -> Any:
        """Make modules below one of the wrapped model's, until ``restore()``."""
        self._check_whole(what)
        made, end = install(find_module(self._core.module, name), name)
        self._core.on_close.callback(end)
        return made

    def create_hook_group(
        self,
        group_name: str,
        group_constructor: str | re.Pattern | type,
        expected_shape: Sequence[int | None] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int | str = 0,
        hook_type: str = "forward",
        *,
        output_name: str | None = None,
        parameters: Iterable[str] = (),
    ) -> list[HookFunction]:
        """Register a similar HookFunction at every module that matches, all in group
        ``group_name``; return them.

        Example::

            flex.create_hook_group("mlps", "mlp", editing_function=halve)
            flex.create_hook_group("norms", re.compile(r"layers\\.[02]\\..*norm"))
            flex.create_hook_group(
                "grads", nn.Linear, hook_type="full_backward", output_name="{name}.grad"
            )

        Args:
            group_constructor: A substring of module names (of parameter names for
                ``hook_type="tensor"``), a compiled regex that is searched in them, or a module
                type.
            hook_type: "forward", "forward_pre", "full_backward", "full_backward_pre" or "tensor".
            output_name: Template of the records' names; ``{name}`` is the module's.

        Raises:
            ValueError: nothing matches, or an unknown ``hook_type``.
            TypeError: ``group_constructor`` is none of the three.
        """
        check_group_name(group_name)
        if hook_type not in KINDS:
            raise ValueError(
                f"create_hook_group: hook_type must be one of {KINDS}, got {hook_type!r}"
            )
        handles: list[HookHandle] = []
        try:
            for name in self._matching(group_constructor, hook_type):
                function = HookFunction(
                    name,
                    expected_shape,
                    editing_function,
                    unpack_idx,
                    output_name=output_name and output_name.replace("{name}", name),
                    parameters=parameters,
                )
                handles.append(self._register(function, hook_type, [group_name]))
        except BaseException:
            for handle in handles:
                handle.remove()
            raise
        return [handle.hook_function for handle in handles]

    def _matching(self, constructor: str | re.Pattern | type, hook_type: str) -> list[str]:
        index = self._runner.index
        names = index.hookable_names(hook_type)
        what = "parameter" if hook_type == "tensor" else "module"
        if isinstance(constructor, type) and hook_type != "tensor":
            found, names = index.names_of_type(constructor)
            text, what = constructor.__name__, "module type"
        elif isinstance(constructor, (str, re.Pattern)):
            found = [name for name in names if matches(constructor, name)]
            text = pattern_text(constructor)
        else:
            raise TypeError(
                "create_hook_group: group_constructor must be a str, a compiled regex or a module "
                "type, got "
                f"{constructor!r}"
            )
        if not found:
            raise ValueError(
                f"create_hook_group: {text} matches no {what}; "
                f"{nearest(text.strip(chr(39)), names, what)}"
            )
        return found

    def update_hook_groups(self, group_constructor: Members, group_name: str) -> list[HookFunction]:
        """Add registered hooks to a group: a HookFunction, a list of them, or a substring or regex
        of their module names.
        """
        functions = self._core.table.groups.update(group_constructor, group_name)
        self._core.table.refresh([r for function in functions for r in function._registrations])
        return functions

    def remove_hook_groups(self, group_constructor: Members, group_name: str) -> list[HookFunction]:
        """Remove hooks from a group. As ``update_hook_groups``; no hook can leave "all"
        (ValueError).
        """
        functions = self._core.table.groups.remove(group_constructor, group_name)
        self._core.table.refresh([r for function in functions for r in function._registrations])
        return functions

    def get_hook_function_groups(self, hook_function: HookFunction) -> set[str]:
        """Return the names of the groups that a registered hook is in."""
        return self._core.table.groups.of(hook_function)

    def get_group_hook_functions(self, group_name: str) -> list[HookFunction]:
        """Return the hooks of a group, in the order of their registration."""
        return self._core.table.groups.members(group_name)

    # Inspection.

    def layouts(self, why: bool = False) -> Layouts:
        """Return the registered hooks, with the full and local shapes, dtype and layout of their
        tensors in the last runs, and the source of these. Prints as a table.

        Example::

            print(flex.layouts())
            print(flex.layouts(why=True))

        Args:
            why: Include the proof of each layout in the forward that was followed last: the
                operations that lead to the tensor, each with the placement of its result.

        Local, and the same on every rank; in a pipeline a rank has its own stages, rank 0 those
        of which it has records.
        """
        return inspection.hook_tables.layouts(self._core, self._dict_records, why)

    def annotate_layout(
        self,
        pattern: str | re.Pattern[str] | type[nn.Module],
        *,
        kind: str = "forward",
        index: int = 0,
        tp: Any = None,
        dp: Any = None,
        sizes: Sequence[int | None] | None = None,
        part_sizes: Sequence[int] | None = None,
    ) -> None:
        """State how tensors of modules, or parameters, are placed over the ranks, where that can't
        be proven. Proofs start from it.

        Example::

            from torch.distributed.tensor import Replicate, Shard

            flex.annotate_layout("mlp.up.weight", kind="parameter", tp=Shard(0))
            flex.annotate_layout("attention.core", tp=Shard(2))
            flex.annotate_layout("qkv", tp=Shard(2), part_sizes=(4096, 1024, 1024))
            flex.annotate_layout("", kind="parameter", tp=Replicate())  # whole on every tp rank
            flex.annotate_layout(re.compile("^$"), kind="forward_pre", index=1, dp=Replicate())

        Args:
            pattern: A part of a module's or parameter's name, a compiled regular expression, or a
                module type (with ``kind="parameter"``: all parameters of such modules).
            kind: ``"forward"``: a module's output; ``"forward_pre"``: a module's input, for the
                model itself its arguments; ``"parameter"``: parameters and buffers.
            index: Which tensor, counted as ``HookFunction(unpack_idx=...)``.
            tp, dp: ``Shard(dim)``, ``Replicate()`` or ``Partial()`` of
                ``torch.distributed.tensor``; None leaves that axis to the proof.
            sizes: Sizes of the full tensor, None for those that are not checked.
            part_sizes: Full sizes of the parts that are fused along the split dim (the q, k and v
                of one projection): each part is split over the ranks, and a rank holds its shards
                of all parts, one after another.

        Raises:
            TypeError, ValueError: a wrong argument, a pattern that matches nothing, or a parameter
                for which the model states another layout. At the next run: a statement about
                activations that contradicts a proof.

        Local, but every rank must make the same call, which the next run checks. A stated ``Shard``
        whose parts are equal on all ranks is warned of, where a hook gets it.
        """
        statement = statement_of(pattern, kind, index, tp, dp, sizes, part_sizes)
        if not self._runner.index.names_of_statement(statement):
            what = "parameter" if kind == "parameter" else "module"
            raise ValueError(
                f"{statement.describe()}: no {what} of {type(self.module).__name__} matches; see "
                "flex.wrapped_module_names"
            )
        self._core.tracking.state(statement)

    def explain(self) -> Explanation:
        """Return the cost of the last run, and of its backward, at each hook: the transport,
        headers, collectives, bytes moved by this rank, and why. Prints as a table.

        Example::

            flex(tokens)
            print(flex.explain())

        Counted during the run, in bytes; ``dry_run`` predicts the same numbers. Local.
        """
        return inspection.hook_tables.explain(self._core)

    def dry_run(self, *args: Any, **kwargs: Any) -> DryRun:
        """Predict what a run with these inputs does at each hook: shapes, layout, ranks, bytes
        moved and collectives, of all hooks in all groups. Prints as a table.

        Example::

            dry = flex.dry_run(tokens)
            print(dry)
            dry.raise_if_wrong()

        The model runs on shapes only (torch's fake tensors): nothing is computed or recorded, no
        random number is drawn, and the model is not changed. Each hook's editing function is
        called once, on fake tensors of the full shape; errors in it are in ``findings``, with file
        and line (docs/checks.md). It gets a copy of ``save_ctx``; other state that it changes (a
        counter, a list of its own) stays changed. Layouts are those that a run proves; a row
        without one has the error that a run would raise. Costs are those of a run whose layouts
        are remembered; one that is followed also compares the ranks' operations, and values.
        Gradients are assumed to be whole on ranks that share a tensor.

        Collective over the ranks of the model: inputs are compared by their hashes.

        Raises:
            HookError: the model can't run on shapes (its control flow needs values; FSDP1; FSDP2
                with mixed precision). Run it for real, and see ``layouts``.
            RuntimeError: called during a run.
        """
        self._check_whole("dry_run")
        return inspection.dry_run.dry_run(self._core, args, kwargs)

    @contextlib.contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """A context in which every hook, edit, header and transfer of every rank is timed. It
        yields a list of the spans of each rank, filled when the context ends; ``show`` plots it.

        Example::

            with flex.timeline() as timeline:
                flex(tokens)
            print(timeline)                 # by rank: how many, bytes, time in edits and waiting
            flex.show(html="map.html")

        Times are of the hosts' clocks, which several hosts have to agree on (by NTP, for one). Code
        that isn't timed has no overhead. Its end is collective over the ranks of the model.

        Raises:
            RuntimeError: one is being recorded already.
        """
        self._check_open()
        with recorded(self._core, self._runner.communicators, Timeline()) as timeline:
            self._timeline = timeline
            yield timeline

    def show(
        self,
        *args: Any,
        html: str | os.PathLike[str] | None = None,
        show_all: bool = False,
        rank: int | None = 0,
    ) -> None:
        """Print the modules as a tree, and at each its hooks: kind, edit, groups, the full tensor
        and its layout, and its cost in the last run, as ``explain`` counts it; then the last
        ``timeline``.

        Example::

            flex.show()
            flex.show(tokens)            # with the input and output tensors of each module
            flex.show(html="map.html")   # a page of the same: find, fold, zoom into the timeline

        Args:
            args: Inputs of a run on shapes only, as by ``dry_run``: all modules show their tensors,
                hooked or not.
            html: Write a page that needs no other file and no network, instead of printing.
            show_all: Print numbered modules that are alike one by one.
            rank: Which rank of the model prints or writes what it has; all others return at once.
                None: every rank that calls.

        Local without ``args``: call it on all ranks or on one, at any time. With them collective
        over the ranks of the model, before or after a run.

        Raises:
            ValueError: no such rank.
            HookError, RuntimeError: with ``args``, as ``dry_run``.
        """
        if rank is not None and rank not in range(self.mesh.num_ranks):
            raise ValueError(
                f"show: rank must be one of the model's, 0 to {self.mesh.num_ranks - 1}, or None "
                f"for all, got {rank!r}"
            )
        self._check_open()
        modules = self._runner.modules_to_show(args)
        if rank not in (None, self.mesh.rank):
            return
        picture = visualize.model_map.model_map(
            self._core, self._dict_records, modules, self._timeline
        )
        if html is None:
            picture.print(show_all)
        else:
            Path(html).write_text(visualize.html.page(picture), "utf-8")

    def fingerprint(
        self,
        folder: str | os.PathLike[str],
        *args: Any,
        loss: Callable[[Any], Tensor] | None = None,
        tensors: bool = False,
        routing: bool = True,
        **kwargs: Any,
    ) -> None:
        """Record one run in a folder, to be compared with another one by ``flex_model.compare``:
        of each module's first input and output, in the order of execution, shape, dtype, mean, root
        of the mean square, largest magnitude, and 2,048 values at positions that depend on the full
        shape alone; and which experts tokens go to. The same on any sharding.

        Example::

            flex.fingerprint("run_a", tokens)
            flex.fingerprint("run_a", tokens, loss=lambda out: out.logits.square().mean())

        No registered hook runs, and gradients stay as they were. Sites that can't be hooked are in
        the folder with the reason. A fingerprint that the folder has is removed before the run, so
        that of a run that fails or is interrupted ``compare`` finds none. Inputs are kept in full.
        The first one proves the layouts for the later ones, too, except where gates choose experts.

        Args:
            args, kwargs: This rank's inputs, as for a forward.
            loss: From the model's output to a scalar, the mean over rows: the gradients of inputs,
                outputs and parameters are recorded, too.
            tensors: Keep full tensors, too: ``compare`` is exact, and can tell own errors.
            routing: Record the experts that gates choose. Without, for gates that don't choose by
                one top k.

        Collective over the ranks of the model; rank 0 writes.

        Raises:
            ValueError: the folder has other files; inputs that are neither the same on all ranks
                nor rows of one batch; with ``loss`` what `editing.attribution_patching` refuses of
                a backward. On every rank.
            OSError: the folder can't be written. On every rank.
            RuntimeError: called during a run.
        """
        self._check_whole("fingerprint")
        recorded_run.record_run(self._core, folder, (args, kwargs), loss, tensors, routing)

    def verify(
        self,
        reference: nn.Module | Callable[[], nn.Module] | str | os.PathLike[str] | None,
        *args: Any,
        loss: Callable[[Any], Tensor] | None = None,
        edits: bool = False,
        rtol: float | None = None,
        atol: float = 0.0,
        raise_on_difference: bool = False,
        reference_timeout: float = 1800.0,
        names: comparison.Names | None = None,
        own: bool = False,
        **kwargs: Any,
    ) -> VerifyReport | Comparison:
        """Compare this model with the unsharded one at every hooked site, or without hooks at the
        outputs of all modules. Prints as a table that names the first site that differs.

        Example::

            report = flex.verify(lambda: load_on_one_device(path), tokens)
            assert report.is_equal, report

        No editing function runs (but see ``edits``), nothing is recorded, and gradients stay as
        they were. A tensor is equal where its largest difference is at most ``atol`` plus ``rtol``
        times the reference's largest absolute value.

        Args:
            reference: The unsharded model, with the same weights and in the same mode (``eval()``,
                or without dropout), or a function that makes it. Only rank 0's is used: pass None
                on the others. With ``dp_batch="local"`` rank 0 is the first of each run's ranks.
                Or the folder of a ``fingerprint``, on every rank: the result is a
                ``flex_model.Comparison``; without inputs the model is run with the folder's.
            args, kwargs: This rank's inputs, as for a forward. Rank 0 gathers the rows of all
                data-parallel ranks for the reference.
            loss: From the model's output to a scalar, the mean over rows: backward hooks' sites
                are compared too. It gets each rank's own output, and the reference's.
            edits: Both models are edited by the registered hooks: the tensors passed to hooks are
                compared, the output, and with ``loss`` the gradients of trainable modules. So
                rank 0 runs each function twice, each time with a copy of ``save_ctx`` and of the
                trainable modules; what it keeps elsewhere stays. Hooks of parameters are left out.
            rtol: By default the two-thirds power of the dtype's ``eps``, 2e-5 for float32; of the
                coarsest dtype of the compared sites up to there.
            reference_timeout: Seconds that the other ranks wait for the reference.
            names, own: With a folder: as of ``flex_model.compare``.

        Collective over the ranks of the model.

        Raises:
            AssertionError: with ``raise_on_difference``, where a site differs, no site could be
                compared or a hooked one could not; on every rank.
            HookError: the reference failed on rank 0, or an editing function did.
            ValueError: inputs that are neither the same on all ranks nor rows of one batch; an edit
                at a module that the reference has not; with ``loss`` as `fingerprint`.
            RuntimeError: called during a run.
        """
        self._check_whole("verify")
        report: VerifyReport | Comparison
        if isinstance(reference, (str, os.PathLike)):
            if edits or rtol is not None or atol:
                raise ValueError(
                    "verify: edits, rtol and atol are for a live reference, not for a folder"
                )
            report = comparison.compare_live(
                self._core, reference, (args, kwargs), loss, names, own
            )
        else:
            if names is not None or own:
                raise ValueError("verify: names and own are for the folder of a fingerprint")
            report = inspection.verify.verify(
                self._core, reference, args, kwargs, loss, rtol, atol, reference_timeout, edits
            )
        if raise_on_difference and not report.is_equal:
            raise AssertionError(f"verify: the sharded model differs or was not compared\n{report}")
        return report

    # Parameters and trainable modules.

    def get_module_parameter(
        self,
        parameter_name: str,
        expected_shape: Sequence[int | None] | None = None,
        *,
        raw: bool = False,
        experts: Selector = None,
    ) -> Tensor:
        """Return the full parameter, detached, on the CPU, on every rank. Collective over the ranks
        of the model.

        A quantised or compressed weight (torchao, bitsandbytes, compressed-tensors, float8 of
        transformers) is dequantised, in the shape of the unpacked weight::

            values = flex.get_module_parameter("layers.0.mlp.up_proj.weight")  # (out, in), floats
            packed = flex.get_module_parameter("layers.0.mlp.up_proj.weight", raw=True)

        ``experts`` selects the weights of some experts of a layer::

            down = flex.get_module_parameter("layers.3.mlp.experts.down_proj", experts=[3, 17])

        Args:
            expected_shape: Shape of the full parameter; None for sizes that may vary. It states the
                layout along tp where nothing else does, as in ``HookFunction``; else it is checked.
            raw: Return a packed weight as it is stored: bytes, or its package's tensor.
            experts: Of a parameter of a module with ``num_experts``, whose dim 0 is experts: an
                int, a slice, ints or a mask. Only these are moved, from whichever ranks hold them.

        Raises:
            ValueError: an unknown name (the message has the nearest), a buffer, another full shape,
                or a layout that is not known: DTensors and layers that state their full sizes have
                one, that of other shards is stated with ``annotate_layout(kind="parameter")``; a
                packed weight of a kind that can't be unpacked.
        """
        self._check_collective()
        return self._runner.parameters.get(
            parameter_name, expected_shape, sharded=True, raw=raw, experts=experts
        )

    def set_module_parameter(
        self,
        parameter_name: str,
        full: Tensor,
        expected_shape: Sequence[int | None] | None = None,
        *,
        experts: Selector = None,
    ) -> None:
        """Write a full value, the same on every rank, into the parameter's shards. Collective, as
        ``get_module_parameter``.

        ``full`` is cast to the parameter's dtype, as ``load_state_dict`` does. ``expected_shape``
        states the layout, as there. With ``experts`` it is the value of these experts alone.

        Raises:
            ValueError: an unknown name, a shape that the parameter does not have, values that
                differ between ranks, or a quantised or compressed weight.
            TypeError: no tensor, or a complex one for a real parameter.
        """
        self._check_collective()
        self._runner.parameters.set(parameter_name, full, expected_shape, experts)

    def iterate_parameters(self, *, raw: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield all full parameters, one at a time: ``(clean name, tensor)``, on the CPU, on every
        rank; tied ones once, by their first name.

        Example::

            for name, full in flex.iterate_parameters():
                norms[name] = full.norm()

        Each is gathered when it is requested, so no more than one is in memory (FSDP1: the
        parameters of its unit). Every step is collective, as ``get_module_parameter``: all ranks
        take the same number of steps.

        Args:
            raw: Yield packed weights as they are stored: see ``get_module_parameter``.

        Raises:
            ValueError: as ``get_module_parameter``.
        """
        self._check_collective()
        return self._runner.parameters.iterate(raw=raw)

    def get_module_gradient(
        self,
        parameter_name: str,
        expected_shape: Sequence[int | None] | None = None,
        *,
        experts: Selector = None,
    ) -> Tensor | None:
        """Return the full ``.grad`` of a parameter (Megatron's ``main_grad``), or that of some
        experts, on the CPU, on every rank; None without one. Collective.

        Raises:
            ValueError: as ``get_module_parameter``; a parameter that accelerate offloads, whose
                gradient is not kept; a gradient that the ranks have still to reduce, or of which
                several stages of a pipeline have a part each;
                FSDP1 with ``use_orig_params=False``, which keeps one for all parameters of a unit.
        """
        self._check_collective()
        return self._runner.parameters.gradient(parameter_name, expected_shape, experts)

    def register_trainable_module(self, name: str, module: nn.Module) -> None:
        """Register a module that editing functions use as ``modules[name]``. Collective: rank 0's
        values are sent to all ranks.

        Raises:
            ValueError, TypeError: a name that ``nn.ModuleDict`` can't have; no module; with several
                ranks, one of DTensors, without values, or with tensors of the wrapped model itself.
            HookMismatchError: the ranks' modules have different parameters.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"register_trainable_module: expected an nn.Module, got {type(module).__name__}"
            )
        self._check_collective()
        check_name(self.trainable_modules, name)
        what = f"register_trainable_module({name!r})"
        send_from_rank_0(self._communicator, what, module, self.module)
        self.trainable_modules[name] = module

    def sync_trainable_modules(self) -> None:
        """Send rank 0's trainable modules to all ranks, after an optimizer step on rank 0 only.
        Collective.

        Example::

            if dist.get_rank() == 0:  # the only rank with the optimizer's state
                optimizer.step()
            flex.sync_trainable_modules()
        """
        self._check_collective()
        send_from_rank_0(self._communicator, "sync_trainable_modules", self.trainable_modules)

    def save_trainable_modules(
        self, path: str | os.PathLike[str], optimizer: Any = None, extra: Any = None
    ) -> None:
        """Write the trainable modules and their optimizer to one file with ``torch.save``, without
        the wrapped model. The file is replaced in whole, or stays as it was.

        Example::

            optimizer = torch.optim.AdamW(flex.trainable_modules.parameters(), lr=1e-3)
            ...
            flex.save_trainable_modules("probe.pt", optimizer, extra={"step": 1000})

        Args:
            path: Rank 0 writes it; folders are made.
            optimizer: One of trainable modules' parameters only. Passed on all ranks, or on rank 0
                if only that has one (None elsewhere).
            extra: Tensors, numbers, text, and containers of them: a scheduler's ``state_dict()``,
                ``torch.get_rng_state()``. Rank 0's is kept.

        The state alone, as torch has it: ``flex.trainable_modules.state_dict()``. Collective.

        Raises:
            HookMismatchError: ranks that run editing functions have other values than rank 0.
            ValueError, TypeError: an optimizer of other parameters; values that can't be saved.
            OSError: rank 0 can't write; on every rank.
        """
        self._check_collective()
        communicator, runs_edits = self._communicator, self._core.runs_edits
        with communicator.uncounted():
            checkpoint.save(
                path, self.trainable_modules, optimizer, extra, communicator, runs_edits
            )

    def load_trainable_modules(self, path: str | os.PathLike[str], optimizer: Any = None) -> Any:
        """Read what ``save_trainable_modules`` wrote, on any number of ranks and any sharding, into
        the registered modules and the optimizer, bit for bit. No code in the file is run.

        Args:
            path: Rank 0 reads it and sends it to all.
            optimizer: Made with the same groups of parameters. None: modules only, on ranks without
                an optimizer.

        Returns:
            The ``extra`` that was saved, on every rank.

        Collective.

        Raises:
            ValueError: other names, shapes or dtypes; no optimizer in the file; a file that is not
                whole. Raised on every rank, before anything is changed.
            OSError: rank 0 can't read it; on every rank.
        """
        self._check_collective()
        with self._communicator.uncounted():
            return checkpoint.load(path, self.trainable_modules, optimizer, self._communicator)

    def wrapped_module_requires_grad(self, requires_grad: bool = True) -> FlexModel:
        """Turn gradients of the wrapped model's parameters on or off; those of trainable modules
        stay.
        """
        self.module.requires_grad_(requires_grad)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the wrapped model's; those of trainable modules are
        ``trainable_modules.parameters()``.
        """
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the wrapped model's, with its names."""
        return self.module.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Return the wrapped model's."""
        return nn.Module.buffers(self.module, recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the wrapped model's, with its names."""
        return self.module.named_buffers(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the wrapped model and of the trainable modules."""
        self.module.zero_grad(set_to_none)
        self.trainable_modules.zero_grad(set_to_none)

    # Names.

    @property
    def wrapped_module_names(self) -> list[str]:
        """Names of all modules of the wrapped model, as they are; of all stages of a pipeline."""
        return self._runner.index.module_names

    @property
    def trainable_modules_names(self) -> list[str]:
        """Names of all modules in ``trainable_modules``."""
        return module_names(self.trainable_modules)

    @property
    def all_modules_names(self) -> list[str]:
        """Names of all modules of the wrapped model and in ``trainable_modules``."""
        return self.wrapped_module_names + self.trainable_modules_names

    # The end.

    def restore(self) -> Any:
        """Remove all hooks and return the wrapped model, or schedule, as it was; free process
        groups and files.

        Repeated calls do nothing. The backward of a graph made before it still has its hooks, and
        checkpointed parts are recomputed with their edits; with several ranks, the memory for that
        is freed after it, or with the graph. An editing function that refers to this
        FlexModel keeps it alive until then.
        """
        self.__dict__.pop("fmps", None)  # with its connections
        self._core.runs.end_left()
        try:
            if self._runner.session is not None:
                self._runner.session.close()
        finally:
            self._finalizer()
        return self._wrapped

    def __enter__(self) -> FlexModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if self._runner.session is not None:
            self._runner.session.close(kind)
        self.restore()

    def __copy__(self) -> FlexModel:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> FlexModel:
        raise TypeError(
            "a FlexModel can't be copied, since it stands for ranks of a run; copy flex.module "
            "and wrap the copy"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a FlexModel can't be pickled; save flex.state_dict(), or flex.module after restore()"
        )

    def _check_open(self) -> None:
        check_open(self._core)

    def _check_whole(self, what: str) -> None:
        """Check that this is open, and no pipeline."""
        self._check_open()
        self._runner.check_runs_whole_model(what)

    def _check_collective(self) -> None:
        """Check that a collective over all ranks of the model can begin."""
        self._check_open()
        if not self._communicator.is_local:
            self._core.communicator.check_no_edit()


def _is_of_torch(hook: object) -> bool:
    """Return whether it is a hook of torch's own tools (``CommDebugMode``), which they register at
    every module, the FlexModel included.
    """
    return callable(hook) and str(getattr(hook, "__module__", "")).startswith("torch.")


def _is_schedule(value: object) -> bool:
    """Return whether it is a schedule of a pipeline, whose module is not imported for the test."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    return schedules is not None and isinstance(value, schedules._PipelineSchedule)
