"""Keeps what is proven of the rows in the tensors of hooks, from step to step."""

from __future__ import annotations

from collections.abc import Sequence
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
    followed; all ranks follow the same ones.
    """

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline = pipeline
        self._conditions: int | None = None  # of the steps that were followed
        self._found: dict[int, dict[int, BatchRows]] = {}  # by a hook's index and the stage
        self._recordings: dict[int, StageRecording] = {}  # of the running step, by stage

    def begin(self, call: StepCall, plan: StepPlan, chosen: Sequence[Registration]) -> None:
        """Record this rank's stages in the step that begins, if it records new hooks."""
        if plan.number == 1:
            return
        conditions = site_hash(plan.conditions, call.until)
        if conditions != self._conditions:
            self._conditions = conditions
            self._found.clear()
        # The same on all ranks: each has the registrations of every stage.
        joined = [r for r in chosen if r.hook_function.record and r.kind != "tensor"]
        if all(registration.index in self._found for registration in joined):
            return
        self._found |= {registration.index: {} for registration in joined}
        here = [r for r in chosen if r.module is not None and r.kind != "tensor"]
        core, buffers = self._pipeline.core, Buffers(self._pipeline.core.module)
        for stage in self._pipeline.local.instrumented:
            of_torch = stage.stage
            recording = StageRecording(
                of_torch.submod,
                core,
                buffers,
                here,
                plan.input_dims,
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
