"""What goes from stage to stage: found out before a step, by all ranks together, so that a stage
that can't run is an error on every rank and nobody waits for it.

Each stage is run once on zeros, in the order of the stages, with no hook and no gradient, and left
as it was: buffers (BatchNorm's) and random generators are put back.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import (
    DTYPE_OF_NAME,
    Description,
    describe,
    exchange_json,
)
from flex_model.hooks.registration import Registration
from flex_model.pipelining.overlaid_stage import OverlaidStage, whole
from flex_model.pipelining.stages import Directory, is_traced, targets


def settle(
    overlaid: Sequence[OverlaidStage],
    directory: Directory,
    line: Communicator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_backward: bool,
) -> str:
    """Tell every stage of this rank the shapes of its inputs and outputs. What is wrong, in words;
    empty where nothing is. Collective over the stages of one pipeline.

    Args:
        args, kwargs: Of one micro-batch; ``args`` count on the first stage's rank.
    """
    mine = {one.stage.stage_index: one for one in overlaid}
    shapes: Sequence[Description] = []
    for index in range(directory.num_stages):
        told: dict[str, Any] = {}
        if index in mine:
            one = mine[index]
            try:
                inputs = args if index == 0 else zeros(shapes, one.stage.device)
                told["shapes"] = _outputs_of(one, inputs, one.accepted(kwargs))
            except Exception as error:
                told["error"] = f"stage {index}: {type(error).__name__}: {error}"
            is_last = index == directory.num_stages - 1
            if "error" not in told and has_backward and not is_last:
                told["error"] = _refused_by_torch(index, told["shapes"])
        answer = exchange_json(line, told, f"the shapes of stage {index}")
        answer = answer[directory.places[index]]
        if answer.get("error"):
            return answer["error"]
        shapes = answer["shapes"]
    return ""


def _refused_by_torch(index: int, shapes: Sequence[Description]) -> str:
    """Torch's stages send a gradient back for every tensor."""
    others = [name for name, _ in shapes if not DTYPE_OF_NAME[name].is_floating_point]
    if not others:
        return ""
    return (
        f"stage {index} sends a tensor of {others[0]} to the next one, and torch's stages need a "
        "gradient for all that they receive; give it to the stages as a keyword argument (a mask, "
        "position ids), split the model elsewhere, or run it under torch.no_grad()"
    )


def zeros(shapes: Sequence[Description], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(sizes, dtype=DTYPE_OF_NAME[name], device=device) for name, sizes in shapes
    )


def _outputs_of(
    one: OverlaidStage, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Description]:
    stage = one.stage
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if is_traced(stage):
        return _outputs_of_traced(stage, tensors)
    metas = tuple(_meta(tensor) for tensor in tensors)
    if stage.inputs_meta is not None and not hasattr(stage, "_settled"):  # the user's
        _check_equal("input_args", stage.inputs_meta, metas)
        return describe(stage.get_outputs_meta())
    outputs = run_on_zeros(stage.submod, inputs, kwargs)
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    is_sent = isinstance(outputs, (tuple, list)) and all(isinstance(o, Tensor) for o in outputs)
    if not is_sent:
        raise TypeError(
            f"the stage returns a {type(outputs).__name__}; pipeline stages return a tensor or a "
            "tuple of tensors"
        )
    stage.inputs_meta = metas
    stage._outputs_meta = tuple(_meta(output) for output in outputs)
    stage._settled = True
    return describe(stage._outputs_meta)


def _outputs_of_traced(stage: Any, given: Sequence[Tensor]) -> Sequence[Description]:
    graph = stage.submod.graph
    examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    if stage.is_first:
        _check_equal("its example", examples[: len(given)], given)
    values = pytree.tree_leaves([node.args for node in graph.nodes if node.op == "output"])
    return describe([value.meta["val"] for value in values])


def _check_equal(what: str, expected: Sequence[Any], given: Sequence[Any]) -> None:
    wanted, got = describe(expected), describe(given)
    if wanted != got:
        raise ValueError(
            f"it was made for inputs {_text(wanted)} ({what}), and a micro-batch is {_text(got)}; "
            "give batches of that size, or make the stage without input_args (split the model with "
            'pipeline(method="modules")) for batches of any size'
        )


def _text(shapes: Sequence[Description]) -> str:
    return ", ".join(f"{tuple(sizes)} of {name}" for name, sizes in shapes) or "none"


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def run_on_zeros(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's output for tensors of zeros like ``inputs``; the module is left as it was."""
    inputs = pytree.tree_map_only(Tensor, torch.zeros_like, inputs)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _left_as_it_was(module),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of zeros and of no gradients; the step itself warns
        return whole(module(*inputs, **kwargs))


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = {buffer.device.index for buffer in module.parameters() if buffer.is_cuda}
    with torch.random.fork_rng(devices=sorted(device or 0 for device in devices)):
        try:
            yield
        finally:
            for buffer, before in buffers:
                if buffer.shape == before.shape:
                    buffer.copy_(before)


def have_rows(
    overlaid: Sequence[OverlaidStage],
    registrations: Sequence[Registration],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim_of: Any,
) -> dict[int, bool]:
    """By index: whether the tensor that a hook is about has rows of the batch. For micro-batches of
    one row, whose size does not tell it: the stages are run on one row and on two. Local.

    Args:
        dim_of: ``(registration) -> dim`` along which records are joined.
    """
    found: dict[int, bool] = {}
    for one in overlaid:
        stage = one.stage
        inputs = args if stage.is_first else zeros(describe(stage.inputs_meta), stage.device)
        sizes = []
        for times in (1, 2):
            given = pytree.tree_map_only(
                Tensor, functools.partial(_rows, times), (inputs, one.accepted(kwargs))
            )
            sizes.append(_sizes(stage.submod, registrations, given[0], given[1], dim_of))
        for index, size in sizes[0].items():
            found[index] = sizes[1].get(index) != size
    return found


def _rows(times: int, tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(times, 0) if tensor.dim() and tensor.shape[0] == 1 else tensor


def _sizes(
    root: nn.Module,
    registrations: Sequence[Registration],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim_of: Any,
) -> dict[int, int]:
    found: dict[int, int] = {}
    handles = []
    for registration in registrations:
        is_input = registration.kind in ("forward_pre", "full_backward")

        def note(module, args, kwargs, output, registration=registration, is_input=is_input):
            with contextlib.suppress(Exception):  # the hook itself will say what is wrong
                shape = registration.leaf((args, kwargs) if is_input else output).shape
                found.setdefault(registration.index, shape[dim_of(registration)])

        for module in targets(root, registration.name):
            handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        run_on_zeros(root, inputs, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found
