"""Split a model by keeping its module tree: stages that run the model's own code.

A stage is a second tree of the model's modules, over the same parameters, in which what belongs to
other stages is replaced by stand-ins (`stand_in`). It runs the model's own forward: stand-ins
of earlier blocks are run through, the first own block is given what the stage has received, and
the call of the block after the last own one ends the forward. So masks, rotary embeddings and all
else without parameters are computed in every stage, by the model's own code.

Runs of the model on the example show how the hidden state is passed and which sizes values have.
Then every stage is run with all values that are not its own marked: what its output depends on is
what it must hold. It may not depend on another stage's block, nor on an input that only the first
stage gets, and all stages together must equal the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.pipelining import SplitPoint

from flex_model.pipelining.splitting.assembly import Parts, build, find_parts
from flex_model.pipelining.splitting.block_list import BlockList, cannot_split
from flex_model.pipelining.splitting.clones import users_hooks
from flex_model.pipelining.splitting.dependence import Dependence
from flex_model.pipelining.splitting.learning import Learned, learn
from flex_model.pipelining.splitting.observe import find_difference, quietly, tensors_in
from flex_model.pipelining.splitting.templates import UnknownSizesError


def split_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> list[nn.Module]:
    """The stages, verified. ValueError if there is no right split at these points."""
    with quietly(model):
        learned = learn(model, args, kwargs, split_spec)
        blocks = learned.blocks
        _check_hooks(model, blocks)
        parts = find_parts(model, blocks, learned.recordings[0].calls)
        held: list[set[str]] = []
        given: tuple[Any, ...] = args
        for index in range(blocks.num_stages):
            names, output = _examine(model, learned, parts, index, given)
            held.append(names)
            given = (output,)
        order = [name for name, _ in model.named_modules()]
        for name in parts.keys() - set().union(*held):  # no stage needed it on the example
            holder = name if name in order else name.rpartition(".")[0]
            is_in_front = order.index(holder) < order.index(blocks.blocks[0])
            held[0 if is_in_front else -1].add(name)

        def stages(with_hooks: bool) -> list[nn.Module]:
            return [
                build(model, learned, parts, index, names, with_hooks=with_hooks)
                for index, names in enumerate(held)
            ]

        _compare(stages(with_hooks=False), learned, type(model).__name__)
    return stages(with_hooks=True)


def _check_hooks(model: nn.Module, blocks: BlockList) -> None:
    """ValueError for hooks on what no stage has as a whole."""
    for name, _ in users_hooks(model):
        if blocks.is_in(name):
            raise ValueError(
                f"{type(model).__name__} has a hook on {name!r}, which is spread over all stages; "
                "remove it before pipeline() and hook what is in one stage"
            )


def _examine(
    model: nn.Module, learned: Learned, parts: Parts, index: int, given: tuple[Any, ...]
) -> tuple[set[str], Any]:
    """The parts that a stage must hold, and what it returns: its blocks, and all that its output
    depends on. ValueError if it depends on a value that it cannot have.
    """
    kwargs = learned.examples[0][1]
    held = {learned.blocks.blocks[number] for number in learned.blocks.of_stage(index)}

    def follow(dependence: Dependence) -> Any:
        for name, buffer in stage.named_buffers():
            if name in parts:
                dependence.mark(buffer, {name})
        try:
            with dependence:
                return stage(*given, **kwargs)
        except UnknownSizesError as error:
            if error.name not in parts.keys() - held - set(learned.blocks.blocks):
                raise ValueError(cannot_split(model, f"stage {index}: {error}")) from error
            raise
        except Exception as error:
            why = f"stage {index} does not run without the others: {error}"
            raise ValueError(cannot_split(model, why)) from error

    def is_same_with(lie: int) -> bool:
        try:
            other = follow(Dependence(lie=lie))
        except (ValueError, UnknownSizesError):
            return False
        return find_difference(tensors_in(other), tensors_in(output)) is None

    while True:
        stage = build(model, learned, parts, index, held, with_hooks=False)
        try:
            output = follow(dependence := Dependence())
        except UnknownSizesError as error:  # no placeholder: the stage computes it itself
            held.add(error.name)
            continue
        labels = dependence.labels_of(output)
        needed = {name for name in labels & parts.keys() if name not in learned.blocks.blocks}
        if not needed:
            break
        held |= needed
    _refuse(model, index, labels)
    # Where Python decides something by a value that is not here, it must not matter how.
    if dependence.read and not all(is_same_with(lie) for lie in (1, -1)):
        read = ", ".join(sorted(dependence.read))
        why = f"what stage {index} runs depends on values that it does not have ({read})"
        raise ValueError(cannot_split(model, f"{why}: .item(), .tolist(), or an if"))
    return held, output


def _refuse(model: nn.Module, index: int, labels: set[str]) -> None:
    """ValueError if a stage's output depends on these: inputs of the first, or other blocks."""
    if not labels:
        return
    label = min(labels, key=lambda label: (label.startswith("input "), label))
    name = label.removeprefix("input ")
    if name != label:
        why = (
            f"stage {index} needs the model's input {name!r}, which only the first stage is given "
            "(a skip connection past the blocks, or a mask made of it?); give it by keyword, so "
            f"that every stage has it: mb_kwargs={{{name!r}: ...}}"
        )
    else:
        why = (
            f"what stage {index} computes depends on blocks of other stages ({name!r}) other than "
            "by the hidden state"
        )
    raise ValueError(cannot_split(model, why))


def _compare(stages: list[nn.Module], learned: Learned, name: str) -> None:
    for (args, kwargs), answer in zip(learned.examples, learned.answers):
        difference = find_difference(tensors_in(run_stages(stages, args, kwargs)), answer)
        if difference is not None:
            raise ValueError(
                f"the stages of {name} do not compute what the model computes on the example "
                f"({difference}). Does it return values of blocks beside the hidden state "
                "(output_hidden_states, output_attentions), draw random numbers other than by "
                "dropout, or keep state from call to call? In eval() it may not"
            )


def run_stages(stages: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All stages in order, each with all keyword arguments."""
    output = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        output = stage(output, **kwargs)
    return output
