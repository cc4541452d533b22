"""Split a model by keeping its module tree: stages that run the model's own code.

A stage is a second tree of the model's modules, over the same parameters, in which what belongs to
other stages is replaced by stand-ins (`assembly`). It runs the model's own forward: stand-ins
of earlier blocks are run through, the first own block is given what the stage has received, and
the call of the block after the last own one ends the forward. So masks, rotary embeddings and all
else without parameters are computed in every stage, by the model's own code.

A run of the model on the example shows how the hidden state is passed. Then every stage is run.
What it lacks is there without its values (`absent_tensor`), so a stage must hold what it can't run
without. That may not be another stage's block, nor an input that only the first stage gets, and all
stages together must equal the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree

from flex_model.integrations.absent_tensor import AbsentError
from flex_model.pipelining.splitting.assembly import Parts, build, find_parts
from flex_model.pipelining.splitting.recording import (
    Recording,
    cannot_split,
    find_difference,
    quietly,
    record,
    tensors_in,
)


def split_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> list[nn.Module]:
    """Return the stages, verified. ValueError if no split at these points is right."""
    with quietly(model):
        recording = record(model, args, kwargs, split_spec)
        blocks = recording.blocks
        parts = find_parts(model, blocks, recording.calls)
        stages_hold: list[set[str]] = []
        given: tuple[Any, ...] = args
        for index in range(blocks.num_stages):
            held, output = _examine(model, recording, parts, index, given)
            stages_hold.append(held)
            given = (output,)
        order = [name for name, _ in model.named_modules()]
        # No stage needed these on the example.
        for name in parts.keys() - set().union(*stages_hold):
            holder = name if name in order else name.rpartition(".")[0]
            is_in_front = order.index(holder) < order.index(blocks.blocks[0])
            stages_hold[0 if is_in_front else -1].add(name)

        def stages() -> list[nn.Module]:
            return [
                build(model, recording, parts, index, held)
                for index, held in enumerate(stages_hold)
            ]

        examples = [recording]
        more_args, more_kwargs = _one_row_more(args, kwargs)
        with contextlib.suppress(Exception):  # a size that the model does not take
            examples.append(record(model, more_args, more_kwargs, split_spec))
        for example in examples:
            _compare(model, stages(), example)
    return stages()


def _examine(
    model: nn.Module, recording: Recording, parts: Parts, index: int, given: tuple[Any, ...]
) -> tuple[set[str], Any]:
    """What a stage must hold, and what it returns: its blocks, and all that it can't run without.
    ValueError if that is a value that it cannot have.
    """
    blocks = recording.blocks.blocks
    held = {blocks[number] for number in recording.blocks.of_stage(index)}
    while True:
        stage = build(model, recording, parts, index, held)
        try:
            return held, stage(*given, **recording.kwargs)
        except AbsentError as error:
            needed = error.names & parts.keys() - held - set(blocks)
            if not needed:
                _refuse(model, index, error)
            held |= needed
        except Exception as error:
            why = f"stage {index} does not run without the others: {error}"
            raise ValueError(cannot_split(model, why)) from error


def _refuse(model: nn.Module, index: int, error: AbsentError) -> NoReturn:
    """ValueError for a stage that needs inputs of the first, or other blocks."""
    label = min(error.names, key=lambda label: (label.startswith("input "), label))
    name = label.removeprefix("input ")
    if name != label:
        why = (
            f"stage {index} needs the model's input {name!r}, which only the first stage is given "
            "(a skip connection past the blocks, a mask made of it?); give it by keyword, so "
            f"that every stage has it: mb_kwargs={{{name!r}: ...}}"
        )
    elif error.is_read:
        why = f"stage {index}: {error}"
    else:
        why = (
            f"what stage {index} computes depends on blocks of other stages ({name!r}) other than "
            "by the hidden state"
        )
    raise ValueError(cannot_split(model, why)) from error


def _compare(model: nn.Module, stages: list[nn.Module], recording: Recording) -> None:
    try:
        output = run_stages(stages, recording.args, recording.kwargs)
    except RuntimeError as error:
        why = (
            f"its stages run with the sizes of the example only ({error}); give the inputs by "
            "keyword, so that every stage has them"
        )
        raise ValueError(cannot_split(model, why)) from error
    difference = find_difference(tensors_in(output), recording.answer)
    if difference is not None:
        raise ValueError(
            f"the stages of {type(model).__name__} do not compute what the model computes on the "
            f"example ({difference}). Does it return values of blocks beside the hidden state "
            "(output_hidden_states, output_attentions), draw random numbers other than by "
            "dropout, or keep state from call to call? In eval() it may not"
        )


def _one_row_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The example with its first row once more: sizes that were equal by chance differ there."""
    tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    rows = next((one.shape[0] for one in tensors if one.dim()), None)

    def longer(one: Tensor) -> Tensor:
        return torch.cat([one, one[:1]]) if one.dim() and one.shape[0] == rows else one

    return _pytree.tree_map_only(Tensor, longer, (args, kwargs))


def run_stages(stages: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All stages in order, each with all keyword arguments."""
    output = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        output = stage(output, **kwargs)
    return output
