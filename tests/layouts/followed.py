"""Models whose forward is followed without hooks: what is proven of every module's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shape, ShardLayout
from flex_model.integrations import dtensor
from flex_model.layouts.follow import Follower, paused
from flex_model.layouts.sources import Constants, Weights
from flex_model.layouts.statements import Statements


@dataclass
class HookedTensor:
    """One tensor that a module was given or returned, as this rank has it."""

    name: str
    shard: torch.Tensor
    value: Any


class Sites(nn.Module):
    """Runs ``lines(m, *inputs)``, where ``m.name(tensor)`` shows a tensor. ``own``: its modules,
    and numbers that it states.
    """

    def __init__(self, lines, names="", **own):
        super().__init__()
        self.lines = lines
        for name, value in (dict.fromkeys(names.split()) | own).items():
            setattr(self, name, nn.Identity() if value is None else value)

    def forward(self, *inputs):
        return self.lines(self, *inputs)


def follow(model, mesh: Mesh, inputs, placements, statements=(), keywords=None):
    """Run the model; every tensor that its modules return, with what is proven of it.

    Args:
        inputs: Positional arguments; ``placements``: of each, along dp and tp.
        statements: What ``annotate_layout`` would state.
    """
    stated = Statements(model)
    for statement in statements:
        stated.append(statement)
    follower = Follower(model, mesh, stated, Weights(model, mesh, stated, Constants(model)))
    for i, (tensor, pair) in enumerate(zip(inputs, placements)):
        follower.note_input(tensor, str(i), pair)
    hooked: list[HookedTensor] = []

    def record(name):
        def hook(module, args, output):
            for tensor in _C.flatten(output)[0]:
                with paused(follower):
                    plain = dtensor.to_local(tensor) if dtensor.is_dtensor(tensor) else tensor
                    shard = dtensor.wait(plain).detach().clone()
                    hooked.append(HookedTensor(name, shard, follower.joint_value(tensor)))

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    try:
        with follower:
            output = model(*inputs, **(keywords or {}))
    finally:
        for handle in handles:
            handle.remove()
    communicator = Communicator(mesh, 30.0)
    try:
        if len(mesh.stage_ranks) > 1:
            follower.sync(communicator)
        found = {}
        for one in hooked:
            found.setdefault(one.name, []).append(gathered(communicator, follower, one))
    finally:
        communicator.close()
    return found, follower, output


def gathered(
    communicator: Communicator, follower: Follower, hooked: HookedTensor
) -> torch.Tensor | None:
    """The full tensor by its proven layout; None where none is proven. Collective."""
    dp, tp = follower.placements(hooked.value)
    numbers = torch.tensor([dp is None or tp is None, hooked.shard.dim(), *hooked.shard.shape])
    table = communicator.exchange(numbers).tolist()
    assert len({row[0] for row in table}) == 1, (
        f"{hooked.name}: ranks have proven different placements"
    )
    if dp is None or tp is None:
        return None
    shapes: list[Shape] = [tuple(row[2:]) for row in table]
    spec = TensorSpec.of(communicator, ShardLayout(dp, tp), shapes, hooked.shard.dtype)
    return spec.all_gather(hooked.shard.contiguous())


def unsharded(model, inputs, keywords=None):
    """The tensors that the modules of an unsharded model return, by module name."""
    found: dict[str, list[torch.Tensor]] = {}

    def record(name):
        def hook(module, args, output):
            found.setdefault(name, []).extend(
                tensor.detach().clone() for tensor in _C.flatten(output)[0]
            )

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    model(*inputs, **(keywords or {}))
    for handle in handles:
        handle.remove()
    return found
