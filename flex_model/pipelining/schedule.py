"""One rank's stages under torch's schedules: run a step in micro-batches or as one, and come to its
end whatever fails.

Torch's schedules are used as they are; methods of the stages are overlaid on their instances.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.utils import _pytree as pytree

from flex_model.hooks.core import HookCore
from flex_model.pipelining.overlaid_stage import OverlaidStage
from flex_model.runs.step import Step

_FLAGS = [
    f"_{stages}_{way}_initialized"
    for stages in ("stage", "stages")
    for way in ("forward", "backward")
]


def is_schedule(value: object) -> bool:
    """Whether it is a schedule of ``torch.distributed.pipelining``."""
    return isinstance(value, schedules._PipelineSchedule)


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages, in their order."""
    stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    return sorted(stages, key=lambda stage: stage.stage_index)


class StageRunner:
    """This rank's part of a schedule.

    Args:
        trainable: Modules that editing functions use.
    """

    def __init__(self, schedule: Any, step: Step, core: HookCore, trainable: nn.Module) -> None:
        self.schedule = schedule
        self.step = step
        self.overlaid = [
            OverlaidStage(stage, step, core, trainable) for stage in stages_of(schedule)
        ]
        self._is_connected = False
        self._before = {
            name: vars(schedule)[name]
            for name in ("_loss_fn", "_has_backward", *_FLAGS)
            if name in vars(schedule)
        }

    @property
    def stages(self) -> list[Any]:
        return [overlaid.stage for overlaid in self.overlaid]

    def close(self) -> None:
        """Leave stages and schedule as they were."""
        for overlaid in self.overlaid:
            overlaid.restore()
        vars(self.schedule).update(self._before)

    # Before a step.

    def connect(self, number: int, has_backward: bool, args: Any, kwargs: Any) -> None:
        """Make the buffers that a step of ``number`` micro-batches needs; the stages' shapes are
        known. Collective over the pipeline the first time.
        """
        if not self._is_connected:
            operations = [op for one in self.overlaid for op in one.get_init_p2p_neighbors_ops()]
            schedules._wait_batch_p2p(schedules._batch_p2p(operations))
            self._is_connected = True
        for stage in self.stages:
            stage.has_backward = has_backward
            stage.args_recv_info.clear()
            stage.act_send_info = {}
            stage.grad_recv_info.clear()
            stage.grad_send_info = None
            if hasattr(stage, "pipe_info"):
                stage._outputs_meta = None
            stage._prepare_forward_infra(number, args if stage.is_first else (), kwargs)
            if hasattr(stage, "pipe_info"):  # as `whole` makes them
                stage._outputs_meta = tuple(
                    torch.empty(meta.shape, dtype=meta.dtype, device="meta")
                    for meta in stage._outputs_meta
                )
            if has_backward:
                stage._prepare_backward_infra(number)
            else:
                stage.chunks = number
        for name in _FLAGS:
            if hasattr(self.schedule, name):
                setattr(self.schedule, name, "forward" in name or has_backward)

    # A step.

    def run(
        self,
        arg_chunks: list[Any],
        kwarg_chunks: list[Any],
        target_chunks: list[Any] | None,
        losses: list[Tensor],
        return_outputs: bool,
        has_backward: bool,
    ) -> Any:
        """Run the step, in micro-batches along the schedule, or as one by a loop over the stages
        where there is one chunk for several. The merged output of the last stage, if it is here.
        """
        schedule = self.schedule
        for overlaid in self.overlaid:
            overlaid.begin(has_backward)
        schedule._internal_losses.clear()
        kept = schedule._has_backward, schedule._loss_fn
        schedule._has_backward = has_backward
        schedule._loss_fn = self._guarded(kept[1]) if target_chunks is not None else None
        run = schedule._step_microbatches
        if len(arg_chunks) != schedule._n_microbatches:
            run = self._run_as_one
        try:
            wanted = losses if target_chunks is not None else None
            run(arg_chunks, kwarg_chunks, target_chunks, wanted, return_outputs)
        finally:
            schedule._has_backward, schedule._loss_fn = kept
        for stage in self.stages:
            if stage.is_last and return_outputs and not self.step.failure:
                return schedule._merge_outputs(stage.output_chunks)
        return None

    def _guarded(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(output: Any, target: Any) -> Tensor:
            try:
                return loss_fn(output, target)
            except BaseException as error:
                self.step.fail_in_model(error, "loss function")
                floats = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
                return floats[0].sum() * 0

        return compute

    def _run_as_one(
        self,
        arg_chunks: list[Any],
        kwarg_chunks: list[Any],
        target_chunks: list[Any] | None,
        losses: list[Tensor] | None,
        return_outputs: bool,
    ) -> None:
        """The whole batch through all stages, and back. A schedule may refuse so few chunks."""
        sends: list[Any] = []
        by_index = {stage.stage_index: stage for stage in self.stages}
        for index, stage in by_index.items():
            if index - 1 not in by_index:
                self._wait(schedules._sorted_batch_p2p(stage.get_fwd_recv_ops(0)))
            output = stage.forward_one_chunk(
                0, arg_chunks[0], kwarg_chunks[0], save_forward_output=return_outputs
            )
            if index + 1 in by_index:
                by_index[index + 1].set_local_fwd_input(output, 0)
            else:
                sends.append(schedules._sorted_batch_p2p(stage.get_fwd_send_ops(0)))
            self.schedule._maybe_compute_loss(stage, output, target_chunks, 0)
        for index, stage in reversed(by_index.items()) if self.schedule._has_backward else ():
            if index + 1 not in by_index:
                self._wait(schedules._sorted_batch_p2p(stage.get_bwd_recv_ops(0)))
            loss = self.schedule._maybe_get_loss(stage, 0)
            stage.backward_one_chunk(0, loss=loss, last_backward=True)
            if index - 1 in by_index:
                by_index[index - 1].set_local_bwd_input(stage.get_local_bwd_output(0), 0)
            else:
                sends.append(schedules._sorted_batch_p2p(stage.get_bwd_send_ops(0)))
            stage.perform_reduce_grad(1)
        for works in sends:
            self._wait(works)
        if losses is not None and any(stage.is_last for stage in self.stages):
            losses[:] = self.schedule._internal_losses
        self.schedule._internal_losses.clear()

    @staticmethod
    def _wait(works: dict[int, list[dist.Work]]) -> None:
        for work in itertools.chain.from_iterable(works.values()):
            work.wait()
