"""Finds the caller of an operation, or of the reading of a size: the model, torch, or what shards
the model.

The modules of the frames on Python's stack identify it.
"""

from __future__ import annotations

import sys
from typing import Any

# Their frames lie between the caller and the recorded function.
_WRAPPERS = ("flex_model.layouts.sizes", "torch._tensor", "torch.storage")
#: Those of other followers may lie there, too.
RECORDERS = ("flex_model.layouts.function_recorder",)
#: Whatever branch their comparisons take, each row of a mask depends on its own tokens alone.
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


def is_called_by_model(but_for: tuple[str, ...] = (), through: tuple[str, ...] = ()) -> bool:
    """Whether the model called the function that calls this one directly, or through the modules
    ``through``. What shards the model does not count, as it handles its own tensors, nor do the
    modules ``but_for``.
    """
    caller = _frame_outside(sys._getframe(2), _WRAPPERS + through)
    return not _is_in(caller, _SHARDING + but_for)


def is_run_by_model() -> bool:
    """Whether the model runs the operation that is being recorded, not what shards the model."""
    return not _is_in(_frame_outside(sys._getframe(1), _BETWEEN), _SHARDING)


def is_called_by_torch() -> bool:
    """Whether a function of torch calls, which checks its arguments."""
    return _is_in(_frame_outside(sys._getframe(1), _BETWEEN), ("torch.",))


def is_run_by_tp_plan() -> bool:
    """Whether Hugging Face's tensor parallelism runs an operation, by the model's plan."""
    return _is_in(_frame_outside(sys._getframe(1), ("flex_model.layouts.", "torch.")), _PLANS)


def _frame_outside(frame: Any, modules: tuple[str, ...]) -> Any:
    while frame.f_back is not None and _is_in(frame, modules):
        frame = frame.f_back
    return frame


def _is_in(frame: Any, modules: tuple[str, ...]) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith(modules))
