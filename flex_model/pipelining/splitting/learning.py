"""What a model does, learnt from runs on the example: when its modules run, how the hidden state
passes the boundaries, which sizes values have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree

from flex_model import pytree
from flex_model.pipelining.splitting.block_list import BlockList, cannot_split, find_block_list
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.observe import (
    Arguments,
    Dependence,
    ParameterUses,
    Recording,
    other_examples,
)
from flex_model.pipelining.splitting.stage_forward import StageCall
from flex_model.pipelining.splitting.stand_in import StandIn
from flex_model.pipelining.splitting.templates import TreeTemplate


@dataclass(frozen=True)
class Crossing:
    """How the hidden state passes one boundary.

    Attributes:
        argument: Index of the leaf in the arguments of the block behind the boundary; None at the
            end of the list.
        output: Index of the leaf in the output of the block in front of it, where the block behind
            is given that very tensor; else None.
        shapes: Its sizes in each run.
        dtype: Its dtype.
    """

    argument: int | None
    output: int | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


@dataclass
class Learnt:
    """What the runs on the example showed."""

    signature: inspect.Signature
    fixed: dict[str, Any]
    examples: list[Arguments]
    recordings: list[Recording]
    inputs: list[dict[str, Any]]  # per example: what only the first stage gets
    answers: list[list[Tensor]]
    blocks: BlockList
    crossings: list[Crossing] = field(default_factory=list)


def learn(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_spec: Mapping[str, SplitPoint],
) -> Learnt:
    twin = clone_tree(model, with_hooks=False)
    signature = inspect.signature(twin.forward)
    fixed = {"use_cache": False} if "use_cache" in signature.parameters else {}
    kwargs = {**kwargs, **fixed}
    recording = Recording(twin)
    with recording.on(), ParameterUses(recording):
        twin(*args, **kwargs)
    blocks = find_block_list(model, split_spec, recording.calls)
    examples: list[Arguments] = []
    recordings, answers = [], []
    for index, (some_args, some_kwargs) in enumerate(
        [(args, kwargs), *other_examples(args, kwargs)]
    ):
        again = Recording(twin, keep=blocks.blocks)
        try:
            with again.on():
                output = twin(*some_args, **some_kwargs)
        except Exception:
            if index == 0:
                raise
            continue  # a size that the model does not take
        if again.calls != recording.calls:
            continue  # another path: nothing can be learnt from it
        examples.append((some_args, some_kwargs))
        recordings.append(again)
        answers.append(pytree.flatten(output)[0])
    if not answers[0]:
        raise ValueError(
            f"{type(model).__name__} returns no tensor on the example; a pipeline's last stage "
            "must return some"
        )
    recordings[0].parameter_uses = recording.parameter_uses
    recordings[0].outer_uses = recording.outer_uses
    inputs = [_first_stage_inputs(model, signature, *example) for example in examples]
    learnt = Learnt(signature, fixed, examples, recordings, inputs, answers, blocks)
    learnt.crossings = _find_crossings(model, learnt)
    return learnt


def _first_stage_inputs(
    model: nn.Module, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Positional arguments; without any, the keyword argument that is the model's main input."""
    if args:
        return dict(signature.bind_partial(*args).arguments)
    main = getattr(model, "main_input_name", None)
    if main not in kwargs:
        main = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    return {} if main is None else {main: kwargs[main]}


def _find_crossings(model: nn.Module, learnt: Learnt) -> list[Crossing]:
    blocks = learnt.blocks
    arguments = _dependent_arguments(model, learnt)
    crossings = []
    for boundary in blocks.boundaries:
        behind = blocks.blocks[boundary] if boundary < len(blocks.blocks) else None
        before = blocks.blocks[boundary - 1] if boundary else None
        argument = output = None
        if behind is not None:
            argument = _only_hidden(model, learnt, boundary, arguments)
            leaves = [recording.kept[behind][0][argument] for recording in learnt.recordings]
            if before is not None:
                returned = learnt.recordings[0].kept[before][1]
                output = next((i for i, leaf in enumerate(returned) if leaf is leaves[0]), None)
        else:
            assert before is not None
            returned = learnt.recordings[0].kept[before][1]
            output = next((i for i, leaf in enumerate(returned) if _is_hidden(leaf)), None)
            if output is None:
                raise ValueError(cannot_split(model, f"block {before!r} returns no float tensor"))
            leaves = [recording.kept[before][1][output] for recording in learnt.recordings]
        if not _is_hidden(leaves[0]):
            raise ValueError(cannot_split(model, f"block {behind!r} is given no float tensor"))
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        crossings.append(Crossing(argument, output, shapes, leaves[0].dtype))
    return crossings


def _is_hidden(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def _only_hidden(
    model: nn.Module, learnt: Learnt, boundary: int, arguments: dict[int, dict[int, str]]
) -> int:
    name = learnt.blocks.blocks[boundary]
    found = arguments.get(boundary, {})
    if boundary == 0:  # nothing comes before it: as the next block
        found = arguments.get(1, {})
        if not found:
            leaves = learnt.recordings[0].kept[name][0]
            found = {i: "" for i, leaf in enumerate(leaves) if _is_hidden(leaf)}
            found = dict(list(found.items())[:1])
    if len(found) != 1:
        what = (
            f"is given {len(found)} tensors that depend on the blocks before it "
            f"({', '.join(found.values())})"
            if found
            else "is given no tensor that depends on the block before it"
        )
        raise ValueError(cannot_split(model, f"block {name!r} {what}"))
    return next(iter(found))


def _dependent_arguments(model: nn.Module, learnt: Learnt) -> dict[int, dict[int, str]]:
    """Which arguments of each block depend on what blocks before it returned: by block, leaf index
    and name.
    """
    blocks = learnt.blocks.blocks
    recording = learnt.recordings[0]
    exchange, stand_ins = {}, []
    for name in blocks:
        outputs = [TreeTemplate.learn(recording.outputs[name][:1], [()], torch.float32)]
        block = model.get_submodule(name)
        stand_ins.append(StandIn(block, name, outputs))
        exchange[id(block)] = stand_ins[-1]
    twin = clone_tree(model, exchange, with_hooks=False)
    dependence = Dependence()
    found: dict[int, dict[int, str]] = {}

    def look(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves, _ = _pytree.tree_flatten_with_path((args, kwargs))
            found[index] = {
                number: _argument_name(path)
                for number, (path, leaf) in enumerate(leaves)
                if isinstance(leaf, Tensor) and dependence.labels_of(leaf)
            }
            if index == len(blocks) - 1:
                raise _Enough

        return hook

    for index, stand_in in enumerate(stand_ins):
        stand_in.register_forward_pre_hook(look(index), with_kwargs=True)
    args, kwargs = learnt.examples[0]
    try:
        with dependence, StageCall(None, dependence):
            twin(*args, **kwargs)
    except _Enough:
        pass
    except Exception as error:
        raise ValueError(
            cannot_split(model, f"what it does between blocks depends on their values ({error})")
        ) from error
    return found


class _Enough(BaseException):
    pass


def _argument_name(path: Any) -> str:
    side, *rest = path
    if getattr(side, "idx", 0) == 0:
        return "positional argument " + _pytree.keystr(tuple(rest)).strip("[]")
    return _pytree.keystr(tuple(rest)).strip("[]")
