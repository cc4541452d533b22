"""Runs the steps of a schedule with hooks, by the unsplit model's names, and the forwards
of a model that transformers has split into stages (``DistributedConfig(pp_size=...)``).

Such a model has no schedule: on every rank its ``forward`` receives hidden states, runs this rank's
layers, sends hidden states, and takes part in a broadcast of the logits. One forward is a step of
one micro-batch. An exception in the middle of it leaves no other stage waiting, for zeros replace
what was not sent.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed.communicator import Communicator
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import Registration
from flex_model.hooks.site import Moment
from flex_model.hooks.table import EVERYTHING, Choice
from flex_model.inspection.tree import Node
from flex_model.integrations import cut, fsdp2, refused
from flex_model.integrations.transformers_private import cache_of, pipeline_stage, with_cache_of
from flex_model.names import find_parameter
from flex_model.pipelining.instrumented_stage import LocalSchedule, StageStep, StepCall, StepPlan
from flex_model.pipelining.local_pipeline import LocalPipeline, check_dims
from flex_model.pipelining.stages import StageIndex, find_targets
from flex_model.pipelining.step_runner import StepRunner
from flex_model.records.store.session import Session, config_hash
from flex_model.runs.module import check_open
from flex_model.runs.settings import Groups, Settings, refuse_of_steps
from flex_model.runs.step import MicrobatchState
from flex_model.runs.until import ended_at
from flex_model.visualize.model_map import Modules

_OF_STEP = ("target", "losses", "return_outputs")  # keyword arguments of the step, not of stages


class ScheduleRunner:
    """Runs the steps of a schedule with hooks. The constructor and steps are collective over all
    ranks of the pipeline.

    Attributes:
        core: The engine of the hooks on this rank's stages.
        index: The modules and parameters of all stages, by name.
        parameters: Reads and writes the parameters of all stages in full.
        session: The session of the store that records go to, if any.
        step_settings: Those of the next steps.
        everyone: The communicator to all ranks of the model.
    """

    def __init__(self, schedule: Any, settings: Settings, local_class: Any = LocalSchedule) -> None:
        self._pipeline = pipeline = LocalPipeline(schedule, settings, local_class)
        self.core, self.index, self.everyone = pipeline.core, pipeline.index, pipeline.everyone
        self._shown: Any = schedule  # its class stands for the model in ``show``
        self.parameters = pipeline.parameters
        self.session: Session | None = None
        self.step_settings = settings
        self._choice: Choice | None = None  # of an active()
        self._is_first_of_run, self._has_batch = True, False
        self._steps = StepRunner(pipeline)
        output_ptr = settings.output_ptr
        self._records = output_ptr if isinstance(output_ptr, dict) else {}
        try:
            check_dims(settings.microbatch_dim, self.index)
            if not isinstance(output_ptr, dict):
                config = config_hash(pipeline.local.stages[0].submod)
                self.session = Session(
                    output_ptr,
                    pipeline.world,
                    config,
                    self._take_records,
                    dp_size=pipeline.mesh.dp_size,
                )
        except BaseException:
            pipeline.close()
            raise
        vars(schedule).update(  # until close()
            step=lambda *args, **kwargs: self.run(args, kwargs),
            eval=lambda *args, **kwargs: self.run(args, kwargs, forward_only=True),
        )

    def _take_records(self) -> dict[str, list[Any]]:
        taken = dict(self._records)
        self._records.clear()
        return taken

    def close(self) -> None:
        """Leave stages and schedule as they were, and free groups and files. Local."""
        if self.session is not None:
            self.session.abandon()
        for name in ("step", "eval"):
            vars(self._pipeline.schedule).pop(name, None)
        self._pipeline.close()

    @property
    def communicators(self) -> dict[str, Communicator]:
        """The communicators that hooks use; the first is to all ranks of a step."""
        world, line = self._pipeline.world, self._pipeline.line
        lines = {} if line is world else {"line": line}
        return {"all": world, **lines, "stage": self.core.communicator}

    @property
    def is_running(self) -> bool:
        return self.core.runs.current is not None or self._choice is not None

    def change(self, name: str, value: Any) -> None:
        """Change a setting of the next steps."""
        self.step_settings = replace(self.step_settings, **{name: value})

    def stages_of(self, name: str) -> tuple[int, ...]:
        return self.index.stages_of(name)

    # Running.

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups = "all",
        complement: bool = False,
        forward_only: bool = False,
    ) -> Any:
        """Run one step of the schedule, with the hooks of ``groups``. Collective over all ranks of
        the pipeline.
        """
        of_step = {name: kwargs.pop(name) for name in _OF_STEP if name in kwargs}
        choice = self.core.table.choice(groups, complement)
        return self._step(args, kwargs, choice, forward_only, **of_step)

    def run_idle(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step while no hook is active on this rank."""
        return self.run(args, kwargs)

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        choice: Choice,
        forward_only: bool,
        **of_step: Any,
    ) -> Any:
        check_open(self.core)
        if self._choice is not None and choice == EVERYTHING:
            choice = self._choice
        has_loss = self._pipeline.schedule._loss_fn is not None
        call = StepCall(
            args,
            kwargs,
            choice,
            self.step_settings,
            has_backward=has_loss and torch.is_grad_enabled() and not forward_only,
            appends=not self._is_first_of_run,
            **of_step,
        )
        session = self.session
        try:
            if session is not None:
                if self._is_first_of_run:
                    session.begin_run()
                    self._has_batch = False
                self._has_batch |= bool(self.core.table.chosen(choice))
                session.check_hooks(self.core.digests.described())
            result = self._steps.run(call, self._records)
        except BaseException:
            if session is not None:
                session.fail_run()
            raise
        finally:
            self._is_first_of_run = self._choice is None
        if self._choice is None:
            self._end_batch()
        return result

    def _end_batch(self) -> None:
        """Pass all records of a run to the store. Collective."""
        if self.session is not None and self._has_batch:
            self.session.end_run(is_whole=True)
        elif self.session is not None:
            self.session.leave_run()

    @contextlib.contextmanager
    def active(self, groups: Groups, complement: bool) -> Iterator[None]:
        """A context in which steps use these hooks, and their records append. With a store they are
        one batch, and the end is collective.
        """
        before = self._choice
        self._choice = self.core.table.choice(groups, complement)
        try:
            yield
            if before is None and not self._is_first_of_run:
                self._end_batch()
        except BaseException:
            if self.session is not None:
                self.session.fail_run()
            raise
        finally:
            self._choice = before
            self._is_first_of_run = before is None

    def run_until(
        self,
        module_name: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups,
        complement: bool,
    ) -> None:
        """Run a step's forward until this module, or the last of the hooked ones, was called."""
        choice = self.core.table.choice(groups, complement)
        if choice == EVERYTHING and self._choice is not None:
            choice = self._choice
        if module_name is not None:
            self.index.stage_of(module_name)
            until = [(module_name, "forward")]
        else:
            until = [
                (registration.name, registration.kind)
                for registration in self.core.table.chosen(choice)
                if registration.kind in ("forward", "forward_pre")
            ]
            if not until:
                raise ValueError(cut.NO_HOOK)
        self._step(args, kwargs, choice, forward_only=True, return_outputs=False, until=until)

    def interrupted(self, error: BaseException) -> None:
        """Do nothing: a step reports a Ctrl-C when it ends."""

    # Hooks.

    def targets_of(
        self, function: HookFunction, kind: str
    ) -> tuple[Sequence[nn.Module | nn.Parameter], Moment]:
        """Return the modules on this rank that stand for a hook's, or its parameter; a parameter's
        hook is called when the step ends.
        """
        for parameter_name in function.parameter_names:
            self.index.holders_of_parameter(parameter_name)
        name, local = function.module_name, self._pipeline.root.by_index
        if kind != "tensor":
            root = local.get(self.index.stage_of(name, kind))
            return [] if root is None else find_targets(root, name), "requested"
        root = local.get(self.index.holder_of_gradient(name, "register_hook"))
        if root is None:
            return [], "requested"
        # The one whose ``.grad`` a step leaves: under FSDP2 the sharded one.
        _, _, parameter = find_parameter(root, name)
        return [fsdp2.sharded_parameter(root, name, parameter)], "requested"

    # Inspection.

    def modules_to_show(self, args: tuple[Any, ...]) -> Modules:
        """Return the modules of all stages, for ``show``."""
        if args:
            self.check_runs_whole_model("show with inputs")
        return modules_of(self.core, self.index, type(self._shown).__name__)

    def check_runs_whole_model(self, operation: str) -> None:
        """RuntimeError: this needs a model that can be run without a schedule."""
        raise RuntimeError(
            f"{operation} is for a model that runs as a whole, and a pipeline's stages are run by "
            f"their schedule only; call {operation} on the unsplit model"
        )


def modules_of(core: HookCore, index: StageIndex, schedule: str) -> Modules:
    """Return the modules of the unsplit model. Local, and the same on every rank.

    Args:
        schedule: The name of its class, which stands for the model.
    """
    called, classes = set(index.called_names), index.class_names
    nodes = {"": Node("", schedule, has_forward=False, was_run=False)}
    stages: dict[str, str] = {}
    for name in index.module_names:
        # A stage may hold the module without those above it.
        for above in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            nodes.setdefault(above, Node(above, "(of several stages)", False, was_run=False))
        nodes[name] = Node(name, classes[name], name in called, was_run=False)
        numbers = index.stages_of(name)
        stages[name] = f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    num_ranks = len(core.mesh.stage_ranks)

    def where_of(registration: Registration) -> str:
        if registration.kind == "tensor":
            stage = index.holders_of_parameter(registration.name)[0]
        else:
            stage = index.stage_of(registration.name, registration.kind)
        pp_rank = index.pp_ranks[stage]
        if pp_rank == core.mesh.coordinates["pp"]:
            return ""
        return f"rank {core.mesh.ranks[pp_rank * num_ranks]} has its cost"

    return Modules(nodes, stages, where_of)


_REPLACED = ("communicate", "broadcast_from_last")


class ForwardStage:
    """This rank's stage, with the attributes of torch's stages."""

    def __init__(self, model: Any) -> None:
        place = pipeline_stage(model)
        self.submod, self.place = model, place
        self.stage_index, self.num_stages = place.pp_rank, place.pp_size
        self.is_first, self.is_last = place.pp_is_first_stage, place.pp_is_last_stage
        self.group = place.pp_group
        # The last stage has them for the head whose weight is tied to theirs.
        self.uncalled = [] if self.is_first else [model.get_input_embeddings()]

    @property
    def device(self) -> torch.device:
        return next(self.submod.parameters()).device


class ForwardSchedule:
    """A forward of the stages, with the attributes of torch's schedules."""

    _n_microbatches, _loss_fn, scale_grads = 1, None, False
    _args_chunk_spec = _kwargs_chunk_spec = None

    def __init__(self, model: nn.Module) -> None:
        self._stage = ForwardStage(model)
        self._num_stages = self._stage.num_stages


class LocalForward:
    """This rank's part of the forwards, as ``LocalSchedule`` is of a schedule's steps, and its one
    instrumented stage: the methods are replaced by which it reaches the other stages.
    """

    needs_shapes = False
    calls_roots = False  # the model's own forward runs the stages

    def __init__(self, schedule: ForwardSchedule, state: MicrobatchState, core: HookCore) -> None:
        self.stage = stage = schedule._stage
        self.stages, self.instrumented = [stage], [self]
        self.index, self.has_last = stage.stage_index, stage.is_last
        self._state, self._core = state, core
        self._forward = stage.submod.forward
        self._step = StageStep()
        self._left: list[str] = []  # what this forward has yet to send or receive
        self._kwargs: dict[str, Any] = {}
        self._is_tracked = False
        vars(stage.place).update({name: getattr(self, name) for name in _REPLACED})

    def close(self) -> None:
        """Leave the stage as it was."""
        for name in _REPLACED:
            vars(self.stage.place).pop(name, None)

    def check_inputs(self, kwargs: dict[str, Any]) -> None:
        """ValueError for inputs whose numbers would be others than the unsplit model's. Local."""
        if self.stage.is_first:  # only its cache has the keys of layer 0
            _check_cache(kwargs)

    def begin(self, step: StageStep) -> None:
        """Begin a step."""
        self._step = step

    def run(self, call: StepCall, plan: StepPlan, losses: list[Tensor]) -> Any:
        """Run the model's own forward, without autograd: transformers sends no gradients. Return
        its output, which every rank has.
        """
        stage, kwargs = self.stage, plan.kwarg_chunks[0]
        self._kwargs = kwargs
        self._left = [
            *(["recv_forward"] if not stage.is_first else []),
            *(["send_forward"] if not stage.is_last else []),
            "broadcast",
        ]
        output = None
        with torch.no_grad(), self._state.at(self.index, 0):
            try:
                if not self._step.is_skipped:
                    with ended_at(self._step.sites, stage.submod):
                        if stage.is_first:
                            self._begin_tracking(kwargs)
                        output = self._forward(**kwargs)
            except BaseException as error:
                self._state.fail_in_model(error)
            finally:
                self._end_tracking(None)
                self._kwargs = {}
            try:
                self._send_zeros(kwargs)
            except BaseException as error:
                self._state.fail_in_model(error)
        return output if call.return_outputs and not self._state.failure.has_error else None

    def _begin_tracking(self, kwargs: dict[str, Any]) -> None:
        core = self._core
        if not self._state.is_silent:
            self._is_tracked = True
            core.tracking.begin((), kwargs, core.table.active_hooks, stage=self.index)

    def _end_tracking(self, output: Tensor | None) -> None:
        if self._is_tracked:
            self._is_tracked = False
            self._core.tracking.end(output)

    # The replaced methods, with the signatures of transformers.

    def communicate(self, operation: str, **kwargs: Any) -> Tensor | None:
        self._end_tracking(kwargs.get("tensor"))
        received = self._move(operation, "communicate", operation, **kwargs)
        if received is not None:
            inputs = {k: v for k, v in self._kwargs.items() if k != "input_ids"}
            self._begin_tracking({**inputs, "inputs_embeds": received})
        return received

    def broadcast_from_last(self, tensor: Tensor | None, **kwargs: Any) -> Tensor:
        self._end_tracking(tensor)
        return self._move("broadcast", "broadcast_from_last", tensor, **kwargs)

    def _move(self, operation: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Send or receive; if this fails, the group is broken, and nothing more is sent."""
        later = [name for name in self._left if name != operation]
        self._left = []
        place = self.stage.place
        result = getattr(type(place), method)(place, *args, **kwargs)
        self._left = later
        return result

    def _send_zeros(self, kwargs: dict[str, Any]) -> None:
        """Send and receive what a forward that has ended early has left: other stages wait."""
        model, is_last = self.stage.submod, self.stage.is_last
        parameter = next(model.parameters())
        of_tensor: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
        shape = _shape_of_hidden_states(kwargs, model.config.hidden_size)
        for operation in list(self._left):
            if operation == "broadcast":
                zeros = torch.zeros(1, 1, 1, **of_tensor) if is_last else None
                self._move(operation, "broadcast_from_last", zeros, **of_tensor)
            elif shape is not None:
                zeros = torch.zeros(shape, **of_tensor)
                self._move(
                    operation, "communicate", operation, shape=shape, tensor=zeros, **of_tensor
                )


def _shape_of_hidden_states(kwargs: dict[str, Any], width: int) -> tuple[int, ...] | None:
    """Return the shape of what stages send; None where no stage can tell, so that none sends."""
    embeddings, tokens = kwargs.get("inputs_embeds"), kwargs.get("input_ids")
    if embeddings is not None:
        return tuple(embeddings.shape) if isinstance(embeddings, Tensor) else None
    return (*tokens.shape[:2], width) if isinstance(tokens, Tensor) else None


def _check_cache(kwargs: dict[str, Any]) -> None:
    """ValueError for a forward that continues from a cache where later stages would compute other
    positions or another mask: transformers asks the cache about layer 0, which they don't have.
    """
    cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
    if cache is None or not cache.get_seq_length():
        return
    inputs = kwargs.get("inputs_embeds")
    inputs = kwargs.get("input_ids") if inputs is None else inputs
    reason = ""
    if kwargs.get("position_ids") is None:
        reason = "without position_ids, they would count positions from 0"
    elif isinstance(mask, Tensor) and mask.dim() == 2 and not mask.all():
        reason = "they would not leave out the padding of attention_mask"
    elif getattr(cache, "is_compileable", False):
        reason = f"they would not see the keys in a {type(cache).__name__}"
    elif inputs is not None and inputs.shape[1] > 1:
        reason = "they would see no mask for several new positions"
    if reason:
        raise ValueError(
            "the forward continues from a cache, of whose length the later stages of transformers' "
            f"pipeline (pp_size) know nothing: {reason}; pass use_cache=False, or, with a dynamic "
            "cache, position_ids and one new position of rows without padding"
        )


_MARK = "_flex_model_runner"  # an attribute of the forward that a runner has replaced


class ForwardRunner(ScheduleRunner):
    """Runs each forward of the model as a step of one micro-batch: ``generate`` is several. The
    constructor and forwards are collective over all ranks of the model.
    """

    def __init__(self, model: Any, settings: Settings) -> None:
        settings.check_no_steps()
        if hasattr(model.forward, _MARK):
            raise TypeError(
                "the model has a FlexModel already, which runs its forwards; restore() that one "
                "first"
            )
        refused.check_copies(model)
        self._model, self._before = model, model.forward
        self._signature = inspect.signature(model.forward)
        self._called_with: Choice = EVERYTHING  # the hooks of a call of the FlexModel
        super().__init__(ForwardSchedule(model), settings, LocalForward)
        self._shown = model

        @functools.wraps(self._before)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs, self._called_with, forward_only=True)

        setattr(forward, _MARK, True)
        vars(model).update(forward=forward)

    def close(self) -> None:
        vars(self._model).update(forward=self._before)
        super().close()

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups = "all",
        complement: bool = False,
        forward_only: bool = True,
    ) -> Any:
        """Call the model with the hooks of ``groups``. Collective over all its ranks."""
        before = self._called_with
        self._called_with = self.core.table.choice(groups, complement)
        try:
            return self._model(*args, **kwargs)
        finally:
            self._called_with = before

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *of_step: Any, **more: Any
    ) -> Any:
        # By name: every stage needs the shape of what the first one gets.
        self._signature.bind(*args, **kwargs)
        kwargs = dict(zip(self._signature.parameters, args)) | kwargs
        kwargs = with_cache_of(list(self._signature.parameters), kwargs)
        return super()._step((), kwargs, *of_step, **more)

    def one_run_at_most(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all forwards are one run."""
        is_one = self._choice is not None
        return contextlib.nullcontext() if is_one else self.active("all", complement=False)

    # What belongs to schedules.

    def change(self, name: str, value: object) -> None:
        """TypeError: there are no steps here whose setting could change."""
        refuse_of_steps(name)

    def targets_of(
        self, function: HookFunction, kind: str
    ) -> tuple[Sequence[nn.Module | nn.Parameter], Moment]:
        """Return the modules on this rank that stand for a hook's."""
        if kind not in ("forward", "forward_pre"):
            raise ValueError(
                f"{kind} hook on {function.module_name!r}: transformers' stages (pp_size) send no "
                "gradients, so no backward can be hooked; load the model without pp_size, or wrap "
                "the torch.distributed.pipelining schedule that runs its stages"
            )
        return super().targets_of(function, kind)
