"""Gradients that a step of a pipeline leaves in parameters, one micro-batch after the other: made
what one backward of the unsplit model would leave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.group_pool import GRID
from flex_model.errors import HookError
from flex_model.hooks.core import HookCore
from flex_model.integrations import fsdp


class Gradients:
    """Of one step. What parameters had before is put aside, and added again at the end.

    Args:
        divisor: What makes gradients of the mean loss of sums over micro-batches.
    """

    def __init__(self, core: HookCore, divisor: int) -> None:
        self._core, self._divisor = core, divisor
        self._hooked = core.table.parameters()
        # A stage whose editing functions use a trainable module has its part of the gradient.
        self._trainable = [p for p in core.modules.parameters() if p.requires_grad]
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []
        stages = [
            parameter
            for stage in core.module.children()
            for parameter in fsdp.kept_parameters(stage)
            if parameter.requires_grad
        ]
        for parameter in {id(p): p for p in [*stages, *self._trainable]}.values():
            self._before.append((parameter, parameter.grad))
            parameter.grad = None

    def scale(self) -> None:
        """Make them those of the mean loss. Local."""
        if self._divisor > 1:
            for parameter, _ in self._before:
                if parameter.grad is not None:
                    parameter.grad.div_(self._divisor)

    def run_hooks(self) -> None:
        """Call the hooks on parameters' gradients, with those of the whole batch. Collective over
        the ranks of each stage.
        """
        for parameter, registrations in self._hooked:
            if not parameter.requires_grad:
                raise HookError(
                    f"{registrations[0].describe()}: the parameter does not require a gradient; "
                    "call requires_grad_(True) before the step"
                )
            if parameter.grad is not None:
                parameter.grad = self._core.run_parameter_hooks(registrations, parameter.grad)

    def told(self) -> list[bool]:
        """Which trainable parameters have a part of their gradient here. JSON can hold it."""
        return [parameter.grad is not None for parameter in self._trainable]

    def add_stages(self, line: Communicator, told: Sequence[Sequence[bool]]) -> None:
        """Give every rank the sum over stages of trainable parameters' gradients. Collective over
        the stages of a pipeline.

        Args:
            told: By stage's rank, what ``told`` said there.
        """
        for index, parameter in enumerate(self._trainable):
            if not any(of_rank[index] for of_rank in told):
                continue
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if not line.is_local:
                grad = line.all_reduce_sum(GRID, grad.detach().cpu()).to(parameter.device)
            parameter.grad = grad

    def put_back(self, is_failed: bool) -> None:
        """Add what was there before the step; if it failed, leave only that. Local."""
        for parameter, before in self._before:
            if before is None:
                if is_failed:
                    parameter.grad = None
            elif is_failed or parameter.grad is None:
                parameter.grad = before
            else:
                with torch.no_grad():
                    parameter.grad = before.add_(parameter.grad)
