"""Which transports the GPUs of a group can have."""

import pytest
import torch
import torch.distributed as dist

from flex_model.distributed import process_groups
from flex_model.distributed.transports import on_gpu
from flex_model.distributed.transports.choice import choose
from flex_model.distributed.transports.on_gpu import Rank, candidates

OWN = [Rank(11, True, True), Rank(12, True, True)]


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
        ([OWN[0], Rank(12, True, False)], True, "auto", ["peer_memory"]),
        ([OWN[0], Rank(12, False, True)], True, "auto", []),
        ([OWN[0], Rank(0, False, False)], True, "auto", []),
    ],
)
def test_candidates(ranks, is_one_host, wanted, names):
    assert candidates(ranks, is_one_host, wanted)[0] == names


def test_what_is_left_out_says_why():
    ranks = [OWN[0], OWN[0], Rank(13, True, False)]
    assert candidates(ranks, False)[1] == [
        "peer_memory: the ranks are on several hosts",
        "nccl: ranks [2] have no NCCL, ranks [0, 1] share a GPU",
    ]
    assert candidates(OWN, True, "nccl")[1] == ["peer_memory: FLEX_MODEL_TRANSPORT=nccl"]


@pytest.mark.ranks(2)
def test_ranks_without_gpus_stay_with_the_cpu():
    group, _ = process_groups.acquire((0, 1), 20.0)
    try:
        device = torch.device("cpu")
        on_cpu, why = choose(group, lambda works: [work.wait() for work in works], device)
        to, reason = on_gpu.connect(on_cpu, why, lambda works: None, device)
        assert to is on_cpu
        assert reason.startswith(why)
        assert "nccl: ranks [0, 1] have no GPU" in reason
        assert dist.get_world_size() == 2
    finally:
        group.release()


class Broken:
    def __init__(self, *args):
        raise RuntimeError("not here")


class Made:
    name = "nccl"

    def __init__(self, *args):
        self.closed = False

    def close(self):
        self.closed = True


@pytest.mark.ranks(2)
def test_all_ranks_fall_back_if_one_fails():
    """Rank 1 can't have peer memory, so both go on to the next."""
    patch = pytest.MonkeyPatch()
    group, _ = process_groups.acquire((0, 1), 20.0)
    try:
        patch.setattr(on_gpu, "_facts", lambda device: [dist.get_rank() + 1, 1, 1])
        made = Made()
        peers = Broken if dist.get_rank() == 1 else (lambda *args: made)
        ways = {"peer_memory": peers, "nccl": Made}
        patch.setattr(on_gpu, "_make", lambda name, *args: ways[name]())
        on_cpu, why = choose(
            group, lambda works: [work.wait() for work in works], torch.device("cpu")
        )
        to, reason = on_gpu.connect(on_cpu, why, lambda works: None, torch.device("cpu"))
        assert to.name == "nccl"
        assert made.closed == (dist.get_rank() == 0)
        said = "not here" if dist.get_rank() == 1 else "it failed on another rank"
        assert f"peer_memory: {said}" in reason
    finally:
        patch.undo()
        group.release()
