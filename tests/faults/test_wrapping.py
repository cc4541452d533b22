"""A rank that ends while others wrap the model, and wait for it to connect."""

import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch

import models
from flex_model import _C, FlexModel, HookFunction
from flex_model.distributed import process_groups
from flex_model.distributed.rendezvous import Rendezvous
from forked_ranks import Ranks
from tiers import grid_but

SITES = {
    "shared_memory": ["before it meets", "before memory is shared", "before it opens memory"],
    "gloo": ["before it meets", "before gloo connects", "at the end"],
}


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
    owner, name, place = {
        "before it meets": (Rendezvous, "all_gather", "meeting"),
        "before memory is shared": (process_groups, "share", ""),
        "before it opens memory": (_C, "HostGroup", ""),
        "before gloo connects": (Rendezvous, "backend", ""),
        "at the end": (Rendezvous, "all_gather", "made"),
    }[site]
    original = getattr(owner, name)

    def dies(*args, **options):
        if not place or args[1].startswith(place):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    if name == "HostGroup":
        dies = SimpleNamespace(made=dies, open=dies)
    setattr(owner, name, dies)


@pytest.mark.parametrize("size, victim", grid_but([(2, 0), (4, 2)], (2, 0)))
@pytest.mark.parametrize(
    "transport, site", [(transport, site) for transport, sites in SITES.items() for site in sites]
)
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


class Unopenable:
    """A HostGroup for a process that may not open the memory of others."""

    @staticmethod
    def open(*args):
        raise RuntimeError("shared memory: no permission")

    made = open


def wrap_without_permission(rank, tell, size, num_hosts, without):
    os.environ["FLEX_MODEL_HOST"] = f"host {rank * num_hosts // size}"
    if rank == without:
        _C.HostGroup = Unopenable
    x = models.random(4, 8)
    expected = models.mlp(width=8)(x)
    flex = FlexModel(models.mlp(width=8), {}, tensor_parallel_size=size, timeout=20)
    with models.replicas(flex):
        flex.register_forward_hook(HookFunction("fc1", editing_function=lambda m, full, s, o: full))
        assert torch.equal(flex(x), expected)
        return str(flex.explain())


PLACES = [(2, 1, 0), (2, 1, 1), (4, 2, 2), (4, 2, 3)]


@pytest.mark.parametrize("size, num_hosts, without", grid_but(PLACES, (2, 1, 1)))
def test_where_one_rank_cant_open_memory_none_shares_it(size, num_hosts, without):
    with Ranks(size, wrap_without_permission, size, num_hosts, without) as ranks:
        outcomes = ranks.outcomes(30)
    assert len(outcomes) == size
    for outcome in outcomes.values():
        assert outcome.kind == "returned", outcome
        assert f"rank {without}: shared memory: no permission" in outcome.value
