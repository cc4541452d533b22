"""FlexModel over the schedule of a pipeline: hooks of all stages, by the unsplit model's names."""

from __future__ import annotations

import contextlib
import functools
import weakref
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh, group_ranks
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.hooks.registration import HookHandle
from flex_model.hooks.save_ctx import StageContext
from flex_model.hooks.table import EVERYTHING, Choice
from flex_model.hooks.tracking import Follow
from flex_model.inspection import DryRun, VerifyReport
from flex_model.integrations import cut, fsdp
from flex_model.integrations.mesh_sources import Source
from flex_model.layouts.sources import BatchDim, check_batch_dim
from flex_model.layouts.statements import Statement
from flex_model.model import FlexModel, check_arguments, find_mesh
from flex_model.names import find_parameter, shapes_by_name
from flex_model.pipelining.agreement import StepCall, check_dims
from flex_model.pipelining.pictures import modules_of
from flex_model.pipelining.schedule import stages_of
from flex_model.pipelining.stages import LocalStages, targets
from flex_model.pipelining.steps import Pipeline
from flex_model.records.store import ActivationStore
from flex_model.records.store.session import Session
from flex_model.runs.step import Step
from flex_model.visualize.model_map import Modules

_CHOICES = {"batch_mode": ("micro", "full"), "return_on": ("last", "all")}


class PipelinedFlexModel(FlexModel):
    """What ``FlexModel(schedule, ...)`` makes: the hooks of FlexModel over a pipeline's stages.

    Example::

        stage = PipelineStage(my_part, rank, 2, device)  # or pipe.build_stage(rank, device)
        flex = FlexModel(ScheduleGPipe(stage, 4, loss_fn=mse), activations := {})
        flex.register_forward_hook(HookFunction("layers.3.fc1", editing_function=halve))
        out = flex(x, target=y, losses=(losses := []))
        # rank 0: activations["layers.3.fc1"][0] is (batch, ...); out is on the last stage's rank

    Names are those of the unsplit model, as the stages have them; hooks are registered in the same
    order on every rank, also for modules of other ranks. Records are of the whole batch, on rank 0
    when the call returns. Gradients are those of the mean loss over micro-batches
    (``scale_grads=True``). After the step rank 0's ``save_ctx`` has what any stage wrote, or every
    rank's (``save_ctx_on="all"``).

    Args:
        schedule: Any of ``torch.distributed.pipelining``, before its first step.
        tensor_parallel_size, ...: As of FlexModel; left at 1 they come from the stages' group and
            from the modules' own mesh. ``process_group``: the ranks of all stages.
        batch_mode: ``"micro"``: an editing function is called once per micro-batch, with its rows.
            ``"full"``: a step runs as one micro-batch, whatever the schedule: the function sees
            the whole batch. Can be set; read at each step.
        return_on: ``"last"``: ranks with the last stage get the output, the others None;
            ``"all"``: every rank gets it, detached.
        microbatch_dim: Along which dim the records of micro-batches are joined, or a dict of it by
            module name. Default: as the schedule splits its first input, else 0. Tensors that have
            no rows of the batch are the same in all micro-batches, and kept once.

    Attributes:
        schedule: The one given. ``module`` holds this rank's stages.

    Raises:
        ValueError: sizes that contradict the stages' groups; stages that no rank has.
        HookMismatchError: ranks give different schedules or settings.

    Collective over all ranks of the pipeline: the constructor, calls, everything about parameters
    and trainable modules. Registering hooks is local.
    """

    def __init__(
        self,
        schedule: Any,
        output_ptr: dict[str, list[Tensor]] | ActivationStore | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        *,
        batch_mode: str = "micro",
        return_on: str = "last",
        microbatch_dim: int | Mapping[str, int] | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        edit_on: str = "all",
        output_ranks: str = "rank0",
        save_ctx_on: str = "rank0",
        timeout: float = 60.0,
        batch_dim: BatchDim = 0,
        follow: Follow = "new",
    ) -> None:
        nn.Module.__init__(self)
        stages = stages_of(schedule)
        if "step" in vars(schedule):
            raise TypeError("the schedule is that of a FlexModel already; restore() it first")
        root = LocalStages(stages)
        check_arguments(root, output_ptr, edit_on, output_ranks, save_ctx_on, timeout, follow)
        for name, value in (("batch_mode", batch_mode), ("return_on", return_on)):
            _check_choice(name, value)
        sizes = (tensor_parallel_size, pipeline_parallel_size, data_parallel_size)
        along = Source("the stages' process group", _along(stages[0].group), is_exact=False)
        mesh = find_mesh(root, sizes, process_group, device_mesh, float(timeout), [along])
        step = Step()
        core = HookCore(
            root,
            mesh,
            {},
            StageContext(),
            nn.ModuleDict(),
            edit_on,
            "rank0",
            float(timeout),
            step,
            batch_dim=check_batch_dim(batch_dim),
            follow=follow,
        )
        self.__dict__["schedule"] = schedule
        self.__dict__["_records"] = output_ptr if isinstance(output_ptr, dict) else {}
        self.batch_mode, self.return_on = batch_mode, return_on
        self.microbatch_dim = microbatch_dim
        self._choice: Choice | None = None  # of an active()
        self._is_first_of_run, self._has_batch = True, False
        pipeline = None
        try:
            pipeline = Pipeline(
                schedule,
                core,
                step,
                float(timeout),
                [edit_on, output_ranks, mesh.describe(), save_ctx_on],
                output_ranks == "all",
                save_ctx_on == "all",
            )
            check_dims(microbatch_dim, pipeline.directory)
        except BaseException:
            (core if pipeline is None else pipeline).close()
            raise
        self.__dict__["_pipeline"] = pipeline
        if isinstance(output_ptr, ActivationStore):
            self.__dict__["_store"] = output_ptr
            try:
                pipeline.open_store(output_ptr, functools.partial(_taken, self._records))
            except BaseException:
                pipeline.close()
                raise
        self._hold(core, process_group, pipeline.close)
        _overlay(schedule, weakref.ref(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CHOICES:
            _check_choice(name, value)
        super().__setattr__(name, value)

    @property
    def output_ptr(self) -> dict[str, list[Tensor]] | ActivationStore:
        return self.__dict__.get("_store") or self._records

    @property
    def _session(self) -> Session | None:
        return self._pipeline.session

    @property
    def save_ctx(self) -> Namespace:
        return self._core.save_ctx

    @property
    def _communicator(self) -> Communicator:
        return self._pipeline.world

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The indices of the stages that have a module of this name. Local.

        Raises:
            ValueError: there is none; the message has the nearest names.
        """
        return self._pipeline.directory.stages_of(name)

    # Running.

    def __call__(
        self,
        *args: Any,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> Any:
        return nn.Module.__call__(self, *args, groups=groups, complement=complement, **kwargs)

    def forward(
        self,
        *args: Any,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run one step of the schedule, with the hooks of ``groups``: forward and, with a
        ``loss_fn`` and gradients on, backward.

        Args:
            args: Inputs of the whole batch, used on the rank of the first stage.
            target, losses: Used on the rank of the last stage. ``losses`` is refilled: one loss
                per micro-batch.
            kwargs: On every rank; each stage is given those that its forward takes.

        Returns:
            The merged output on the rank of the last stage, else None (see ``return_on``).

        Collective over all ranks of the pipeline.

        Raises:
            ValueError: inputs that can't be split or run, an unknown group; on every rank, before
                anything is sent.
            HookError: an editing function failed on some rank; on every rank, after the step was
                finished without edits. Gradients of that step mean nothing; the next step works.
            HookMismatchError: ranks differ in hooks or in how they call it.
        """
        return self._step(args, kwargs, target, losses, return_outputs, (groups, complement))

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Tensor | None,
        losses: list[Tensor] | None,
        return_outputs: bool,
        groups: tuple[str | Iterable[str], bool],
        forward_only: bool = False,
        until: list[tuple[str, str]] | None = None,
    ) -> Any:
        self._check_open()
        choice = self._core.table.choice(*groups)
        if self._choice is not None and choice == EVERYTHING:
            choice = self._choice
        has_backward = (
            self.schedule._loss_fn is not None and torch.is_grad_enabled() and not forward_only
        )
        call = StepCall(
            args,
            kwargs,
            target,
            losses,
            return_outputs,
            choice,
            self.batch_mode,
            self.return_on,
            self.microbatch_dim,
            has_backward,
            not self._is_first_of_run,
            until,
        )
        session = self._session
        try:
            if session is not None:
                if self._is_first_of_run:
                    session.begin_run()
                    self._has_batch = False
                self._has_batch |= bool(self._core.table.chosen(choice))
                session.check_hooks(self._core.digests.described())
            result = self._pipeline.run(call, self._records)
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
        """A store has all that a run recorded. Collective."""
        if self._session is not None and self._has_batch:
            self._session.end_run(is_whole=True)
        elif self._session is not None:
            self._session.in_run = False

    def run_until(
        self,
        module_name: str | None,
        *args: Any,
        groups: str | Iterable[str] = "all",
        complement: bool = False,
        **kwargs: Any,
    ) -> None:
        choice = (groups, complement)
        with self.active(*choice) if choice != ("all", False) else contextlib.nullcontext():
            until = self._names_until(module_name)
            self._step(args, kwargs, None, None, False, choice, forward_only=True, until=until)

    run_until.__doc__ = FlexModel.run_until.__doc__

    def _names_until(self, module_name: str | None) -> list[tuple[str, str]]:
        table = self._core.table
        choice = table.choice("all", False) if self._choice is None else self._choice
        if module_name is not None:
            self._pipeline.directory.stage_of(module_name)
            return [(module_name, "forward")]
        found = [
            (registration.name, registration.kind)
            for registration in table.chosen(choice)
            if registration.kind in ("forward", "forward_pre")
        ]
        if not found:
            raise ValueError(cut.NO_HOOK)
        return found

    @contextlib.contextmanager
    def active(
        self, groups: str | Iterable[str] = "all", complement: bool = False
    ) -> Iterator[FlexModel]:
        """Inside, steps use these hooks, and their records append. With a store they are one batch,
        and the end is collective.

        Raises:
            ValueError: an unknown group; the message has the nearest names.
        """
        before = self._choice
        self._choice = self._core.table.choice(groups, complement)
        try:
            yield self
            if before is None and not self._is_first_of_run:
                self._end_batch()
        except BaseException:
            if self._session is not None:
                self._session.fail_run()
            raise
        finally:
            self._choice = before
            self._is_first_of_run = before is None

    # Hooks.

    def _register(
        self, hook_function: HookFunction, kind: str, groups: Iterable[str] = ()
    ) -> HookHandle:
        if not isinstance(hook_function, HookFunction):
            raise TypeError(f"expected a HookFunction, got {type(hook_function).__name__}")
        self._check_open()
        core, directory = self._core, self._pipeline.directory
        for parameter in hook_function.parameter_names:
            directory.holders_of_parameter(parameter)
        name = hook_function.module_name
        found: Sequence[Any]
        if kind == "tensor":
            holders = directory.holders_of_parameter(name)
            if len(holders) > 1:
                raise ValueError(
                    f"register_hook: parameter {name!r} is on the stages {holders}, each of which "
                    "has a part of its gradient only; add up its .grad on them after the step"
                )
            found = [
                _kept_parameter(stage.submod, name)
                for stage in self._pipeline.runner.stages
                if stage.stage_index == holders[0]
            ]
        else:
            index = directory.stage_of(name)
            found = [
                module
                for stage in self._pipeline.runner.stages
                if stage.stage_index == index
                for module in targets(stage.submod, name)
            ]
        registrations = core.register(hook_function, kind, found, groups, "requested")

        def remove() -> None:
            core.table.unregister(registrations)

        return HookHandle(remove, hook_function)

    def _hookable_names(self, hook_type: str) -> list[str]:
        directory = self._pipeline.directory
        return directory.parameter_names if hook_type == "tensor" else directory.called_names

    def _names_of_statement(self, statement: Statement) -> list[str]:
        directory = self._pipeline.directory
        if isinstance(statement.pattern, type):
            return directory.names_of_type(statement.pattern)[0]
        is_parameter = statement.kind == "parameter"
        names = directory.parameter_names if is_parameter else directory.module_names
        return [name for name in names if statement.matches(name, self.module)]

    def _names_of_type(self, kind: type) -> tuple[list[str], list[str]]:
        return self._pipeline.directory.names_of_type(kind)

    @property
    def wrapped_module_names(self) -> list[str]:
        """Names of all modules of the pipeline, in the order of its stages."""
        return self._pipeline.directory.module_names

    # Parameters.

    def get_module_parameter(
        self, parameter_name: str, expected_shape: Sequence[int | None] | None = None
    ) -> Tensor:
        self._check_open()
        return self._pipeline.parameter(parameter_name, expected_shape)

    def set_module_parameter(self, parameter_name: str, full: Tensor) -> None:
        self._check_open()
        self._pipeline.set_parameter(parameter_name, full)

    def get_module_gradient(
        self, parameter_name: str, expected_shape: Sequence[int | None] | None = None
    ) -> Tensor | None:
        self._check_open()
        return self._pipeline.gradient(parameter_name, expected_shape)

    def iterate_parameters(
        self, expected_shapes: Mapping[str, Sequence[int | None]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self._check_open()
        names = self._pipeline.directory.parameter_names
        shapes = shapes_by_name(expected_shapes, {name: name for name in names})
        return ((name, self._pipeline.parameter(name, shapes.get(name))) for name in names)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """What ``state_dict`` gave: of this rank's stages, and of the trainable modules. Local."""
        for prefix, module in (
            ("module.", self.module),
            ("trainable_modules.", self.trainable_modules),
        ):
            own = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
            module.load_state_dict(own, strict, assign)

    # Seeing it.

    def _communicators(self) -> dict[str, Communicator]:
        pipeline = self._pipeline
        communicators = {
            "all": pipeline.world,
            "line": pipeline.line,
            "stage": self._core.communicator,
        }
        if pipeline.line is pipeline.world:
            del communicators["line"]
        return communicators

    def _modules_to_show(self, args: tuple[Any, ...]) -> Modules:
        self._check_open()
        if args:
            self._refuse("show with inputs")
        return modules_of(self._core, self._pipeline.directory, type(self.schedule).__name__)

    # What needs the whole model on one rank.

    def dry_run(self, *args: Any, **kwargs: Any) -> DryRun:
        self._refuse("dry_run")

    def verify(self, reference: Any, *args: Any, **kwargs: Any) -> VerifyReport:
        self._refuse("verify")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} runs a model, and a pipeline's stages are run by their schedule only; call "
            f"{what} on the unsplit model, or compare the records of a step"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            schedule = self.__dict__.get("schedule")
            if schedule is None or not hasattr(schedule, name):
                raise AttributeError(
                    f"neither FlexModel nor the wrapped {type(schedule).__name__} has an attribute "
                    f"{name!r}"
                ) from None
        return getattr(schedule, name)

    def restore(self) -> Any:
        """Take all hooks off; the schedule and its stages as they were, which is returned."""
        super().restore()
        return self.schedule


def _kept_parameter(root: nn.Module, name: str) -> nn.Parameter:
    """The parameter whose ``.grad`` a step leaves: under FSDP2 the sharded one."""
    return fsdp.sharded_parameter(root, name, find_parameter(root, name)[2])


def _taken(records: dict[str, list[Any]]) -> dict[str, list[Any]]:
    taken = dict(records)
    records.clear()
    return taken


def _along(group: dist.ProcessGroup | None) -> Mesh:
    """The ranks of one pipeline."""
    ranks = group_ranks(group)
    return Mesh(ranks, ranks.index(dist.get_rank()), pp_size=len(ranks))


def _check_choice(name: str, value: object) -> None:
    if value not in _CHOICES[name]:
        first, second = _CHOICES[name]
        raise ValueError(f"FlexModel: {name} must be {first!r} or {second!r}, got {value!r}")


def _overlay(schedule: Any, flex: weakref.ref[PipelinedFlexModel]) -> None:
    """Steps that the schedule itself is asked for are those of the FlexModel, while it lives."""

    def step(*args, target=None, losses=None, return_outputs=True, **kwargs):
        return _run(False, args, kwargs, target, losses, return_outputs)

    def evaluate(*args, target=None, losses=None, **kwargs):
        return _run(True, args, kwargs, target, losses, True)

    def _run(forward_only, args, kwargs, target, losses, return_outputs):
        model = flex()
        assert model is not None  # its finalizer takes the overlay off
        everything = ("all", False)
        return model._step(args, kwargs, target, losses, return_outputs, everything, forward_only)

    schedule.step, schedule.eval = step, evaluate
