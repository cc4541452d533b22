"""torch.compile: compiled code must be recompiled when hooks are added or removed.

By default it has no guards on the hooks of submodules, so a hook added after the first call would
never run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flex_model.errors import text_of
from flex_model.integrations.torch_private import DYNAMO, eval_frame, guard_on_hooks
from flex_model.integrations.torch_private import num_compiled as num_compiled

# In dynamo's message where a graph must not break.
HOOKS_BREAK_GRAPHS = (
    "hooks of a FlexModel run between two pieces of a graph: compile without fullgraph=True, or "
    "remove the hooks"
)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def is_compiled(root: nn.Module) -> bool:
    """Whether a call of the model, or of one of its modules, runs compiled code:
    ``module.compile()``, ``torch.compile(module)``, ``module.forward =
    torch.compile(module.forward)``.
    """
    if DYNAMO not in sys.modules:  # nothing was compiled
        return False
    return any(is_compiled_itself(module) for module in root.modules())


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether a call of this module itself runs compiled code; see ``is_compiled``."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        # torch.compile puts this on the functions that it returns
        or hasattr(vars(module).get("forward"), "get_compiler_config")
    )


def nothing_compiled() -> AbstractContextManager[None]:
    """Return a context in which all code runs eagerly. Code that dynamo first traced under a
    dispatch mode would stay uncompiled, or fail, after the mode as well.
    """
    # `flex_attention` imports the compiler when it is called.
    if not sys.modules.keys() & {DYNAMO, "torch.nn.attention.flex_attention"}:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def stopped_at_fullgraph(error: BaseException) -> bool:
    """Whether ``torch.compile(fullgraph=True)`` raised this since a forward on several ranks is
    followed, which is not compiled; its message names frames only. Dynamo's own says it already
    where a hook broke a graph.
    """
    text = text_of(error)
    is_stopped = isinstance(error, RuntimeError) and "fullgraph=True" in text
    return is_stopped and HOOKS_BREAK_GRAPHS not in text


def outside_graphs(hook: _Hook) -> _Hook:
    """Mark a hook so that compiled code breaks its graph there, and nothing that the hook calls is
    compiled. ``torch.compiler.disable`` does the same, but would import the compiler in every
    process and add half a microsecond to every call.
    """
    return _marked(hook, True)


def between_graphs(function: _Hook) -> _Hook:
    """Mark a function that is not compiled itself; the model that it calls may be: with
    ``torch.compile(flex)``.
    """
    return _marked(function, False)


def _marked(function: _Hook, is_recursive: bool) -> _Hook:
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # else slower
        return torch.compiler.disable(function, recursive=is_recursive, reason=HOOKS_BREAK_GRAPHS)
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = HOOKS_BREAK_GRAPHS
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if is_recursive else default)
    eval_frame.set_code_exec_strategy(marked.__code__, strategy)
    return function


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is not compiled itself. Torch disables the compiler around the call of
    any other mode, and imports it for that: 900 modules, 4 s.
    """

    def __init_subclass__(cls) -> None:
        cls.__torch_dispatch__ = outside_graphs(cls.__torch_dispatch__)  # type: ignore[method-assign]


class HookGuards:
    """Makes compiled code call hooks of a model that were registered after it was compiled: the
    model's own code, and what others compiled around it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._num_compiled = 0

    def renew(self, has_new_hooks: bool) -> None:
        """Have code recompiled where hooks are new, or something was compiled since the last call.
        Cheap where neither is so.
        """
        number = num_compiled()
        if number == self._num_compiled and not has_new_hooks:
            return
        # Dynamo guards on hooks from now on. Code compiled before has no such guards, so all of it
        # is dropped, that of other models too.
        if (number or is_compiled(self._root)) and guard_on_hooks():
            torch.compiler.reset()
        self._num_compiled = num_compiled()
