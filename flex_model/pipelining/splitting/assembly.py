"""The module trees of stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from flex_model.pipelining.splitting.block_list import BlockList
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.placeholder import Placeholder, without_values
from flex_model.pipelining.splitting.recording import Recording
from flex_model.pipelining.splitting.stage_forward import StageForward
from flex_model.pipelining.splitting.stand_in import Entry, StandIn

Parts = dict[str, nn.Module | nn.Parameter]


@dataclass
class Held:
    """What a stage holds.

    Attributes:
        names: Of parts.
        answer: See `StageForward`.
    """

    names: set[str]
    answer: int | None = None


def find_parts(model: nn.Module, blocks: BlockList, called: Iterable[str]) -> Parts:
    """What a stage holds or does not hold as a whole, by name: a block, another module that is
    called, or a parameter of a module that is not. What has no parameters is in every stage.
    """
    called, parts, seen = set(called), Parts(), set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_whole = not blocks.is_in(name) and (name in called or not module._modules)
        if name in blocks.blocks or (is_whole and any(True for _ in module.parameters())):
            parts[name] = module
        elif not is_whole:
            prefix = f"{name}." if name else ""
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parts[prefix + key] = parameter
            for key, child in module._modules.items():
                if child is not None:
                    visit(prefix + key, child)

    visit("", model)
    return parts


def build(
    model: nn.Module,
    recording: Recording,
    parts: Parts,
    index: int,
    held: Held,
    *,
    with_hooks: bool,
) -> nn.Module:
    """Make a stage that holds these parts, and stand-ins of the others."""
    blocks, crossings = recording.blocks, recording.crossings
    enters = crossings[index - 1] if index else None
    leaves = crossings[index] if index < len(crossings) else None
    received = None if enters is None else enters.hidden
    own = blocks.of_stage(index)
    ends = {} if leaves is None else {blocks.blocks[own.stop]: leaves.argument}
    others = {name: part for name, part in parts.items() if name not in held.names}
    exchange: dict[int, Any] = {
        id(part): StandIn(part, name, recording.outputs, received, name, ends.get(name))
        for name, part in others.items()
        if isinstance(part, nn.Module)
    }
    stage = clone_tree(model, exchange, with_hooks=with_hooks)
    for name, part in others.items():
        if isinstance(part, nn.Parameter):
            parent, _, key = name.rpartition(".")
            module = stage.get_submodule(parent)
            del module._parameters[key]
            absent = Placeholder(without_values(part), None, is_fixed=True).make(None, {name})
            vars(module)[key] = absent
    if enters is not None:
        stage.get_submodule(blocks.blocks[own.start]).register_forward_pre_hook(
            Entry(enters.argument), prepend=True, with_kwargs=True
        )
    stage.forward = StageForward(
        stage.forward,
        is_first=index == 0,
        is_last=leaves is None,
        signature=recording.signature,
        num_positional=len(recording.args),
        absent={
            name: Placeholder(value, received) for name, value in recording.positional().items()
        },
        fixed=recording.fixed,
        example=recording.kwargs,
        answer=held.answer,
    )
    return stage
