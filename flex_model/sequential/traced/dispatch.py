"""Keeps a model's weights on the CPU while its subgraphs are run by hand on a GPU."""

from __future__ import annotations

import sys
import warnings
from typing import Any, TypeVar

import torch
from torch import nn

_Model = TypeVar("_Model", bound=nn.Module)


def dispatch_for_sequential(model: _Model) -> _Model:
    """Keep a model's weights on the CPU, and move each module's to the GPU while it runs; hooks of
    an earlier dispatch are removed. Without a GPU it stays on the CPU, with a warning. Returns the
    same object.

    Example::

        model = dispatch_for_sequential(model)
        subgraphs = trace_subgraphs(model, batch, ["LlamaDecoderLayer"])

    Raises:
        ImportError: there is a GPU and no accelerate, which moves the weights.
    """
    loaded: Any = sys.modules.get("accelerate")
    if any(hasattr(module, "_hf_hook") for module in model.modules()) and loaded is not None:
        loaded.hooks.remove_hook_from_module(model, recurse=True)
    if not torch.cuda.is_available():
        warnings.warn("dispatch_for_sequential: no GPU; the model stays on the CPU", stacklevel=2)
        return model
    try:
        import accelerate
    except ImportError as error:
        raise ImportError(
            "dispatch_for_sequential needs accelerate to move weights to the GPU; pip install "
            "accelerate, or use flex_model.sequential.run(model, batches, device='cuda')"
        ) from error
    accelerate.cpu_offload(model.cpu(), torch.device("cuda", torch.cuda.current_device()))
    return model
