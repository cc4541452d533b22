"""Memory that is written to through views."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
from flex_model.distributed.layout import Replicate, Shard
from flex_model.distributed.mesh import Mesh
from followed import follow


def parts(x):
    made = torch.empty(x.shape, dtype=torch.complex128)
    made.real = x
    made.imag = x
    return made


def pairs(x):
    made = torch.empty(x.shape, dtype=torch.complex128)
    torch.view_as_real(made).copy_(torch.stack([x, x], -1))
    return made


def bits(x):
    made = torch.empty_like(x)
    made.view(torch.int32).copy_(x.view(torch.int32))
    return made


@pytest.mark.ranks(2)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", [parts, pairs, bits])
def test_views_of_unwritten_memory_in_other_dtypes(make, inference):
    """An error of torch's came out of the follower."""

    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.site = nn.Identity()

        def forward(self, x):
            return self.site(make(x))

    mine = models.random(4, 6).chunk(2)[dist.get_rank()]
    mesh = Mesh.from_sizes(dp_size=2)
    with torch.inference_mode(inference):
        found, _, _ = follow(Made(), mesh, [mine], [(Shard(0), Replicate())])
    assert found["site"] == [None]
