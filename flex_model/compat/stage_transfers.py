"""Release 0.1.0's functions between the stages of a pipeline: send, receive, collect on stage 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flex_model.compat.mappings import check_tensor
from flex_model.compat.parallel_state import ParallelState, check_state
from flex_model.distributed.tensor_dicts import describe, exchange_json, gather_tensors
from flex_model.distributed.transports.buffer_layout import as_bytes
from flex_model.errors import agreed
from flex_model.records.records import owned_copy


def batch_isend_irecv_pipeline_parallel(
    fmps: ParallelState,
    recv_tensors: Sequence[Tensor],
    recv_from_ranks: Sequence[int],
    send_tensors: Sequence[Tensor],
    send_to_ranks: Sequence[int],
) -> None:
    """Send and receive between stages of one pipeline; returns when all is done.

    Example::

        stage, last = fmps.get_pipeline_parallel_rank(), fmps.get_pipeline_parallel_world_size() - 1
        receive = [torch.empty(4)] if stage > 0 else []
        send = [hidden] if stage < last else []
        batch_isend_irecv_pipeline_parallel(
            fmps, receive, [stage - 1] * len(receive), send, [stage + 1] * len(send)
        )

    Args:
        recv_tensors: Written in place; shape and dtype as they are sent. Between two stages the
            order counts.
        recv_from_ranks, send_to_ranks: Stages (places in the pipeline group), one for each tensor;
            a stage may send to itself.

    Point to point: only the stages that are named take part (with NCCL the first call needs all of
    them). It goes through the torch group of the pipeline and waits as torch does, with the group's
    own deadline. Not differentiable.

    Raises:
        ValueError: lists of different lengths, a stage out of range, sends to itself that it does
            not receive.
        TypeError: not a dense tensor, no state.
    """
    name = "batch_isend_irecv_pipeline_parallel"
    check_state(fmps, name)
    me = fmps.get_pipeline_parallel_rank()
    receive = _check_pairs(fmps, "recv", recv_tensors, recv_from_ranks, name)
    send = _check_pairs(fmps, "send", send_tensors, send_to_ranks, name)
    kept = [tensor for tensor, stage in receive if stage == me]
    own = [tensor for tensor, stage in send if stage == me]
    if [(tensor.shape, tensor.dtype) for tensor in own] != [(t.shape, t.dtype) for t in kept]:
        raise ValueError(
            f"{name}: stage {me} sends itself {[tuple(tensor.shape) for tensor in own]} and "
            f"receives {[tuple(tensor.shape) for tensor in kept]} from itself; name each of them "
            "in both lists, with one shape and dtype"
        )
    with torch.no_grad():
        for source, target in zip([tensor.clone() for tensor in own], kept, strict=True):
            target.copy_(source)
        _point_to_point(
            fmps.get_pipeline_parallel_group(),
            [(tensor, stage) for tensor, stage in receive if stage != me and tensor.numel()],
            [(tensor, stage) for tensor, stage in send if stage != me and tensor.numel()],
        )


def _check_pairs(
    fmps: ParallelState, what: str, tensors: Sequence[Tensor], stages: Sequence[int], name: str
) -> list[tuple[Tensor, int]]:
    if len(tensors) != len(stages):
        raise ValueError(
            f"{name}: {len(tensors)} {what} tensors, but {len(stages)} ranks; give a rank for each"
        )
    last = fmps.get_pipeline_parallel_world_size() - 1
    for tensor, stage in zip(tensors, stages, strict=True):
        check_tensor(tensor, name)
        if not 0 <= stage <= last:
            raise ValueError(
                f"{name}: {what} rank {stage} is out of range; ranks are stages of the pipeline, "
                f"0 to {last}"
            )
    return list(zip(tensors, stages, strict=True))


def _point_to_point(
    group: dist.ProcessGroup | None,
    receive: list[tuple[Tensor, int]],
    send: list[tuple[Tensor, int]],
) -> None:
    """Send and receive bytes, which every backend can move, whatever the dtype."""
    operations, buffers = [], []
    for tensor, stage in receive:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=_carrier(group, tensor))
        buffers.append((buffer, tensor))
        operations.append(dist.P2POp(dist.irecv, as_bytes(buffer), group=group, group_peer=stage))
    for tensor, stage in send:
        data = as_bytes(tensor.detach().to(_carrier(group, tensor)))
        operations.append(dist.P2POp(dist.isend, data, group=group, group_peer=stage))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for buffer, tensor in buffers:
        tensor.copy_(buffer)


def _carrier(group: dist.ProcessGroup | None, tensor: Tensor) -> torch.device:
    """The device from which the group's backend can send this tensor."""
    backends = dict(
        entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry
    )
    backend = backends.get(tensor.device.type)
    if backend is None:  # NCCL alone, and a tensor on the CPU
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if backend == "gloo" else tensor.device


def gather_pipeline_parallel_tensor_dicts(
    fmps: ParallelState, tensor_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of all stages of a pipeline, on its first stage.

    Example::

        collected = gather_pipeline_parallel_tensor_dicts(fmps, {f"stage{stage}": hidden})
        collected                      # stage 0: {"stage0": ..., "stage1": ...}, the others: {}

    Args:
        tensor_dict: Tensors by name; names are of one stage only. Any dtype and shape.

    Returns:
        On stage 0 the tensors of all stages, in the order of the stages: copies, on the CPU.
            Elsewhere ``{}``. Each (tp, dp) place has its own pipeline, and so its own stage 0.

    Collective over the stages of the pipeline. Names, dtypes and shapes travel as JSON; nothing is
    unpickled.

    Raises:
        TypeError: no state.
        ValueError: two stages have a tensor of the same name; on every rank, naming both.
        HookError: a stage passed something else than a dict of tensors (its own cause is a
            TypeError), or did not call it within the timeout.
    """
    name = "gather_pipeline_parallel_tensor_dicts"
    check_state(fmps, name)
    communicator = fmps.communicator("pp")
    try:
        tensors = _check_dict(tensor_dict, name)
    except TypeError as error:
        communicator.fail(str(error), error)  # with several stages: in the exchange below
        tensor_dict, tensors = {}, []
    by_stage = exchange_json(communicator, list(zip(tensor_dict, describe(tensors))), name)
    _check_names([[key for key, _ in entries] for entries in by_stage], name)
    described = [[description for _, description in entries] for entries in by_stage]
    received = gather_tensors(communicator, tensors, described)
    if received is None:
        return {}
    received[0] = [owned_copy(tensor) for tensor in tensors]
    return {
        key: tensor
        for entries, found in zip(by_stage, received, strict=True)
        for (key, _), tensor in zip(entries, found, strict=True)
    }


def _check_dict(tensor_dict: dict[str, Tensor], name: str) -> list[Tensor]:
    if not isinstance(tensor_dict, dict):
        raise TypeError(f"{name}: expected a dict of tensors, got {type(tensor_dict).__name__}")
    for key, tensor in tensor_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"{name}: expected names of type str, got {key!r}")
        check_tensor(tensor, f"{name}, {key!r}")
    return list(tensor_dict.values())


def _check_names(names: list[list[str]], name: str) -> None:
    stages: dict[str, list[int]] = {}
    for stage, keys in enumerate(names):
        for key in keys:
            stages.setdefault(key, []).append(stage)
    twice = [f"{key!r} on the stages {where}" for key, where in stages.items() if len(where) > 1]
    if twice:
        raise agreed(
            ValueError(
                f"{name}: several stages have tensors of the same name: {'; '.join(twice)}; rename "
                "them"
            )
        )
