"""Messages by gloo: random exchanges, waits that are ended, and what an ended one leaves behind."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import GRID, Mesh
from flex_model.distributed.rounds import Part, Round
from flex_model.distributed.transports.transport import Gathered, stacking
from tiers import grid_but


@contextlib.contextmanager
def connected(monkeypatch):
    """A communicator of ranks that share no memory."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", "gloo")
    communicator = Communicator(Mesh.from_sizes(dist.get_world_size(), 1, 1), 20.0)
    try:
        yield communicator
    finally:
        communicator.close()


def check_exchanges(gloo, rank, size):
    """Many of any sizes, each with other bytes."""
    choose = random.Random(size)
    for i in range(60):
        sizes = [choose.choice([0, 1, 64, 100_000]) for _ in range(size)]
        expected = [torch.full((n,), (i + r) % 251, dtype=torch.uint8) for r, n in enumerate(sizes)]
        gathered, starts = gloo._between.gather(expected[rank], sizes)
        for start, num_bytes, row in zip(starts, sizes, expected):
            assert torch.equal(gathered[start : start + num_bytes], row)
        rows = gloo.exchange_bytes(bytes([i, rank]) * 32)
        assert rows == [bytes([i, r]) * 32 for r in range(size)]
        assert gloo.exchange(torch.full((2, 3), rank)).tolist() == [
            [[r] * 3] * 2 for r in range(size)
        ]
        assert gloo.exchange(torch.empty(0, 2)).shape == (size, 0, 2)


@pytest.mark.ranks(3)
def test_three_ranks_exchange_bytes(monkeypatch):
    with connected(monkeypatch) as communicator:
        check_exchanges(communicator.transport(GRID), dist.get_rank(), 3)


@pytest.mark.ranks(5, timeout=120)
@pytest.mark.parametrize("of_ranks", grid_but(["abcab", "aabbc", "abcde"], "abcab"))
def test_hosts_of_different_numbers_of_ranks_give_the_same_to_all(of_ranks, monkeypatch):
    rank = dist.get_rank()
    monkeypatch.setenv("FLEX_MODEL_HOST", f"host {of_ranks[rank]}")
    communicator = Communicator(Mesh.from_sizes(5, 1, 1), 20.0)
    for size in (3, 50_001):
        terms = torch.randn(5, size, generator=torch.Generator().manual_seed(size))
        total = terms[0] + terms[1] + terms[2] + terms[3] + terms[4]
        assert torch.equal(communicator.all_reduce_sum(("tp",), terms[rank]), total)
        rows = communicator.exchange(terms[rank])
        assert torch.equal(rows, terms)
        got = communicator.broadcast(terms[0] if rank == 0 else None, torch.empty(size))
        assert torch.equal(got, terms[0])
    with pytest.raises(HookError) as caught:
        communicator.check_consistency(Header("tensor", site=7 + (rank == 3)), f"place {rank}")
    texts = [None] * 5
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1 and all(f"rank {r} is at place {r}" in texts[0] for r in range(5))
    communicator.close()


def waiting():
    return [thread for thread in threading.enumerate() if "waits for gloo" in thread.name]


def until(is_true):
    start = time.monotonic()
    while not is_true() and time.monotonic() < start + 5:
        time.sleep(0.01)
    return is_true()


@pytest.mark.ranks(3)
def test_an_abort_ends_waits_and_leaves_nothing_behind(monkeypatch):
    """Rank 0 waits for rank 1, and both others wait for rank 0, which aborts."""
    rank, buffer = dist.get_rank(), torch.zeros(4, dtype=torch.uint8)
    with connected(monkeypatch) as communicator:
        messages = communicator.transport(GRID).group.messages
        communicator.exchange(torch.ones(1))
        held = num_sockets()
        dist.barrier()
        work = messages.exchange(buffer, [Round([], [Part(1 if rank == 0 else 0, 0, 4)])])
        time.sleep(0.2)
        assert not work.is_completed()
        if rank == 0:
            messages.abort()
        assert until(work.is_completed)
        with pytest.raises(RuntimeError, match=r"closure|closed"):
            work.wait()
        dist.barrier()
        assert len(waiting()) == 1  # for the next exchange
        del messages, work
    gc.collect()
    assert until(lambda: not waiting() and num_sockets() <= held - 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("gone", [1, 2])
def test_of_the_silent_ranks_the_one_whose_connection_is_lost_is_named(gone, monkeypatch):
    """The other one has sent its part, and waits for nothing."""
    rank = dist.get_rank()
    with connected(monkeypatch) as communicator:
        communicator.exchange(torch.ones(1))
        if rank == gone:
            communicator.transport(GRID).group.messages.abort()
            dist.barrier()
            return
        one = Gathered(stacking(3, 4, 4), [0, 1, 2], torch.ones(1, 4))
        if rank == 0:
            with pytest.raises(HookError, match=f"lost at .*: rank {gone} [^,]* ended or died"):
                communicator.gather_to_first(GRID, [one])
        else:
            with contextlib.suppress(HookError):  # it may see the lost connection before it sends
                assert communicator.gather_to_first(GRID, [one]) is None
        dist.barrier()


def num_sockets():
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:  # listdir's own
            continue
    return count


def fails():
    """A script of two ranks: one raises in its edit, and all end at once."""
    dist.init_process_group("gloo")
    os.environ["FLEX_MODEL_HOST"] = f"host {dist.get_rank()}"

    def edit(module, full, save_ctx, modules):
        if dist.get_rank() == 0 and sys.argv[1] == "raise":
            raise ValueError("the edit's own error")
        return full * 2

    flex = FlexModel(nn.Linear(4, 4), data_parallel_size=dist.get_world_size(), timeout=20)
    flex.register_forward_hook(HookFunction("", editing_function=edit))
    if dist.get_rank() == 0 and sys.argv[1] == "leave":
        time.sleep(0.3)
        raise KeyboardInterrupt
    try:
        flex(torch.ones(1, 4))
    except HookError as error:
        print(error)
        sys.exit(3)


@pytest.mark.slow
@pytest.mark.parametrize("how", grid_but(["raise", "leave"], "raise"))
def test_a_rank_that_ends_during_a_wait_ends_as_python_does(how, tmp_path):
    """Not by a signal from a thread that still waits while the interpreter ends."""
    port = str(29600 + os.getpid() % 1000)
    ranks = []
    for rank in range(2):
        places = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **places, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen([sys.executable, __file__, how], env=environment, **pipes))
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    first = 3 if how == "raise" else -signal.SIGINT
    assert [rank.returncode for rank in ranks] == [first, 3], texts
    assert ("the edit's own error" if how == "raise" else "rank 0 ") in texts[1]


if __name__ == "__main__":
    fails()
