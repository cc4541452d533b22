"""Runs the steps of a pipeline with hooks: planned by all ranks before anything is sent, run along
the schedule, and ended together.

Nothing of ours crosses stages while the schedule runs: records, ``save_ctx``, gradients of
trainable modules and errors do when it is over, through groups of our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.failure import FAILED
from flex_model.distributed.header import site_hash
from flex_model.distributed.placement import Replicate, Shard
from flex_model.distributed.serialization import decode, encode
from flex_model.distributed.tensor_dicts import describe, exchange_json, from_rank, gather_tensors
from flex_model.errors import HookError, HookMismatchError, agreed, is_agreed
from flex_model.hooks import save_ctx
from flex_model.hooks.random_state import renew_seed
from flex_model.hooks.registration import Registration
from flex_model.layouts.module_buffers import Buffers
from flex_model.pipelining import microbatches
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.instrumented_stage import StageStep, StepCall, StepPlan
from flex_model.pipelining.local_pipeline import LocalPipeline, plan_step
from flex_model.pipelining.row_proofs import BatchRows, StageRecording
from flex_model.pipelining.shapes import infer_shapes, run_in_order
from flex_model.pipelining.stages import find_targets
from flex_model.records.records import drop
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
                        drop(output_ptr, registration.hook_function.record_name)
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
        run = self._begin_run(call, plan)
        core.executor.average_over(divisor)
        inputs = pytree.tree_leaves((call.args, call.kwargs))
        gradients = Gradients(core, divisor, [one for one in inputs if isinstance(one, Tensor)])
        is_edited = any(r.edits and r.kind in ("forward", "forward_pre") for r in chosen)
        self._rows.begin(call, plan, chosen)
        self._begin_stages(call, gradients if is_edited else None)
        losses: list[Tensor] = []
        output = None
        before = save_ctx.begin_step(core.save_ctx)
        try:
            output = self._local.run(call, plan, losses)
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
        except BaseException as error:
            self._prepared = None  # what failed may have left buffers in use
            self._rows.forget()
            gradients.restore(is_failed=True)
            if error.__cause__ is None:  # the others may be in the schedule still, waited for
                error.__cause__ = state.failure.cause
            raise
        gradients.restore(is_failed=False)
        if call.losses is not None and self._local.has_last:
            call.losses[:] = losses  # none, where there is no target
        return output

    def _begin_run(self, call: StepCall, plan: StepPlan) -> Run | None:
        """Begin the run of this rank's stages. Where that fails, return None: they are computed
        without hooks, as the other stages wait for what they send, and the step's end reports it.
        """
        try:
            run = self._core.runs.begin(call.choice)
        except BaseException as error:
            self._state.silence()
            self._state.failure.set_error(str(error), error)
            return None
        run.use_seed(plan.seed)
        if call.appends and self._last is not None:
            run.continue_draws(self._last)
        self._last = run
        return run

    def _begin_stages(self, call: StepCall, edited: Gradients | None) -> None:
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
            is_skipped = stage.index > last
            recording = self._rows.recordings.get(stage.index)
            stage.begin(StageStep(call.has_backward, is_skipped, sites, edited, recording))

    def _stated_dims(self, call: StepCall, chosen: list[Registration]) -> dict[str, int | None]:
        """Return the dims of the rows in records that the user states, by their name; None for
        those that have no rows.
        """
        stated = call.settings.microbatch_dim
        dims: dict[str, int | None] = {}
        for registration in chosen:
            name = registration.hook_function.record_name
            if isinstance(stated, int):
                dims[name] = stated
            elif stated is not None and registration.name in stated:
                dims.setdefault(name, stated[registration.name])
        return dims

    def _end_run(self, run: Run | None) -> bool:
        """Deliver the records of the stage's ranks to its first; return whether an edit drew random
        numbers on this rank.
        """
        # All ranks of the pipeline renew the seed together.
        consumed = run is not None and run.take_draws()
        try:
            if run is not None:
                self._core.runs.end(run, None)
        except Exception as error:  # of this stage's layouts, too: the others wait for this one
            self._state.fail(str(error), error)
        STOP_REQUEST.follow(self._state.fail)
        self._core.table.forget_calls()
        return consumed

    def _join_records(
        self, plan: StepPlan, chosen: list[Registration], stated: dict[str, int | None]
    ) -> list[microbatches.StageRecords]:
        records = self._core.records
        if self._state.failure.has_error or not records.keeps_full:
            return []
        hooks: dict[tuple[str, str], list[Registration]] = {}
        placements = {
            name: Replicate() if dim is None else Shard(dim) for name, dim in stated.items()
        }
        for registration in chosen:
            key = registration.hook_function.record_name, registration.kind
            hooks.setdefault(key, []).append(registration)
        try:
            self._rows.check_selections(chosen, stated)
            return microbatches.join_records(
                records.output_ptr,
                plan.number,
                plan.rows,
                placements,
                self._rows.of_records(chosen),
                hooks,
            )
        except ValueError as error:
            self._state.fail(str(error), error)
            return []


class StepEnd:
    """Ends the steps of one pipeline. ``finish`` is collective over all its ranks."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline, self._core, self._state = pipeline, pipeline.core, pipeline.state
        self._world, self._line, self._local = pipeline.world, pipeline.line, pipeline.local
        self._on_all_ranks = pipeline.settings.output_ranks == "all"
        self._has_drawn = False  # whether edits drew random numbers in this run
        self._context_on_all = pipeline.settings.save_ctx_on == "all"

    def finish(
        self,
        call: StepCall,
        records: list[microbatches.StageRecords],
        before: dict[str, Any],
        gradients: Gradients,
        consumed: bool,
        output: Any,
        output_ptr: dict[str, list[Tensor]],
    ) -> Any:
        """Return the result of the call on this rank.

        Args:
            records: Those of this rank's stages.
            before: The snapshot of ``save_ctx`` at the start of the step.
            consumed: Whether an edit drew random numbers on this rank.

        Raises:
            HookError, HookMismatchError: the step failed on some rank; or the model's own error, on
                the rank where it was raised.
            ValueError: values that can't be sent, or that stages wrote twice; on every rank.
        """
        core, mesh = self._core, self._core.mesh
        names = save_ctx.written(core.save_ctx, before) if mesh.group_rank == 0 else []
        written, sent = save_ctx.encoded(core.save_ctx, names)
        outputs: list[Tensor] = []
        structure = None
        failure = self._state.failure
        if call.settings.return_on == "all" and self._local.has_last and not failure.has_error:
            try:
                structure = encode(output, outputs)
            except TypeError as error:
                self._state.fail(f"return_on='all': the last stage returns {error}", error)
        own = {
            "error": self._describe_failure(),
            "consumed": consumed,
            "records": microbatches.describe_records(records),
            "written": written,
            "gradients": gradients.describe(),
            "output": [structure, describe(outputs)],
        }
        gathered = exchange_json(self._world, own, "the end of a step of the pipeline")
        self._has_drawn &= call.appends
        if not self._has_drawn and any(of_rank["consumed"] for of_rank in gathered):
            self._has_drawn = True  # once in a run, of however many steps
            renew_seed()
        failed = [(r, of_rank["error"]) for r, of_rank in enumerate(gathered) if of_rank["error"]]
        if failed or failure.has_error:
            self._raise_failure(failed, call.has_backward)
        self._check_contexts(gathered)
        described = [of_rank["records"] for of_rank in gathered]
        microbatches.deliver(self._world, records, described, self._on_all_ranks, output_ptr)
        self._merge_contexts([of_rank["written"] for of_rank in gathered], sent)
        along = gathered[mesh.group_rank :: len(mesh.stage_ranks)]  # this rank's pipeline
        gradients.add_stages(self._line, [of_rank["gradients"] for of_rank in along])
        if call.settings.return_on == "all" and call.return_outputs:
            last = self._pipeline.index.pp_ranks[-1]
            structure, shapes = along[last]["output"]
            tensors = from_rank(self._line, last, outputs, shapes)
            device = self._local.stages[0].device
            output = decode(structure, [tensor.detach().to(device) for tensor in tensors])
        return output

    def _describe_failure(self) -> list[str] | None:
        failure = self._state.failure
        if is_agreed(failure.cause) and self._core.mesh.group_rank > 0:
            return None  # all ranks of the stage have it, and the first one reports it
        return [type(failure.cause).__name__, failure.text] if failure.has_error else None

    def _raise_failure(self, failed: list[Any], has_backward: bool) -> None:
        """Raise this rank's own error of the model, or else those of all ranks."""
        state, cause = self._state.failure.state, self._state.failure.cause
        if cause is not None and (state is FAILED or not isinstance(cause, Exception)):
            raise cause
        if not failed:
            failed = [(self._core.mesh.rank, ["HookError", "a stage failed"])]
        texts: dict[str, None] = {}
        for rank, (_, text) in failed:
            texts[text if text.startswith("rank ") else f"rank {rank}: {text}"] = None
        is_mismatch = any(kind == "HookMismatchError" for _, (kind, _) in failed)
        left = "; the gradients that it left mean nothing: zero them" if has_backward else ""
        error = agreed(
            (HookMismatchError if is_mismatch else HookError)(
                f"{'; '.join(texts)}. The step was finished without edits from there on{left}"
            )
        )
        raise error from cause

    # ``save_ctx``.

    def _check_contexts(self, gathered: list[dict[str, Any]]) -> None:
        """ValueError, on every rank, for attributes of save_ctx that can't be merged."""
        writers: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(gathered):
            attributes = of_rank["written"][0]
            for name in attributes:
                writers.setdefault(name, []).append(rank)
            if rank or self._context_on_all:
                save_ctx.check_sendable(rank, attributes, "rank 0")
        twice = [
            f"save_ctx.{name} by {' and '.join(map(self._describe_writer, ranks))}"
            for name, ranks in writers.items()
            if len(ranks) > 1
        ]
        if twice:
            raise agreed(
                ValueError(
                    f"several stages wrote one attribute: {'; '.join(twice)}; the stages of a "
                    "pipeline do not share save_ctx during a step: give each hook an attribute of "
                    "its own, and combine them after the step"
                )
            )

    def _merge_contexts(self, written: list[save_ctx.Encoded], sent: list[Tensor]) -> None:
        """Set what each stage wrote in the save_ctx of rank 0, or of all ranks; remove an older
        value on the others.
        """
        if self._world.is_local or not any(attributes for attributes, _, _ in written):
            return
        described = [of_rank[1] for of_rank in written]
        received = gather_tensors(self._world, sent, described, self._context_on_all)
        context, mesh = self._core.save_ctx, self._core.mesh
        device = self._local.stages[0].device if self._context_on_all else None
        for rank, of_rank in enumerate(written):
            is_own = rank == mesh.rank
            if self._core.executor.edits_on_all:  # every rank of a stage writes the same
                pp_rank_of = self._pipeline.pp_rank_of
                is_own = pp_rank_of(rank) == pp_rank_of(mesh.rank)
            if is_own:
                continue
            if received is not None:
                save_ctx.set_received(context, of_rank, received[rank], device)
            else:
                for name in of_rank[0]:
                    vars(context).pop(name, None)

    def _describe_writer(self, rank: int) -> str:
        pp_rank = self._pipeline.pp_rank_of(rank)
        stages = [
            str(i) for i, other in enumerate(self._pipeline.index.pp_ranks) if other == pp_rank
        ]
        return f"stage {', '.join(stages)} (rank {rank})"


RecordKey = tuple[str, str, int]  # name, kind and stage


class StepRows:
    """The rows in the tensors of one pipeline's hooks. The steps that record a hook first are
    followed, or with ``follow="always"`` every step; all ranks follow the same ones.

    Attributes:
        recordings: By stage: what records it in the running step.
    """

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline = pipeline
        self._conditions: int | None = None  # of the steps that were followed
        self._found: dict[int, dict[int, BatchRows]] = {}  # by a hook's index and the stage
        self.recordings: dict[int, StageRecording] = {}
        # Steps write other statistics to them than the unsplit model's forwards.
        self._buffers = Buffers(pipeline.core.module)
        self._is_always = pipeline.settings.follow == "always"

    def begin(self, call: StepCall, plan: StepPlan, chosen: Sequence[Registration]) -> None:
        """Have this rank's stages recorded in the step that begins, if it records new hooks."""
        self.recordings = {}
        if plan.number == 1:
            return
        conditions = site_hash(plan.conditions, call.until)
        if conditions != self._conditions or self._is_always:
            self._conditions = conditions
            self._found.clear()
        # The same on all ranks: each has the registrations of every stage.
        joined = [r for r in chosen if r.kind != "tensor" and (r.hook_function.record or r.select)]
        if all(registration.index in self._found for registration in joined):
            return
        self._found |= {registration.index: {} for registration in joined}
        here = [r for r in chosen if r.module is not None and r.kind != "tensor"]
        core = self._pipeline.core
        inputs = call.args, call.kwargs
        self.recordings = {
            one.stage_index: StageRecording(
                one.submod, core, self._buffers, here, inputs, one.is_first, plan.number
            )
            for one in self._pipeline.local.stages
        }

    def infer(self) -> None:
        """Infer what the step has shown, if it was recorded. Then collective over the stages of
        one pipeline.
        """
        if not self.recordings:
            return

        def infer(stage: Any, received: list[Any] | None) -> list[Any]:
            found, sent = self.recordings[stage.index].infer(received or ())
            for index, rows in found.items():
                self._found.setdefault(index, {})[stage.index] = rows
            return sent

        problem = run_in_order(self._pipeline, "the rows in stage", infer)
        self.recordings = {}
        self._pipeline.conditions.note_attributes()
        if problem:
            self._pipeline.state.fail(problem, HookError(problem))

    def forget(self) -> None:
        """Follow the next step, after one that failed. The same on all ranks."""
        self._found.clear()
        self.recordings = {}

    def check_selections(
        self, chosen: Sequence[Registration], stated: Mapping[str, int | None]
    ) -> None:
        """ValueError for a hook that selects rows of micro-batches, or may do so.

        Args:
            stated: The dims of the rows that the user states, by the name of the record.
        """
        for registration in chosen:
            for rows in self._found.get(registration.index, {}).values():
                if registration.select is None:
                    continue
                what = f"{registration.describe()}: {registration.select}"
                if rows.selected is not None:
                    raise ValueError(
                        f"{what} selects along dim {rows.selected}, along which the batch is split "
                        'into micro-batches; use batch_mode="full", or select in the editing '
                        "function"
                    )
                is_stated = registration.hook_function.record_name in stated
                if rows.placement is None and not is_stated:
                    after = f" (lost at {rows.lost_at})" if rows.lost_at else ""
                    raise ValueError(
                        f"{what} may select rows of the micro-batches: their dim is not known"
                        f"{after}; state it with microbatch_dim={{name of the module: dim}}, or "
                        'use batch_mode="full"'
                    )

    def of_records(self, chosen: Sequence[Registration]) -> dict[RecordKey, BatchRows]:
        """Return what is known of the records of these hooks on this rank. Nothing is known of
        those that several hooks make of different tensors.
        """
        found: dict[RecordKey, BatchRows] = {}
        for registration in chosen:
            function = registration.hook_function
            for stage, rows in self._found.get(registration.index, {}).items():
                key = function.record_name, registration.kind, stage
                if function.record:
                    found[key] = rows if found.setdefault(key, rows) == rows else BatchRows()
        return found
