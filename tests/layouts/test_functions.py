"""Contracts of ``autograd.Function``s that the user states, on 2 ranks, and their errors."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard as DTensorShard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.placement import Shard
from flex_model.layouts import register_function


class Copied(models.CopyToRanks):
    """Without a contract until one is stated."""


class Detached(Copied):
    """Returns another tensor of the input's memory."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.detach()


class Chunk(torch.autograd.Function):
    """The rank's columns, by a kernel that is not followed."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return torch.from_numpy(x.detach().numpy().copy()).chunk(2, 1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.shape)
        whole.chunk(2, 1)[dist.get_rank()].copy_(grad)
        dist.all_reduce(whole)
        return whole


class Columns(nn.Module):
    def __init__(self, group, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.recomputes = function, False
        self.site, self.group = nn.Tanh(), group
        self.full = nn.Linear(6, 8).double()
        self.up = models.ColumnLinear(self.full, group)
        self.up.in_features, self.up.out_features = 6, 8
        del self.full

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=True) if self.recomputes else self.run(x)

    def run(self, x):
        h = nn.functional.linear(self.function.apply(self.site(x), self.group), self.up.weight)
        return models.SumOverRanks.apply(h.square().sum(-1), self.group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [Copied, Detached])
def test_a_function_in_front_of_shards_is_refused_until_it_is_stated(function):
    x, model = models.random(4, 6).requires_grad_(), Columns(dist.group.WORLD, function)
    with FlexModel(model, {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.register_full_backward_pre_hook(HookFunction("site"))
        with pytest.raises(ValueError, match=r"'site'.*register_function\("):
            flex(x).sum().backward()
    register_function(function, gradient="whole")
    records, found = {}, []
    for model.recomputes in (False, True):
        with FlexModel(model, records, tensor_parallel_size=2, timeout=20) as flex:
            flex.register_forward_hook(HookFunction("site", output_name="forward"))
            flex.register_full_backward_pre_hook(HookFunction("site"))
            flex(x).sum().backward()
        found += records.get("site", [])
    if dist.get_rank() == 0:
        whole, h = (
            x.detach().tanh().requires_grad_(),
            models.seeded(nn.Linear, 6, 8, seed=0).double().weight,
        )
        nn.functional.linear(whole, h).square().sum().backward()
        assert_close(found, [whole.grad, whole.grad])


@pytest.mark.ranks(2)
def test_a_forward_with_a_contract_is_not_followed():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.site = nn.Identity()

        def forward(self, x):
            return self.site(Chunk.apply(x))

    x = models.random(4, 6)
    register_function(Chunk, forward=lambda placement: Shard(1), gradient="whole")
    with FlexModel(Taken(), records := {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("site"))
        flex(x)
    if dist.get_rank() == 0:
        assert_close(records["site"][0], x)


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return tuple(one.clone() for one in x.chunk(2, -1))

    @staticmethod
    def backward(ctx, *grads):
        return torch.cat(grads, -1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (DTensorShard(0), ""),
        ([DTensorShard(0), Shard(0)], ""),
        ([DTensorShard(0)], "must return one placement for all results, or a list of 2, got"),
        ("S(0)", r"= must be Shard\(dim\), .* of torch.distributed.tensor, got 'S\(0\)'"),
        (DTensorShard(-1), r"=Shard\(-1\): count the dim from the front"),
    ],
)
def test_placements_of_torch_and_what_is_none(returned, text):
    """A placement of torch was a bare TypeError, and those passed were none of torch's."""

    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.site = nn.Identity()

        def forward(self, x):
            return self.site(Halves.apply(x)[0])

    passed = []
    register_function(Halves, forward=lambda one: passed.append(one) or returned, gradient="local")
    x = models.random(4, 6)
    with FlexModel(Taken(), records := {}, data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("site"))
        raises = pytest.raises((TypeError, ValueError), match=rf"Halves\): forward.*{text}")
        with raises if text else nullcontext():
            flex(x.chunk(2)[dist.get_rank()])
    assert passed[0] == DTensorShard(0)
    if dist.get_rank() == 0 and not text:
        assert_close(records["site"][0], x[:, :3])


def test_what_is_no_contract():
    with pytest.raises(TypeError, match=r"expected a subclass of torch\.autograd\.Function"):
        register_function(nn.Linear, gradient="whole")
    with pytest.raises(TypeError, match="must be a text or a function of placements"):
        register_function(Chunk, forward=Shard(1))
    for contract in (None, "whole"):
        with pytest.raises(ValueError, match="communicates nothing; pass gradient='local'"):
            register_function(Chunk, forward="x:...* -> ...*", gradient=contract)
    for contract in (None, "half"):
        with pytest.raises(ValueError, match="state forward=, or gradient="):
            register_function(Chunk, gradient=contract)
