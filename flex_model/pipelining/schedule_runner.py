"""Runs the steps of a pipeline's schedule with hooks, by the unsplit model's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
from flex_model.integrations import cut, fsdp
from flex_model.names import find_parameter
from flex_model.pipelining.instrumented_stage import LocalSchedule
from flex_model.pipelining.local_pipeline import LocalPipeline
from flex_model.pipelining.stages import StageIndex, find_targets
from flex_model.pipelining.step_plan import StepCall, check_dims
from flex_model.pipelining.step_runner import StepRunner
from flex_model.records.store.session import Session, config_hash
from flex_model.runs.module import check_open
from flex_model.runs.settings import Groups, Settings
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
        step_settings: ``batch_mode``, ``return_on`` and ``microbatch_dim`` of the next steps.
    """

    def __init__(self, schedule: Any, settings: Settings, local_class: Any = LocalSchedule) -> None:
        self._pipeline = pipeline = LocalPipeline(schedule, settings, local_class)
        self.core, self.index = pipeline.core, pipeline.index
        self.parameters = pipeline.parameters
        self.session: Session | None = None
        self.step_settings: dict[str, Any] = {
            "batch_mode": settings.batch_mode,
            "return_on": settings.return_on,
            "microbatch_dim": settings.microbatch_dim,
        }
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
                    output_ptr, pipeline.world, config, self._take_records, pipeline.mesh.dp_size
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
        found = {"all": world, "line": line, "stage": self.core.communicator}
        if line is world:
            del found["line"]
        return found

    @property
    def everyone(self) -> Communicator:
        """The communicator to all ranks of the model."""
        return self._pipeline.everyone

    @property
    def is_running(self) -> bool:
        return self.core.runs.current is not None or self._choice is not None

    def change(self, name: str, value: Any) -> None:
        """Change a setting of the next steps."""
        self.step_settings[name] = value

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
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        until: list[tuple[str, str]] | None = None,
    ) -> Any:
        check_open(self.core)
        if self._choice is not None and choice == EVERYTHING:
            choice = self._choice
        has_loss = self._pipeline.schedule._loss_fn is not None
        call = StepCall(
            args,
            kwargs,
            target,
            losses,
            return_outputs,
            choice,
            has_backward=has_loss and torch.is_grad_enabled() and not forward_only,
            appends=not self._is_first_of_run,
            until=until,
            **self.step_settings,
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
        return [fsdp.sharded_parameter(root, name, parameter)], "requested"

    # Inspection.

    def modules_to_show(self, args: tuple[Any, ...]) -> Modules:
        """Return the modules of all stages, for ``show``."""
        if args:
            self.check_runs_whole_model("show with inputs")
        return modules_of(self.core, self.index, type(self._pipeline.schedule).__name__)

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
        for above in _above(name):  # a stage may hold the module without those above it
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

    def owner_of(registration: Registration) -> str:
        is_parameter = registration.kind == "tensor"
        return registration.name.rpartition(".")[0] if is_parameter else registration.name

    return Modules(nodes, owner_of, stages, where_of)


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
