"""A place to hook where a model has no module."""

from __future__ import annotations

from typing import Any

from torch import nn


class DummyModule(nn.Module):
    """A module that returns its input. Put it where you want to hook.

    Example::

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.residual = DummyModule()

            def forward(self, x):
                return self.residual(x + self.mlp(x))
    """

    def forward(self, inputs: Any) -> Any:
        return inputs
