"""The module trees of stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flex_model.pipelining.pass_through import PassThrough
from flex_model.pipelining.splitting.block_list import cannot_split
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.learning import Crossing, Learnt
from flex_model.pipelining.splitting.ownership import parts
from flex_model.pipelining.splitting.stage_forward import StageForward
from flex_model.pipelining.splitting.stand_in import (
    Entry,
    Exit,
    LeaveAtExit,
    ReceiveAtEntry,
    StandIn,
)
from flex_model.pipelining.splitting.templates import NoRuleError, Observed, TreeTemplate


def build(
    model: nn.Module, learnt: Learnt, index: int, held: set[str], *, with_hooks: bool
) -> nn.Module:
    """A stage. ``held``: what it holds though it is another stage's, by name."""
    blocks = learnt.blocks
    start, end = blocks.start(index), blocks.end(index)
    enters = learnt.crossings[index - 1] if index else None
    leaves = learnt.crossings[index] if index < len(learnt.crossings) else None
    exchange: dict[int, Any] = {}
    for number, name in enumerate(blocks.blocks):
        if start <= number < end:
            continue
        block = model.get_submodule(name)
        stand_in: PassThrough
        if number < start and enters is not None:
            output = _follow(model, learnt, _outputs(learnt, name, 0), enters, name)
            if number == start - 1 and enters.output is not None:
                stand_in = Entry(block, name, output, enters.output)
            else:
                stand_in = StandIn(block, name, (output,))
        elif number == end and leaves is not None and leaves.argument is not None:
            stand_in = Exit(block, name, leaves.argument)
        else:
            stand_in = StandIn(block, name)
        exchange[id(block)] = stand_in
    absent_parameters: list[tuple[str, nn.Parameter]] = []
    for name, owned, stages in parts(model, learnt):
        if index in stages or name in held:
            continue
        if isinstance(owned, nn.Parameter):
            absent_parameters.append((name, owned))
            continue
        count = len(learnt.recordings[0].outputs.get(name, ()))
        outputs = []
        if enters is not None and min(stages) < index:
            outputs = [
                _follow(model, learnt, _outputs(learnt, name, call), enters, name)
                for call in range(count)
            ]
        exchange[id(owned)] = StandIn(owned, name, outputs)
    stage = clone_tree(model, exchange, with_hooks=with_hooks)
    for name, parameter in absent_parameters:
        parent, _, key = name.rpartition(".")
        holder = stage.get_submodule(parent)
        del holder._parameters[key]
        fill = float("nan") if parameter.dtype.is_floating_point else 0
        nothing = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
        holder.register_buffer(key, nothing.expand(parameter.shape), persistent=False)
    if enters is not None and enters.argument is not None:
        first = stage.get_submodule(blocks.blocks[start])
        hook = ReceiveAtEntry(enters.argument, is_behind_entry=enters.output is not None)
        first.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    leaving = None
    if leaves is not None and leaves.argument is None:
        assert leaves.output is not None
        last = stage.get_submodule(blocks.blocks[-1])
        handle = last.register_forward_hook(LeaveAtExit(leaves.output))
        leaving = (last, handle.id)
    absent = _absent_inputs(model, learnt, enters) if enters is not None else {}
    stage.forward = StageForward(
        stage,
        stage.forward,
        is_first=index == 0,
        is_last=index == blocks.num_stages - 1,
        signature=learnt.signature,
        absent=absent,
        absent_parameters=[name for name, _ in absent_parameters],
        fixed=learnt.fixed,
        leaving=leaving,
    )
    return stage


def _absent_inputs(model: nn.Module, learnt: Learnt, crossing: Crossing) -> dict[str, TreeTemplate]:
    absent = {}
    for name in learnt.inputs[0]:
        observed = [Observed.of(inputs[name]) for inputs in learnt.inputs]
        try:
            absent[name] = _follow(model, learnt, observed, crossing, f"input {name}")
        except ValueError:
            if learnt.examples[0][0]:  # positional
                raise
            # Given by keyword, as it was in the example, it is not absent.
    return absent


def _outputs(learnt: Learnt, name: str, call: int) -> list[Observed]:
    """What a module's call returned, per run."""
    return [recording.outputs[name][call] for recording in learnt.recordings]


def _follow(
    model: nn.Module, learnt: Learnt, observed: list[Observed], crossing: Crossing, what: str
) -> TreeTemplate:
    try:
        return TreeTemplate.learn(observed, crossing.shapes, crossing.dtype)
    except NoRuleError:
        sizes = [
            [getattr(leaf, "sizes", None) for leaf in tree.leaves if hasattr(leaf, "sizes")]
            for tree in observed
        ]
        raise ValueError(
            cannot_split(
                model,
                f"the sizes of {what!r} ({sizes}) do not follow from those of the hidden state "
                f"({list(crossing.shapes)})",
            )
        ) from None
