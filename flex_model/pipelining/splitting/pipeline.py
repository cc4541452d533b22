"""Split a model into the stages of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint

from flex_model.errors import TraceError
from flex_model.pipelining.splitting.block_list import check_split_spec
from flex_model.pipelining.splitting.clones import is_hook_of_flex_model, users_hooks
from flex_model.pipelining.splitting.module_pipe import ModulePipe
from flex_model.pipelining.splitting.splitter import split_modules
from flex_model.pipelining.splitting.traced import split_traced

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
