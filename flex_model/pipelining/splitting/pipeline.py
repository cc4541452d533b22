"""Split a model into the stages of a pipeline: by the tracer of torch, or as a model that keeps its
module tree.
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
from torch.distributed.pipelining import Pipe, PipelineStage, SplitPoint
from torch.distributed.pipelining import pipeline as torch_pipeline

from flex_model.errors import TraceError, check_type
from flex_model.integrations import torch_pipelining
from flex_model.integrations.torch_pipelining import GraphStage, PipeInfo, RecvInfo, has_gradient
from flex_model.integrations.torch_private import unchanged
from flex_model.pipelining.splitting.clones import clone_tree, is_hook_of_flex_model, users_hooks
from flex_model.pipelining.splitting.recording import check_split_spec, find_difference, tensors_in
from flex_model.pipelining.splitting.splitter import run_stages, split_modules
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
    twin, reference = (clone_tree(model, _without_cache(model)) for _ in range(2))
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
        ValueError: arguments that do not go together, unknown names, a module with hooks; with
            ``"modules"``, points that are not in one list of blocks, and models whose blocks hand
            on more than the hidden state.
        TraceError: with ``"trace"``, a model that does not trace, or not rightly.
    """
    _check_arguments(module, mb_args, mb_kwargs, split_spec, split_policy, method)
    kwargs = dict(mb_kwargs or {})
    _check_hooks(module)
    check_split_spec(module, split_spec or {})
    if method == "modules" or (method == "auto" and split_spec and _is_hugging_face(module)):
        assert split_spec is not None
        return ModulePipe(split_modules(module, mb_args, kwargs, split_spec))
    try:
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
    check_type("pipeline() splits an nn.Module", module, nn.Module)
    check_type("mb_args is a tuple of positional arguments", mb_args, tuple, "; write (x,)")
    for name, value in (("mb_kwargs", mb_kwargs), ("split_spec", split_spec)):
        check_type(f"{name} is a dict by name, or None", value, Mapping | None)
    expected = "split_policy is a function that puts pipe_split into a traced graph, or None"
    check_type(expected, split_policy, Callable | None)
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


def _check_hooks(module: nn.Module) -> None:
    """ValueError for hooks, which would become part of the stages."""
    hooks = list(users_hooks(module))
    is_wrapper = type(module).__module__ == "flex_model.model"
    if is_wrapper or any(is_hook_of_flex_model(hook) for _, hook in hooks):
        raise ValueError(
            f"{type(module).__name__} has hooks of a live FlexModel, which would become part of "
            "the stages; call restore() on it, split, and wrap the schedule: "
            "FlexModel(schedule, output_ptr)"
        )
    if hooks:
        raise ValueError(
            f"{type(module).__name__} has hooks (on {hooks[0][0]!r}), which would become part of "
            "the stages, or run once while they are traced; remove them before pipeline(), and "
            "hook the stages"
        )


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
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
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
