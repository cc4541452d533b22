"""edit_on="rank0": one rank runs the function, the others get their shards of what it returned."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from cells import EDITS, SITES, differences, table_cell
from flex_model import FlexModel, HookFunction


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("name", ["tp", "dp", "dtensor"])
def test_an_edit_on_rank_0_equals_the_unsharded_run(name, kind):
    parallelism = models.TWO_RANKS[name]
    wrong = []
    for site in SITES[kind]:
        for edit in sorted(EDITS.keys() - {"trainable"}):
            model, batch = models.mlp(), models.random(4, 6)
            cell = table_cell(model, batch, kind, site, edit)
            wrong += differences(parallelism, model, batch, cell, edit_on="rank0")
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(4)
def test_an_edit_on_rank_0_of_four_equals_the_unsharded_run():
    parallelism = models.FOUR_RANKS["tp x dp"]
    wrong = []
    for edit in ("mixing features", "mixing rows", "in place"):
        model, batch = models.mlp(), models.random(4, 6)
        cell = table_cell(model, batch, "forward", "fc1", edit)
        wrong += differences(parallelism, model, batch, cell, edit_on="rank0")
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(2)
def test_only_rank_0_runs_the_function_and_trains_the_module():
    ran = []

    def edit(module, full, save_ctx, modules):
        ran.append(dist.get_rank())
        return modules["probe"](full)

    parallelism = models.TWO_RANKS["tp"]
    model, batch = models.mlp(), models.random(4, 6)
    probe = models.seeded(nn.Linear, 8, 8).double()
    flex = FlexModel(parallelism.shard(model), edit_on="rank0", **parallelism.sizes)
    flex.register_trainable_module("probe", probe)
    flex.register_forward_hook(HookFunction("fc1", editing_function=edit))
    flex(batch).sin().mean().backward()

    oracle = models.seeded(nn.Linear, 8, 8).double()
    model.fc1.register_forward_hook(lambda module, args, output: oracle(output))
    model(batch).sin().mean().backward()
    if dist.get_rank() == 0:
        assert ran == [0]
        assert_close(probe.weight.grad, oracle.weight.grad)
    else:
        assert ran == []
        assert probe.weight.grad is None or not probe.weight.grad.any()


@pytest.mark.ranks(2)
def test_trained_modules_are_sent_to_all_ranks():
    flex = FlexModel(models.mlp(), tensor_parallel_size=2, edit_on="rank0")
    flex.register_trainable_module("probe", nn.Linear(2, 2))
    for parameter in flex.trainable_modules.parameters():
        nn.init.constant_(parameter, 7 + dist.get_rank())
    flex.sync_trainable_modules()
    for parameter in flex.trainable_modules.parameters():
        assert parameter.eq(7).all()
