"""A rank that is stopped: shorter than the deadline is no error, longer names it on all others."""

import random
import signal
import time

import pytest
import torch

import models
from flex_model import FlexModel, HookFunction
from forked_ranks import Ranks
from tiers import grid_but

pytestmark = pytest.mark.slow

BATCH = models.random(4, 8)
DEADLINE_S = 2.0


def train(rank, tell, size, steps):
    """All waits are the library's: the model has no collectives of its own."""
    records = {}
    flex = FlexModel(models.mlp(width=8), records, data_parallel_size=size, timeout=DEADLINE_S)
    flex.register_forward_hook(
        HookFunction("fc1", None, lambda module, full, save_ctx, modules: full * 2)
    )
    flex.register_forward_hook(HookFunction("act"))
    flex.register_full_backward_hook(HookFunction("fc2"))
    flex(BATCH + rank).sum().backward()
    tell("training")
    oracle = models.mlp(width=8)
    for step in range(steps):
        flex(BATCH + step + 0.1 * rank).sum().backward()
        time.sleep(0.01)
        if rank == 0:
            (record,) = records["fc1"]
            batch = torch.cat([BATCH + step + 0.1 * other for other in range(size)])
            assert record.allclose(oracle.fc1(oracle.inp(batch)))
    return steps


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("size", grid_but([2, 4], 2))
def test_a_rank_that_is_stopped_past_the_deadline_is_named(size, transport):
    victim = random.Random(size).randrange(size)
    environment = {"FLEX_MODEL_TRANSPORT": transport}
    with Ranks(size, train, size, 10**6, environment=environment) as ranks:
        ranks.told("training")
        time.sleep(0.1)
        start = ranks.signal(victim, signal.SIGSTOP)
        others = ranks.outcomes(DEADLINE_S + 4, of=set(range(size)) - {victim})
        again = ranks.signal(victim, signal.SIGCONT)
        outcome = ranks.outcomes(5)[victim]
    for other in others.values():
        assert other.kind == "HookError", other
        assert f"missing: rank {victim}" in other.text, other
    took = max(other.when for other in others.values()) - start
    assert DEADLINE_S * 0.9 < took < DEADLINE_S + 1
    assert outcome.kind == "HookError", outcome  # it is told that the others went on without it
    assert outcome.when - again < 3
    print(f"named {took - DEADLINE_S:.2f} s after the deadline")


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_rank_that_is_stopped_for_less_than_the_deadline_goes_on(transport):
    environment = {"FLEX_MODEL_TRANSPORT": transport}
    with Ranks(2, train, 2, 60, environment=environment) as ranks:
        ranks.told("training")
        for victim in (0, 1):
            ranks.signal(victim, signal.SIGSTOP)
            time.sleep(DEADLINE_S / 2)
            ranks.signal(victim, signal.SIGCONT)
            time.sleep(0.2)
        assert not any(here.poll() for here in ranks.connections), "it ended before its stops did"
        outcomes = ranks.outcomes(20)
    assert [outcome.value for outcome in outcomes.values()] == [60, 60], outcomes
