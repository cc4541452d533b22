"""Contracts of ``autograd.Function``s that the user states, on 2 ranks, and their errors."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
import pipelines
from flex_model import FlexModel, HookFunction
from flex_model.distributed.placement import Shard
from flex_model.layouts import register_function
from flex_model.layouts.contracts.functions import contract_of
from shared_edits import mixing_features


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


class Broadcast(torch.autograd.Function):
    """Torch's own, whose backward leaves the sum at the source and zeros elsewhere."""

    @staticmethod
    def apply(x, group):
        return torch.distributed.nn.functional._Broadcast.apply(0, group, x)


@pytest.mark.ranks(2)
def test_a_broadcast_in_front_of_shards():
    x, model, records = models.random(4, 6), Columns(dist.group.WORLD, Broadcast), {}
    flip = lambda module, grad, *_: grad + grad.flip(1)  # noqa: E731
    with FlexModel(model, records, tensor_parallel_size=2, output_ranks="all") as flex:
        flex.register_full_backward_pre_hook(HookFunction("site", None, flip))
        flex(x.requires_grad_()).sum().backward()
    whole = x.detach().tanh().requires_grad_()
    weight = models.seeded(nn.Linear, 6, 8, seed=0).double().weight
    nn.functional.linear(whole, weight).square().sum().backward()
    assert_close(records["site"], [whole.grad])
    dist.all_reduce(x.grad)
    assert_close(x.grad, (whole.grad + whole.grad.flip(1)) * (1 - whole.detach() ** 2))


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


class FirstHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.site = nn.Identity()

    def forward(self, x):
        return self.site(Halves.apply(x)[0])


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
    passed = []
    register_function(Halves, forward=lambda one: passed.append(one) or returned, gradient="local")
    x = models.random(4, 6)
    with FlexModel(FirstHalf(), records := {}, data_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("site"))
        raises = pytest.raises((TypeError, ValueError), match=rf"Halves\): forward.*{text}")
        with raises if text else nullcontext():
            flex(x.chunk(2)[dist.get_rank()])
    assert passed[0] == DTensorShard(0)
    if dist.get_rank() == 0 and not text:
        assert_close(records["site"][0], x[:, :3])


class Summed(models.SumOverRanks):
    """Its contract says that the sum is the same on all ranks."""


class OwnCopy(models.CopyToRanks):
    """Communicates nothing; its contract says of all copies that they are the same on all ranks."""


class Experts(nn.Module):
    """Each rank runs its own of four experts, which are two modules of other names."""

    def __init__(self, own=range(4), join=lambda y, group: y):
        super().__init__()
        self.own, self.join, self.site, self.out = own, join, nn.Identity(), nn.Identity()
        self.experts = nn.ModuleList(models.seeded(nn.Linear, 6, 6, seed=i) for i in range(4))
        self.double()

    def forward(self, x):
        x = self.site(x)
        copied, y = x if len(self.own) == 4 else Copied.apply(x, dist.group.WORLD), 0
        for i in self.own:
            y = y + self.experts[i](copied).tanh()
        return self.out(self.join(y, dist.group.WORLD))


@pytest.mark.ranks(2)
def test_a_contract_joins_what_ranks_made_by_other_modules():
    """The call was left out with the operations before it, which are not the same on all ranks."""
    own = range(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for function in (Summed, OwnCopy):
        register_function(function, forward=lambda one: Replicate(), gradient="whole")
    register_function(Copied, gradient="whole")
    x, found = models.random(4, 6), {}
    for name, model in (("twin", Experts()), ("ranks", Experts(own, Summed.apply))):
        size = 2 if name == "ranks" else 1
        group = dist.group.WORLD if name == "ranks" else pipelines.alone_group()
        with FlexModel(
            model, {}, tensor_parallel_size=size, process_group=group, output_ranks="all"
        ) as flex:
            flex.annotate_layout("", kind="parameter", tp=Replicate())
            flex.register_forward_hook(HookFunction("out", None, mixing_features))
            for site in ("out", "site"):
                hook = HookFunction(site, None, mixing_features, output_name=f"{site}.grad")
                flex.register_full_backward_pre_hook(hook)
            flex(x.clone().requires_grad_()).square().sum().backward()
        found[name] = flex.output_ptr
    assert_close(found["ranks"], found["twin"])
    with FlexModel(Experts(own, OwnCopy.apply), {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.annotate_layout("", kind="parameter", tp=Replicate())
        flex.register_forward_hook(HookFunction("out"))
        with pytest.raises(ValueError, match=r"'out'.*not the same one on all ranks"):
            flex(x)


@pytest.mark.ranks(2)
def test_a_contract_that_takes_other_arguments_is_named():
    """It was a TypeError about a lambda alone."""
    register_function(Halves, forward=lambda one, other: one, gradient="local")
    with FlexModel(FirstHalf(), {}, tensor_parallel_size=2, timeout=20) as flex:
        flex.register_forward_hook(HookFunction("site"))
        text = (
            r"register_function\(.*Halves\): forward= gets .* here 1, and raised TypeError: .*other"
        )
        with pytest.raises(TypeError, match=text):
            flex(models.random(4, 6))


def region(reduces):
    """One of several classes of the same name."""

    class Region(models.CopyToRanks if reduces else torch.autograd.Function):
        if not reduces:

            @staticmethod
            def forward(ctx, x, group):
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                return grad, None

    return Region


@pytest.mark.ranks(2)
def test_classes_of_one_name_have_contracts_of_their_own():
    """Silently wrong before: all had that of the class that was stated last."""
    summing, passing, unstated = region(True), region(False), region(True)
    register_function(summing, gradient="whole")
    register_function(passing, gradient="local")
    x, found = models.random(4, 6), {}
    for function in (summing, passing, unstated):
        model = Columns(dist.group.WORLD, function)
        with FlexModel(model, records := {}, tensor_parallel_size=2, timeout=20) as flex:
            flex.register_full_backward_pre_hook(HookFunction("site"))
            loss = flex(x.clone().requires_grad_()).sum()
            with (
                pytest.raises(ValueError, match="without a contract")
                if function is unstated
                else nullcontext()
            ):
                loss.backward()
        found[function] = records.get("site")
    if dist.get_rank() == 0:
        assert_close(found[summing], found[passing])


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


def test_a_function_that_transformers_adds_is_not_taken_for_local():
    """Wrong before: a collective in one's backward would not have been noticed."""
    for name, contract in (("bitnet.WeightQuant", "local"), ("expert_parallel.AllToAll", None)):
        assert contract_of(f"transformers.integrations.{name}") == contract
