"""The peer-memory transport over host memory, with threads as ranks: layouts, slots, meetings."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flex_model  # noqa: F401  (loads the ops)
from flex_model.distributed.transports.peer_memory import PeerMemory, slot_bytes_for
from flex_model.distributed.transports.transport import Gathered
from tests.distributed.gpu_transfers import check_transfers
from tests.ops.test_ops import blocks, plan_of, random_tensor, same_bits


class HostBuffers:
    """``CudaIpc`` of threads: only ``allocate`` and ``barrier`` wait."""

    def __init__(self, rank, addresses, barrier, kept):
        self.kept = kept  # peers may read after a rank has left
        self.rank, self.addresses, self.threads_barrier = rank, addresses, barrier
        self.num_allocations = self.num_meetings = 0
        self.launches = []  # of barriers: those that no `pull_` makes

    def allocate(self, num_bytes):
        self.num_allocations += 1
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.kept.append(buffer)
        self.addresses[self.rank] = buffer.data_ptr()
        self.threads_barrier.wait()
        addresses = list(self.addresses)
        self.threads_barrier.wait()
        return buffer, addresses

    def barrier(self):
        self.launches.append("barrier")
        self.begin_barrier()

    def begin_barrier(self):
        self.num_meetings += 1
        self.threads_barrier.wait()
        return []

    def begin_transfer(self):
        pass

    def end_transfer(self):
        pass

    def finish(self):
        pass

    check = abort = finish

    def close(self):
        pass


def on_ranks(num_ranks, body):
    """What ``body(transport, memory)`` returns on each rank."""
    addresses, barrier = [0] * num_ranks, threading.Barrier(num_ranks, timeout=20)
    results, errors, kept = [None] * num_ranks, [], []

    def run(rank):
        memory = HostBuffers(rank, addresses, barrier, kept)
        try:
            group = SimpleNamespace(rank=rank, size=num_ranks)
            results[rank] = body(PeerMemory(group, memory), memory)
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def case(dtype=torch.bfloat16):
    """A (5, 7) tensor unevenly over a 2 x 2 grid: full, plan, shards."""
    full = random_tensor((5, 7), dtype)
    slices = blocks((5, 7), ([2], [3]))
    return full, plan_of(full.shape, slices, full.itemsize), [full[block] for block in slices]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128])
def test_transfers(dtype):
    full, plan, shards = case(dtype)
    on_ranks(4, lambda transport, memory: check_transfers(transport, full, plan, shards))


def test_a_slot_is_not_overwritten_before_all_have_read_it():
    """Ranks are as far ahead of each other as meetings let them."""
    _, plan, shards = case()

    def body(transport, memory):
        rank, wrong = transport.group.rank, 0
        for i in range(40):
            if (i + rank) % 4 == 0:
                time.sleep(0.002)
            mine = torch.full(shards[rank].shape, i, dtype=torch.bfloat16)
            (full,) = transport.all_gather(mine, plan)
            wrong += int((full != i).sum())
        return wrong, memory.num_meetings, memory.num_allocations

    assert on_ranks(4, body) == [(0, 40, 1)] * 4


class Launches(TorchDispatchMode):
    """The operators, inside, for which a GPU runs a kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flex_model" or function is torch.ops.aten.copy_.default:
            self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def test_launches():
    """Two at most."""
    full, plan, shards = case(torch.float32)

    def body(transport, memory):
        rank, launches = transport.group.rank, []
        is_first, shard = rank == 0, shards[rank].contiguous()
        for transfer in (
            lambda: transport.all_gather(shard, plan),
            lambda: transport.all_gather(shard, plan, 0),
            lambda: transport.gather_to_first([Gathered(plan, [0, 1, 2, 3], shard)]),
            lambda: transport.scatter_from_first(full if is_first else None, shard, plan),
            lambda: transport.broadcast(full if is_first else None, torch.empty_like(full)),
        ):
            del memory.launches[:]
            with Launches() as inside:
                transfer()
            launches.append(inside.names + memory.launches)
        return launches

    first, *others = on_ranks(4, body)
    gathers = [["copy_", "pull_"], ["copy_", "barrier"]]
    assert first == [*gathers, ["pull_"], ["push", "barrier"], ["copy_", "barrier"]]
    assert others == [[*gathers, ["copy_", "barrier"], ["pull_"], ["pull_"]]] * 3


def test_gather_to_first_shares_a_meeting():
    full, plan, shards = case()
    other = random_tensor((4, 3))
    other_plan = plan_of((4, 3), blocks((4, 3), ([3], [])), 4)  # held by ranks 3 and 1

    def body(transport, memory):
        rank = transport.group.rank
        some = [
            Gathered(plan, [0, 1, 2, 3], shards[rank]),
            Gathered(other_plan, [3, 1], {3: other[:3], 1: other[3:]}.get(rank, other[:0]), 2),
        ]
        return transport.gather_to_first(some), memory.num_meetings

    results = on_ranks(4, body)
    assert results[1:] == [(None, 1)] * 3
    for got, expected in zip(results[0][0], [full, other, other], strict=True):
        same_bits(got, expected)


def test_empty_tensors_need_no_meeting():
    plan = plan_of((0, 4), blocks((0, 4), ([], [2])), 4)

    def body(transport, memory):
        (full,) = transport.all_gather(torch.zeros(0, 2), plan)
        fulls = transport.gather_to_first([Gathered(plan, [0, 1], torch.zeros(0, 2))])
        transport.scatter_from_first(torch.zeros(0, 4), torch.zeros(0, 2), plan)
        total = transport.all_reduce_sum(torch.zeros(0))
        return full.shape, fulls and fulls[0].shape, total.shape, memory.num_meetings

    assert on_ranks(2, body) == [((0, 4), (0, 4), (0,), 0), ((0, 4), None, (0,), 0)]


def test_sizes_of_slots():
    mib = 1 << 20
    sizes = [1, mib, mib + 1, 64 * mib, 65 * mib, 200 * mib]
    assert [slot_bytes_for(size) // mib for size in sizes] == [1, 1, 2, 64, 128, 256]
