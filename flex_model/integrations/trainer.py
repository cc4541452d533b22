"""Hooks on the model that transformers' ``Trainer`` trains, for as long as it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from flex_model.model import FlexModel

__all__ = ["HookCallback"]


class HookCallback(TrainerCallback):
    """Wraps the model when training begins, once ``Trainer`` has moved and sharded it (DDP, FSDP2),
    and removes the hooks when training ends.

    Example::

        from flex_model.integrations.trainer import HookCallback

        def register(flex):
            flex.register_forward_hook(HookFunction("model.layers.3.mlp", editing_function=steer))

        hooks = HookCallback(register, records, data_parallel_size=2)
        Trainer(model, arguments, train_dataset=rows, callbacks=[hooks]).train()

    Every batch of training, and of the evaluations during it, is a run: ``output_ptr`` has the
    records of the last one; take them in another callback's ``on_step_end``. Checkpoints have the
    model's own names. An evaluation without training has no hooks.

    Args:
        register: Called with the ``FlexModel``, to register hooks. On every rank.
        output_ptr, settings: As of ``FlexModel``.

    Attributes:
        flex: The ``FlexModel``, while the model is trained; else None.
    """

    def __init__(
        self,
        register: Callable[[FlexModel], object],
        output_ptr: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._register, self._output_ptr, self._settings = register, output_ptr, settings
        self.flex: FlexModel | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        """Wrap the model. Collective."""
        self._end()  # of a training that failed
        self.flex = FlexModel(model, self._output_ptr, **self._settings)
        self._register(self.flex)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Remove the hooks. Local."""
        self._end()

    def _end(self) -> None:
        flex, self.flex = self.flex, None
        if flex is not None:
            flex.restore()
