"""Positions along a split dim, used as indices beside others."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shard
from followed import follow, unsharded


class Beside(nn.Module):
    """Rows by their positions, beside two columns for each, and beside one column for each."""

    def __init__(self):
        super().__init__()
        self.several, self.behind = nn.Identity(), nn.Identity()

    def forward(self, x):
        rows = torch.arange(x.shape[0])
        self.behind(x[rows[:, None], torch.tensor([0, 3])])
        self.several(x[rows, torch.tensor([0, 3])])


@pytest.mark.ranks(2)
def test_positions_of_one_row_a_rank_beside_other_indices():
    """The rank's only row was repeated for each of the indices, taken for that many rows."""
    x = models.random(2, 5, 8)
    expected = unsharded(Beside(), [x])
    mesh = Mesh.from_sizes(dp_size=2)
    mine = x.chunk(2)[dist.get_rank()]
    found, _, _ = follow(Beside(), mesh, [mine], [(Shard(0), Replicate())])
    assert found["several"] == [None]
    torch.testing.assert_close(found["behind"], expected["behind"])
