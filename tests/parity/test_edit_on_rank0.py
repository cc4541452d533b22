"""edit_on="rank0": one rank runs the function, the others get their shards of what it returned."""

import time
from functools import partial

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close

import models
from cells import EDITS, check_cells
from flex_model import FlexModel, HookError, HookFunction
from oracle import KINDS
from tiers import ways


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("way", ways("tp", grid=["dp", "dtensor"]))
def test_an_edit_on_rank_0_equals_the_unsharded_run(way, kind):
    check_cells(way, kind, edits=sorted(EDITS.keys() - {"trainable"}), edit_on="rank0")


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


# ---- A tensor that the function keeps ------------------------------------------------------------


def keeping(kept, changes, **settings):
    """A FlexModel whose editing function on rank 0 keeps its tensor for a loss."""

    def keep(module, full, save_ctx, modules):
        kept[:] = [full]
        return full * 2 if changes else None

    way = models.TWO_RANKS["tp"]
    flex = FlexModel(way.shard(models.mlp()), edit_on="rank0", **settings, **way.sizes)
    flex.register_forward_hook(HookFunction("fc1", editing_function=keep))
    return flex


@pytest.mark.ranks(2)
def test_a_loss_of_the_output_and_of_what_rank_0_kept():
    batch, kept, own = models.random(4, 6), [], []
    flex = keeping(kept, changes=True)
    loss = flex(batch).sum()
    (loss + kept[0].square().sum() if kept else loss).backward()

    model = models.mlp()
    model.fc1.register_forward_hook(lambda module, args, output: own.append(output) or output * 2)
    (model(batch).sum() + own[0].square().sum()).backward()
    assert_close(flex.module.inp.weight.grad, model.inp.weight.grad)


REFUSED = "forward hook on 'fc1': a backward on rank 0 reaches the tensor that the editing function"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("others", ["run a forward", "run a backward"])
def test_a_backward_on_rank_0_alone_is_refused_on_every_rank(changes, others):
    """It waited for the others, up to the timeout."""
    batch, kept = models.random(4, 6), []
    flex = keeping(kept, changes)
    flex.register_full_backward_hook(HookFunction("fc2", editing_function=lambda m, x, *_: x * 3))
    loss = flex(batch).sum()
    if kept:
        act = kept[0].sum().backward
    else:
        act = loss.backward if others == "run a backward" else partial(flex, batch)
    with pytest.raises(HookError, match=REFUSED):
        act()
    flex.module.zero_grad()
    flex(batch).sum().backward()
    assert flex.module.inp.weight.grad.any()


@pytest.mark.ranks(2)
def test_a_backward_on_rank_0_alone_is_refused_while_the_others_are_elsewhere():
    batch, kept = models.random(4, 6), []
    flex = keeping(kept, changes=True, timeout=1)
    flex(batch)
    if kept:
        start = time.monotonic()
        with pytest.raises(HookError, match=REFUSED):
            kept[0].sum().backward()
        assert time.monotonic() - start < 5
    dist.barrier()
    with pytest.raises(HookError, match="can't be used any more" if kept else REFUSED):
        flex(batch)


@pytest.mark.ranks(2)
def test_an_unknown_scale_of_gradients_is_an_error_on_every_rank():
    """It was one on rank 0 alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = distribute_tensor(models.random(4, 3), mesh, [Shard(0)]).requires_grad_()
    model = nn.Sequential(nn.Identity(), nn.Tanh())
    with FlexModel(model, {}, data_parallel_size=2, edit_on="rank0") as flex:
        flex.register_forward_hook(HookFunction("0", editing_function=lambda m, t, *_: t * 2))
        loss = flex(x).to_local().sum()
        with pytest.raises(HookError, match="the model computes with no parameter that is one"):
            loss.backward()
