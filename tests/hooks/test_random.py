"""Random edits: every rank and every sharding draws the same, and recomputation draws it again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction
from tiers import ways

BATCH = models.random(4, 6)


def add_noise(module, full, save_ctx, modules):
    noise = torch.randn_like(full)
    save_ctx.noises = [*getattr(save_ctx, "noises", ()), noise]
    return full + noise


def noisy(parallelism, *sites, **settings):
    flex = FlexModel(parallelism.shard(models.mlp()), **parallelism.sizes, **settings)
    for site in sites:
        shape = (None, 8) if parallelism.by_hand and site in ("fc1", "act") else None
        flex.register_forward_hook(HookFunction(site, shape, add_noise))
    return flex


def draw(flex, parallelism, seed=0):
    """The noises of one run, and the output."""
    torch.manual_seed(seed)
    flex.save_ctx.noises = []
    output = flex(parallelism.my_rows(BATCH))
    return flex.save_ctx.noises, output


def test_the_torch_seed_governs_the_noise():
    flex = noisy(models.ONE_RANK, "fc1", "act")
    first, output = draw(flex, models.ONE_RANK)
    second, again = draw(flex, models.ONE_RANK)
    other, _ = draw(flex, models.ONE_RANK, seed=1)
    assert_close(first, second, rtol=0, atol=0)
    assert torch.equal(output, again)
    assert not torch.equal(first[0], other[0])


def test_hooks_calls_and_runs_draw_different_noise():
    flex = noisy(models.ONE_RANK, "fc1", "act")
    torch.manual_seed(0)
    with flex.active():
        flex(BATCH)
        flex(BATCH)
    flex(BATCH)
    noises = flex.save_ctx.noises
    assert len(noises) == 6
    for i, noise in enumerate(noises):
        assert not any(torch.equal(noise, other) for other in noises[:i])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dtensor", "dp"])
def test_every_sharding_draws_the_same_as_one_process(name):
    parallelism = models.TWO_RANKS[name]
    sites = ("inp", "fc1", "act", "fc2")
    if name == "dtensor":
        sites = ("inp", "fc2")
    flex = noisy(parallelism, *sites)
    oracle = noisy(models.ONE_RANK, *sites, process_group=pipelines.alone_group())
    for seed in (0, 3):
        noises, output = draw(flex, parallelism, seed)
        expected, full_output = draw(oracle, models.ONE_RANK, seed)
        assert_close(noises, expected, rtol=0, atol=0)
        assert_close(output, parallelism.my_rows(full_output))


@pytest.mark.ranks(2)
def test_ranks_with_other_seeds_draw_what_rank_0_draws_and_keep_their_own_state():
    """Dropout of the model draws on, per rank: the edit's seed is not left behind."""
    flex = noisy(models.TWO_RANKS["tp"], "fc1", "fc2")
    torch.manual_seed(10 + dist.get_rank())
    flex(BATCH)
    own = torch.rand(8)
    for drawn in (*flex.save_ctx.noises, own):
        both = [torch.empty_like(drawn) for _ in range(2)]
        dist.all_gather(both, drawn.contiguous())
        assert torch.equal(*both) == (drawn is not own)


class Dropping(nn.Module):
    """Draws random numbers of its own."""

    columns, rows = ("fc1",), ("fc2",)

    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 6)

    def forward(self, x):
        return self.drop(self.fc2(self.fc1(x)))


def check_own_stream(parallelism, site, draws=0, **settings):
    """Failed before: an edit that drew moved torch's generator on, and the dropout of the next
    forward was another one.
    """
    model, dropped, runs = parallelism.shard(models.seeded(Dropping).double()), [], []
    model.drop.register_forward_hook(lambda module, args, output: dropped.append(output == 0))
    flex = FlexModel(model, **parallelism.sizes, **settings)
    noise = lambda m, full, s, ms: full * torch.randn_like(full)  # noqa: E731
    flex.register_forward_hook(HookFunction(site, editing_function=noise))
    for groups in ((), "all"):
        dropped.clear()
        torch.manual_seed(5)
        torch.rand(draws)
        for _ in range(3):
            flex(parallelism.my_rows(BATCH), groups=groups).sum().backward()
        after = (torch.rand(2000), torch.randn(2000), torch.randint(9, (999,)), torch.randperm(50))
        assert torch.initial_seed() == 5
        runs.append((list(dropped), after))
    assert_close(runs[1], runs[0], rtol=0, atol=0)


@pytest.mark.parametrize("draws", [0, 1, 300, 623, 624, 700])
def test_the_models_own_stream_is_that_of_the_bare_model(draws):
    check_own_stream(models.ONE_RANK, "drop", draws)


def test_a_random_state_that_is_set_again_gives_the_same_noise_again():
    flex = noisy(models.ONE_RANK, "fc1")
    torch.manual_seed(0)
    flex.save_ctx.noises = []
    for _ in range(3):
        flex(BATCH)
    state = torch.get_rng_state()
    flex(BATCH)
    torch.set_rng_state(state)
    flex(BATCH)
    *others, fourth, again = flex.save_ctx.noises
    assert torch.equal(fourth, again)
    assert not any(torch.equal(fourth, other) for other in others)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_the_models_own_stream_is_that_of_the_bare_model_on_two_ranks(name, edit_on):
    check_own_stream(models.TWO_RANKS[name], "fc1", edit_on=edit_on)


# ---- Activation checkpointing -------------------------------------------------------------------


def noisy_run(parallelism, recompute):
    model = models.seeded(models.Checkpointed, recompute).double()
    records, calls = {}, []

    def edit(module, full, save_ctx, modules):
        calls.append(1)
        save_ctx.calls = getattr(save_ctx, "calls", 0) + 1
        return full * torch.randn_like(full) + modules["probe"](full)

    with FlexModel(parallelism.shard(model), records, **parallelism.sizes) as flex:
        flex.register_trainable_module("probe", models.seeded(nn.Linear, 8, 8).double())
        for site in ("b.fc1", "b.act"):
            shape = (None, 8) if parallelism.by_hand else None
            flex.register_forward_hook(HookFunction(site, shape, edit))
        flex.register_full_backward_hook(HookFunction("b.fc2", shape))
        torch.manual_seed(4)
        output = flex(parallelism.my_rows(BATCH))
        output.sin().mean().backward()
        gradients = {
            **parallelism.full_gradients(model, flex.module),
            **{f"probe {n}": p.grad for n, p in flex.trainable_modules.named_parameters()},
        }
    return output, gradients, records, flex.save_ctx.calls, len(calls)


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("parallelism", ways("one", "tp", "dp"))
def test_recomputation_replays_the_edit(parallelism, recompute):
    output, gradients, records, saved_calls, calls = noisy_run(parallelism, recompute)
    expected, oracle, oracle_records, _, _ = noisy_run(parallelism, None)
    assert_close(output, expected, rtol=0, atol=0)
    assert_close(gradients, oracle, rtol=1e-12, atol=1e-12)
    assert_close(records, oracle_records, rtol=0, atol=0)
    assert all(len(record) == 1 for record in records.values())
    assert saved_calls == 2, "a recomputed edit gets a copy of save_ctx that is thrown away"
    assert calls > 2, "nothing was recomputed"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_the_first_of_two_forwards_is_recomputed_with_its_own_noise(recompute):
    gradients = []
    for how in (recompute, None):
        model = models.seeded(models.Checkpointed, how).double()
        flex = FlexModel(models.TWO_RANKS["tp"].shard(model), tensor_parallel_size=2)
        flex.register_forward_hook(HookFunction("b.fc1", (None, 8), add_noise))
        torch.manual_seed(4)
        first, second = flex(BATCH), flex(2 * BATCH)
        first.sin().mean().backward()
        second.cos().mean().backward()
        gradients.append({name: p.grad for name, p in flex.named_parameters()})
        flex.restore()
    assert_close(*gradients)
