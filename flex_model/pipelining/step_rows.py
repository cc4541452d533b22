"""Keeps what is proven of the rows in the tensors of hooks, from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flex_model.distributed.header import site_hash
from flex_model.errors import HookError
from flex_model.hooks.registration import Registration
from flex_model.layouts.module_buffers import Buffers
from flex_model.pipelining.local_pipeline import LocalPipeline
from flex_model.pipelining.row_proofs import BatchRows, StageRecording
from flex_model.pipelining.shapes import run_in_order
from flex_model.pipelining.step_plan import StepCall, StepPlan

RecordKey = tuple[str, str, int]  # name, kind and stage


class StepRows:
    """The rows in the tensors of one pipeline's hooks. The steps that record a hook first are
    followed, or with ``follow="always"`` every step; all ranks follow the same ones.
    """

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline = pipeline
        self._conditions: int | None = None  # of the steps that were followed
        self._found: dict[int, dict[int, BatchRows]] = {}  # by a hook's index and the stage
        self._recordings: dict[int, StageRecording] = {}  # of the running step, by stage
        # Steps write other statistics to them than the unsplit model's forwards.
        self._buffers = Buffers(pipeline.core.module)
        self._is_always = pipeline.settings.follow == "always"

    def begin(self, call: StepCall, plan: StepPlan, chosen: Sequence[Registration]) -> None:
        """Record this rank's stages in the step that begins, if it records new hooks."""
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
        for stage in self._pipeline.local.instrumented:
            of_torch = stage.stage
            recording = StageRecording(
                of_torch.submod,
                core,
                self._buffers,
                here,
                (call.args, call.kwargs),
                of_torch.is_first,
                plan.number,
            )
            self._recordings[stage.index] = recording
            stage.record(recording)

    def infer(self) -> None:
        """Infer what the step has shown, if it was recorded. Then collective over the stages of
        one pipeline.
        """
        if not self._recordings:
            return

        def infer(stage: Any, received: list[Any] | None) -> list[Any]:
            found, sent = self._recordings[stage.index].infer(received or ())
            for index, rows in found.items():
                self._found.setdefault(index, {})[stage.index] = rows
            return sent

        problem = run_in_order(self._pipeline, "the rows in stage", infer)
        self._end()
        self._pipeline.conditions.note_attributes()
        if problem:
            self._pipeline.state.fail(problem, HookError(problem))

    def forget(self) -> None:
        """Follow the next step, after one that failed. The same on all ranks."""
        self._found.clear()
        self._end()

    def _end(self) -> None:
        """Drop the recordings, which hold the operations of all micro-batches."""
        for stage in self._pipeline.local.instrumented if self._recordings else ():
            stage.record(None)
        self._recordings.clear()

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
