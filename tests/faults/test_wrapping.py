"""A rank that ends while others wrap the model, and wait for it to connect."""

import os
import re
import signal
import time

import pytest
import torch.distributed as dist

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.process_groups import _Rendezvous
from forked_ranks import Ranks

SITES = ["before it meets", "before gloo connects", "before hosts are told", "at the end"]
TRANSPORTS = ["shared_memory", "gloo"]


def wrap(rank, tell, size, victim, site):
    """A second wrap, of other ranks' groups than the first; the victim dies in the middle."""
    flex = FlexModel(models.mlp(width=8), {}, data_parallel_size=size, timeout=60)
    flex.register_forward_hook(HookFunction("fc1"))
    flex(models.random(4, 8))
    tell("ready")
    if rank == victim:
        die_at(site)
    FlexModel(models.mlp(width=8), {}, data_parallel_size=size, timeout=61)


def die_at(site):
    rendezvous = _Rendezvous
    name, place = {
        "before it meets": ("all_gather_strings", "meeting"),
        "before gloo connects": ("backend", ""),
        "before hosts are told": ("all_gather_strings", "host"),
        "at the end": ("all_gather_strings", "made"),
    }[site]
    original = getattr(rendezvous, name)

    def dies(self, *words):
        if not words or words[0].startswith(place):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *words)

    setattr(rendezvous, name, dies)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size, victim", [(2, 0), (4, 2)])
@pytest.mark.parametrize("site", SITES)
def test_a_rank_that_dies_while_others_wrap_is_named_at_once(site, size, victim, transport):
    environment = {"FLEX_MODEL_TRANSPORT": transport}
    with Ranks(size, wrap, size, victim, site, environment=environment) as ranks:
        ranks.told("ready")
        start = time.monotonic()
        ranks.killed.add(victim)
        outcomes = ranks.outcomes(7)
    assert len(outcomes) == size - 1
    for outcome in outcomes.values():
        assert outcome.kind == "HookError", outcome
        named = re.search(r"global ranks \[(.*)\] ended or died", outcome.text)
        # A slow rank may see those end, too, that ended because of it.
        assert named and str(victim) in named[1].split(", "), outcome
        assert outcome.when - start < 5
    print(f"{max(outcome.when for outcome in outcomes.values()) - start:.2f} s")


def wrap_once(rank, tell):
    tell("ready")
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    FlexModel(models.mlp(width=8), {}, data_parallel_size=2, timeout=2)


def test_a_rank_that_dies_before_it_wraps_anything_is_named_at_the_timeout():
    """Nobody knows which process it is."""
    with Ranks(2, wrap_once) as ranks:
        ranks.told("ready")
        ranks.killed.add(1)
        outcome = ranks.outcomes(6)[0]
    assert outcome.kind == "HookError" and "global ranks [1] did not arrive" in outcome.text, (
        outcome
    )


@pytest.mark.ranks(2)
def test_a_wrap_may_be_collected_while_the_next_one_is_made(monkeypatch):
    """On one rank: its group is one that the ranks have just told that they hold."""
    old, original = FlexModel(models.mlp(), tensor_parallel_size=2), _Rendezvous.held_by_all

    def held_by_all(rendezvous, number, held):
        if dist.get_rank() == 0:
            old.restore()
        return original(rendezvous, number, held)

    monkeypatch.setattr(_Rendezvous, "held_by_all", held_by_all)
    with models.replicas(FlexModel(models.mlp(), tensor_parallel_size=2, timeout=5)) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        flex(models.random(4, 6))
    old.restore()
