"""The module trees of stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flex_model.pipelining.splitting.block_list import BlockList
from flex_model.pipelining.splitting.clones import clone_tree
from flex_model.pipelining.splitting.learning import Learned
from flex_model.pipelining.splitting.stage_forward import StageForward
from flex_model.pipelining.splitting.stand_in import Entry, StandIn
from flex_model.pipelining.splitting.templates import Template

Parts = dict[str, nn.Module | nn.Parameter]


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
    learned: Learned,
    parts: Parts,
    index: int,
    held: set[str],
    *,
    with_hooks: bool,
) -> nn.Module:
    """Make a stage that holds the parts of these names, and stand-ins of the others."""
    blocks = learned.blocks
    enters = learned.crossings[index - 1] if index else None
    leaves = learned.crossings[index] if index < len(learned.crossings) else None
    own = blocks.of_stage(index)
    ends = {} if leaves is None else {blocks.blocks[own.stop]: leaves.argument}

    def outputs_of(name: str) -> list[Template]:
        return [Template(name, runs, enters) for runs in learned.outputs(name)]

    exchange: dict[int, Any] = {}
    for name, part in parts.items():
        if name in held or isinstance(part, nn.Parameter):
            continue
        exchange[id(part)] = StandIn(part, name, outputs_of, name, ends.get(name))
    stage = clone_tree(model, exchange, with_hooks=with_hooks)
    for name, part in parts.items():
        if name not in held and isinstance(part, nn.Parameter):
            parent, _, key = name.rpartition(".")
            _forget(stage.get_submodule(parent), key, part)
    if enters is not None:
        stage.get_submodule(blocks.blocks[own.start]).register_forward_pre_hook(
            Entry(enters.argument), prepend=True, with_kwargs=True
        )
    stage.forward = StageForward(
        stage.forward,
        is_first=index == 0,
        is_last=leaves is None,
        signature=learned.signature,
        num_positional=len(learned.examples[0][0]),
        absent={
            name: Template(f"input {name}", runs, enters)
            for name, runs in learned.positional().items()
        },
        fixed=learned.fixed,
        example=learned.examples[0][1],
    )
    return stage


def _forget(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Replace a parameter by a placeholder: a buffer of NaN."""
    fill = float("nan") if parameter.dtype.is_floating_point else 0
    nothing = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
    del module._parameters[key]
    module.register_buffer(key, nothing.expand(parameter.shape), persistent=False)
