"""Runs the steps of a pipeline's schedule with hooks, by the unsplit model's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh, group_ranks
from flex_model.hooks.core import HookCore
from flex_model.hooks.function import HookFunction
from flex_model.hooks.save_ctx import StageContext
from flex_model.hooks.site import Moment
from flex_model.hooks.step import MicrobatchState
from flex_model.hooks.table import EVERYTHING, Choice
from flex_model.integrations import cut, fsdp
from flex_model.integrations.mesh_sources import Source
from flex_model.names import find_parameter
from flex_model.pipelining.schedule import stages_of
from flex_model.pipelining.stage_map import modules_of
from flex_model.pipelining.stage_parameters import StageParameters
from flex_model.pipelining.stages import LocalStages, find_targets
from flex_model.pipelining.step_plan import StepCall, check_dims
from flex_model.pipelining.step_runner import StepRunner
from flex_model.records.store.opening import config_hash
from flex_model.records.store.session import Session
from flex_model.runs.module import check_open
from flex_model.runs.settings import Settings
from flex_model.visualize.model_map import Modules


class ScheduleRunner:
    """Runs the steps of a schedule with hooks. The constructor and steps are collective over all
    ranks of the pipeline.

    Attributes:
        core: The engine of the hooks on this rank's stages.
        index: The modules and parameters of all stages, by name.
        parameters: Reads and writes the parameters of all stages in full.
        run_idle: Runs a step while no hook is active.
        batch_mode, return_on, microbatch_dim: As of ``FlexModel``; read at each step.
    """

    def __init__(self, schedule: Any, settings: Settings) -> None:
        stages = stages_of(schedule)
        if "step" in vars(schedule):
            raise TypeError("the schedule is that of a FlexModel already; restore() it first")
        root = LocalStages(stages)
        ranks = group_ranks(stages[0].group)
        of_pipeline = Mesh(ranks, ranks.index(dist.get_rank()), pp_size=len(ranks))
        source = Source("the stages' process group", of_pipeline, is_exact=False)
        mesh = settings.find_mesh(root, [source])
        state, timeout_s = MicrobatchState(), float(settings.timeout)
        self.core = core = HookCore(
            root,
            mesh,
            {},
            StageContext(),
            nn.ModuleDict(),
            settings.edit_on,
            "rank0",
            timeout_s,
            state,
            batch_dim=settings.batch_dim,
            follow=settings.follow,
            make_parameters=StageParameters,
        )
        output_ptr = settings.output_ptr
        self._records = output_ptr if isinstance(output_ptr, dict) else {}
        self.batch_mode, self.return_on = settings.batch_mode, settings.return_on
        self.microbatch_dim = settings.microbatch_dim
        self._schedule = schedule
        self._choice: Choice | None = None  # of an active()
        self._is_first_of_run, self._has_batch = True, False
        self.session: Session | None = None  # of the store that records go to
        steps = None
        try:
            self._steps = steps = StepRunner(
                schedule,
                core,
                state,
                timeout_s,
                [settings.edit_on, settings.output_ranks, mesh.describe(), settings.save_ctx_on],
                settings.output_ranks == "all",
                settings.save_ctx_on == "all",
            )
            self.index, self.parameters = steps.index, steps.parameters
            check_dims(self.microbatch_dim, self.index)
            if not isinstance(output_ptr, dict):
                config, take = config_hash(stages[0].submod), self._take_records
                self.session = Session(output_ptr, steps.world, config, take, mesh.dp_size)
        except BaseException:
            (core if steps is None else steps).close()
            raise
        self.run_idle = self.run
        # Until close(), which removes these.
        vars(schedule).update(step=self._run_schedule_step, eval=self._run_schedule_eval)

    def _take_records(self) -> dict[str, list[Any]]:
        taken = dict(self._records)
        self._records.clear()
        return taken

    def close(self) -> None:
        """Leave stages and schedule as they were, and free groups and files. Local."""
        if self.session is not None:
            self.session.abandon()
        for name in ("step", "eval"):
            vars(self._schedule).pop(name, None)
        self._steps.close()

    @property
    def communicators(self) -> dict[str, Communicator]:
        """The communicators that hooks use; the first is to all ranks."""
        world, line = self._steps.world, self._steps.line
        found = {"all": world, "line": line, "stage": self.core.communicator}
        if line is world:
            del found["line"]
        return found

    @property
    def is_running(self) -> bool:
        return self.core.run is not None or self._choice is not None

    def change(self, name: str, value: Any) -> None:
        """Change a setting of the next steps: a checked ``batch_mode``, ..."""
        vars(self)[name] = value

    def stages_of(self, name: str) -> tuple[int, ...]:
        return self.index.stages_of(name)

    # Running.

    def run(
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
        ``loss_fn`` and gradients on, backward. Collective over all ranks of the pipeline.
        """
        return self._run(args, kwargs, target, losses, return_outputs, (groups, complement))

    def _run_schedule_step(self, *args, target=None, losses=None, return_outputs=True, **kwargs):
        """Run ``schedule.step``, as torch has it."""
        return self._run(args, kwargs, target, losses, return_outputs)

    def _run_schedule_eval(self, *args, target=None, losses=None, **kwargs):
        """Run ``schedule.eval``, as torch has it."""
        return self._run(args, kwargs, target, losses, True, forward_only=True)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Tensor | None,
        losses: list[Tensor] | None,
        return_outputs: bool,
        groups: tuple[str | Iterable[str], bool] = ("all", False),
        forward_only: bool = False,
        until: list[tuple[str, str]] | None = None,
    ) -> Any:
        check_open(self.core)
        choice = self.core.table.choice(*groups)
        if self._choice is not None and choice == EVERYTHING:
            choice = self._choice
        has_backward = (
            self._schedule._loss_fn is not None and torch.is_grad_enabled() and not forward_only
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
        session = self.session
        try:
            if session is not None:
                if self._is_first_of_run:
                    session.begin_run()
                    self._has_batch = False
                self._has_batch |= bool(self.core.table.chosen(choice))
                session.check_hooks(self.core.described_hooks())
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
    def active(self, groups: str | Iterable[str], complement: bool) -> Iterator[None]:
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
        *args: Any,
        groups: str | Iterable[str],
        complement: bool,
        **kwargs: Any,
    ) -> None:
        """Run a step's forward until this module, or the last of the hooked ones, was called."""
        choice = (groups, complement)
        with self.active(*choice) if choice != ("all", False) else contextlib.nullcontext():
            until = self._sites_until(module_name)
            self._run(args, kwargs, None, None, False, choice, forward_only=True, until=until)

    def _sites_until(self, module_name: str | None) -> list[tuple[str, str]]:
        if module_name is not None:
            self.index.stage_of(module_name)
            return [(module_name, "forward")]
        found = [
            (registration.name, registration.kind)
            for registration in self.core.table.chosen(self._choice or EVERYTHING)
            if registration.kind in ("forward", "forward_pre")
        ]
        if not found:
            raise ValueError(cut.NO_HOOK)
        return found

    def interrupted(self, error: BaseException) -> None:
        """Do nothing: a step reports a Ctrl-C when it ends."""

    # Hooks.

    def targets_of(
        self, function: HookFunction, kind: str
    ) -> tuple[Sequence[nn.Module | nn.Parameter], Moment]:
        """Return the modules on this rank that stand for a hook's, or its parameter; a parameter's
        hook is called when the step ends.
        """
        for parameter in function.parameter_names:
            self.index.holders_of_parameter(parameter)
        name, stages = function.module_name, self._steps.local.stages
        if kind != "tensor":
            index = self.index.stage_of(name)
            roots = [stage.submod for stage in stages if stage.stage_index == index]
            return [module for root in roots for module in find_targets(root, name)], "requested"
        holders = self.index.holders_of_parameter(name)
        if len(holders) > 1:
            raise ValueError(
                f"register_hook: parameter {name!r} is on the stages {holders}, each of which "
                "has a part of its gradient only; add up its .grad on them after the step"
            )
        roots = [stage.submod for stage in stages if stage.stage_index == holders[0]]
        # The one whose ``.grad`` a step leaves: under FSDP2 the sharded one.
        parameters = [
            fsdp.sharded_parameter(root, name, find_parameter(root, name)[2]) for root in roots
        ]
        return parameters, "requested"

    # Inspection.

    def modules_to_show(self, args: tuple[Any, ...]) -> Modules:
        """Return the modules of all stages, for ``show``."""
        if args:
            self.check_runs_whole_model("show with inputs")
        return modules_of(self.core, self.index, type(self._schedule).__name__)

    def check_runs_whole_model(self, operation: str) -> None:
        """RuntimeError: this needs a model that can be run without a schedule."""
        raise RuntimeError(
            f"{operation} runs a model, and a pipeline's stages are run by their schedule only; "
            f"call {operation} on the unsplit model, or compare the records of a step"
        )
