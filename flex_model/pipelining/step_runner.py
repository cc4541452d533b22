"""Runs the steps of a pipeline with hooks: planned by all ranks before anything is sent, run along
the schedule, and ended together.

Nothing of ours crosses stages while the schedule runs: records, ``save_ctx``, gradients of
trainable modules and errors do when it is over, through groups of our own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.placement import Replicate, Shard
from flex_model.errors import HookError
from flex_model.hooks import save_ctx
from flex_model.hooks.registration import Registration
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.pipelining import microbatches, step_records
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.local_pipeline import LocalPipeline
from flex_model.pipelining.row_proofs import BatchRows
from flex_model.pipelining.shapes import infer_shapes
from flex_model.pipelining.stages import find_targets
from flex_model.pipelining.step_end import StepEnd
from flex_model.pipelining.step_plan import StepCall, StepPlan, plan_step
from flex_model.pipelining.step_rows import StepRows
from flex_model.runs.run import Run
from flex_model.runs.stop_request import STOP_REQUEST
from flex_model.runs.until import Site


class StepRunner:
    """Runs the steps of one pipeline. ``run`` is collective over all its ranks."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline, self._core, self._state = pipeline, pipeline.core, pipeline.state
        self._schedule, self._local = pipeline.schedule, pipeline.local
        self._index, self._end = pipeline.index, StepEnd(pipeline)
        self._prepared: int | None = None  # the inputs that the stages have buffers for
        self._last: Run | None = None
        self._rows = StepRows(pipeline)

    def run(self, call: StepCall, output_ptr: dict[str, list[Tensor]]) -> Any:
        """Run one step; return the result of the call on this rank."""
        core = self._core
        plan = plan_step(call, self._pipeline, self._prepared)
        chosen = core.table.chosen(call.choice)
        stated = self._stated_dims(call, chosen)
        with self._state.running(plan.rows):
            try:
                with self._state.silenced():
                    self._prepare(call, plan)
                if not call.appends:
                    for registration in chosen:
                        output_ptr.pop(registration.hook_function.record_name, None)
                return self._run(call, plan, chosen, stated, output_ptr)
            finally:
                core.records.output_ptr.clear()

    def _prepare(self, call: StepCall, plan: StepPlan) -> None:
        """Infer shapes and make buffers, where some rank has them for other inputs."""
        if plan.is_prepared or not self._local.needs_shapes:
            return
        self._prepared = None
        args, kwargs = plan.arg_chunks[0], plan.kwarg_chunks[0]
        unsplit = microbatches.find_unsplit(self._schedule, call.kwargs, kwargs, plan.number)
        with torch.inference_mode(False):
            gather_checked(
                self._pipeline.world,
                "the shapes of the pipeline's stages",
                lambda: infer_shapes(self._pipeline, args, kwargs, call.has_backward, unsplit),
            )
            self._local.connect(plan.number, call.has_backward, args, kwargs)
        self._prepared = plan.inputs

    def _run(
        self,
        call: StepCall,
        plan: StepPlan,
        chosen: list[Registration],
        stated: dict[str, int | None],
        output_ptr: dict[str, list[Tensor]],
    ) -> Any:
        core, state = self._core, self._state
        self._pipeline.parameters.read_for_hooks(
            name for r in chosen for name in r.hook_function.parameter_names
        )
        default = microbatches.batch_dim(self._schedule)
        for registration in chosen:
            dim = stated.get(registration.hook_function.record_name, default)
            if registration.kind != "tensor":
                shape = registration.hook_function.expected_shape
                shape = microbatches.part_of_shape(shape, dim, plan.rows)
                registration.expect_microbatches(dim if plan.number > 1 else None, shape)
        divisor = plan.number if self._schedule.scale_grads else 1
        run = core.runs.begin(call.choice)
        run.use_seed(plan.seed)
        if call.appends and self._last is not None:
            run.continue_draws(self._last)
        self._last = run
        core.executor.average_over(divisor)
        inputs = pytree.tree_leaves((call.args, call.kwargs))
        gradients = Gradients(core, divisor, [one for one in inputs if isinstance(one, Tensor)])
        self._begin_stages(call)
        self._rows.begin(call, plan, chosen)
        losses: list[Tensor] = []
        output = None
        before = save_ctx.begin_step(core.save_ctx)
        try:
            output = self._local.run(
                plan.arg_chunks,
                plan.kwarg_chunks,
                plan.target_chunks,
                losses,
                call.return_outputs,
                call.has_backward,
            )
            gradients.scale()
            if call.has_backward and not state.is_silent:
                gradients.run_hooks()
        except BaseException as error:
            state.fail_in_model(error, "schedule")
        consumed = self._end_run(run)
        try:
            self._rows.infer()
            records = self._join_records(plan, chosen, stated)
            output = self._end.finish(
                call, records, before, gradients, consumed, output, output_ptr
            )
        except BaseException:
            self._prepared = None  # what failed may have left buffers in use
            self._rows.forget()
            gradients.restore(is_failed=True)
            raise
        gradients.restore(is_failed=False)
        if call.losses is not None and self._local.has_last:
            call.losses[:] = losses  # none, where there is no target
        return output

    def _begin_stages(self, call: StepCall) -> None:
        """Begin the step on all stages; with ``until``, for what the last of these sites needs."""
        last = self._index.num_stages
        if call.until is not None:
            last = max(self._index.stage_of(*site) for site in call.until)
        for stage in self._local.instrumented:
            sites: list[Site] | None = None
            if call.until is not None and stage.index == last:
                sites = [
                    (find_targets(stage.stage.submod, name), kind)
                    for name, kind in call.until
                    if self._index.stage_of(name, kind) == last
                ]
            stage.begin(call.has_backward, stage.index > last, sites)

    def _stated_dims(self, call: StepCall, chosen: list[Registration]) -> dict[str, int | None]:
        """Return the dims of the rows in records that the user states, by their name; None for
        those that have no rows.
        """
        stated = call.microbatch_dim
        dims: dict[str, int | None] = {}
        for registration in chosen:
            name = registration.hook_function.record_name
            if isinstance(stated, int):
                dims[name] = stated
            elif stated is not None and registration.name in stated:
                dims.setdefault(name, stated[registration.name])
        return dims

    def _end_run(self, run: Run) -> bool:
        """Deliver the records of the stage's ranks to its first; return whether an edit drew random
        numbers on this rank.
        """
        consumed = run.take_draws()  # all ranks of the pipeline renew the seed together
        try:
            self._core.runs.end(run, None)
        except HookError as error:
            self._state.fail(str(error), error)
        STOP_REQUEST.follow(self._state.fail)
        self._core.table.forget_calls()
        return consumed

    def _join_records(
        self, plan: StepPlan, chosen: list[Registration], stated: dict[str, int | None]
    ) -> list[step_records.StageRecords]:
        records = self._core.records
        if self._state.failure.has_error or not records.keeps_full:
            return []
        shapes: dict[tuple[str, str], list[ExpectedShape]] = {}
        rows = self._rows.of_records(chosen)
        placements = {
            name: Replicate() if dim is None else Shard(dim) for name, dim in stated.items()
        }
        for registration in chosen:
            function = registration.hook_function
            shape = function.expected_shape if function.select is None else None
            shapes.setdefault((function.record_name, registration.kind), []).append(shape)
        try:
            self._rows.check_selections(chosen, stated)
            return step_records.join(
                records.output_ptr,
                plan.number,
                plan.rows,
                placements.get,
                lambda *key: rows.get(key, BatchRows()),
                {key: of_key[0] for key, of_key in shapes.items() if len(of_key) == 1},
            )
        except ValueError as error:
            self._state.fail(str(error), error)
            return []
