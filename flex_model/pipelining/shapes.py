"""Infers the shapes that stages send each other, before a step and by all ranks together, so that a
stage that can't run is an error on every rank, and no rank waits for it.

Each stage is run once on zeros, in the order of the stages, with no hook and no gradient, and left
as it was: buffers (BatchNorm's) and random generators are restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME, Description, describe, exchange_json
from flex_model.integrations.torch_pipelining import is_traced, to_meta
from flex_model.integrations.torch_private import restored, unchanged
from flex_model.pipelining.instrumented_stage import InstrumentedStage, sendable
from flex_model.pipelining.local_pipeline import LocalPipeline


def infer_shapes(
    pipeline: LocalPipeline,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_backward: bool,
    unsplit: Mapping[str, int],
) -> None:
    """Set the shapes of the inputs and outputs of this rank's stages. Collective over the stages of
    one pipeline.

    Args:
        args, kwargs: A micro-batch's; ``args`` count on the first stage's rank.
        unsplit: The keyword arguments that might be rows of the batch and are passed whole to every
            micro-batch, with their numbers of rows.

    Raises:
        ValueError: a stage can't run these inputs; on every rank of the pipeline.
    """

    def run(stage: InstrumentedStage, received: Sequence[Description] | None) -> Any:
        inputs = args if received is None else _zeros(received, stage.stage.device)
        shapes = _output_shapes(stage, inputs, stage.accepted(kwargs))
        if has_backward and not stage.stage.is_last:
            _check_floats(shapes)
        return shapes

    problem = run_in_order(pipeline, "the shapes of stage", run)
    if problem:
        raise ValueError(f"the pipeline can't run these inputs: {problem}{_advise_split(unsplit)}")


def run_in_order(
    pipeline: LocalPipeline, what: str, run: Callable[[InstrumentedStage, Any], Any]
) -> str | None:
    """Run the stages one after the other, each on its rank; return the error of the first that
    fails, on every rank. Collective over the stages of one pipeline.

    Args:
        what: For the exchanges: ends with the number of a stage.
        run: Gets a stage and what the one before returned, as JSON; None for the first.
    """
    index, local = pipeline.index, {stage.index: stage for stage in pipeline.local.instrumented}
    sent: Any = None
    for number in range(index.num_stages):
        own: dict[str, Any] = {}
        if number in local:
            try:
                own["sent"] = run(local[number], sent)
            except Exception as error:
                own["error"] = f"stage {number}: {type(error).__name__}: {error}"
        of_stage = exchange_json(pipeline.line, own, f"{what} {number}")[index.pp_ranks[number]]
        if "error" in of_stage:
            return of_stage["error"]
        sent = of_stage["sent"]
    return None


def _advise_split(unsplit: Mapping[str, int]) -> str:
    if not unsplit:
        return ""
    sizes = " and ".join(f"{name!r} ({rows} rows)" for name, rows in unsplit.items())
    return (
        f"; every micro-batch was passed all of {sizes}; make the schedule with "
        "kwargs_chunk_spec=, which has TensorChunkSpec(0) for each keyword argument that is split, "
        "if it is to have its own part of them"
    )


def _check_floats(shapes: Sequence[Description]) -> None:
    others = [name for name, _ in shapes if not DTYPE_OF_NAME[name].is_floating_point]
    if others:
        raise TypeError(
            f"it sends a tensor of {others[0]} to the next one, and torch's stages need a gradient "
            "for all that they receive; give it to the stages as a keyword argument (a mask, "
            "position ids), split the model elsewhere, or run it under torch.no_grad()"
        )


def _zeros(shapes: Sequence[Description], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(sizes, dtype=DTYPE_OF_NAME[name], device=device) for name, sizes in shapes
    )


def _output_shapes(
    stage: InstrumentedStage, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Description]:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if is_traced(stage.stage):
        return _output_shapes_of_traced(stage.stage, tensors)
    metas = tuple(map(to_meta, tensors))
    if stage.stated_shapes is not None:
        stated_inputs, stated_outputs = stage.stated_shapes
        _check_equal("input_args", stated_inputs, metas)
        return describe(stated_outputs)
    inputs = pytree.tree_map_only(Tensor, torch.zeros_like, inputs)
    outputs = _run(stage.stage.submod, inputs, kwargs)
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    is_sent = isinstance(outputs, (tuple, list)) and all(isinstance(o, Tensor) for o in outputs)
    if not is_sent:
        raise TypeError(
            f"the stage returns a {type(outputs).__name__}; pipeline stages return a tensor or a "
            "tuple of tensors"
        )
    stage.set_shapes(metas, tuple(map(to_meta, outputs)))
    return describe(outputs)


def _output_shapes_of_traced(stage: Any, inputs: Sequence[Tensor]) -> Sequence[Description]:
    graph = stage.submod.graph
    examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    if stage.is_first:
        _check_equal("its example", examples[: len(inputs)], inputs)
    values = pytree.tree_leaves([node.args for node in graph.nodes if node.op == "output"])
    return describe([value.meta["val"] for value in values])


def _check_equal(source: str, expected: Sequence[Any], inputs: Sequence[Any]) -> None:
    required, got = describe(expected), describe(inputs)
    if required != got:
        raise ValueError(
            f"it was made for inputs {_text(required)} ({source}), and a micro-batch is "
            f"{_text(got)}; give batches of that size, or make the stage without input_args (split "
            'the model with pipeline(method="modules")) for batches of any size'
        )


def _text(shapes: Sequence[Description]) -> str:
    return ", ".join(f"{tuple(sizes)} of {name}" for name, sizes in shapes) or "none"


def _run(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the module's output; the module is left as it was."""
    tables = (table for one in module.modules() for table in (vars(one), one._buffers))
    with (
        torch.inference_mode(False),
        unchanged(module),
        restored(tables),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of zeros and of no gradients; the step itself warns
        return sendable(module(*inputs, **kwargs))
