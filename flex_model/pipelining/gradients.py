"""Turns the gradients that a step of a pipeline adds up in parameters into those of one backward of
the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.group_pool import GRID
from flex_model.errors import HookError
from flex_model.hooks.core import HookCore
from flex_model.integrations import fsdp2
from flex_model.runs.graphs import leaves_between


class Gradients:
    """The gradients of one step. Those that parameters had before are added again at its end.

    Args:
        divisor: Makes gradients of the mean loss of sums over micro-batches. The loss itself is not
            divided, since not all gradients come from it: a Function may add those of an auxiliary
            loss in its backward.
        inputs: The step's, on this rank; they may have gradients, too.
    """

    def __init__(self, core: HookCore, divisor: int, inputs: Iterable[Tensor]) -> None:
        self._core, self.divisor = core, divisor
        self._hooked = core.table.parameters()
        # Each stage whose editing functions use a trainable module has a part of its gradient.
        self._trainable = [p for p in core.modules.parameters() if p.requires_grad]
        self._before: dict[Tensor, Tensor | None] = {}
        self._outside: set[Tensor] = set()  # leaves whose part of the gradient is divided already
        stages = [
            parameter
            for stage in core.module.children()
            for parameter in fsdp2.kept_parameters(stage)
            if parameter.requires_grad
        ]
        self.include([*stages, *self._trainable])
        self._handles = []
        for one in {id(one): one for one in inputs if one.requires_grad and divisor > 1}.values():
            behind = {one} if one.is_leaf else set(leaves_between([], one))
            if one.is_leaf or not behind.isdisjoint(self._trainable):
                self.include([*behind, one] if one.retains_grad else behind)
            else:  # it is computed by modules of others, which may take gradients from autograd
                self._handles.append(one.register_hook(lambda grad: grad / divisor))
                self._outside |= behind

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Scale the gradients of these, too: leaves that editing functions close over.

        Raises:
            HookError: inputs of the step are computed from one.
        """
        for leaf in leaves:
            if leaf in self._outside:
                raise HookError(
                    f"a tensor of shape {tuple(leaf.shape)} that an editing function reads is one "
                    "that inputs of the step are computed from, so the parts of its gradient can't "
                    "be told apart; register its module by register_trainable_module, or pass "
                    "inputs.detach()"
                )
            if leaf not in self._before:
                self._before[leaf], leaf.grad = leaf.grad, None

    def scale(self) -> None:
        """Divide the sums over micro-batches. Local."""
        for leaf in self._before if self.divisor > 1 else ():
            if leaf.grad is not None:
                leaf.grad.div_(self.divisor)

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

    def describe(self) -> list[bool]:
        """Return which trainable parameters have a part of their gradient here, as JSON."""
        return [parameter.grad is not None for parameter in self._trainable]

    def add_stages(self, line: Communicator, described: Sequence[Sequence[bool]]) -> None:
        """Set the sum over stages of trainable parameters' gradients on every rank. Collective
        over the stages of a pipeline.

        Args:
            described: By rank along the pipeline: the result of ``describe`` there.
        """
        for index, parameter in enumerate(self._trainable):
            if not any(of_rank[index] for of_rank in described):
                continue
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if not line.is_local:
                grad = line.all_reduce_sum(GRID, grad.detach().cpu()).to(parameter.device)
            parameter.grad = grad

    def restore(self, is_failed: bool) -> None:
        """Add the gradients from before the step; if it failed, restore them. Local."""
        for handle in self._handles:
            handle.remove()
        for parameter, before in self._before.items():
            if is_failed or parameter.grad is None:
                parameter.grad = before
            elif before is not None:
                with torch.no_grad():
                    parameter.grad = before.add_(parameter.grad)
