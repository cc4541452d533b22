"""Steps of a pipeline with hooks: agreed on by all ranks before anything is sent, run along the
schedule, and brought to an end together.

Nothing of ours crosses stages while the schedule runs: records, ``save_ctx``, gradients of
trainable modules and errors do when it is over, through groups of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.tensor_dicts import describe, exchange_json, from_rank
from flex_model.errors import HookError, agreed
from flex_model.hooks import save_ctx
from flex_model.hooks.context import RunContext
from flex_model.hooks.core import HookCore
from flex_model.hooks.step import Step
from flex_model.hooks.until import Until
from flex_model.layouts.resolve import ExpectedShape
from flex_model.names import shapes_by_name
from flex_model.pipelining import chunks, shapes, step_records
from flex_model.pipelining.agreement import (
    Plan,
    StepCall,
    agree,
    attempt,
    check_alike,
    raise_told,
)
from flex_model.pipelining.ending import StepEnd
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.schedule import StageRunner
from flex_model.pipelining.stages import Directory, StageParameters, targets
from flex_model.pipelining.stages import describe as describe_stage
from flex_model.records.store import ActivationStore
from flex_model.records.store.opening import config_hash
from flex_model.records.store.session import Session


class Pipeline:
    """The stages of a schedule over all ranks. The constructor and ``run`` are collective over
    them.

    Args:
        core: Of this rank's stages.
        timeout_s: Of one wait for other ranks.

    Attributes:
        world, line: Channels to all ranks, and to those of this rank's pipeline.
        settings: What must be alike on all ranks, besides what a call says.
    """

    def __init__(
        self,
        schedule: Any,
        core: HookCore,
        step: Step,
        timeout_s: float,
        settings: list[Any],
        on_all_ranks: bool,
        context_on_all: bool,
    ) -> None:
        mesh = core.mesh
        self.schedule, self.core, self.settings = schedule, core, settings
        self._step = step
        along = mesh.axis_ranks("pp")
        self.world = Communicator(Mesh(mesh.ranks, mesh.rank, tp_size=mesh.num_ranks), timeout_s)
        self.line = (
            self.world
            if len(along) == mesh.num_ranks
            else Communicator(Mesh(along, mesh.coordinates["pp"], tp_size=len(along)), timeout_s)
        )
        self.session: Session | None = None  # where records go to a store
        self.runner = StageRunner(schedule, step, core, core.modules)
        self.parameters = StageParameters(
            self.runner.stages, core.communicator, core.tracking.statements
        )
        core.parameters = self.parameters
        try:
            self.directory = self._meet()
        except BaseException:
            self.close()
            raise
        self._end = StepEnd(
            core,
            step,
            self.runner.stages,
            self.directory,
            self.world,
            self.line,
            on_all_ranks,
            context_on_all,
        )
        self._connected: str | None = None  # for which inputs
        self._have_rows: tuple[Any, dict[int, bool]] | None = None

    def open_store(self, store: ActivationStore, take: Callable[[], dict[str, list[Any]]]) -> None:
        """Records go there from now on, from rank 0, which has them in full. Collective."""
        stage = self.runner.stages[0].submod
        self.session = Session(store, self.world, config_hash(stage), take, self.core.mesh.dp_size)

    def close(self) -> None:
        """Leave stages and schedule as they were, and give groups back. Local."""
        if self.session is not None:
            self.session.abandon()
        for name in ("step", "eval"):
            self.schedule.__dict__.pop(name, None)
        for stage in self.runner.stages:
            if stage.__dict__.pop("_settled", False):
                stage.inputs_meta = stage._outputs_meta = None
        self.runner.close()
        self.core.close()
        for communicator in {self.world, self.line}:
            communicator.close()

    def _meet(self) -> Directory:
        """Tell all ranks of this rank's stages, and hear of theirs."""
        schedule = self.schedule
        mine = {
            "stages": [describe_stage(stage) for stage in self.runner.stages],
            "schedule": [
                type(schedule).__name__,
                schedule._n_microbatches,
                schedule._loss_fn is not None,
                schedule.scale_grads,
                schedule._num_stages,
            ],
            "settings": self.settings,
        }
        told = exchange_json(self.world, mine, "FlexModel over a schedule: its stages")
        for what in ("schedule", "settings"):
            check_alike([of_rank[what] for of_rank in told], f"the {what} of a pipeline")
        grid = len(self.core.mesh.stage_ranks)
        described: dict[int, Any] = {}
        places: dict[int, int] = {}
        for rank, of_rank in enumerate(told):
            for stage in of_rank["stages"]:
                index, place = stage["index"], rank // grid
                if places.setdefault(index, place) != place:
                    raise agreed(
                        ValueError(
                            f"FlexModel: stage {index} is at the places {places[index]} and "
                            f"{place} of the pipeline; give each stage to one rank of a pipeline, "
                            "and data_parallel_size or tensor_parallel_size where several ranks "
                            "hold it"
                        )
                    )
                described[index] = stage
        missing = [i for i in range(schedule._num_stages) if i not in described]
        if missing:
            raise agreed(ValueError(f"FlexModel: no rank of the pipeline has the stages {missing}"))
        order = range(schedule._num_stages)
        return Directory([described[i] for i in order], [places[i] for i in order])

    # A step.

    def run(self, call: StepCall, output_ptr: dict[str, list[Tensor]]) -> Any:
        """Run one step; what the call returns on this rank."""
        plan = agree(call, self.schedule, self.runner.stages, self.core, self.directory, self.world)
        core, step = self.core, self._step
        step.is_running, step.is_silent, step.failure, step.is_of_model = True, True, None, False
        step.rows = plan.rows
        try:
            self._prepare(call, plan)
            step.is_silent = False
            core.records.output_ptr.clear()
            if not call.appends:
                for registration in self.core.table.chosen(call.choice):
                    output_ptr.pop(registration.hook_function.record_name, None)
            return self._run(call, plan, output_ptr)
        finally:
            step.is_running = step.is_silent = False
            core.records.output_ptr.clear()

    def _prepare(self, call: StepCall, plan: Plan) -> None:
        """Shapes and buffers for these inputs, where they are not those of the step before."""
        if self._connected != plan.inputs:
            self._connected = None
            with torch.inference_mode(False):
                args, kwargs = plan.arg_chunks[0], plan.kwarg_chunks[0]
                error = shapes.settle(
                    self.runner.overlaid, self.directory, self.line, args, kwargs, call.has_backward
                )
                told = exchange_json(self.world, error, "the shapes of the pipeline's stages")
                if any(told):
                    text = next(text for text in told if text)
                    raise agreed(ValueError(f"the pipeline can't run these inputs: {text}"))
                self.runner.connect(plan.number, call.has_backward, args, kwargs)
            self._connected = plan.inputs

    def _run(self, call: StepCall, plan: Plan, output_ptr: dict[str, list[Tensor]]) -> Any:
        core, step, schedule = self.core, self._step, self.schedule
        have_rows = self._find_rows(call, plan)
        self._read_parameters(call)
        for registration in self.core.table.chosen(call.choice):
            function = registration.hook_function
            dim = self._dim(call, function.record_name)
            if registration.kind != "tensor":
                registration.split_dim = dim if plan.number > 1 else None
                registration.expected_shape = chunks.part_of_shape(
                    function.expected_shape, dim, plan.rows
                )
        run = core.begin(call.choice)
        run.seed = plan.seed
        divisor = plan.number if schedule.scale_grads else 1
        core.caller.gradient_scale = core.mesh.dp_size * divisor
        gradients = Gradients(core, divisor)
        self._cut(call.until)
        losses: list[Tensor] = []
        output = None
        before = save_ctx.begin_step(core.save_ctx)
        try:
            output = self.runner.run(
                plan.arg_chunks,
                plan.kwarg_chunks,
                plan.target_chunks,
                losses,
                call.return_outputs,
                call.has_backward,
            )
            gradients.scale()
            if call.has_backward and not step.is_silent:
                gradients.run_hooks()
        except BaseException as error:
            step.fail_in_model(error, "schedule")
        consumed = self._end_run(run)
        found = self._join_records(call, plan, have_rows)
        try:
            failed, output = self._end.finish(
                call, found, before, gradients, consumed, output, output_ptr
            )
        except BaseException:
            gradients.put_back(is_failed=True)
            raise
        gradients.put_back(is_failed=bool(failed))
        if failed:
            self._connected = None
            self._end.raise_failure(failed)
        if call.losses is not None and any(stage.is_last for stage in self.runner.stages):
            call.losses[:] = losses  # none, where there is no target
        return output

    def _cut(self, until: list[tuple[str, str]] | None) -> None:
        """Have stages compute as far as to the last of these sites; None: all of it."""
        last = self.directory.num_stages
        if until is not None:
            last = max(self.directory.stage_of(name) for name, _ in until)
        for overlaid in self.runner.overlaid:
            index = overlaid.stage.stage_index
            overlaid.is_beyond, overlaid.until = index > last, None
            if until is not None and index == last:
                overlaid.until = Until(
                    [
                        (targets(overlaid.stage.submod, name), kind)
                        for name, kind in until
                        if self.directory.stage_of(name) == last
                    ]
                )

    def _find_rows(self, call: StepCall, plan: Plan) -> dict[tuple[str, str], bool]:
        """By record's name and kind: whether there are rows of the batch in it; for micro-batches
        of one row only.
        """
        in_all = sum(of_rank[0] for of_rank in plan.rows)
        if plan.number == 1 or in_all != 1:
            return {}
        mine = [r for r in self.core.table.chosen(call.choice) if r.module is not None]
        key = (plan.inputs, tuple(r.index for r in mine))
        if self._have_rows is None or self._have_rows[0] != key:
            self._step.is_silent = True
            found = shapes.have_rows(
                self.runner.overlaid,
                [r for r in mine if r.kind != "tensor"],
                plan.arg_chunks[0],
                plan.kwarg_chunks[0],
                lambda registration: self._dim(call, registration.hook_function.record_name),
            )
            self._step.is_silent = False
            self._have_rows = key, found
        told = self._have_rows[1]
        return {
            (r.hook_function.record_name, r.kind): told[r.index] for r in mine if r.index in told
        }

    def _dim(self, call: StepCall, name: str) -> int:
        given = call.microbatch_dim
        if isinstance(given, int):
            return given
        default = chunks.batch_dim(self.schedule)
        if given is None:
            return default
        modules = [
            r.name
            for r in self.core.table.chosen(call.choice)
            if r.hook_function.record_name == name
        ]
        return next((given[module] for module in modules if module in given), default)

    def _read_parameters(self, call: StepCall) -> None:
        """Full parameters that hooks named, whichever stage has them, before the schedule runs."""
        names = {
            name: None
            for registration in self.core.table.chosen(call.choice)
            for name in registration.hook_function.parameter_names
        }
        found = {name: self.get(name, None) for name in names}
        self.core.caller.full_parameter = found.__getitem__

    def _end_run(self, run: RunContext) -> bool:
        """Records of the stage's ranks to its first; whether an edit drew random numbers here."""
        consumed, run.consumed = run.consumed, False
        try:
            self.core.end(run, None)
        except HookError as error:
            self._step.fail(str(error), error)
        self.core.table.forget_calls()
        return consumed

    def _join_records(
        self, call: StepCall, plan: Plan, have_rows: dict[tuple[str, str], bool]
    ) -> list[step_records.StageRecords]:
        if self._step.failure or not self.core.records.keeps_full:
            return []
        try:
            return step_records.joined(
                self.core.records.output_ptr,
                plan.number,
                plan.rows,
                lambda name: self._dim(call, name),
                lambda name, kind: have_rows.get((name, kind)),
                self._expected_shapes(call),
            )
        except ValueError as error:
            self._step.fail(str(error), error)
            return []

    def _expected_shapes(self, call: StepCall) -> dict[tuple[str, str], ExpectedShape]:
        """Of records that one hook makes: what its ``expected_shape`` says of the whole batch."""
        found: dict[tuple[str, str], list[ExpectedShape]] = {}
        for registration in self.core.table.chosen(call.choice):
            function = registration.hook_function
            shape = function.expected_shape if function.select is None else None
            found.setdefault((function.record_name, registration.kind), []).append(shape)
        return {key: shapes[0] for key, shapes in found.items() if len(shapes) == 1}

    # Parameters.

    def get(self, name: str, expected_shape: Any, *, sharded: bool = False) -> Tensor:
        """A full parameter, from the first stage that has it. Collective."""
        return self._read(name, lambda p: p.get(name, expected_shape, sharded=sharded))

    def iterate(
        self, expected_shapes: Mapping[str, Sequence[int | None]] | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full parameters, one at a time. Collective."""
        names = self.directory.parameter_names
        shapes = shapes_by_name(expected_shapes, {name: name for name in names})
        return ((name, self.get(name, shapes.get(name), sharded=True)) for name in names)

    def gradient(self, name: str, expected_shape: Any) -> Tensor | None:
        """A parameter's full gradient, from the first stage that has it. Collective."""
        return self._read(name, lambda p: p.gradient(name, expected_shape))

    def _read(self, name: str, read: Any) -> Any:
        first = self.directory.holders_of_parameter(name)[0]
        place = self.directory.places[first]
        value, error = None, None
        if first in self.parameters.of_stage:
            value, error = attempt(lambda: read(self.parameters.of_stage[first]))
        tensors = [] if value is None else [value]
        told = exchange_json(self.line, [error, describe(tensors)], f"parameter {name!r}")
        raise_told([of_rank[0] for of_rank in told])
        received = from_rank(self.line, place, tensors, told[place][1])
        return received[0] if received else None

    def set(self, name: str, full: Tensor) -> None:
        """Write a full parameter on all stages that have it. Collective."""
        error = None
        for stage in self.directory.holders_of_parameter(name):
            mine = self.parameters.of_stage.get(stage)
            if mine is not None and error is None:
                _, error = attempt(lambda mine=mine: mine.set(name, full))
        raise_told(exchange_json(self.world, error, f"a new value of parameter {name!r}"))
