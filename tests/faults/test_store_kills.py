"""Two ranks that write a store, one of them killed at any moment: nothing acknowledged is lost."""

import os
import random
import signal
import time

import pytest
import torch
from torch import nn

import models
from flex_model import ActivationStore, FlexModel, HookFunction
from forked_ranks import Ranks

pytestmark = pytest.mark.slow

pytest.importorskip("safetensors")
BATCHES = 16


class Wide(nn.Module):
    """One column-parallel layer, whose output is not small."""

    columns, rows = ("fc",), ()

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4096)

    def forward(self, x):
        return self.fc(x)


def model():
    made = Wide()
    nn.init.ones_(made.fc.weight)
    nn.init.zeros_(made.fc.bias)
    return made


def batch(number):
    return torch.full((16, 4), float(number))


def write(rank, tell, folder):
    """From where the ranks before came to; told: how many batches were acknowledged."""
    store = ActivationStore(folder, shard_bytes=1)
    way = models.Parallelism("tp", tp=2)
    with FlexModel(way.shard(model()), store, **way.sizes, timeout=5) as flex:
        flex.register_forward_hook(HookFunction("fc"))
        tell("begins")
        for number in range(store.num_batches, BATCHES):
            flex(batch(number))
            time.sleep(0.02)
            if number % 2:
                store.flush()
                tell("acknowledged", number + 1)


def killed_once(folder, choose):
    """How many batches both ranks, or one, heard of as acknowledged."""
    heard = 0
    with Ranks(2, write, folder) as ranks:
        ranks.told("begins")
        time.sleep(choose.uniform(0, 0.25))
        victim = choose.randrange(2)
        if ranks.processes[victim].is_alive():
            ranks.signal(victim, signal.SIGKILL)
        for here in ranks.connections:
            for process in ranks.processes:
                process.join(8)
            while here.poll(0):
                try:
                    word, value = here.recv()
                except (EOFError, ConnectionResetError):
                    break
                heard = max(heard, value) if word == "acknowledged" else heard
    return heard


def check(folder, acknowledged):
    store = ActivationStore(folder)
    assert acknowledged <= store.num_batches <= BATCHES
    for number in range(store.num_batches):
        (record,) = store.batch(number)["fc"]
        assert torch.equal(record, torch.full((16, 4096), 4.0 * number))
    return store.num_batches


def kill_until_done(folder, num_kills, choose):
    num_partial = num_before = 0
    for _ in range(num_kills):
        num_before = check(folder, max(num_before, killed_once(folder, choose)))
        num_partial += 0 < num_before < BATCHES
    with Ranks(2, write, folder) as ranks:
        outcomes = ranks.outcomes(60)
    assert {outcome.kind for outcome in outcomes.values()} == {"returned"}, outcomes
    assert check(folder, BATCHES) == BATCHES and ActivationStore(folder).is_complete
    left = {name for name in os.listdir(folder) if name.endswith(".part")}
    assert not left
    return num_partial


def test_a_rank_killed_while_both_write(tmp_path):
    kill_until_done(tmp_path / "store", 3, random.Random(0))
