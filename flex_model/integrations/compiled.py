"""torch.compile: compiled code must notice that hooks come and go.

By default it does not look at the hooks of modules inside of what it compiled, so one that came
after the first call would never run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def is_compiled(root: nn.Module) -> bool:
    """Whether a call of the model, or of a part of it, runs compiled code: ``module.compile()``,
    ``torch.compile(module)``, ``module.forward = torch.compile(module.forward)``.
    """
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        return False
    return any(is_compiled_itself(module) for module in root.modules())


def is_compiled_itself(module: nn.Module) -> bool:
    """As ``is_compiled``, of this one module."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        # torch.compile puts this on the functions that it returns
        or hasattr(vars(module).get("forward"), "get_compiler_config")
    )


def num_compiled() -> int:
    """A number that changes when anything was compiled in this process, by whoever keeps it:
    ``generate`` with a static cache keeps a compiled ``model._compiled_call`` beside the model's
    own call, and so may any function of the user. Cheap.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    return getattr(getattr(dynamo, "convert_frame", None), "FRAME_COUNTER", 0)  # no public way


def nothing_compiled() -> AbstractContextManager[None]:
    """Inside, all code runs as written. Code that the compiler meets under a dispatch mode it would
    leave uncompiled from then on, or fail at, outside of the mode too.
    """
    # `flex_attention` imports the compiler when it is called.
    if not sys.modules.keys() & {"torch._dynamo", "torch.nn.attention.flex_attention"}:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def outside_graphs(hook: _Hook) -> _Hook:
    """Mark a hook: code that is compiled around it breaks its graph there, and nothing that the
    hook calls is compiled. So does ``torch.compiler.disable``, which would import the compiler
    for everybody and add half a microsecond to every call.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # private; there in torch 2.11
        return torch.compiler.disable(hook)
    marked: Any = hook
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "flex_model's hooks run between two pieces of a graph"
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return hook


def see_hooks() -> None:
    """From now on, compiled code is compiled anew where hooks have changed. Code compiled before
    does not know: it is dropped, that of other models too.
    """
    config = torch._dynamo.config
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()
