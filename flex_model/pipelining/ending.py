"""The end of a step of a pipeline: records, ``save_ctx``, gradients and output go where they
belong, or every rank hears what failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flex_model.distributed.channel import Channel
from flex_model.distributed.tensor_dicts import (
    describe,
    exchange_json,
    from_rank,
    gather_to_first,
)
from flex_model.errors import HookError, HookMismatchError, agreed, is_agreed
from flex_model.hooks.context import advance_generator
from flex_model.hooks.core import HookCore
from flex_model.hooks.step import Step
from flex_model.pipelining import contexts, records
from flex_model.pipelining.agreement import StepCall
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.stages import Directory


class StepEnd:
    """Of one pipeline. ``finish`` is collective over all its ranks."""

    def __init__(
        self,
        core: HookCore,
        step: Step,
        stages: Sequence[Any],
        directory: Directory,
        world: Channel,
        line: Channel,
        on_all_ranks: bool,
    ) -> None:
        self._core, self._step, self._stages = core, step, stages
        self._directory, self._world, self._line = directory, world, line
        self._on_all_ranks = on_all_ranks

    def finish(
        self,
        call: StepCall,
        found: list[records.StageRecords],
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
        is_leader = mesh.place == 0
        has_last = any(stage.is_last for stage in self._stages)
        sent: list[Tensor] = []
        written = contexts.written(core.save_ctx, before) if is_leader else []
        encoded = {}
        for name in written:
            try:
                encoded[name] = contexts.encode(getattr(core.save_ctx, name), sent)
            except TypeError as error:
                encoded[name] = {"unknown": str(error)}
        outputs: list[Tensor] = []
        structure = None
        if call.return_on == "all" and has_last and not self._step.failure:
            try:
                structure = contexts.encode(output, outputs)
            except TypeError as error:
                self._step.fail(f"return_on='all': the last stage returns {error}", error)
        failure = self._step.failure
        mine = {
            "error": None if failure is None else _told_failure(failure, self._step, is_leader),
            "consumed": consumed,
            "records": records.told(found),
            "written": [encoded, describe(sent)],
            "gradients": gradients.told(),
            "output": [structure, describe(outputs)],
        }
        told = exchange_json(self._world, mine, "the end of a step of the pipeline")
        if any(of_rank["consumed"] for of_rank in told):
            advance_generator()
        failed = [(r, of_rank["error"]) for r, of_rank in enumerate(told) if of_rank["error"]]
        if failed or self._step.failure:
            return failed or [(mesh.rank, ["HookError", "a stage failed"])], None
        self._check_written([of_rank["written"][0] for of_rank in told])
        records.deliver(
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
            output = contexts.decode(structure, tensors)
        return [], output

    def _along(self) -> list[int]:
        """This pipeline's ranks, as places among all."""
        grid = len(self._core.mesh.grid)
        return list(range(self._core.mesh.place, self._core.mesh.num_ranks, grid))

    def _check_written(self, written: list[dict[str, Any]]) -> None:
        """ValueError, on every rank, for attributes of save_ctx that can't be merged."""
        writers: dict[str, list[int]] = {}
        for rank, attributes in enumerate(written):
            for name, value in attributes.items():
                writers.setdefault(name, []).append(rank)
                if rank and isinstance(value, dict) and "unknown" in value:
                    raise agreed(
                        ValueError(
                            f"save_ctx.{name} is {value['unknown']} on rank {rank}, and can't be "
                            "sent to rank 0; keep tensors, numbers, text, and lists and dicts of "
                            "them"
                        )
                    )
        twice = [f"save_ctx.{n} by the ranks {r}" for n, r in writers.items() if len(r) > 1]
        if twice:
            raise agreed(
                ValueError(
                    f"several stages wrote one attribute: {'; '.join(twice)}; a pipeline's stages "
                    "have no save_ctx in common while a step runs: give each hook an attribute of "
                    "its own, and put them together after the step"
                )
            )

    def _merge_contexts(self, written: list[Any], sent: list[Tensor]) -> None:
        """Rank 0's save_ctx gets what the other stages wrote."""
        if self._world.is_local or not any(attributes for attributes, _ in written[1:]):
            return
        received = gather_to_first(self._world, sent, [described for _, described in written])
        for (attributes, _), tensors in zip(written[1:], (received or [])[1:]):
            for name, value in attributes.items():
                setattr(self._core.save_ctx, name, contexts.decode(value, tensors))

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
