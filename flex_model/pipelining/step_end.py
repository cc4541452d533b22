"""The end of a step of a pipeline: records, ``save_ctx``, gradients and the output are sent to the
ranks that receive them, or every rank raises the errors of all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flex_model.distributed.failure import FAILED
from flex_model.distributed.serialization import decode, encode
from flex_model.distributed.tensor_dicts import (
    describe,
    exchange_json,
    from_rank,
    gather_to_first,
)
from flex_model.errors import HookError, HookMismatchError, agreed, is_agreed
from flex_model.hooks import save_ctx
from flex_model.hooks.random_state import renew_seed
from flex_model.pipelining import step_records
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.local_pipeline import LocalPipeline
from flex_model.pipelining.step_plan import StepCall


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
        records: list[step_records.StageRecords],
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
        if call.return_on == "all" and self._local.has_last and not failure.has_error:
            try:
                structure = encode(output, outputs)
            except TypeError as error:
                self._state.fail(f"return_on='all': the last stage returns {error}", error)
        own = {
            "error": self._describe_failure(),
            "consumed": consumed,
            "records": step_records.describe_records(records),
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
        step_records.deliver(self._world, records, described, self._on_all_ranks, output_ptr)
        self._merge_contexts([of_rank["written"] for of_rank in gathered], sent)
        along = gathered[mesh.group_rank :: len(mesh.stage_ranks)]  # this rank's pipeline
        gradients.add_stages(self._line, [of_rank["gradients"] for of_rank in along])
        if call.return_on == "all" and call.return_outputs:
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
        received: dict[int, list[Tensor]] = {}
        if self._context_on_all:
            for rank, (attributes, described, _) in enumerate(written):
                if attributes:
                    received[rank] = from_rank(self._world, rank, sent, described)
        else:
            of_ranks = gather_to_first(self._world, sent, [d for _, d, _ in written])
            received = dict(enumerate(of_ranks or []))
        context, mesh = self._core.save_ctx, self._core.mesh
        device = self._local.stages[0].device if self._context_on_all else None
        for rank, of_rank in enumerate(written):
            is_own = rank == mesh.rank
            if self._core.executor.edits_on_all:  # every rank of a stage writes the same
                is_own = self._is_same_stage(rank, mesh.rank)
            if is_own:
                continue
            if rank in received:
                save_ctx.set_received(context, of_rank, received[rank], device)
            else:
                for name in of_rank[0]:
                    vars(context).pop(name, None)

    def _is_same_stage(self, one: int, other: int) -> bool:
        return self._pipeline.pp_rank_of(one) == self._pipeline.pp_rank_of(other)

    def _describe_writer(self, rank: int) -> str:
        pp_rank = self._pipeline.pp_rank_of(rank)
        stages = [
            str(i) for i, other in enumerate(self._pipeline.index.pp_ranks) if other == pp_rank
        ]
        return f"stage {', '.join(stages)} (rank {rank})"
