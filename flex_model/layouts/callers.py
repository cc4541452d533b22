"""Whose code runs an operation or reads a size: the model's, torch's, or what shards the model.

The modules of the frames on Python's stack show it.
"""

from __future__ import annotations

import sys
from typing import Any

# Their functions are called by what asks.
_PASSING_ON = ("flex_model.layouts.sizes", "torch._tensor", "torch.storage")
#: A mask is each row's own, on all paths there.
MASKS = ("transformers.masking_utils",)
_PLANS = ("transformers.distributed.", "transformers.integrations.tensor_parallel")
_BETWEEN = ("flex_model.layouts.", "torch._dynamo.", "torch._compile", "torch._ops")
_SHARDING = (
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch._utils",
    "flex_model.",
    "megatron.",
    "fairscale.",
)


def is_asked_by_model(but_for: tuple[str, ...] = ()) -> bool:
    """Whether the model asks, and not what shards it, which looks after its own tensors, nor these
    modules of it. To be called by what is asked.
    """
    return not _is_of(_outside(sys._getframe(2), _PASSING_ON), _SHARDING + but_for)


def is_run_by_model() -> bool:
    """Likewise, of an operation that is recorded."""
    return not _is_of(_outside(sys._getframe(1), _BETWEEN), _SHARDING)


def is_asked_by_torch() -> bool:
    """Whether a function of torch asks, which checks what it is given."""
    return _is_of(_outside(sys._getframe(1), _BETWEEN), ("torch.",))


def is_of_a_plan() -> bool:
    """Whether Hugging Face's tensor parallelism runs an operation, by the model's plan."""
    return _is_of(_outside(sys._getframe(1), ("flex_model.layouts.", "torch.")), _PLANS)


def _outside(frame: Any, modules: tuple[str, ...]) -> Any:
    while frame.f_back is not None and _is_of(frame, modules):
        frame = frame.f_back
    return frame


def _is_of(frame: Any, modules: tuple[str, ...]) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith(modules))
