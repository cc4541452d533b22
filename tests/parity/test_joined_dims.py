"""Tensors of which both axes split one dim: rows and heads that were joined for batched products.

An edit of one, and hooks that read others behind it and before it, forward and backward.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import frameworks
import models
import table
from frameworks import Pair
from table import KINDS, Cell
from tiers import grid_but


class Attention(nn.Module):
    """Its patterns are (rows x heads, length, length), its values (heads x rows, length, size)."""

    def __init__(self, heads, width=8):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        for name in ("scores", "pattern", "values"):
            setattr(self, name, nn.Sequential(*(nn.Identity() for _ in range(3))))

    def forward(self, x):
        rows, length = x.shape[:2]
        q, k, v = (
            layer(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = self.scores(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT))
        values = torch.bmm(self.pattern(scores.softmax(-1)), v.flatten(0, 1)).view_as(v)
        values = self.values(values.transpose(0, 1).flatten(0, 1))
        values = values.unflatten(0, (v.shape[1], rows)).transpose(0, 1)
        return self.o(values.transpose(1, 2).flatten(2)) * 1  # no AsyncCollectiveTensor


def pair_of(heads, rows):
    model, mesh = frameworks.randomise(Attention(heads).double()), models.mesh(2, 2)

    def shard():
        plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
        return parallelize_module(copy.deepcopy(model), mesh["tp"], plan)

    def full_gradients(sharded):
        found = frameworks.gradients(sharded)
        for gradient in found.values():
            dist.all_reduce(gradient, group=mesh["dp"].get_group())
        return {name: gradient / 2 for name, gradient in found.items()}

    return Pair(
        model,
        shard,
        (models.random(rows, 3, 8),),
        {},
        (),
        full_gradients,
        dp=2,
        dp_rank=mesh["dp"].get_local_rank(),
        sizes={"tensor_parallel_size": 2, "data_parallel_size": 2},
    )


SITES = ("scores", "pattern", "values")
READS = (("forward", 2), ("full_backward", 0))  # and of which of a site's three modules


@pytest.mark.ranks(4)
@pytest.mark.parametrize("heads, rows", [(8, 4), pytest.param(4, 8, marks=pytest.mark.grid)])
@pytest.mark.parametrize("kind", grid_but(KINDS[:-1], "forward", "full_backward"))
def test_edits_of_joined_rows_and_heads(kind, heads, rows):
    """What was read behind an edit, and gradients, were put together in another order."""
    pair = pair_of(heads, rows)
    reads = [Cell(read, f"{site}.{place}") for site in SITES for read, place in READS]
    runs = [[Cell(kind, f"{site}.1", "mixing"), *reads] for site in SITES]
    oracles = [table.oracle_run(pair, cells) for cells in runs]
    sharded, outcomes = table.Sharded(pair), []
    for cells, oracle in zip(runs, oracles):
        outcomes += table.run_cells(sharded, cells, oracle)
    assert [one for one in outcomes if one.result != "right"] == []
