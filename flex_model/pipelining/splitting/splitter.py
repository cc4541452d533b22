"""Split a model by keeping its module tree: stages that run the model's own code.

A stage is a second tree of the model's modules, over the same parameters, in which what belongs to
other stages is replaced by stand-ins (`stand_in`). It runs the model's own forward: stand-ins
of earlier blocks are run through, the first own block is given what the stage has received, and
the call of the block after the last own one ends the forward. So masks, rotary embeddings and all
else without parameters are computed in every stage, by the model's own code.

What is whose, how the hidden state is passed and which sizes values have is learnt from runs of
the model on the example. Then every stage is run and examined: its output must not depend on any
value that stood in for another, and all stages together must equal the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from flex_model import pytree
from flex_model.pipelining.splitting.assembly import build
from flex_model.pipelining.splitting.block_list import cannot_split
from flex_model.pipelining.splitting.clones import users_hooks
from flex_model.pipelining.splitting.learning import Learnt, learn
from flex_model.pipelining.splitting.observe import Dependence, quietly


def split_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> list[nn.Module]:
    """The stages, verified. ValueError if there is no right split at these points."""
    with quietly(model):
        learnt = learn(model, args, kwargs, split_spec)
        _check_hooks(model, learnt)
        held = _examine(model, learnt)
        _compare(
            [
                build(model, learnt, index, held[index], with_hooks=False)
                for index in range(learnt.blocks.num_stages)
            ],
            learnt,
            type(model).__name__,
        )
    return [
        build(model, learnt, index, held[index], with_hooks=True)
        for index in range(learnt.blocks.num_stages)
    ]


def _check_hooks(model: nn.Module, learnt: Learnt) -> None:
    """ValueError for hooks on what no stage has as a whole."""
    for name, _ in users_hooks(model):
        if learnt.blocks.is_in(name):
            raise ValueError(
                f"{type(model).__name__} has a hook on {name!r}, which is spread over all stages; "
                "remove it before pipeline() and hook what is in one stage"
            )


def _examine(model: nn.Module, learnt: Learnt) -> list[set[str]]:
    """What each stage must hold beside its own: modules in front of the blocks whose output its
    blocks are given. ValueError if a stage depends on a value that it cannot have.
    """
    args, kwargs = learnt.examples[0]
    held: list[set[str]] = []
    given = args
    for index in range(learnt.blocks.num_stages):
        needed: set[str] = set()
        while True:
            stage = build(model, learnt, index, needed, with_hooks=False)
            dependence = Dependence()
            output = _follow_run(model, index, stage, dependence, given, kwargs)
            labels = {label for leaf in leaves_of(output) for label in dependence.labels_of(leaf)}
            _refuse(model, learnt, index, labels)
            if labels <= needed:
                break
            needed |= labels
        if dependence.read:
            # Python decided something by a value that is not here. It must not matter how.
            read = ", ".join(sorted(dependence.read))
            try:
                other = _follow_run(model, index, stage, Dependence(lie=True), given, kwargs)
                matters = not all(map(_is_same, leaves_of(other), leaves_of(output)))
            except ValueError:
                matters = True
            if matters:
                raise ValueError(
                    cannot_split(
                        model,
                        f"what stage {index} runs depends on values that it does not have "
                        f"({read}): .item(), or an if",
                    )
                )
        held.append(needed)
        given = (output,)
    return held


def _follow_run(
    model: nn.Module,
    index: int,
    stage: nn.Module,
    dependence: Dependence,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a stage, its values without meaning marked."""
    forward: Any = stage.forward
    forward.labels = dependence
    for name in forward.absent_parameters:
        dependence.mark(stage.get_buffer(name), name)
    try:
        with dependence:
            return stage(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            cannot_split(model, f"stage {index} does not run without the others: {error!r}")
        ) from error
    finally:
        forward.labels = None


def _refuse(model: nn.Module, learnt: Learnt, index: int, labels: set[str]) -> None:
    inputs = sorted(label[len("input ") :] for label in labels if label.startswith("input "))
    if inputs:
        raise ValueError(
            cannot_split(
                model,
                f"stage {index} needs the model's input {inputs[0]!r}, which only the first stage "
                "is given (a skip connection past the blocks, or a mask made of it?); give it by "
                f"keyword, so that every stage has it: mb_kwargs={{{inputs[0]!r}: ...}}",
            )
        )
    blocks = sorted(label for label in labels if label in learnt.blocks.blocks)
    if blocks:
        raise ValueError(
            cannot_split(
                model,
                f"what stage {index} computes depends on blocks of other stages ({blocks[0]!r}) "
                "other than by the hidden state",
            )
        )


def _compare(stages: list[nn.Module], learnt: Learnt, name: str) -> None:
    for (args, kwargs), answer in zip(learnt.examples, learnt.answers):
        output = run_stages(stages, args, kwargs)
        leaves = leaves_of(output)
        if len(leaves) != len(answer):
            raise ValueError(
                f"the stages of {name} return {len(leaves)} tensors where the model returns "
                f"{len(answer)}: it returns values of blocks beside the hidden state "
                "(output_hidden_states, output_attentions?), which only their own stages have"
            )
        for got, expected in zip(leaves, answer):
            if not _is_same(got, expected):
                raise ValueError(
                    f"the stages of {name} do not compute what the model computes on the example "
                    f"(largest difference {_difference(got, expected)}). Does it draw random "
                    "numbers other than by dropout, or keep state from call to call? In eval() it "
                    "may not"
                )


def run_stages(stages: list[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """All stages in order, each with all keyword arguments."""
    output = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        output = stage(output, **kwargs)
    return output


def _is_same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.is_meta or not got.dtype.is_floating_point:
        return got.is_meta or torch.equal(got, expected)
    # Bit for bit where kernels are deterministic; some of those on a GPU are not.
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def _difference(got: Tensor, expected: Tensor) -> str:
    if got.shape != expected.shape:
        return f"shapes {tuple(got.shape)} and {tuple(expected.shape)}"
    return f"{(got.double() - expected.double()).abs().max().item():.2g}"


def leaves_of(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    return pytree.flatten(output)[0]
