"""Slices whose bounds are tensors: the numbers in them may be a rank's own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = models.seeded(nn.Linear, 6, 6).double(), nn.Tanh()

    def forward(self, x, sizes):
        return self.act(self.fc(x)[:, : sizes[0]])


SHARED = {"sizes": None}


def double(module, full, save_ctx, modules):
    return full * 2 + full.flip(0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_a_bound_that_is_the_same_on_all_ranks(size):
    model, x, sizes = Sliced(), models.random(4, 6), torch.tensor([size, 9])
    expected = model.act(model.fc(x)[:, :size]).detach()
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    with (
        FlexModel(model, found := {}, data_parallel_size=2, batch_dim=SHARED) as flex,
        torch.no_grad(),
    ):
        flex.register_forward_hook(HookFunction("act", editing_function=double))
        output = flex(x[rows], sizes)
    assert_close(output, double(None, expected, None, None)[rows])
    assert_close(found.get("act", []), [expected] if dist.get_rank() == 0 else [])
