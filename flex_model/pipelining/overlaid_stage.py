"""A stage of torch's as a step with hooks needs it: it tells which micro-batch it computes, and
puts a stand-in in the place of what failed, since an exception in the middle of a schedule would
leave other stages waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import _RecvInfo
from torch.nn.parallel import DistributedDataParallel

from flex_model.errors import is_agreed
from flex_model.hooks.core import HookCore
from flex_model.integrations import cut
from flex_model.pipelining.own_tensor import OwnTensor
from flex_model.pipelining.stages import accepted_kwargs
from flex_model.runs.step import Step
from flex_model.runs.until import Until

_OVERLAID = (
    "forward_one_chunk",
    "forward_maybe_with_nosync",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "scale_grads",
    "get_local_bwd_output",
    "set_local_bwd_input",
    "_get_init_p2p_neighbors_ops",
    "_validate_fwd_input",
)


class OverlaidStage:
    """A stage that tells the step what it computes, and never raises in the middle of it.

    Attributes:
        failed: Micro-batches for which a stand-in goes on.
        until: Where this step's forwards end; None: at the end.
        is_beyond: Whether this step needs nothing of the stage.
    """

    def __init__(self, stage: Any, step: Step, core: HookCore, trainable: nn.Module) -> None:
        self.stage = stage
        self.failed: set[int] = set()
        self.until: Until | None = None
        self.is_beyond = False
        self._step, self._core, self._trainable = step, core, trainable
        self._accepted = accepted_kwargs(stage.submod)
        # What reduces gradients over data-parallel ranks follows a whole backward only: where a
        # zero-bubble schedule splits it, torch leaves some gradients out of the reduction.
        self._splits_backward = not any(
            isinstance(module, (DistributedDataParallel, FSDPModule))
            for module in stage.submod.modules()
        )
        self._num_backwards = 0
        for name in _OVERLAID:
            setattr(stage, name, getattr(self, name.lstrip("_")))

    def restore(self) -> None:
        """Take the overlay off."""
        for name in _OVERLAID:
            self.stage.__dict__.pop(name, None)

    def begin(self, has_backward: bool) -> None:
        """A step begins."""
        self.failed.clear()
        self._num_backwards = 0
        self.stage.has_backward = has_backward
        self.stage.clear_runtime_states()

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
                if not self.is_beyond:
                    with self._cut():
                        output = self._of_torch(
                            "forward_one_chunk",
                            fwd_chunk_id,
                            args,
                            self.accepted(kwargs),
                            save_forward_output=save_forward_output,
                        )
                        self._keep_tensors(fwd_chunk_id)
                        return output
            except BaseException as error:
                self._fail(fwd_chunk_id, error)
            return self._stand_in(fwd_chunk_id, save_forward_output)

    def _keep_tensors(self, microbatch: int) -> None:
        """Of the inputs that the backward is given: a split one asks each of them whether it needs
        a gradient.
        """
        cache = self.stage.fwd_cache
        outputs, inputs = cache[microbatch]
        cache[microbatch] = outputs, [value for value in inputs if isinstance(value, Tensor)]

    @contextlib.contextmanager
    def _cut(self) -> Iterator[None]:
        """Inside, the forward ends where the step says."""
        if self.until is None:
            yield
            return
        with self.until.installed(), self.until.one_forward():
            yield
        cut.clean_up(self.stage.submod)
        if not self.until.is_reached:
            raise RuntimeError(cut.not_reached(None))

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        core = self._core
        if self._step.is_silent:
            return whole(self._of_torch("forward_maybe_with_nosync", *args, **kwargs))
        active, stage = core.runs.active_hooks(), self.stage.stage_index
        core.tracking.begin(args, kwargs, active, part=stage)
        output = None
        try:
            output = self._of_torch("forward_maybe_with_nosync", *args, **kwargs)
        finally:
            core.tracking.end(output)
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
        self._num_backwards += 1
        if not self._splits_backward:
            full_backward, last_backward = True, self._num_backwards == self.stage.chunks
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
        if not self._splits_backward:
            return
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

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Nothing where the step has no backward: V schedules ask all the same."""
        if self.stage.has_backward:
            return self._of_torch("get_local_bwd_output", mb_index)
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """See ``get_local_bwd_output``."""
        if self.stage.has_backward:
            self._of_torch("set_local_bwd_input", next_stage_bwd_outputs, mb_index)

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


def whole(output: Any) -> Any:
    """A stage's output as it can be sent and, later, detached in place: contiguous, no view, not
    an input of the stage itself.
    """

    def one(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        tensor = tensor.contiguous()
        if tensor.requires_grad and (tensor._is_view() or tensor.grad_fn is None):
            return OwnTensor.apply(tensor)
        return tensor

    if isinstance(output, Tensor):
        return one(output)
    if type(output) in (tuple, list):
        return type(output)(one(item) for item in output)
    return output
