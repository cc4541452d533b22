"""One rank's stages under torch's schedules: run a step in micro-batches or as one, to its end
whatever fails.

Torch's schedules are used as they are; methods of the stages are replaced on their instances.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.utils import _pytree as pytree

from flex_model.hooks.core import HookCore
from flex_model.integrations import torch_pipelining
from flex_model.pipelining.instrumented_stage import InstrumentedStage
from flex_model.runs.step import MicrobatchState

_FLAGS = [
    f"_{stages}_{direction}_initialized"
    for stages in ("stage", "stages")
    for direction in ("forward", "backward")
]


def stages_of(schedule: Any) -> list[Any]:
    """Return this rank's stages, in their order."""
    stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    return sorted(stages, key=lambda stage: stage.stage_index)


class LocalSchedule:
    """This rank's part of a schedule.

    Attributes:
        stages: Torch's stages.
        instrumented: Those with their methods replaced.
        needs_shapes: Whether the shapes of what stages send must be known before a step.
        calls_roots: See `StageIndex`.
    """

    needs_shapes = True
    calls_roots = True

    def __init__(self, schedule: Any, state: MicrobatchState, core: HookCore) -> None:
        self._schedule, self._state = schedule, state
        self.stages = stages_of(schedule)
        self.has_last = any(stage.is_last for stage in self.stages)
        self.instrumented = [InstrumentedStage(stage, state, core) for stage in self.stages]
        self._is_connected = False
        self._before = {
            name: vars(schedule)[name]
            for name in ("_loss_fn", "_has_backward", *_FLAGS)
            if name in vars(schedule)
        }

    def close(self) -> None:
        """Leave stages and schedule as they were."""
        for stage in self.instrumented:
            stage.restore()
        vars(self._schedule).update(self._before)

    def check_inputs(self, kwargs: dict[str, Any]) -> None:
        """ValueError for an argument of torch's own ``step`` that steps with hooks don't have."""
        other = set(torch_pipelining.own_arguments(self._schedule)) & set(kwargs)
        if other:
            raise ValueError(
                f"step() got {', '.join(sorted(other))}, which steps with hooks don't take; give "
                "the whole batch, target=, losses= and return_outputs=, or restore() the FlexModel"
            )

    def connect(self, number: int, has_backward: bool, args: Any, kwargs: Any) -> None:
        """Make the buffers for a step of ``number`` micro-batches; the stages' shapes are known.
        Collective over the pipeline the first time.
        """
        if not self._is_connected:
            torch_pipelining.connect(self._schedule, self.stages)
            self._is_connected = True
        for stage in self.instrumented:
            stage.prepare(number, has_backward, args, kwargs)
        vars(self._schedule).update(
            {name: "forward" in name or has_backward for name in _FLAGS if name in self._before}
        )

    def run(
        self,
        arg_chunks: list[Any],
        kwarg_chunks: list[Any],
        target_chunks: list[Any] | None,
        losses: list[Tensor],
        return_outputs: bool,
        has_backward: bool,
    ) -> Any:
        """Run a step of stages that have begun it: in micro-batches along the schedule, or as one
        by a loop over the stages where there is one chunk for several. Return the merged output of
        the last stage, if it is on this rank.
        """
        schedule = self._schedule
        schedule._internal_losses.clear()
        loss_fn = None if target_chunks is None else self._guarded(schedule._loss_fn)
        before = {"_has_backward": schedule._has_backward, "_loss_fn": schedule._loss_fn}
        run = schedule._step_microbatches
        if len(arg_chunks) != schedule._n_microbatches:
            run = self._run_as_one
        # Torch's schedules take these in their constructor only.
        vars(schedule).update(_has_backward=has_backward, _loss_fn=loss_fn)
        try:
            filled = losses if target_chunks is not None else None
            run(arg_chunks, kwarg_chunks, target_chunks, filled, return_outputs)
        finally:
            vars(schedule).update(before)
        if self.has_last and return_outputs and not self._state.failure.has_error:
            return schedule._merge_outputs(self.stages[-1].output_chunks)
        return None

    def _guarded(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(output: Any, target: Any) -> Tensor:
            try:
                return loss_fn(output, target)
            except BaseException as error:
                self._state.fail_in_model(error, "loss function")
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
        """Run the whole batch through all stages, and back: a schedule may refuse so few chunks."""
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
            self._schedule._maybe_compute_loss(stage, output, target_chunks, 0)
        for index, stage in reversed(by_index.items()) if self._schedule._has_backward else ():
            if index + 1 not in by_index:
                self._wait(schedules._sorted_batch_p2p(stage.get_bwd_recv_ops(0)))
            loss = self._schedule._maybe_get_loss(stage, 0)
            stage.backward_one_chunk(0, loss=loss, last_backward=True)
            if index - 1 in by_index:
                by_index[index - 1].set_local_bwd_input(stage.get_local_bwd_output(0), 0)
            else:
                sends.append(schedules._sorted_batch_p2p(stage.get_bwd_send_ops(0)))
            stage.perform_reduce_grad(1)
        for works in sends:
            self._wait(works)
        if losses is not None and self.has_last:
            losses[:] = self._schedule._internal_losses
        self._schedule._internal_losses.clear()

    @staticmethod
    def _wait(works: dict[int, list[dist.Work]]) -> None:
        for work in itertools.chain.from_iterable(works.values()):
            work.wait()
