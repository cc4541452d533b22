"""A split model whose stages keep the model's module tree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage

from flex_model.integrations.torch_pipelining import PipeInfo
from flex_model.pipelining.splitting.splitter import run_stages
from flex_model.pipelining.stages import note_tied


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
