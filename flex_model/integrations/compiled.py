"""torch.compile: compiled code must notice that hooks come and go.

By default it does not look at the hooks of modules inside of what it compiled, so one that came
after the first call would never run.
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def is_compiled(root: nn.Module) -> bool:
    """Whether the model, or a part of it, is compiled."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        return False
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        for module in root.modules()
    )


def see_hooks() -> None:
    """From now on, compiled code is compiled anew where hooks have changed. Code compiled before
    does not know: it is dropped, that of other models too.
    """
    config = torch._dynamo.config
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()
