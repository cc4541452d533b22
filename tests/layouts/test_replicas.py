"""Ranks that should hold the same and do not: how far apart their values may be."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from flex_model import FlexModel, HookFunction
from flex_model.distributed import values


class Noisy(nn.Module):
    """An activation that the second rank moves by a fraction of its largest value."""

    def __init__(self, fraction):
        super().__init__()
        self.register_buffer("moved", torch.tensor(fraction * dist.get_rank()).double())

    def forward(self, x):
        moved = x.double() + x.double().abs().max() * self.moved
        return moved.to(x.dtype)


def recorded(dtype, fraction):
    records = {}
    model = nn.Sequential(Noisy(fraction))
    flex = FlexModel(model, records, tensor_parallel_size=2, output_ranks="all")
    flex.annotate_layout("moved", kind="parameter", tp=Replicate())
    flex.register_forward_hook(HookFunction("0", None))
    flex(torch.ones(4, 8, dtype=dtype))
    return records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_may_be_as_far_apart_as_verify_allows(dtype):
    """float16 was allowed four times as much, float32 a sixth less."""
    bound = values.tolerance(torch.zeros(1, dtype=dtype))
    assert recorded(dtype, bound * 0.8)
    with pytest.raises(ValueError, match="hold different values"):
        recorded(dtype, bound * 1.3)


def test_nan_and_infinities_are_equal_to_themselves():
    ours = torch.tensor([torch.nan, torch.inf, 1.0])
    assert values.difference(ours, ours.clone()) == (0.0, 1.0)
    assert values.difference(ours, torch.tensor([1.0, torch.inf, 1.0]))[0] == torch.inf
    assert values.tolerance(torch.zeros(1, dtype=torch.int64)) == 0.0
