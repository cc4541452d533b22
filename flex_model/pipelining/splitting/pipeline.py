"""Split a model into the stages of a pipeline; a split model that keeps its module tree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint

from flex_model.errors import TraceError
from flex_model.integrations.torch_pipelining import PipeInfo
from flex_model.pipelining.splitting.clones import is_hook_of_flex_model, users_hooks
from flex_model.pipelining.splitting.recording import check_split_spec
from flex_model.pipelining.splitting.splitter import run_stages, split_modules
from flex_model.pipelining.splitting.traced import split_traced
from flex_model.pipelining.stages import note_tied

METHODS = ("auto", "trace", "modules")


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    *,
    method: str = "auto",
) -> Pipe | ModulePipe:
    """Split ``module`` into stages. Local; every rank calls it.

    Example::

        from flex_model.pipelining import ScheduleGPipe, SplitPoint, pipeline

        half = {"model.layers.2": SplitPoint.BEGINNING}
        pipe = pipeline(llama, (ids[:2],), {"attention_mask": mask[:2]}, split_spec=half)
        schedule = ScheduleGPipe(pipe.build_stage(rank, device), 4, loss_fn=loss_fn)

    The module is left as it is, and stages hold its very parameters. Both kinds of result are
    verified: run on the example here, all stages together equal the model.

    Args:
        mb_args: Example positional arguments, of one micro-batch. With ``"modules"``, what only the
            first stage gets.
        mb_kwargs: Example keyword arguments. With ``"modules"``, what every stage gets.
        split_spec: A point in front of or behind each named module.
        split_policy: For the tracer: takes the traced graph, puts ``pipe_split`` in, returns it.
        method: ``"trace"``: torch's tracer; sizes are those of the example. ``"modules"``: keeps
            the module tree, for models that run a list of blocks; any sizes; needs ``split_spec``.
            ``"auto"``: ``"modules"`` for a Hugging Face model with a ``split_spec``; else
            ``"trace"``, and ``"modules"`` with a warning where that fails and there is a
            ``split_spec``.

    Raises:
        ValueError: arguments that do not go together, unknown names, a module with hooks of a live
            FlexModel; with ``"modules"``, points that are not in one list of blocks, and models
            whose blocks hand on more than the hidden state.
        TraceError: with ``"trace"``, a model that does not trace, or not rightly.
    """
    _check_arguments(module, mb_args, mb_kwargs, split_spec, split_policy, method)
    kwargs = dict(mb_kwargs or {})
    has_hooks = _check_hooks(module)
    check_split_spec(module, split_spec or {})
    if method == "modules" or (method == "auto" and split_spec and _is_hugging_face(module)):
        assert split_spec is not None
        return ModulePipe(split_modules(module, mb_args, kwargs, split_spec))
    try:
        if has_hooks:
            raise TraceError(
                f"{type(module).__name__} has hooks (on {has_hooks!r}), and tracing would run them "
                "once and make what they do part of the stages for ever; remove them and hook the "
                'stages, or use method="modules", which carries them over'
            )
        return split_traced(module, mb_args, kwargs, split_spec, split_policy)
    except TraceError as error:
        if method == "trace" or not split_spec:
            raise
        try:
            pipe = ModulePipe(split_modules(module, mb_args, kwargs, split_spec))
        except ValueError as other:
            raise ValueError(f"{other}. Nor can it be traced: {error}") from error
        warnings.warn(
            f'{error}. It was split with method="modules" instead; say so to silence this',
            stacklevel=2,
        )
        return pipe


def _check_arguments(
    module: Any, mb_args: Any, mb_kwargs: Any, split_spec: Any, split_policy: Any, method: str
) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"pipeline() splits an nn.Module, got {type(module).__name__}")
    if not isinstance(mb_args, tuple):
        raise TypeError(
            f"mb_args is a tuple of positional arguments, got {type(mb_args).__name__}; write (x,)"
        )
    for name, value in (("mb_kwargs", mb_kwargs), ("split_spec", split_spec)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} is a dict by name, or None; got {type(value).__name__}")
    if split_policy is not None and not callable(split_policy):
        raise TypeError(
            "split_policy is a function from a traced graph to one with pipe_split in it, or None; "
            f"got {type(split_policy).__name__}"
        )
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose from {', '.join(map(repr, METHODS))}")
    if split_spec is not None and split_policy is not None:
        raise ValueError(
            "split_spec and split_policy are two ways to say where to split; give one of them"
        )
    if method == "modules" and not split_spec:
        raise ValueError(
            'method="modules" needs a split_spec, for example '
            '{"layers.2": SplitPoint.BEGINNING}; a split_policy is for the tracer'
        )


def _check_hooks(module: nn.Module) -> str | None:
    """The name of a module with a user's hook. ValueError for a FlexModel's."""
    found = None
    is_wrapper = type(module).__module__ == "flex_model.model"
    for name, hook in users_hooks(module):
        if is_wrapper or is_hook_of_flex_model(hook):
            is_wrapper = True
            break
        found = name
    if is_wrapper:
        raise ValueError(
            f"{type(module).__name__} has hooks of a live FlexModel, which would become part of "
            "the stages; call restore() on it, split, and wrap the schedule: "
            "FlexModel(schedule, output_ptr)"
        )
    return found


def _is_hugging_face(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


class ModulePipe(nn.Module):
    """The stages of a model, as ``pipeline(..., method="modules")`` makes them.

    Example::

        pipe = pipeline(model, (ids,), split_spec={"model.layers.2": SplitPoint.BEGINNING})
        pipe.num_stages  # 2
        stage = pipe.build_stage(rank, device)  # for any schedule
        logits = pipe(ids, attention_mask=mask)  # all stages, here

    Stages have the model's module names and types, and hold its very parameters. A stage does not
    keep the others alive: drop the pipe and the model to free what other ranks run.

    Attributes:
        num_stages: How many.
        replicated_params: Tied weights: per parameter that several stages hold, its name in each
            stage, by stage index. On ranks of their own its gradients are not summed.
        has_loss_and_backward: False: the schedule does the backward.
        loss_spec: None.
    """

    has_loss_and_backward = False
    loss_spec = None

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.num_stages = len(stages)
        for index, stage in enumerate(stages):
            self.add_module(_stage_name(index), stage)
        self.replicated_params = _replicated(stages)
        for names in self.replicated_params:
            note_tied(names, stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here. Every stage is given all keyword arguments."""
        return run_stages([self.get_stage_module(i) for i in range(self.num_stages)], args, kwargs)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module tree of a stage. ValueError if there is no such stage."""
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(
                f"there is no stage {stage_idx}; this pipe has stages 0 to {self.num_stages - 1}"
            )
        return self.get_submodule(_stage_name(stage_idx))

    def build_stage(
        self,
        stage_index: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> PipelineStage:
        """A stage for any schedule, its module moved to ``device``. Local.

        Sizes are found out at the first step, so any batch will do.
        """
        module = self.get_stage_module(stage_index)
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(device)
        return PipelineStage(module, stage_index, self.num_stages, device, group=group)

    def info(self) -> PipeInfo:
        """What torch's ``build_stage`` and tools take: the graph of stages, and their number."""
        graph = fx.Graph()
        value = graph.placeholder("inputs")
        for index in range(self.num_stages):
            value = graph.call_module(_stage_name(index), (value,))
        graph.output(value)
        return PipeInfo(graph, self.num_stages, self.has_loss_and_backward)

    def print_readable(self) -> None:
        """Print the modules of every stage."""
        for index in range(self.num_stages):
            print(f"stage {index}: {self.get_stage_module(index)}")

    def __getattr__(self, name: str) -> Any:
        if name == "split_gm":
            raise AttributeError(
                'a ModulePipe has no split_gm: nothing was traced. pipeline(..., method="trace") '
                "makes a Pipe, which has one; stages are at get_stage_module(index)"
            )
        return super().__getattr__(name)


def _stage_name(index: int) -> str:
    return f"submod_pp_{index}"  # as torch names them


def _replicated(stages: list[nn.Module]) -> list[dict[int, str]]:
    holders: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            holders.setdefault(id(parameter), {})[index] = name
    return [names for names in holders.values() if len(names) > 1]
