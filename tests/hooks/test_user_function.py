"""What an editing function is given, and in which state it runs."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import flex_model
import models
from flex_model import FlexModel, HookError, HookFunction, Select
from pipelines import alone_group
from shared_edits import mixing_features
from tiers import ways

LIBRARY = Path(flex_model.__file__).parent


class Net(nn.Module):
    """A site whose tensor is sharded over two ranks, and a weight that is not."""

    def __init__(self):
        super().__init__()
        self.site = nn.Identity()
        self.weight = nn.Parameter(models.random(6, 6))

    def forward(self, x):
        return self.site(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_parameters_are_whole_and_tensors_can_be_changed_in_any_mode(edit_on, mode):
    full = models.random(4, 6)
    model, records = Net(), {}
    mix = HookFunction("site", (None, 6), parameters=["weight"])
    mix.editing_function = lambda module, x, save_ctx, modules: x @ mix.parameters["weight"]

    def double(module, x, save_ctx, modules):
        x.mul_(2)

    with FlexModel(model, records, tensor_parallel_size=2, edit_on=edit_on) as flex:
        models.replicas(flex).annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        flex.register_forward_hook(mix)
        flex.register_forward_hook(HookFunction("site", (None, 6), double, output_name="mixed"))
        with mode():
            result = flex(full.chunk(2, -1)[dist.get_rank()])
    mixed = (full @ model.weight).detach()
    assert_close(result, (mixed * 2).chunk(2, -1)[dist.get_rank()])
    assert mix.parameters == {}
    if dist.get_rank() == 0:
        assert_close(records["site"][0], full)
        assert_close(records["mixed"][0], mixed)
        assert not any(record.is_inference() for kept in records.values() for record in kept)


def output_and_gradient(flex, rows, kind, site, own):
    """Of a model with an edit that mixes features, and adds a vector."""

    def edit(module, full, save_ctx, modules):
        return mixing_features(module, full, save_ctx, modules) + own(full.shape[-1])

    handle = getattr(flex, f"register_{kind}_hook")(HookFunction(site, editing_function=edit))
    x, error = rows.clone().requires_grad_(), None
    try:
        output = flex(x)
        output.square().mean().backward()
    except ValueError as raised:
        error = raised
    handle.remove()
    return error or (output, x.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
@pytest.mark.parametrize("kind", ["forward", "full_backward_pre"])
@pytest.mark.parametrize("site", ["fc1", "out"])
def test_a_value_of_a_ranks_own_is_an_error_on_every_rank(name, kind, site):
    """Silently wrong before: replicas diverged, and a split tensor had parts of two vectors."""
    rank, parallelism, batch = dist.get_rank(), models.TWO_RANKS[name], models.random(4, 6)
    rows = parallelism.my_rows(batch)
    with FlexModel(parallelism.shard(models.mlp()), **parallelism.sizes) as flex:
        found = output_and_gradient(flex, rows, kind, site, lambda n: models.random(n, seed=rank))
        assert f"'{site}': all ranks edit one full tensor" in str(found)
        assert "on the ranks [1] differs from that on rank 0, by up to" in str(found)
        with FlexModel(models.mlp(), process_group=alone_group()) as twin:
            expected = output_and_gradient(twin, batch, kind, site, lambda n: models.random(n))
        # But for rounding, as of kernels that are not deterministic.
        found = output_and_gradient(
            flex, rows, kind, site, lambda n: models.random(n) + 1e-15 * rank
        )
    expected = expected[0], expected[1] * parallelism.dp
    assert_close(found, tuple(parallelism.my_rows(one) for one in expected))


@pytest.mark.ranks(2)
def test_an_error_on_rank_0_alone_names_the_hook_everywhere():
    def fail(module, x, save_ctx, modules):
        raise KeyError("boom")

    with FlexModel(Net(), tensor_parallel_size=2, edit_on="rank0") as flex:
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        handle = flex.register_forward_hook(HookFunction("site", (None, 6), fail))
        for _ in range(2):
            with pytest.raises(
                HookError, match=r"rank 0: forward hook on 'site'.*KeyError: 'boom'"
            ):
                flex(models.random(4, 6).chunk(2, -1)[dist.get_rank()])
        handle.remove()
        flex(models.random(4, 3))


def test_what_was_returned_is_not_changed_by_the_model():
    """A function that returns a tensor of the user's: the next module works in place."""
    mine = models.random(4, 6)
    kept = mine.clone()
    flex = FlexModel(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)))
    flex.register_forward_hook(HookFunction("0", editing_function=lambda m, x, ctx, mods: mine))
    assert_close(flex(models.random(4, 6)), kept.relu())
    assert_close(mine, kept)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("way", ways("one", "tp", "dp"))
def test_a_pre_hook_on_an_input_made_before_inference_mode(way, edit_on, in_place):
    """Failed before (inference tensors track no version), and every later run with it: the model
    was taken to be inside an editing function.
    """

    def double(module, full, save_ctx, modules):
        return full.mul_(2) if in_place else full * 2

    model = models.mlp()
    for needs_grad, units in itertools.product((False, True), (None, [0, 2])):
        x = models.random(4, 6).requires_grad_(needs_grad)
        kept, scale = x.detach().clone(), torch.ones(6, dtype=x.dtype)
        scale[slice(None) if units is None else units] = 2
        expected = way.my_rows(model(kept * scale))
        hook = HookFunction("inp", editing_function=double, select=units and Select(units=units))
        with FlexModel(way.shard(model), edit_on=edit_on, **way.sizes) as flex:
            flex.register_forward_pre_hook(hook)
            with torch.inference_mode():
                assert_close(flex(way.my_rows(x)), expected)
            assert_close(flex(way.my_rows(x)), expected)
        assert torch.equal(x, kept)


# ---- The frames between torch and the function ---------------------------------------------------


def frames_of_the_library():
    """How many frames of flex_model are between torch's hook and the function that calls this."""
    frame, count = sys._getframe(2), 0
    while Path(frame.f_code.co_filename).is_relative_to(LIBRARY):
        count, frame = count + 1, frame.f_back
    return count


@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("parallelism", ways("one", "dp"))
def test_at_most_six_frames_are_between_torch_and_the_function(parallelism, edit_on):
    counts = {}  # by kind of hook
    model = parallelism.shard(models.seeded(models.MLP).double())
    flex = FlexModel(model, edit_on=edit_on, **parallelism.sizes)
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):

        def count(module, full, save_ctx, modules, kind=kind):
            counts[kind] = frames_of_the_library()

        getattr(flex, f"register_{kind}_hook")(HookFunction("fc1", None, count, record=False))
    rows = parallelism.my_rows(models.random(4, 6)).requires_grad_()
    flex(rows).sum().backward()
    if parallelism.dp == 1 or edit_on == "all" or dist.get_rank() == 0:
        assert len(counts) == 4 and max(counts.values()) <= 6
    if parallelism.dp == 1:
        assert counts["forward"] <= 3
