"""Ranks whose hooks, their order or groups differ: every one is found before a payload moves."""

import random
import time

import pytest
import torch
import torch.distributed as dist

import models
from counted_traffic import payloads_of
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from shared_edits import double
from tiers import grid_but

BATCH = models.random(4, 6)
SITES = ["inp", "fc1", "act", "fc2", "out"]
KINDS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


def any_hooks(choose):
    """One to five hooks as (kind, site, tensor index, whether it edits), in any order."""
    places = [(kind, site) for kind in KINDS for site in SITES]
    chosen = choose.sample(places, choose.randint(1, 5))
    return [(*place, choose.random() < 0.5) for place in chosen]


def another(hooks, choose):
    """Hooks that differ from ``hooks`` in one way or in all; and sometimes not."""
    way = choose.choice(["none", "order", "more", "fewer", "site", "kind", "all"])
    hooks = list(hooks)
    if way == "order":
        choose.shuffle(hooks)
    elif way == "all":
        return any_hooks(choose)
    elif way == "more":
        hooks.insert(choose.randrange(len(hooks) + 1), any_hooks(choose)[0])
    elif way == "fewer" and len(hooks) > 1:
        del hooks[choose.randrange(len(hooks))]
    elif way in ("site", "kind"):
        at = choose.randrange(len(hooks))
        kind, site, edits = hooks[at]
        if way == "site":
            hooks[at] = kind, choose.choice(SITES), edits
        else:
            hooks[at] = choose.choice(KINDS), site, edits
    return hooks


def register(flex, hooks):
    handles = []
    for i, (kind, site, edits) in enumerate(hooks):
        edit = double if edits else None
        shape = (None, 8) if is_split(kind, site) else None
        hook = HookFunction(site, shape, edit, output_name=f"{kind} {site} {i}")
        handles.append(getattr(flex, f"register_{kind}_hook")(hook))
    return handles


def is_split(kind, site):
    """Whether the hook sees hidden features, of which each rank has half."""
    outputs = {"forward", "full_backward_pre"}  # the others see inputs
    return (
        site == "act"
        or (site == "fc1" and kind in outputs)
        or (site == "fc2" and kind not in outputs)
    )


def error_of(flex):
    """What a step raised, of this kind."""
    try:
        flex(BATCH).sum().backward()
    except HookMismatchError as error:
        return error
    return None


def sites_of(hooks):
    return [(kind, site) for kind, site, _ in hooks]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", grid_but(["shared_memory", "gloo"], "shared_memory"))
def test_hundred_pairs_of_hook_sets_of_which_none_is_taken_for_the_other(transport, monkeypatch):
    """200 with both transports. The pairs that are alike run."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    choose = random.Random(transport)
    rank, found = dist.get_rank(), 0
    flex = FlexModel(models.TWO_RANKS["tp"].shard(models.mlp()), tensor_parallel_size=2)
    for _ in range(100):
        first = any_hooks(choose)
        pair = first, another(first, choose)
        handles = register(flex, pair[rank])
        flex._core.communicator.begin_run()
        start = time.monotonic()
        error = error_of(flex)
        assert (error is not None) == (sites_of(pair[0]) != sites_of(pair[1])), error
        if error is not None:
            found += 1
            assert time.monotonic() - start < 2
            assert payloads_of(flex._core.communicator) == 0
            for place, hooks in enumerate(pair):
                shown = str(error).split(f"rank {place} is at ")[1].split("; rank")[0]
                assert all(f"{site!r}" in shown for _, site, _ in hooks)
        for handle in handles:
            handle.remove()
    assert 50 < found < 100
    flex.restore()


class TalkingMLP(models.MLP):
    """Its ranks meet between two of its modules, as those of tensor parallelism do."""

    def forward(self, x):
        x = self.inp(x)
        dist.all_reduce(torch.zeros(1))
        return self.out(self.fc2(self.act(self.fc1(x))))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "two hosts"])
@pytest.mark.parametrize("has_run", [True, False])
def test_groups_that_differ_are_found_though_a_rank_waits_for_another_inside_the_model(
    transport, has_run, monkeypatch
):
    rank = dist.get_rank()
    if transport == "two hosts":
        monkeypatch.setenv("FLEX_MODEL_HOST", f"host {rank}")
    else:
        monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    flex = models.replicas(FlexModel(models.seeded(TalkingMLP, 6, 8), tensor_parallel_size=2))
    for site in ("inp", "fc2"):
        flex.register_forward_hook(HookFunction(site, editing_function=double))
        flex.update_hook_groups(site, site)
    batch, start = BATCH.float(), time.monotonic()
    if has_run:
        flex(batch)
    with pytest.raises(HookError) as caught:
        flex(batch, groups=["inp", "fc2"][rank])
    assert time.monotonic() - start < 10
    assert "the groups ['inp']" in str(caught.value) and "the groups ['fc2']" in str(caught.value)


@pytest.mark.ranks(2)
def test_data_parallel_ranks_of_different_numbers_of_calls_are_advised():
    """Generation ends earlier where all rows of a rank have ended."""
    batch = models.random(2, 6)

    def generate(flex):
        with flex.active():
            for _ in range(2 + dist.get_rank()):
                flex(batch)

    for axis, is_advised in ("data", True), ("tensor", False):
        with FlexModel(models.mlp(), {}, timeout=20, **{f"{axis}_parallel_size": 2}) as flex:
            models.replicas(flex)
            flex.register_forward_hook(HookFunction("fc1"))
            with pytest.raises(HookMismatchError, match="end of the run") as error:
                generate(flex)
            assert ("synced_gpus=True" in str(error.value)) == is_advised
            assert ('FlexModel(dp_batch="local")' in str(error.value)) == is_advised
