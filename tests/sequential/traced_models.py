"""Models around two blocks, and what runs their subgraphs one after another."""

import torch
from torch import nn

import models


class Model(nn.Module):
    """Two blocks, and what the code around them may read: a parameter, a buffer, attributes."""

    def __init__(self):
        super().__init__()
        self.blocks = models.seeded(lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(2)))
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.register_buffer("shift", torch.arange(6.0))
        self.factor, self.calls = 2.0, 0
        self.table = torch.ones(6)

    def around(self, x, scale=1.0):
        return self.blocks[1](self.blocks[0](x) * scale)


def model_of(forward):
    """A `Model` whose class has this ``forward(self, x)``."""
    return type("Made", (Model,), {"forward": forward})()


def run_by_hand(model, subgraphs, inputs):
    values = dict(inputs)
    for subgraph in subgraphs:
        output = subgraph.forward(model, **values)
        for name in subgraph.consumed_names:
            del values[name]
        if subgraph is not subgraphs[-1]:
            assert isinstance(output, dict)
            values.update(output)
    assert values == {}
    return output


def called(model, subgraph):
    return [
        model.get_submodule(node.target)
        for node in subgraph.graph.nodes
        if node.op == "call_module"
    ]
