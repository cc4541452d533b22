"""The end of a step of a pipeline: records, ``save_ctx``, gradients and output go where they
belong, or every rank hears what failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.serialization import decode, encode
from flex_model.distributed.tensor_dicts import (
    describe,
    exchange_json,
    from_rank,
    gather_to_first,
)
from flex_model.errors import HookError, HookMismatchError, agreed, is_agreed, see
from flex_model.hooks import save_ctx
from flex_model.hooks.core import HookCore
from flex_model.hooks.random_state import renew_seed
from flex_model.pipelining import step_records
from flex_model.pipelining.agreement import StepCall
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.stages import Directory
from flex_model.runs.step import Step


class StepEnd:
    """Of one pipeline. ``finish`` is collective over all its ranks."""

    def __init__(
        self,
        core: HookCore,
        step: Step,
        stages: Sequence[Any],
        directory: Directory,
        world: Communicator,
        line: Communicator,
        on_all_ranks: bool,
        context_on_all: bool,
    ) -> None:
        self._core, self._step, self._stages = core, step, stages
        self._directory, self._world, self._line = directory, world, line
        self._on_all_ranks, self._context_on_all = on_all_ranks, context_on_all

    def finish(
        self,
        call: StepCall,
        found: list[step_records.StageRecords],
        before: dict[str, Any],
        gradients: Gradients,
        consumed: bool,
        output: Any,
        output_ptr: dict[str, list[Tensor]],
    ) -> tuple[list[Any], Any]:
        """Bring to the ranks what belongs there. What failed, by rank; and what the call returns on
        this rank.
        """
        core, mesh = self._core, self._core.mesh
        is_leader = mesh.group_rank == 0
        has_last = any(stage.is_last for stage in self._stages)
        names, read = save_ctx.end_step(core.save_ctx, before)
        written, sent = save_ctx.encoded(core.save_ctx, names if is_leader else [])
        outputs: list[Tensor] = []
        structure = None
        if call.return_on == "all" and has_last and not self._step.failure:
            try:
                structure = encode(output, outputs)
            except TypeError as error:
                self._step.fail(f"return_on='all': the last stage returns {error}", error)
        failure = self._step.failure
        mine = {
            "error": None if failure is None else _told_failure(failure, self._step, is_leader),
            "consumed": consumed,
            "records": step_records.told(found),
            "written": written,
            "read": read,
            "gradients": gradients.told(),
            "output": [structure, describe(outputs)],
        }
        told = exchange_json(self._world, mine, "the end of a step of the pipeline")
        if any(of_rank["consumed"] for of_rank in told):
            renew_seed()
        failed = [(r, of_rank["error"]) for r, of_rank in enumerate(told) if of_rank["error"]]
        if failed or self._step.failure:
            return failed or [(mesh.rank, ["HookError", "a stage failed"])], None
        self._check_contexts(told)
        step_records.deliver(
            self._world, found, [r["records"] for r in told], self._on_all_ranks, output_ptr
        )
        self._merge_contexts([of_rank["written"] for of_rank in told], sent)
        along = [told[rank] for rank in self._along()]
        gradients.add_stages(self._line, [r["gradients"] for r in along])
        if call.return_on == "all" and call.return_outputs:
            last = self._directory.places[-1]
            structure, described = along[last]["output"]
            tensors = from_rank(self._line, last, outputs, described)
            device = self._stages[0].device
            tensors = [tensor.detach().to(device) for tensor in tensors]
            output = decode(structure, tensors)
        return [], output

    def _along(self) -> list[int]:
        """This pipeline's ranks, as places among all."""
        grid = len(self._core.mesh.stage_ranks)
        return list(range(self._core.mesh.group_rank, self._core.mesh.num_ranks, grid))

    def _check_contexts(self, told: list[dict[str, Any]]) -> None:
        """ValueError, on every rank, for attributes of save_ctx that can't be merged, or that
        another stage read in the same step.
        """
        writers: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(told):
            attributes = of_rank["written"][0]
            for name in attributes:
                writers.setdefault(name, []).append(rank)
            if rank or self._context_on_all:
                save_ctx.check_sendable(rank, attributes, "rank 0")
        twice = [
            f"save_ctx.{name} by {' and '.join(map(self._describe, ranks))}"
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
        crossing = [
            f"save_ctx.{name} is written on rank {writers[name][0]} and read on rank {rank}"
            for rank, of_rank in enumerate(told)
            for name in of_rank["read"]
            if name in writers and self._place(writers[name][0]) != self._place(rank)
        ]
        if crossing:
            raise agreed(
                ValueError(
                    f"in one step {'; '.join(crossing)}: the stages of a pipeline do not share "
                    "save_ctx during a step; write it in one step and read it in the next, with "
                    f"save_ctx_on='all' ({see('what-another-stage-wrote')})"
                )
            )

    def _merge_contexts(self, written: list[save_ctx.Encoded], sent: list[Tensor]) -> None:
        """Bring what each stage wrote to rank 0's save_ctx, or to those of all ranks; from those
        of the others an older value is removed.
        """
        if self._world.is_local or not any(attributes for attributes, _, _ in written):
            return
        received = {}
        if self._context_on_all:
            for rank, (attributes, described, _) in enumerate(written):
                if attributes:
                    received[rank] = from_rank(self._world, rank, sent, described)
        else:
            of_ranks = gather_to_first(self._world, sent, [d for _, d, _ in written])
            received = dict(enumerate(of_ranks or []))
        context, device = self._core.save_ctx, self._stages[0].device
        for rank, of_rank in enumerate(written):
            if self._has(rank):
                continue
            if rank in received:
                on = device if self._context_on_all else None
                save_ctx.set_received(context, of_rank, received[rank], on)
            else:
                save_ctx.set_elsewhere(context, of_rank[0], rank)

    def _has(self, writer: int) -> bool:
        """Whether what that rank's functions wrote was written here too."""
        mesh = self._core.mesh
        if not self._core.caller.edits_on_all:
            return mesh.rank == writer
        return self._place(mesh.rank) == self._place(writer)

    def _place(self, rank: int) -> int:
        """Which of the pipeline's places a rank is at."""
        return rank // len(self._core.mesh.stage_ranks)

    def _describe(self, rank: int) -> str:
        place = self._place(rank)
        stages = [str(i) for i, other in enumerate(self._directory.places) if other == place]
        return f"stage {', '.join(stages)} (rank {rank})"

    def raise_failure(self, told: list[Any]) -> None:
        step = self._step
        own = step.failure[1] if step.failure else None
        if own is not None and step.is_of_model:
            raise own
        if own is not None and not isinstance(own, Exception):
            raise own
        texts: dict[str, None] = {}
        kinds = set()
        for rank, (kind, text) in told:
            kinds.add(kind)
            texts[text if text.startswith("rank ") else f"rank {rank}: {text}"] = None
        kind = HookMismatchError if "HookMismatchError" in kinds else HookError
        error = agreed(
            kind(
                f"{'; '.join(texts)}. The step was finished without edits from there on; the "
                "gradients that it left mean nothing: zero them"
            )
        )
        raise error from own


def _told_failure(
    failure: tuple[str, BaseException], step: Step, is_leader: bool
) -> list[str] | None:
    text, cause = failure
    if is_agreed(cause) and not is_leader:
        return None  # all ranks of the stage know of it, and its first tells
    return [type(cause).__name__, text]
