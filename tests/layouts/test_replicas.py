"""Ranks that should hold the same and do not: how far apart their values may be."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed import values
from flex_model.errors import ReplicasDifferError
from shared_edits import double


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


@pytest.mark.ranks(2)
def test_all_ranks_keep_the_first_rank_s_values():
    """Each kept its own, which differ by less than the bound."""
    (kept,) = recorded(torch.float32, values.tolerance(torch.zeros(1)) * 0.5)["0"]
    assert torch.equal(kept, torch.ones(4, 8))


class Claims(nn.Module):
    """A DTensor that says it is replicated."""

    def __init__(self, mesh, by):
        super().__init__()
        self.mesh, self.by = mesh, by

    def forward(self, x):
        own = x + self.by * dist.get_rank()
        return DTensor.from_local(own, self.mesh, [Replicate()], run_check=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [None, double])
def test_dtensors_that_claim_to_be_replicated_are_compared(edit):
    """Rank 0's values were taken for all, without a word; of edits, each rank's own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for by, is_right in ((0.0, True), (1e-3, False)):
        with FlexModel(nn.Sequential(Claims(mesh, by)), {}, tensor_parallel_size=2) as flex:
            flex.register_forward_hook(HookFunction("0", editing_function=edit))
            for _ in range(2):
                if is_right:
                    flex(torch.ones(4, 8))
                else:
                    with pytest.raises(ValueError, match="hold different values"):
                        flex(torch.ones(4, 8))


class Spoils(torch.autograd.Function):
    """Its backward adds another number on each rank, from the second call on."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Spoils.calls += 1
        return grad + (Spoils.calls > 1) * dist.get_rank()


class Spoiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.site, self.fc = nn.Identity(), nn.Linear(8, 8)

    def forward(self, x):
        return Spoils.apply(self.site(self.fc(x)))


@pytest.mark.ranks(2)
def test_gradients_that_are_whole_are_compared_every_time():
    """Of the second backward, rank 0's were recorded without a word."""
    Spoils.calls = 0
    with FlexModel(models.seeded(Spoiled), {}, tensor_parallel_size=2) as flex:
        flex.annotate_layout("", kind="parameter", tp=Replicate())
        site = HookFunction("site", placements={"tp": Replicate()})
        flex.register_full_backward_hook(site)
        flex(torch.ones(4, 8)).sum().backward()
        with pytest.raises(ValueError, match="hold different values"):
            flex(torch.ones(4, 8)).sum().backward()


def test_nan_and_infinities_are_equal_to_themselves():
    ours = torch.tensor([torch.nan, torch.inf, 1.0])
    assert values.difference(ours, ours.clone()) == (0.0, 1.0)
    assert values.difference(ours, torch.tensor([1.0, torch.inf, 1.0]))[0] == torch.inf
    assert values.tolerance(torch.zeros(1, dtype=torch.int64)) == 0.0


def test_integers_beyond_the_bits_of_float64():
    ours = torch.tensor([2**60 + 1])
    assert values.apart(ours, ours - 1).item() and not values.beyond_rounding(ours, ours)
    assert values.beyond_rounding(ours, ours - 1)


class Masked(Noisy):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.ones_like(x).triu(1).bool(), -torch.inf)


@pytest.mark.ranks(2)
def test_an_edit_of_replicas_that_differ_by_rounding_gets_the_first_rank_s():
    """-inf became NaN in the second forward; in the first one each rank edited its own."""
    x = models.random(4, 4).float().requires_grad_()
    expected = Masked(0.0)(x.detach()) * 2
    model = nn.Sequential(Masked(values.tolerance(x) * 0.1))
    with FlexModel(model, {}, tensor_parallel_size=2) as flex:
        flex.annotate_layout("moved", kind="parameter", tp=Replicate())
        flex.register_forward_hook(HookFunction("0", editing_function=double))
        for _ in range(2):
            found = flex(x)
            assert torch.equal(found, expected)
            x.grad = None
            found.tril().nan_to_num(neginf=0.0).sum().backward()
            torch.testing.assert_close(x.grad, 2 * torch.ones(4, 4).tril(), rtol=0, atol=1e-3)


@pytest.mark.ranks(2)
def test_a_large_value_does_not_hide_what_a_rank_adds():
    """A tensor with one of 300 had ranks add vectors 3 apart."""

    def edit(module, full, save_ctx, modules):
        return full + models.random(8, seed=dist.get_rank()).bfloat16()

    x = torch.ones(2, 8).bfloat16()
    x[0, 3] = 300
    with FlexModel(nn.Sequential(nn.Identity()), {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("0", editing_function=edit))
        with pytest.raises(ReplicasDifferError, match="all ranks edit one full tensor"):
            flex(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_first_call_that_edits_is_compared(mode):
    """The first call was, which left its tensor alone."""

    def edit(module, full, save_ctx, modules):
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        return full + dist.get_rank() if save_ctx.calls > 2 else None

    with FlexModel(nn.Sequential(nn.Identity()), {}, data_parallel_size=2) as flex, mode():
        flex.register_forward_hook(HookFunction("0", editing_function=edit))
        for _ in range(2):
            flex(torch.ones(2, 8))
        with pytest.raises(ReplicasDifferError, match="all ranks edit one full tensor"):
            flex(torch.ones(2, 8))
