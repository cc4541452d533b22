"""Which transports the GPUs of a group can have."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist

from flex_model.distributed import process_groups
from flex_model.distributed.transports import choice
from flex_model.distributed.transports.choice import Rank, candidates, choose
from flex_model.distributed.transports.transport import UnavailableError, on_every_rank
from flex_model.errors import HookError
from tests.distributed.test_nccl import wait

OWN = [Rank(11, True), Rank(12, True)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "is_one_host", "wanted", "names"),
    [
        (OWN, True, "auto", ["peer_memory", "nccl"]),
        (OWN, True, "nccl", ["nccl"]),
        (OWN, True, "peer_memory", ["peer_memory"]),
        (OWN, True, "gloo", []),
        (OWN, False, "auto", ["nccl"]),
        (OWN, False, "peer_memory", []),
        ([OWN[0], OWN[0]], True, "auto", ["peer_memory"]),
        ([OWN[0], Rank(12, False)], True, "auto", ["peer_memory"]),
        ([OWN[0], Rank(12, True, "no kernels")], True, "auto", []),
        ([OWN[0], Rank(0, False)], True, "auto", []),
    ],
)
def test_candidates(ranks, is_one_host, wanted, names):
    assert candidates(ranks, is_one_host, wanted)[0] == names


def test_what_is_left_out_says_why():
    ranks = [OWN[0], OWN[0], Rank(13, False, "no kernels")]
    assert candidates(ranks, False)[1] == [
        "peer_memory, nccl: ranks [2]: no kernels",
        "nccl: ranks [2] have no NCCL",
        "nccl: ranks [0, 1] share a GPU",
        "peer_memory: the ranks are on several hosts",
    ]
    assert candidates(OWN, True, "nccl")[1] == ["peer_memory: FLEX_MODEL_TRANSPORT=nccl"]


@pytest.mark.ranks(2)
def test_ranks_without_gpus_stay_with_the_cpu():
    group, _ = process_groups.acquire((0, 1), 20.0)
    try:
        on_cpu, why = choose(group, wait, CPU)
        to, reason = choice.connect(on_cpu, why, wait, CPU)
        assert to is on_cpu
        assert reason.startswith(why)
        assert "peer_memory, nccl: ranks [0, 1] have no GPU" in reason
        assert dist.get_world_size() == 2
    finally:
        group.release()


class Made:
    """A transport of GPU tensors; the one of a name is replaced at a large transfer."""

    def __init__(self, name):
        self.name, self.is_closed = name, False

    def broadcast(self, tensor, like):
        if self.name == "peer_memory" and like.nbytes > 100:
            raise UnavailableError("ranks [0]: no room")
        return self.name

    def close(self):
        self.is_closed = True


class OnGpu:
    is_cuda = True

    def __init__(self, nbytes):
        self.nbytes = nbytes


@contextlib.contextmanager
def ranks_with(wanted="auto", **means):
    """Two ranks, and the transport that they choose from ``means``, by name."""
    group, _ = process_groups.acquire((0, 1), 20.0)
    made = {}

    def make(name, on_cpu, *_):
        made[name] = on_every_rank(on_cpu, lambda: means[name](name))
        return made[name]

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "_rank", lambda device: Rank(dist.get_rank() + 1, True))
            patch.setattr(choice, "_MEANS", {n: partial(make, n) for n in choice.NAMES})
            on_cpu, why = choose(group, wait, CPU)
            yield made, lambda: choice.connect(on_cpu, why, wait, CPU, wanted)
    finally:
        group.release()


def fails_on_rank_1(name):
    if dist.get_rank() == 1:
        raise AttributeError("not here")
    return Made(name)


@pytest.mark.ranks(2)
def test_all_ranks_fall_back_if_one_fails():
    """Rank 1 can't have peer memory, so both go on to the next."""
    with ranks_with(peer_memory=fails_on_rank_1, nccl=Made) as (_, connect):
        to, reason = connect()
    assert to.name == "nccl"
    assert "peer_memory: ranks [1]: AttributeError: not here" in reason


@pytest.mark.ranks(2)
def test_a_transport_that_can_no_longer_be_used_is_replaced():
    with ranks_with(peer_memory=Made, nccl=Made) as (made, connect):
        to, why = connect()
        names = [to.broadcast(None, OnGpu(nbytes)) for nbytes in (1, 1000, 1)]
        assert names == ["peer_memory", "nccl", "nccl"]
        assert to.name == "nccl" and made["peer_memory"].is_closed
        no_room = "; peer_memory can't be used any more: ranks [0]: no room"
        assert no_room in to.changes(why) and no_room not in why
        assert to.changes(why + to.changes(why)) == ""


@pytest.mark.ranks(2)
def test_a_requested_transport_is_not_replaced():
    refused = r"FLEX_MODEL_TRANSPORT=nccl is not available: .*AttributeError"
    with (
        ranks_with("nccl", nccl=fails_on_rank_1) as (_, connect),
        pytest.raises(HookError, match=refused),
    ):
        connect()
    with ranks_with("peer_memory", peer_memory=Made) as (_, connect):
        to, _ = connect()
        for _ in range(2):
            with pytest.raises(HookError, match=r"FLEX_MODEL_TRANSPORT=peer_memory is .*no room"):
                to.broadcast(None, OnGpu(1000))
