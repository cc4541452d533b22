"""The private parts of torch.distributed.pipelining, each named once.

A module apart from ``torch_private``: importing torch's package takes about a second, and only
pipelines need it. What a stage keeps has changed twice: torch 2.12 describes shapes by
``_TensorMeta`` (2.11: by meta tensors), and torch 2.15 keeps a ``_ForwardChunkState`` of each
micro-batch (before: a pair in ``fwd_cache``) and allocates what it receives only then.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import _utils, schedules
from torch.distributed.pipelining._IR import _modify_graph_op_device as modify_graph_op_device
from torch.distributed.pipelining._utils import PipeInfo
from torch.distributed.pipelining.stage import _PipelineStage as GraphStage
from torch.distributed.pipelining.stage import _RecvInfo as RecvInfo

__all__ = ["GraphStage", "PipeInfo", "RecvInfo", "modify_graph_op_device"]

_TensorMeta: Any = getattr(_utils, "_TensorMeta", None)
IS_2_11 = _TensorMeta is None
# What `set_shapes` and `prepare` set on a stage, of all versions.
STATE = (
    "inputs_meta",
    "_outputs_meta",
    "_user_meta",
    "_stage_meta",
    "_inference_mode",
    "_runtime_validate",
)


def is_traced(stage: Any) -> bool:
    """Return whether torch's tracer made the stage, so that its shapes are fixed."""
    return hasattr(stage, "pipe_info")


def to_meta(tensor: Tensor) -> Tensor:
    """Return a contiguous meta tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


# ---- The shapes of what a stage receives and sends -----------------------------------------------


def stated_shapes(stage: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """Return the inputs and outputs that the user made a stage for, on meta; None: any."""
    if is_traced(stage):
        return None
    if IS_2_11:
        if stage.inputs_meta is None:
            return None
        return tuple(map(to_meta, stage.inputs_meta)), tuple(map(to_meta, stage.get_outputs_meta()))
    stated = stage._user_meta
    if stated.inputs is None or stated.outputs is None:
        return None
    return tuple(map(to_meta, stated.inputs)), tuple(map(to_meta, stated.outputs))


def outputs_of_graph(stage: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a traced stage that is prepared, on meta."""
    held = stage._outputs_meta if IS_2_11 else stage._stage_meta.outputs
    return tuple(map(to_meta, held))


def prepare(
    stage: Any,
    number: int,
    has_backward: bool,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Make what a stage needs for steps of ``number`` micro-batches, without torch's own inference
    of shapes.

    Args:
        inputs, outputs: Their shapes, on meta; a traced stage has its own.
        args, kwargs: A micro-batch's.
    """
    stage.has_backward = has_backward
    stage.args_recv_info.clear()
    stage.grad_recv_info.clear()
    # Torch prepares a stage once, and has no method that undoes it.
    vars(stage).update(act_send_info={}, grad_send_info=None, chunks=number)
    args = args if stage.is_first else ()
    if IS_2_11:
        if is_traced(stage):
            vars(stage).update(_outputs_meta=None)
        else:
            vars(stage).update(inputs_meta=tuple(inputs), _outputs_meta=tuple(outputs))
        stage._prepare_forward_infra(number, args, kwargs)
        if is_traced(stage):  # contiguous, as stages send them
            vars(stage).update(_outputs_meta=tuple(map(to_meta, stage._outputs_meta)))
    else:
        stated = _utils._StageMeta()
        if not is_traced(stage):
            stated.inputs = tuple(_meta_of(one, has_backward) for one in inputs)
            stated.outputs = tuple(_meta_of(one, has_backward) for one in outputs)
            vars(stage).update(_user_meta=stated, _inference_mode=_utils.InferenceMode.STATIC)
        # All ranks agreed on the inputs before the step.
        vars(stage).update(_stage_meta=_utils._StageMeta(), _runtime_validate=False)
        stage._prepare_forward_infra(number, args, kwargs, has_backward=has_backward)
        if is_traced(stage):
            describe_graph(stage)
    if has_backward:
        stage._prepare_backward_infra(number)


def _meta_of(tensor: Any, has_backward: bool) -> Any:
    """Return torch's description of a contiguous tensor, which gets a gradient if any can."""
    has_grad = has_backward and has_gradient(tensor)
    return _TensorMeta(tensor.shape, to_meta(tensor).stride(), tensor.dtype, has_grad)


def has_gradient(value: Any) -> bool:
    """Return whether a tensor, or torch's description of one, is of a dtype with gradients."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def describe_graph(stage: Any) -> None:
    """Describe what a traced stage receives and sends as stages send it: contiguous, and with
    gradients where the dtype has them (torch 2.11 and 2.12 ask for those of indices, too).
    """
    has_backward = stage.has_backward
    for info in (info for infos in stage.args_recv_info.values() for info in infos):
        if IS_2_11 and isinstance(info, RecvInfo):
            received: Any = info.buffer
            received.requires_grad_(has_backward and has_gradient(received))
        elif not IS_2_11 and not info.is_root_arg:
            meta = _meta_of(info.tensor_meta, has_backward)
            vars(info).update(tensor_meta=meta)
            if info.buffer is not None:  # before torch 2.15
                buffer = torch.empty(meta.shape, dtype=meta.dtype, device=stage.device)
                vars(info).update(buffer=buffer.requires_grad_(meta.requires_grad))
    if IS_2_11:
        return
    held = stage._stage_meta
    changed = {"outputs": tuple(_meta_of(meta, has_backward) for meta in held.outputs)}
    if not stage.is_first:
        infos = [info for info in stage.args_recv_info[0] if not info.is_root_arg]
        changed["inputs"] = tuple(info.tensor_meta for info in infos)
    vars(stage).update(_stage_meta=dataclasses.replace(held, **changed))


# ---- A schedule's stages -------------------------------------------------------------------------


def connect(schedule: Any, stages: Sequence[Any]) -> None:
    """Connect each rank of a pipeline to its neighbours. Collective over the pipeline."""
    if hasattr(schedule, "_initialize_pipeline_distributed_state"):  # since torch 2.15
        schedule._initialize_pipeline_distributed_state(list(stages), False, True)
        vars(schedule).update(_p2p_initialized=True)
        return
    operations = [
        operation
        for stage in stages
        for operation in stage._get_init_p2p_neighbors_ops()
        if operation.group_peer != stage.group_rank  # V schedules, which gloo can't do
    ]
    schedules._wait_batch_p2p(schedules._batch_p2p(operations))


def own_arguments(schedule: Any) -> list[str]:
    """Return the keyword arguments of the schedule's ``step`` in this version of torch."""
    found = inspect.signature(type(schedule).step).parameters.values()
    return [one.name for one in found if one.kind is inspect.Parameter.KEYWORD_ONLY]


# ---- What a stage keeps of a micro-batch ---------------------------------------------------------


def keep_inputs(stage: Any, microbatch: int, keep: Callable[[list[Any]], list[Tensor]]) -> None:
    """Replace the inputs that a stage keeps for a micro-batch's backward."""
    if hasattr(stage, "fwd_cache"):
        outputs, inputs = stage.fwd_cache[microbatch]
        stage.fwd_cache[microbatch] = outputs, keep(inputs)
    else:
        states = stage._forward_chunk_states
        state = states[microbatch]
        states[microbatch] = dataclasses.replace(state, input_values=keep(state.input_values))


def keep_outputs(stage: Any, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
    """Keep these as the outputs of a micro-batch that has no inputs: they are sent."""
    if hasattr(stage, "fwd_cache"):
        stage.fwd_cache[microbatch] = (outputs, [])
    else:
        stage._forward_chunk_states[microbatch] = stage._make_forward_chunk_state(outputs, [])


def drop_forward(stage: Any, microbatch: int) -> None:
    """Drop what a stage keeps for a micro-batch's backward."""
    held = stage.fwd_cache if hasattr(stage, "fwd_cache") else stage._forward_chunk_states
    held.pop(microbatch, None)


def drop_received(received: dict[int, Any], microbatch: int) -> None:
    """Drop what was received for a micro-batch and no computation takes: since torch 2.15 the next
    step refuses to receive into a buffer that is still there.

    Args:
        received: ``args_recv_info`` or ``grad_recv_info`` of a stage.
    """
    for info in received.get(microbatch, ()):
        if hasattr(info, "take_buffer"):
            vars(info).update(buffer=None)


def received_like(info: Any) -> Any:
    """Return the shape and dtype of what a stage receives and sends a gradient for; None: it does
    not.
    """
    if IS_2_11:
        like = info.buffer if isinstance(info, RecvInfo) else None
    else:
        like = None if info.is_root_arg else info.tensor_meta
    return like if like is not None and has_gradient(like) else None


def zero_gradients(stage: Any, microbatch: int) -> tuple[Tensor | None, ...]:
    """Return zeros for all gradients of a micro-batch that a stage sends."""
    return tuple(
        None if like is None else torch.zeros(like.shape, dtype=like.dtype, device=stage.device)
        for like in map(received_like, stage.args_recv_info[microbatch])
    )
