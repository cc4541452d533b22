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
from torch.distributed.pipelining._utils import PipeInfo
from torch.distributed.pipelining.stage import _PipelineStage, _RecvInfo

from flex_model import pytree
from flex_model.errors import TraceError
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.observe import unchanged

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
    twin = clone_tree(model, _without_cache(model), with_hooks=False)
    spec = dict(split_spec) if split_spec else None
    try:
        with warnings.catch_warnings():  # torch's, about its own internals
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            pipe = torch_pipeline(twin, args, kwargs, split_spec=spec, split_policy=split_policy)
    except Exception as error:
        raise TraceError(
            f"torch could not trace or split {name}: {_last_line(error)}. "
            + _advice(split_spec is not None)
        ) from error
    _check_stages(pipe, split_spec, name)
    _verify(pipe, model, args, kwargs, name)
    _check_edges(pipe, name)
    _use_own_parameters(pipe, model)
    pipe.__class__ = TracedPipe
    return pipe


def _without_cache(model: nn.Module) -> dict[int, Any]:
    """Hugging Face configs that turn the cache on, by id, each with one that does not."""
    exchange: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and getattr(config, "use_cache", False) is True:
            exchange[id(config)] = copied = copy.copy(config)
            copied.use_cache = False
    return exchange


def _advice(has_spec: bool) -> str:
    if has_spec:
        return 'method="modules" splits without tracing, in lists of blocks'
    return 'With a split_spec, method="modules" splits without tracing, in lists of blocks'


def _last_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"[:300]


def _check_stages(pipe: Pipe, split_spec: Mapping[str, SplitPoint] | None, name: str) -> None:
    """Torch drops a stage that computes nothing, and counts one that runs nothing."""
    if split_spec and pipe.num_stages < 2:
        raise TraceError(
            f"splitting {name} at {', '.join(map(repr, split_spec))} left one stage: nothing is "
            "computed before or behind these points"
        )


# ---- Does it compute the same? ---------------------------------------------------------------


def _verify(
    pipe: Pipe, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> None:
    reference = clone_tree(model, _without_cache(model), with_hooks=False)

    def run(module: nn.Module) -> list[Tensor]:
        with unchanged(model, pipe):
            torch.manual_seed(0)  # dropout draws in the same order in both
            return pytree.flatten(module(*args, **kwargs))[0]

    expected = run(reference)
    try:
        got = run(pipe)
    except Exception as error:
        raise TraceError(
            f"torch's stages of {name} do not run on the example: {_last_line(error)}"
        ) from error
    if len(got) != len(expected):
        raise TraceError(
            f"torch's stages of {name} return {len(got)} tensors, the model {len(expected)}"
        )
    for ours, theirs in zip(got, expected):
        if theirs.is_meta:  # no values to compare
            continue
        try:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        except AssertionError as error:
            raise TraceError(
                f"torch's stages of {name} do not compute what the model computes on the example: "
                f"{_last_line(error)}. Does it draw random numbers, or depend on values?"
            ) from error


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


def _use_own_parameters(pipe: Pipe, model: nn.Module) -> None:
    """Torch gives every stage a copy of a tied weight."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for names in pipe.replicated_params:
        parameter = next(own[name] for name in names.values() if name in own)
        for stage, name in names.items():
            parent, _, key = name.rpartition(".")
            setattr(pipe.split_gm.get_submodule(stage).get_submodule(parent), key, parameter)


def _values_of(node: fx.Node) -> list[fx.Node]:
    picked = [user for user in node.users if user.target is operator.getitem]
    return picked or [node]


# ---- Stages ----------------------------------------------------------------------------------


class TracedPipe(Pipe):
    """Torch's ``Pipe``, with stages that can train where masks or indices cross."""

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> _PipelineStage:
        module = self.get_stage_module(stage_index)
        torch.distributed.pipelining._IR._modify_graph_op_device(
            cast(fx.GraphModule, module), device
        )
        return TracedStage(module, stage_index, self.info(), device, group)


class TracedStage(_PipelineStage):
    """Torch's traced stage, for values of any dtype between stages.

    Torch asks for gradients of all that it receives; masks and indices have none, so none are
    asked for, sent or received.
    """

    def _create_act_recv_info(self):
        has_backward, self.has_backward = self.has_backward, False
        try:
            infos = super()._create_act_recv_info()
        finally:
            self.has_backward = has_backward
        for info in infos:
            if isinstance(info, _RecvInfo) and _has_grad(info.buffer) and has_backward:
                info.buffer.requires_grad_(True)
        return infos

    def _create_grad_send_info(self, args_recv_info):
        return [
            info.source if isinstance(info, _RecvInfo) and _has_grad(info.buffer) else None
            for info in args_recv_info
        ]

    def _create_grad_recv_info(self, act_send_info):
        infos = super()._create_grad_recv_info(act_send_info)
        return tuple(info if _has_grad(info.buffer) else None for info in infos)

    def _map_tensor_from_recv_info(self, recv_infos):
        return tuple(None if info is None else info.buffer for info in recv_infos)

    def set_local_fwd_input(self, prev_stage_outputs, mb_index):
        values = (
            prev_stage_outputs if isinstance(prev_stage_outputs, tuple) else (prev_stage_outputs,)
        )
        for info, tensor in zip(self.args_recv_info[mb_index], values):
            assert isinstance(info, _RecvInfo)
            info.buffer = tensor.detach()
            if _has_grad(tensor):
                info.buffer.requires_grad_(True)

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        for info, tensor in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs):
            if info is not None:
                info.buffer = tensor


def _has_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


__all__ = ["PipeInfo", "TracedPipe", "TracedStage", "split_traced"]
