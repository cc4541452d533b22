"""Refuses hooks that need the host while a CUDA graph is captured: a replay of the graph does not
repeat what the host does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flex_model.errors import HookError, see

if TYPE_CHECKING:
    from flex_model.hooks.hook_call import HookCall


def is_captured(tensor: Tensor) -> bool:
    """Whether work on the tensor is captured in a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check(call: HookCall, tensor: Tensor, is_alone: bool, moves: bool = False) -> None:
    """HookError for a hook that can't be captured: before it does anything, so that the capture can
    end and the FlexModel remains usable. A read-only hook of several ranks can: it copies its shard
    on the GPU, and the end of the run delivers what the last replay left there.

    Args:
        is_alone: Whether this process holds the full tensor, which it records at once.
        moves: Whether the hook needs a transfer, even if it is read-only.
    """
    if not is_captured(tensor):
        return
    if call.registration.edits:
        why = "an edit compares the ranks and seeds random numbers on the host"
    elif moves:
        why = "its gradient is averaged over ranks that are compared on the host"
    elif is_alone and call.records:
        why = "its record is a copy on the host"
    else:
        return
    raise refusal(call.describe(), why)


def refusal(hooks: str, why: str) -> HookError:
    """The error of hooks that can't be captured."""
    return HookError(
        f"{hooks}: {why}, which a CUDA graph can't repeat; leave it out of the captured run "
        f"(flex.active(...)), or run the model without a graph ({see('a-cuda-graph')})"
    )
