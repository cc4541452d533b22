"""Several models on one world: sub-groups of ranks, and different meshes side by side."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction
from oracle import watch
from shared_edits import mixing_features

BATCH = models.random(4, 6)


def run(model, site="fc1", batch=BATCH):
    """The unsharded oracle with the mixing edit at one site."""
    model = copy.deepcopy(model)
    seen = watch(model, site, mixing_features)
    with torch.no_grad():
        return model(batch), seen


@pytest.mark.ranks(4)
def test_two_models_on_two_halves_of_the_world():
    """Each half runs as often as it likes; rank 0 of a wrap is rank 0 of its own group."""
    half = models.mesh(2, 2)["tp"].get_group()
    which = dist.get_rank() // 2
    model = models.mlp(hidden=8 + which)
    records = {}
    flex = FlexModel(
        models.tensor_parallel(model, half), records, tensor_parallel_size=2, process_group=half
    )
    flex.register_forward_hook(HookFunction("fc1", editing_function=mixing_features))
    expected, seen = run(model)
    for _ in range(1 + 3 * which):
        with torch.no_grad():
            assert_close(flex(BATCH), expected)
    assert_close(records.get("fc1", []), seen if half.rank() == 0 else [])
    flex.restore()


@pytest.mark.ranks(4)
def test_models_with_different_meshes_on_one_world():
    model = models.mlp()
    expected, seen = run(model)
    wraps = []
    for name in ("tp", "tp x dp", "tp"):
        parallelism, records = models.FOUR_RANKS[name], {}
        flex = FlexModel(parallelism.shard(model), records, **parallelism.sizes)
        flex.register_forward_hook(HookFunction("fc1", editing_function=mixing_features))
        wraps.append((parallelism, flex, records))
    for _ in range(2):
        for parallelism, flex, records in wraps:
            with torch.no_grad():
                assert_close(flex(parallelism.my_rows(BATCH)), parallelism.my_rows(expected))
            assert_close(records.get("fc1", []), seen if dist.get_rank() == 0 else [])
    wraps[0][1].restore()
    parallelism, flex, records = wraps[1]
    with torch.no_grad():
        assert_close(flex(parallelism.my_rows(BATCH)), parallelism.my_rows(expected))
