"""Forwards in part (``run_until``, ``run_from``): which models allow it, and the clean-up after an
early exit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from flex_model.integrations import compiled, fsdp1, fsdp2, offload
from flex_model.integrations.torch_private import fsdp2_state

NO_HOOK = (
    "run_until: no forward or forward-pre hook is active, and no module was named, so no module "
    "can be run to; register a hook, choose its group, or give a module's name"
)


def not_reached(module_name: str | None, method: str = "run_until") -> str:
    what = "a hooked module" if module_name is None else f"{module_name!r}"
    return (
        f"{method}: the forward ended, and {what} was not called; give the name of a "
        "module that this forward calls, or call flex(...)"
    )


def check(root: nn.Module, method: str = "run_until") -> None:
    """Raise ValueError for a model whose forward must run as a whole."""
    reason = ""
    if compiled.is_compiled(root):
        reason = "it is compiled, and hooks inside compiled code are not called"
    elif any(fsdp1.is_fsdp1(module) for module in root.modules()):
        reason = "FullyShardedDataParallel (FSDP1) frees what it gathered after each forward"
    elif any(offload.is_zero_3(parameter) for parameter in root.parameters()):
        reason = "DeepSpeed ZeRO-3 frees what it gathered after each forward"
    if reason:
        raise ValueError(
            f"{method}: this model's forward can't run in part: {reason}; call flex(...)"
        )


def clean_up(root: nn.Module) -> None:
    """Reset the model as after a full forward. Collective if weights were being gathered."""
    for module in root.modules():
        if fsdp2.is_fsdp2(module):
            _end_forward(module)


def _end_forward(module: Any) -> None:
    """Reshard the weights of FSDP2, those being prefetched too, and let the next forward begin at
    the root. Torch does so in forward hooks, which the early exit skipped.
    """
    state = fsdp2_state(module)
    state._training_state = type(state._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    for group in fsdp2.param_groups(module):
        group._training_state = type(group._training_state).IDLE
        if group._all_gather_result is not None:
            module.unshard()
    module.reshard()
