"""A rank that is killed, wherever it is: the others end within seconds and say which one."""

import itertools
import os
import random
import signal
import time

import pytest
import torch

import models
from flex_model import FlexModel, HookError, HookFunction
from forked_ranks import Ranks
from tiers import grid_but

pytestmark = pytest.mark.slow

BATCH = models.random(4, 8)
TRANSPORTS = ["shared_memory", "gloo"]
END_S = 5.0


def train(rank, tell, size, first_step=0):
    """Edits forward and backward, records of both, until something ends it."""
    records, step = {}, first_step
    model = models.Parallelism("tp", tp=size).shard(models.mlp(width=8))
    flex = FlexModel(model, records, tensor_parallel_size=size, timeout=60)

    def edit(module, full, save_ctx, modules):
        return full * 1.5

    flex.register_forward_hook(HookFunction("fc1", (None, 8), edit))
    flex.register_forward_hook(HookFunction("act", (None, 8)))
    flex.register_full_backward_hook(HookFunction("fc2"))
    flex.register_full_backward_hook(HookFunction("fc1", (None, 8), edit, output_name="grad"))
    flex(BATCH).sum().backward()
    tell("training")
    while True:
        flex.zero_grad()
        try:
            flex(BATCH + step).sum().backward()
        except HookError:
            raise
        except RuntimeError as error:  # of the model's own collectives: the wrap knows who it was
            if "rank" not in "".join(getattr(error, "__notes__", ())):
                flex(BATCH)
            raise
        assert rank > 0 or [len(kept) for kept in records.values()] == [1, 1, 1, 1]
        step += 1


def decode(rank, tell, size):
    """Settled edits, whose headers and shards travel in one round; all waits are the library's."""
    flex = FlexModel(models.mlp(width=8), {}, data_parallel_size=size, timeout=60)
    for name in ("fc1", "act"):
        flex.register_forward_hook(HookFunction(name, None, lambda m, full, s, ms: full * 1.5))
    with torch.no_grad():
        for step in itertools.count():
            flex(BATCH + step)
            if step == 3:
                tell("training")


def shared_memory_files():
    """Without semaphores, which come and go with other programs; the library makes none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def kill_one(size, transport, choose, body=train):
    """Kill a rank at a random moment; how long the slowest of the others took to end."""
    before = shared_memory_files()
    environment = {"FLEX_MODEL_TRANSPORT": transport}
    with Ranks(size, body, size, environment=environment) as ranks:
        ranks.told("training")
        time.sleep(choose.random() * 0.3)
        victim = choose.randrange(size)
        start = ranks.signal(victim, signal.SIGKILL)
        outcomes = ranks.outcomes(END_S + 2)
    took = max(outcome.when for outcome in outcomes.values()) - start
    assert len(outcomes) == size - 1
    for rank, outcome in outcomes.items():
        assert f"rank {victim}" in outcome.text, f"rank {rank}: {outcome}"
    assert took < END_S
    assert shared_memory_files() <= before
    return took


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", grid_but([2, 4], 4))
def test_a_killed_rank_is_named_by_all_others(size, transport):
    for seed in range(6 // size):
        print(f"{kill_one(size, transport, random.Random(seed)):.2f} s")


def test_a_rank_killed_in_a_settled_edit_is_named_by_the_other():
    for seed in range(3):
        kill_one(2, "shared_memory", random.Random(seed), decode)
