"""Edits that return strided tensors, in front of layers that look at strides: DTensor's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction
from tiers import grid_but

X = models.random(2, 4, 6)

EDITS = {
    "transposed": lambda full: (2 * full).transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda full: torch.stack([full, -full], -1).flatten(-2)[..., ::2],
    "permuted": lambda full: full.permute(2, 0, 1).contiguous().sin().permute(1, 2, 0),
}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mlp = nn.Linear(6, 6), models.MLP()
        self.mlp.inp = self.mlp.out = nn.Identity()

    def forward(self, x):
        return self.mlp(self.first(x)).view(2, -1)


PLANS = {
    "plain": {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()},
    "sequence": {
        "mlp.fc1": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
    },
    "dtensor inputs": {
        "mlp": PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Replicate(),),
            use_local_output=False,
        ),
        "mlp.fc1": ColwiseParallel(use_local_output=False),
        "mlp.fc2": RowwiseParallel(),
    },
}
SITES = [("first", "forward"), ("mlp.fc1", "forward_pre"), ("mlp.fc1", "forward")]
SITES += [("mlp.fc2", "forward_pre"), ("mlp.fc1", "full_backward"), ("first", "full_backward_pre")]


def hook(site, shape, edit):
    return HookFunction(site, shape, lambda module, full, save_ctx, modules: EDITS[edit](full))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", grid_but(["all", "rank0"], "all"))
@pytest.mark.parametrize("plan", PLANS)
def test_a_strided_edit_in_front_of_a_dtensor_layer(plan, edit_on):
    rank, is_split = dist.get_rank(), plan == "sequence"
    x = X.chunk(2, 1)[rank].contiguous() if is_split else X
    for (site, kind), edit in [(site, edit) for site in SITES for edit in EDITS]:
        shape = (2, 4, None) if is_split and site == "first" else None
        expected = models.seeded(Layers).double()
        with FlexModel(expected, oracle := {}, process_group=pipelines.alone_group()) as flex:
            getattr(flex, f"register_{kind}_hook")(hook(site, shape, edit))
            flex(X).square().mean().backward()
        sharded = parallelize_module(
            models.seeded(Layers).double(), models.mesh(1, 2)["tp"], PLANS[plan]
        )
        with FlexModel(sharded, records := {}, tensor_parallel_size=2, edit_on=edit_on) as flex:
            if is_split:
                flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
            getattr(flex, f"register_{kind}_hook")(hook(site, shape, edit))
            output = flex(x)
            (output.square().sum() / X.numel()).backward()
        where = f"{kind} {site} {edit}"
        if rank == 0:
            assert_close(records, oracle, msg=where)
        for name, parameter in sharded.named_parameters():
            got = parameter.grad
            if hasattr(got, "full_tensor"):
                got = got.full_tensor()
            elif is_split:
                got = got.clone()
                dist.all_reduce(got)
            assert_close(got, expected.get_parameter(name).grad, msg=f"{where}: {name}")


@pytest.mark.parametrize("edit", EDITS)
def test_a_strided_edit_in_front_of_a_view(edit):
    """As torch's own hooks do not, but every sharding does."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            return self.first(x).view(-1).square()

    model = models.seeded(Viewed).double()
    expected = EDITS[edit](model.first(X)).reshape(-1).square()
    with FlexModel(model) as flex:
        flex.register_forward_hook(
            HookFunction("first", editing_function=lambda m, full, s, ms: EDITS[edit](full))
        )
        output = flex(X)
    assert_close(output, expected)
    output.sum().backward()
    got = model.first.weight.grad.clone()
    model.zero_grad()
    expected.sum().backward()
    assert_close(got, model.first.weight.grad)
