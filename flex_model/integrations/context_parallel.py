"""Refuses torch's context parallelism, which splits the sequence over ranks: it is not supported.
``distributed/mesh.py`` refuses meshes with such a dim.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import nn

from flex_model.errors import HookError, agreed
from flex_model.integrations.torch_private import CONTEXT_PARALLEL
from flex_model.names import clean

_REFUSAL = (
    "splits the sequence over {} ranks, and context parallelism is not supported: hooks would see "
    "parts of sequences as rows of the batch; run the model without it"
)


def check_modules(root: nn.Module) -> None:
    """Raise ValueError if the attention of a model is context parallel, as torchtitan makes it."""
    for name, module in root.named_modules():
        for hook in module._forward_pre_hooks.values():
            style = getattr(getattr(hook, "func", None), "__self__", None)
            size = _size(getattr(hook, "keywords", {}).get("mesh"))
            if type(style).__name__ == "_ContextParallel" and size > 1:
                raise ValueError(
                    f"FlexModel: the module {clean(root, name)!r} {_REFUSAL.format(size)}"
                )


def check_run() -> None:
    """Raise HookError, the same on every rank, inside
    ``torch.distributed.tensor.experimental.context_parallel(...)``.
    """
    attention: Any = sys.modules.get(CONTEXT_PARALLEL)
    patched: Any = F.scaled_dot_product_attention
    if patched not in getattr(attention, "_replaced_functions", ()):
        return
    cells = zip(patched.__code__.co_freevars, patched.__closure__ or ())
    size = _size(next((cell.cell_contents for name, cell in cells if name == "device_mesh"), None))
    if size > 1:
        raise agreed(HookError(f"context_parallel(...) {_REFUSAL.format(size)}"))


def _size(mesh: Any) -> int:
    return 1 if mesh is None else mesh.size()
