"""Split a model with torch's tracer, and make sure that the parts compute what the model computes.

The tracer is given a second module tree over the same parameters (`clones`), so what it does to
modules is not done to the user's. Its graph is run on the example: it may leave something out, or
have decided something once and for all.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint
from torch.distributed.pipelining import pipeline as torch_pipeline

from flex_model.errors import TraceError
from flex_model.integrations import torch_pipelining
from flex_model.integrations.torch_pipelining import GraphStage, RecvInfo, has_gradient
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.observe import find_difference, tensors_in, unchanged
from flex_model.pipelining.stages import note_tied

Policy = Callable[[fx.GraphModule], fx.GraphModule]


def split_traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint] | None,
    split_policy: Policy | None,
) -> Pipe:
    """Torch's ``Pipe``, verified. TraceError if the model does not trace, or not rightly."""
    name = type(model).__name__
    twin, reference = (clone_tree(model, _without_cache(model), with_hooks=False) for _ in range(2))
    spec = dict(split_spec) if split_spec else None
    try:
        with warnings.catch_warnings():  # torch's, about its own internals
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            pipe = torch_pipeline(twin, args, kwargs, split_spec=spec, split_policy=split_policy)
    except Exception as error:
        raise TraceError(
            f"torch could not trace or split {name}: {_last_line(error)}. "
            'With a split_spec, method="modules" splits without tracing, in lists of blocks'
        ) from error
    if split_spec and pipe.num_stages < 2:  # torch drops a stage that computes nothing
        raise TraceError(
            f"splitting {name} at {', '.join(map(repr, split_spec))} left one stage: nothing is "
            "computed before or behind these points"
        )
    _verify(pipe, reference, args, kwargs, name)
    _check_edges(pipe, name)
    return TracedPipe(pipe, model)


def _without_cache(model: nn.Module) -> dict[int, Any]:
    """Hugging Face configs that turn the cache on, by id, each with one that does not."""
    exchange: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and getattr(config, "use_cache", False) is True:
            exchange[id(config)] = copied = copy.copy(config)
            copied.use_cache = False
    return exchange


def _last_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"[:300]


# ---- Does it compute the same? ---------------------------------------------------------------


def _verify(
    pipe: Pipe, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> None:

    def run(module: nn.Module) -> list[Tensor]:
        with unchanged(model, pipe):
            torch.manual_seed(0)  # dropout draws in the same order in both
            return tensors_in(module(*args, **kwargs))

    expected = run(model)
    try:
        got = run(pipe)
    except Exception as error:
        raise TraceError(
            f"torch's stages of {name} do not run on the example: {_last_line(error)}"
        ) from error
    difference = find_difference(got, expected)
    if difference is not None:
        raise TraceError(
            f"torch's stages of {name} do not compute what the model computes on the example "
            f"({difference}). Does it draw random numbers, or depend on values?"
        )


def _check_edges(pipe: Pipe, name: str) -> None:
    """TraceError where a value passes over a stage: torch's stages cannot send its gradient."""
    graph = pipe.split_gm.graph
    calls = [node for node in graph.nodes if node.op == "call_module"]
    for index, node in enumerate(calls):
        for value in _values_of(node):
            takers = {calls.index(user) for user in value.users if user.op == "call_module"}
            if takers - {index + 1}:
                raise TraceError(
                    f"in {name}, what stage {index} computes is used in stages "
                    f"{sorted(takers)}; torch's schedules pass values to the next stage only. "
                    "Split elsewhere"
                )


def _values_of(node: fx.Node) -> list[fx.Node]:
    picked = [user for user in node.users if user.target is operator.getitem]
    return picked or [node]


# ---- Stages ----------------------------------------------------------------------------------


class TracedPipe(Pipe):
    """Torch's ``Pipe`` over the model's own parameters, with stages that can train where masks or
    indices cross.
    """

    def __init__(self, pipe: Pipe, model: nn.Module) -> None:
        replicated = pipe.replicated_params
        super().__init__(pipe.split_gm, pipe.num_stages, pipe.has_loss_and_backward, pipe.loss_spec)
        self.replicated_params = replicated
        # Torch gives every stage a copy of a tied weight.
        own = dict(model.named_parameters(remove_duplicate=False))
        for names in replicated:
            parameter = next(own[name] for name in names.values() if name in own)
            for stage, name in names.items():
                parent, _, key = name.rpartition(".")
                holder = self.split_gm.get_submodule(stage).get_submodule(parent)
                holder.register_parameter(key, parameter)
            by_index = {int(stage.rpartition("_")[2]): name for stage, name in names.items()}
            note_tied(by_index, [self.get_stage_module(i) for i in range(self.num_stages)])

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> GraphStage:
        module = self.get_stage_module(stage_index)
        torch_pipelining.modify_graph_op_device(cast(fx.GraphModule, module), device)
        kind = _TracedStageOf211 if torch_pipelining.IS_2_11 else TracedStage
        return kind(module, stage_index, self.info(), device, group)


class TracedStage(GraphStage):
    """Torch's traced stage, for values of any dtype between stages.

    Torch asks for gradients of all that it receives; masks and indices have none, so none are
    asked for, sent or received.
    """

    def _prepare_forward_infra(self, *args, **kwargs):
        has_backward, self.has_backward = self.has_backward, False
        try:
            described = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = has_backward
        torch_pipelining.describe_graph(self)
        return described

    def _create_grad_send_info(self, args_recv_info):
        return [
            None if torch_pipelining.received_like(info) is None else info.source
            for info in args_recv_info
        ]


class _TracedStageOf211(TracedStage):
    def _create_grad_recv_info(self, act_send_info):
        infos = super()._create_grad_recv_info(act_send_info)
        return tuple(info if has_gradient(info.buffer) else None for info in infos)

    def _map_tensor_from_recv_info(self, recv_infos):
        return tuple(None if info is None else info.buffer for info in recv_infos)

    def set_local_fwd_input(self, prev_stage_outputs, mb_index):
        is_tuple = isinstance(prev_stage_outputs, tuple)
        values = prev_stage_outputs if is_tuple else (prev_stage_outputs,)
        for info, tensor in zip(self.args_recv_info[mb_index], values):
            assert isinstance(info, RecvInfo)
            info.buffer = tensor.detach().requires_grad_(has_gradient(tensor))

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        for info, tensor in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs):
            if info is not None:
                info.buffer = tensor
