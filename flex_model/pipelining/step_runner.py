"""Runs the steps of a pipeline with hooks: planned by all ranks before anything is sent, run along
the schedule, and ended together.

Nothing of ours crosses stages while the schedule runs: records, ``save_ctx``, gradients of
trainable modules and errors do when it is over, through groups of our own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh
from flex_model.errors import HookError, agreed
from flex_model.hooks import save_ctx
from flex_model.hooks.context import RunContext
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.hooks.step import MicrobatchState
from flex_model.hooks.until import Site
from flex_model.layouts.resolve import ExpectedShape
from flex_model.pipelining import microbatches, step_records
from flex_model.pipelining.agreement import gather_checked
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.schedule import LocalSchedule
from flex_model.pipelining.shapes import find_batched, infer_shapes
from flex_model.pipelining.stage_index import StageIndex
from flex_model.pipelining.stage_parameters import PipelineParameters
from flex_model.pipelining.stages import describe_stage, find_targets
from flex_model.pipelining.step_end import StepEnd
from flex_model.pipelining.step_plan import StepCall, StepPlan, plan_step


class StepRunner:
    """Runs the steps of a schedule over all ranks. The constructor and ``run`` are collective.

    Args:
        core: The engine of this rank's stages.
        settings: What must be equal on all ranks, besides the arguments of a step.

    Attributes:
        world, line: Communicators to all ranks, and to those of this rank's pipeline.
        index: The modules and parameters of all stages.
        local: This rank's part of the schedule.
        parameters: Reads and writes the parameters of all stages.
    """

    def __init__(
        self,
        schedule: Any,
        core: HookCore,
        state: MicrobatchState,
        timeout_s: float,
        settings: list[Any],
        on_all_ranks: bool,
        context_on_all: bool,
    ) -> None:
        mesh = core.mesh
        self._schedule, self._core, self._state = schedule, core, state
        along = mesh.axis_ranks("pp")
        self.world = Communicator(Mesh(mesh.ranks, mesh.rank, tp_size=mesh.num_ranks), timeout_s)
        self.line = (
            self.world
            if len(along) == mesh.num_ranks
            else Communicator(Mesh(along, mesh.coordinates["pp"], tp_size=len(along)), timeout_s)
        )
        self.local = LocalSchedule(schedule, state, core, core.modules)
        try:
            self.index = self._index_stages(settings)
        except BaseException:
            self.close()
            raise
        self.parameters = PipelineParameters(core.parameters, self.index, self.world, self.line)
        self._end = StepEnd(
            core,
            state,
            self.local,
            self.index,
            self.world,
            self.line,
            on_all_ranks,
            context_on_all,
        )
        self._prepared: int | None = None  # the inputs that the stages have buffers for
        self._batched: tuple[Any, dict[int, bool]] | None = None  # see `_find_batched`

    def close(self) -> None:
        """Leave the stages as they were, and free groups. Local."""
        self.local.close()
        self._core.close()
        for communicator in {self.world, self.line}:
            communicator.close()

    def _index_stages(self, settings: list[Any]) -> StageIndex:
        schedule, num_ranks = self._schedule, len(self._core.mesh.stage_ranks)
        gathered = gather_checked(
            self.world,
            "FlexModel over a schedule: its stages",
            lambda: [describe_stage(stage) for stage in self.local.stages],
            {
                "the schedule of a pipeline": [
                    type(schedule).__name__,
                    schedule._n_microbatches,
                    schedule._loss_fn is not None,
                    schedule.scale_grads,
                    schedule._num_stages,
                ],
                "the settings of a pipeline": settings,
            },
        )
        described: dict[int, Any] = {}
        pp_ranks: dict[int, int] = {}
        for rank, stages in enumerate(gathered):
            for stage in stages:
                index, pp_rank = stage["index"], rank // num_ranks
                if pp_ranks.setdefault(index, pp_rank) != pp_rank:
                    raise agreed(
                        ValueError(
                            f"FlexModel: stage {index} is at the places {pp_ranks[index]} and "
                            f"{pp_rank} of the pipeline; give each stage to one rank of a "
                            "pipeline, and data_parallel_size or tensor_parallel_size where "
                            "several ranks hold it"
                        )
                    )
                described[index] = stage
        order = range(schedule._num_stages)
        missing = [index for index in order if index not in described]
        if missing:
            raise agreed(ValueError(f"FlexModel: no rank of the pipeline has the stages {missing}"))
        return StageIndex([described[i] for i in order], [pp_ranks[i] for i in order])

    # A step.

    def run(self, call: StepCall, output_ptr: dict[str, list[Tensor]]) -> Any:
        """Run one step; return the result of the call on this rank."""
        core = self._core
        plan = plan_step(
            call, self._schedule, self.local.stages, core, self.index, self.world, self._prepared
        )
        chosen = core.table.chosen(call.choice)
        with self._state.running(plan.rows):
            try:
                with self._state.muted():
                    self._prepare(call, plan)
                    batched = self._find_batched(call, plan, chosen)
                if not call.appends:
                    for registration in chosen:
                        output_ptr.pop(registration.hook_function.record_name, None)
                return self._run(call, plan, chosen, batched, output_ptr)
            finally:
                core.records.output_ptr.clear()

    def _prepare(self, call: StepCall, plan: StepPlan) -> None:
        """Infer shapes and make buffers, where some rank has them for other inputs."""
        if plan.is_prepared:
            return
        self._prepared = None
        args, kwargs = plan.arg_chunks[0], plan.kwarg_chunks[0]
        with torch.inference_mode(False):
            gather_checked(
                self.world,
                "the shapes of the pipeline's stages",
                lambda: infer_shapes(
                    self.local.instrumented, self.index, self.line, args, kwargs, call.has_backward
                ),
            )
            self.local.connect(plan.number, call.has_backward, args, kwargs)
        self._prepared = plan.inputs

    def _find_batched(
        self, call: StepCall, plan: StepPlan, chosen: list[Registration]
    ) -> dict[tuple[str, str], bool]:
        """Return whether the tensors of records have rows of the batch, by their name and kind; for
        micro-batches of one row only.
        """
        if plan.number == 1 or sum(of_rank[0] for of_rank in plan.rows) != 1:
            return {}
        local = [r for r in chosen if r.module is not None]
        key = (plan.inputs, tuple(r.index for r in local))

        def find() -> None:
            if self._batched is None or self._batched[0] != key:
                self._batched = (
                    key,
                    find_batched(
                        self.local.instrumented,
                        [r for r in local if r.kind != "tensor"],
                        plan.arg_chunks[0],
                        plan.kwarg_chunks[0],
                        lambda r: self._dim(call, chosen, r.hook_function.record_name),
                    ),
                )

        gather_checked(self.world, "a step of micro-batches of one row", find)
        by_index = {} if self._batched is None else self._batched[1]
        return {
            (r.hook_function.record_name, r.kind): by_index[r.index]
            for r in local
            if r.index in by_index
        }

    def _run(
        self,
        call: StepCall,
        plan: StepPlan,
        chosen: list[Registration],
        batched: dict[tuple[str, str], bool],
        output_ptr: dict[str, list[Tensor]],
    ) -> Any:
        core, state = self._core, self._state
        self.parameters.read_for_hooks(
            name for r in chosen for name in r.hook_function.parameter_names
        )
        for registration in chosen:
            dim = self._dim(call, chosen, registration.hook_function.record_name)
            if registration.kind != "tensor":
                shape = registration.hook_function.expected_shape
                shape = microbatches.part_of_shape(shape, dim, plan.rows)
                registration.expect_microbatches(dim if plan.number > 1 else None, shape)
        divisor = plan.number if self._schedule.scale_grads else 1
        run = core.begin(call.choice, seed=plan.seed)
        core.caller.average_over(divisor)
        gradients = Gradients(core, divisor)
        self._begin_stages(call)
        losses: list[Tensor] = []
        output = None
        before = save_ctx.begin_step(core.save_ctx)
        try:
            output = self.local.run(
                plan.arg_chunks,
                plan.kwarg_chunks,
                plan.target_chunks,
                losses,
                call.return_outputs,
                call.has_backward,
            )
            gradients.scale()
            if call.has_backward and not state.is_muted:
                gradients.run_hooks()
        except BaseException as error:
            state.fail_in_model(error, "schedule")
        consumed = self._end_run(run)
        records = self._join_records(call, plan, chosen, batched)
        try:
            output = self._end.finish(
                call, records, before, gradients, consumed, output, output_ptr
            )
        except BaseException:
            self._prepared = None  # what failed may have left buffers in use
            gradients.restore(is_failed=True)
            raise
        gradients.restore(is_failed=False)
        if call.losses is not None and self.local.has_last:
            call.losses[:] = losses  # none, where there is no target
        return output

    def _begin_stages(self, call: StepCall) -> None:
        """Begin the step on all stages; with ``until``, for what the last of these sites needs."""
        last = self.index.num_stages
        if call.until is not None:
            last = max(self.index.stage_of(name) for name, _ in call.until)
        for stage in self.local.instrumented:
            sites: list[Site] | None = None
            if call.until is not None and stage.index == last:
                sites = [
                    (find_targets(stage.stage.submod, name), kind)
                    for name, kind in call.until
                    if self.index.stage_of(name) == last
                ]
            stage.begin(call.has_backward, stage.index > last, sites)

    def _dim(self, call: StepCall, chosen: list[Registration], name: str) -> int:
        """Return the dim along which the micro-batches' records of this name are joined."""
        dim, default = call.microbatch_dim, microbatches.batch_dim(self._schedule)
        if isinstance(dim, int):
            return dim
        modules = [r.name for r in chosen if r.hook_function.record_name == name]
        return next((dim[module] for module in modules if dim and module in dim), default)

    def _end_run(self, run: RunContext) -> bool:
        """Deliver the records of the stage's ranks to its first; return whether an edit drew random
        numbers on this rank.
        """
        consumed = run.take_consumed()  # all ranks of the pipeline renew the seed together
        try:
            self._core.end(run, None)
        except HookError as error:
            self._state.fail(str(error), error)
        self._core.table.forget_calls()
        return consumed

    def _join_records(
        self,
        call: StepCall,
        plan: StepPlan,
        chosen: list[Registration],
        batched: dict[tuple[str, str], bool],
    ) -> list[step_records.StageRecords]:
        records = self._core.records
        if self._state.failure or not records.keeps_full:
            return []
        shapes: dict[tuple[str, str], list[ExpectedShape]] = {}
        for registration in chosen:
            function = registration.hook_function
            shape = function.expected_shape if function.select is None else None
            shapes.setdefault((function.record_name, registration.kind), []).append(shape)
        try:
            return step_records.join(
                records.output_ptr,
                plan.number,
                plan.rows,
                lambda name: self._dim(call, chosen, name),
                lambda name, kind: batched.get((name, kind)),
                {key: of_key[0] for key, of_key in shapes.items() if len(of_key) == 1},
            )
        except ValueError as error:
            self._state.fail(str(error), error)
            return []
