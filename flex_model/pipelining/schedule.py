"""One rank's stages under torch's schedules: run a step in micro-batches or as one, and come to its
end whatever fails.

Torch's stages and schedules are used as they are. Methods of the stages are overlaid on their
instances (``OverlaidStage``) to know which micro-batch is computed, and to put a stand-in in the
place of what failed: an exception in the middle of a schedule would leave other stages waiting.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _RecvInfo
from torch.utils import _pytree as pytree

from flex_model.errors import is_agreed
from flex_model.hooks.core import HookCore
from flex_model.hooks.step import Step
from flex_model.pipelining.stages import accepted_kwargs

_OVERLAID = (
    "forward_one_chunk",
    "forward_maybe_with_nosync",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "scale_grads",
    "_get_init_p2p_neighbors_ops",
    "_validate_fwd_input",
)
_FLAGS = [
    f"_{stages}_{way}_initialized"
    for stages in ("stage", "stages")
    for way in ("forward", "backward")
]


class _Whole(Function):
    """Identity whose result is no view: zero-bubble schedules detach a stage's outputs in place."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def is_schedule(value: object) -> bool:
    """Whether it is a schedule of ``torch.distributed.pipelining``."""
    return isinstance(value, schedules._PipelineSchedule)


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages, in their order."""
    stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    return sorted(stages, key=lambda stage: stage.stage_index)


class OverlaidStage:
    """A stage that tells the step what it computes, and never raises in the middle of it.

    Attributes:
        failed: Micro-batches for which a stand-in goes on.
    """

    def __init__(self, stage: Any, step: Step, core: HookCore, trainable: nn.Module) -> None:
        self.stage = stage
        self.failed: set[int] = set()
        self._step, self._core, self._trainable = step, core, trainable
        self._accepted = accepted_kwargs(stage.submod)
        for name in _OVERLAID:
            setattr(stage, name, getattr(self, name.lstrip("_")))

    def restore(self) -> None:
        """Take the overlay off."""
        for name in _OVERLAID:
            self.stage.__dict__.pop(name, None)

    def accepted(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """Of the step's keyword arguments, those that this stage takes."""
        return {
            name: value
            for name, value in (kwargs or {}).items()
            if self._accepted is None or name in self._accepted
        }

    def _of_torch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.stage), name)(self.stage, *args, **kwargs)

    # The overlaid methods, with torch's signatures.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self._step.at(self.stage.stage_index, fwd_chunk_id):
            try:
                return self._of_torch(
                    "forward_one_chunk",
                    fwd_chunk_id,
                    args,
                    self.accepted(kwargs),
                    save_forward_output=save_forward_output,
                )
            except BaseException as error:
                self._fail(fwd_chunk_id, error)
                return self._stand_in(fwd_chunk_id, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        core = self._core
        if self._step.is_silent:
            return whole(self._of_torch("forward_maybe_with_nosync", *args, **kwargs))
        core.tracking.begin(args, kwargs, core.active_registrations())
        try:
            output = self._of_torch("forward_maybe_with_nosync", *args, **kwargs)
        finally:
            core.tracking.end()
        return whole(output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not self.stage.has_backward:
            return
        with self._step.at(self.stage.stage_index, bwd_chunk_id), self._with_trainable():
            if bwd_chunk_id not in self.failed:
                try:
                    self._of_torch(
                        "backward_one_chunk",
                        bwd_chunk_id,
                        loss=loss,
                        full_backward=full_backward,
                        last_backward=last_backward,
                    )
                    return
                except BaseException as error:
                    self._fail(bwd_chunk_id, error)
            self._stand_in_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._step.at(self.stage.stage_index, bwd_chunk_id), self._with_trainable():
            if bwd_chunk_id not in self.failed:
                try:
                    self._of_torch(
                        "backward_weight_one_chunk", bwd_chunk_id, last_backward=last_backward
                    )
                    return
                except BaseException as error:
                    self._fail(bwd_chunk_id, error)
            self.stage.dw_runner.pop(bwd_chunk_id, None)
            self.stage.backward_state.pop(bwd_chunk_id, None)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: ``Gradients`` does it, once for a parameter of two stages, and not to what was
        there before the step.
        """

    def get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Without those to this rank itself (V schedules), which gloo can't do."""
        stage = self.stage
        me = stage.group_rank
        neighbours = {stage.stage_index - 1, stage.stage_index + 1}
        if all(stage.stage_index_to_group_rank.get(other) != me for other in neighbours):
            return self._of_torch("_get_init_p2p_neighbors_ops")
        return [
            operation
            for operation in self._of_torch("_get_init_p2p_neighbors_ops")
            if operation.group_peer != me
        ]

    def validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: all ranks agreed on the inputs before the step."""

    # What goes on after a failure.

    def _fail(self, microbatch: int, error: BaseException) -> None:
        self.failed.add(microbatch)
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        self._step.is_silent |= is_agreed(cause)
        self._step.fail_in_model(cause)

    def _stand_in(self, microbatch: int, save_forward_output: bool) -> Any:
        stage = self.stage
        outputs = tuple(
            torch.zeros(
                meta.shape,
                dtype=meta.dtype,
                device=stage.device,
                requires_grad=stage.has_backward and meta.dtype.is_floating_point,
            )
            for meta in stage.get_outputs_meta()
        )
        output = outputs[0] if len(outputs) == 1 else outputs
        stage.fwd_cache[microbatch] = (outputs, [])
        if stage.is_last and save_forward_output:
            stage.output_chunks.append(output)
        return output

    def _stand_in_backward(self, microbatch: int) -> None:
        stage = self.stage
        stage.fwd_cache.pop(microbatch, None)
        stage.bwd_cache[microbatch] = tuple(
            torch.zeros_like(info.buffer) if isinstance(info, _RecvInfo) else None
            for info in stage.args_recv_info[microbatch]
        )
        stage.dw_runner[microbatch] = lambda: None

    @contextlib.contextmanager
    def _with_trainable(self) -> Iterator[None]:
        """Inside, trainable modules count as the stage's own: zero-bubble schedules compute
        gradients of parameters that they know of, and of no others.
        """
        submod, trainable = self.stage.submod, list(self._trainable.parameters())
        if not trainable:
            yield
            return
        parameters = type(submod).parameters

        def all_parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
            yield from parameters(submod, recurse)
            yield from (parameter for parameter in trainable if parameter.requires_grad)

        submod.parameters = all_parameters
        try:
            yield
        finally:
            del submod.parameters


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
            overlaid.failed.clear()
            overlaid.stage.has_backward = has_backward
            overlaid.stage.clear_runtime_states()
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


def whole(output: Any) -> Any:
    """A stage's output as it can be sent and, later, detached in place: contiguous, no view, not
    an input of the stage itself.
    """

    def one(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        tensor = tensor.contiguous()
        if tensor.requires_grad and (tensor._is_view() or tensor.grad_fn is None):
            return _Whole.apply(tensor)
        return tensor

    if isinstance(output, Tensor):
        return one(output)
    if type(output) in (tuple, list):
        return type(output)(one(item) for item in output)
    return output
