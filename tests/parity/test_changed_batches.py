"""Batches whose size changes between forwards, with backward passes in any order after them."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import models
import pipelines
from cells import mean_loss
from flex_model import FlexModel, HookFunction
from tiers import grid_but, ways

SIZES = [(4, 4), (2, 2), (8, 2), (2, 6), (1, 1), (4, 4)]  # rows of each dp rank
KINDS = ["forward_pre", "forward", "full_backward_pre", "full_backward"]
ORDERS = ["each", "one late", "last first", "all at once"]


def edit(module, full, save_ctx, modules):
    return full * 2 + modules["probe"].weight.sum()


def look(module, full, save_ctx, modules):
    return None


def run(flex, kinds, site, shape, function, rows_of, order):
    """What was recorded in all, and the gradients of the trainable module."""
    flex.register_trainable_module("probe", models.seeded(torch.nn.Linear, 2, 2).double())
    for kind in kinds:
        hook = HookFunction(site, shape, function, output_name=kind)
        getattr(flex, f"register_{kind}_hook")(hook)
    waiting = []
    for i, sizes in enumerate(SIZES):
        rows, weight = rows_of(models.random(sum(sizes), 6, seed=i), sizes)
        waiting.append(mean_loss(flex(rows)) * weight)
        if order == "each" or (order == "one late" and i):
            waiting.pop(0).backward()
    if order == "all at once":
        waiting = [sum(waiting)]
    for loss in reversed(waiting) if order == "last first" else waiting:
        loss.backward()
    return flex.trainable_modules["probe"].weight.grad


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("edit_on", grid_but(["all", "rank0"], "all"))
@pytest.mark.parametrize("parallelism", ways("dp", grid=["tp", "fsdp2", "tp x dp"], timeout=120))
def test_batches_that_change_between_forwards(parallelism, edit_on, order):
    def whole(full, sizes):
        return full, 1

    def mine(full, sizes):
        if parallelism.dp == 1:
            return full, 1
        rows = full.split(sizes)[parallelism.mesh["dp"].get_local_rank()]
        return rows, 2 * len(rows) / len(full)

    for kinds, site, function in [
        (KINDS[1:2], "fc1", edit),
        (KINDS[:1], "fc2", edit),
        (KINDS[2:], "fc1", look),
        (KINDS[2:3], "inp", edit),
        (KINDS[2:], "inp", look),
        (KINDS[:2], "act", edit),
        (KINDS[1:2], "inp", look),
    ]:
        model, alone = models.mlp(), pipelines.alone_group()
        with FlexModel(expected := models.mlp(), process_group=alone) as flex:
            probe = run(flex, kinds, site, None, function, whole, order)
        sharded = parallelism.shard(model)
        sizes = {**parallelism.sizes, "edit_on": edit_on, "timeout": 15}
        with FlexModel(sharded, **sizes) as flex:
            got = run(flex, kinds, site, None, function, mine, order)
        where = f"{kinds} {site} {function.__name__}: "
        gradients = parallelism.full_gradients(model, sharded)
        for parameter_name, parameter in expected.named_parameters():
            assert_close(
                gradients[parameter_name], parameter.grad, msg=lambda m, where=where: where + m
            )
        if dist.get_rank() == 0 or edit_on == "all":
            assert_close(got, probe, msg=lambda m, where=where: where + m)
