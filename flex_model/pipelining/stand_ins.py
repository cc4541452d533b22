"""The stand-in for modules that another stage has."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd import Function

from flex_model.integrations.transformers_private import stand_ins


class PassThrough(nn.Module):
    """Returns its first argument; holds nothing.

    Example::

        part = copy.deepcopy(model)  # a manual stage: the first two of four layers
        for index in (2, 3):
            part.layers[index] = PassThrough()
        stage = PipelineStage(part, 0, 2, device)

    ``FlexModel`` does not take it for the module whose name it has.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()), None)


def is_stand_in(module: nn.Module) -> bool:
    """Return whether the module stands in for one that another stage has: ours or transformers'."""
    return isinstance(module, (PassThrough, *stand_ins()))


# ---- Tensors that may be changed and detached in place -------------------------------------------


class OwnTensor(Function):
    """Identity whose result is neither a leaf nor a view: zero-bubble schedules detach a stage's
    outputs in place, and its first block may change its input in place.
    """

    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad
