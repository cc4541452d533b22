"""Runs a model that transformers has split into stages, with hooks by the unsplit model's names."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from flex_model.hooks.function import HookFunction
from flex_model.hooks.site import Moment
from flex_model.hooks.table import EVERYTHING, Choice
from flex_model.integrations import copied
from flex_model.integrations.transformers_private import with_cache_of
from flex_model.pipelining.forward_stages import ForwardSchedule, LocalForward
from flex_model.pipelining.schedule_runner import ScheduleRunner
from flex_model.pipelining.stage_map import modules_of
from flex_model.runs.settings import Groups, Settings, refuse_of_steps
from flex_model.visualize.model_map import Modules

_MARK = "_flex_model_runner"  # an attribute of the forward that a runner has replaced


class ForwardRunner(ScheduleRunner):
    """Runs each forward of the model as a step of one micro-batch: ``generate`` is several. The
    constructor and forwards are collective over all ranks of the model.
    """

    def __init__(self, model: Any, settings: Settings) -> None:
        settings.check_no_steps()
        if hasattr(model.forward, _MARK):
            raise TypeError(
                "the model has a FlexModel already, which runs its forwards; restore() that one "
                "first"
            )
        copied.check_modules(model)
        self._model, self._before = model, model.forward
        self._signature = inspect.signature(model.forward)
        self._called_with: Choice = EVERYTHING  # the hooks of a call of the FlexModel
        super().__init__(ForwardSchedule(model), settings, LocalForward)

        @functools.wraps(self._before)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs, self._called_with, forward_only=True)

        setattr(forward, _MARK, True)
        vars(model).update(forward=forward)

    def close(self) -> None:
        vars(self._model).update(forward=self._before)
        super().close()

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        groups: Groups = "all",
        complement: bool = False,
        forward_only: bool = True,
    ) -> Any:
        """Call the model with the hooks of ``groups``. Collective over all its ranks."""
        before = self._called_with
        self._called_with = self.core.table.choice(groups, complement)
        try:
            return self._model(*args, **kwargs)
        finally:
            self._called_with = before

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *of_step: Any, **more: Any
    ) -> Any:
        # By name: every stage needs the shape of what the first one gets.
        self._signature.bind(*args, **kwargs)
        kwargs = dict(zip(self._signature.parameters, args)) | kwargs
        kwargs = with_cache_of(list(self._signature.parameters), kwargs)
        return super()._step((), kwargs, *of_step, **more)

    @contextlib.contextmanager
    def one_run_at_most(self) -> Iterator[None]:
        """A context in which all forwards are one run."""
        if self._choice is not None:
            yield
            return
        with self.active("all", complement=False):
            yield

    # What belongs to schedules.

    def change(self, name: str, value: object) -> None:
        """TypeError: there are no steps here whose setting could change."""
        refuse_of_steps(name)

    def targets_of(
        self, function: HookFunction, kind: str
    ) -> tuple[Sequence[nn.Module | nn.Parameter], Moment]:
        """Return the modules on this rank that stand for a hook's."""
        if kind not in ("forward", "forward_pre"):
            raise ValueError(
                f"{kind} hook on {function.module_name!r}: transformers' stages (pp_size) send no "
                "gradients, so no backward can be hooked; load the model without pp_size, or wrap "
                "the torch.distributed.pipelining schedule that runs its stages"
            )
        return super().targets_of(function, kind)

    def modules_to_show(self, args: tuple[Any, ...]) -> Modules:
        """Return the modules of all stages, for ``show``."""
        if args:
            self.check_runs_whole_model("show with inputs")
        return modules_of(self.core, self.index, type(self._model).__name__)
