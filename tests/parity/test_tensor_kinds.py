"""Tensors that are not plain ones on their way into transfers: those of torch's own collectives,
subclasses, lazily conjugated ones; and those that can't be moved, which are refused by name.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction

X = models.random(2, 8, 6)


class Normed(nn.Module):
    """A norm on parts of the sequence before a layer on all of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), models.MLP()
        self.mlp.inp = self.mlp.out = nn.Identity()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def sequence_parallel(model):
    """Torch's own plan; the norm's output is a plain part of the sequence on each rank."""
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "mlp.fc1": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(model, models.mesh(1, 2)["tp"], plan)


def edit(module, full, save_ctx, modules):
    return full.sin() * torch.arange(1, 9, dtype=full.dtype)[:, None]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("kind", ["forward", "full_backward_pre"])
def test_a_gradient_that_is_still_on_its_way(kind, edit_on, transport, monkeypatch):
    """Before, its address, 0, went to C++, and every rank died."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    rank = dist.get_rank()
    expected = models.seeded(Normed).double()
    with FlexModel(expected, oracle := {}, process_group=pipelines.alone_group()) as flex:
        getattr(flex, f"register_{kind}_hook")(HookFunction("norm", editing_function=edit))
        flex(X).square().mean().backward()
    sharded = sequence_parallel(models.seeded(Normed).double())
    records = {}
    with FlexModel(sharded, records, tensor_parallel_size=2, edit_on=edit_on) as flex:
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        getattr(flex, f"register_{kind}_hook")(
            HookFunction("norm", (None, 8, None), editing_function=edit)
        )
        output = flex(X.chunk(2, 1)[rank].clone())
        (output.square().sum() / X.numel()).backward()
    if rank == 0:
        assert_close(records, oracle)
    for name, parameter in sharded.named_parameters():
        got = parameter.grad
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert_close(got, expected.get_parameter(name).grad, msg=name)


class Renamed(torch.Tensor):
    """A tensor by another name, as many libraries have them."""


class Conjugated(nn.Module):
    def forward(self, x):
        return torch.complex(x, 2 * x).conj()


class Negated(nn.Module):
    def forward(self, x):
        return torch.complex(x, 2 * x).conj().imag  # a negative view


class Rename(nn.Module):
    def forward(self, x):
        return (x * 1).as_subclass(Renamed)


class Back(nn.Module):
    def forward(self, x):
        self.got = type(x)
        return x.as_subclass(torch.Tensor)


KINDS = {"conjugate": Conjugated, "negative": Negated, "subclass": Rename}


def edited(module, full, save_ctx, modules):
    assert type(full) is torch.Tensor
    save_ctx.was = not full.is_conj(), not full.is_neg()
    return full * full.flip(-1)


def edited_as_subclass(module, full, save_ctx, modules):
    return edited(module, full, save_ctx, modules).as_subclass(Renamed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("edit", [None, edited, edited_as_subclass])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_computed_first(kind, edit, edit_on):
    rank, found = dist.get_rank(), []
    for is_sharded in (False, True):
        model, records = nn.Sequential(nn.Identity(), KINDS[kind](), Back()), {}
        x = X.clone().requires_grad_()
        mine = x.chunk(2, -1)[rank] if is_sharded else x
        sizes = {"tensor_parallel_size": 2} if is_sharded else {}
        group = None if is_sharded else pipelines.alone_group()
        with FlexModel(model, records, process_group=group, edit_on=edit_on, **sizes) as flex:
            if is_sharded:
                flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(2))
            flex.register_forward_hook(HookFunction("1", (2, 8, 6), edit))
            flex.register_full_backward_pre_hook(HookFunction("1", (2, 8, 6), output_name="grad"))
            output = flex(mine)
            output.abs().square().sum().backward()
        if kind == "subclass":
            assert model[2].got is Renamed
        if is_sharded:
            output = models.all_parts(output.resolve_neg(), -1, dist.group.WORLD)
            grad = x.grad.clone()
            dist.all_reduce(grad)
        found.append((output.detach(), x.grad if not is_sharded else grad, records))
    assert_close(found[1][:2], found[0][:2])
    if rank == 0:
        assert_close(found[1][2], found[0][2])
    assert all(type(t) is torch.Tensor for kept in found[0][2].values() for t in kept)


class Odd(torch.Tensor):
    """Keeps its values where nobody else knows of."""

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls, elem.shape, dtype=elem.dtype, strides=elem.stride()
        )

    def __init__(self, elem):
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrap = lambda value: value.elem if isinstance(value, Odd) else value  # noqa: E731
        result = function(*map(unwrap, args), **(kwargs or {}))
        return Odd(result) if isinstance(result, torch.Tensor) else result


ODD = {"Odd": Odd, "meta": lambda x: x.to("meta"), "sparse": lambda x: x.to_sparse()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [None, edited])
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_cant_be_moved_are_refused_by_name(kind, edit):
    """Before, the address of the first was 0, and every rank died."""

    class Makes(nn.Module):
        def forward(self, x):
            return ODD[kind](x)

    model = nn.Sequential(nn.Identity(), Makes())
    with FlexModel(model, {}, tensor_parallel_size=2, timeout=10) as flex:
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(2))
        handle = flex.register_forward_hook(HookFunction("1", (2, 8, 12), edit))
        for _ in range(2):
            advice = "no values to record; get shapes" if kind == "meta" else "hook a module"
            with pytest.raises(HookError, match=f"(?s)rank 0.*{kind}.*{advice}"):
                flex(X + dist.get_rank())
        handle.remove()
        flex.register_forward_hook(HookFunction("0", (2, 8, 12)))
        flex(X + dist.get_rank())  # works on
