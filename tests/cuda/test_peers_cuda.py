"""Transports between processes on CUDA: peer memory, NCCL. Needs a GPU."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flex_model.distributed.bounded_store import BoundedStore
from flex_model.distributed.transports import nccl, peer_memory
from flex_model.distributed.transports.transport import UnavailableError
from tests.cuda.processes import run_ranks
from tests.ops.test_ops import blocks, plan_of

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def run(tmp_path, num_ranks, share, *means):
    """The same checks in ``num_ranks`` processes, by one means after the other: see peers.py."""
    run_ranks(tmp_path, "tests.cuda.peers", num_ranks, share, *means)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_that_share_a_gpu(tmp_path, num_ranks):
    run(tmp_path, num_ranks, "share", "cuda ipc", "best")


@pytest.mark.parametrize("means", ["cuda ipc", "nccl"])
def test_processes_with_a_gpu_each(tmp_path, means):
    num_ranks = min(torch.cuda.device_count(), 8)
    if num_ranks < 2:
        pytest.skip("one GPU")
    run(tmp_path, num_ranks, "own", means)


def test_edits_stay_on_the_gpu(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    run_ranks(tmp_path, "tests.cuda.edits", 2)


@pytest.mark.parametrize("how", ["missing", "backward", "interrupted"])
def test_a_transfer_that_one_of_two_processes_misses(tmp_path, how):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    run_ranks(tmp_path, "tests.cuda.failures", 2, how)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_in_processes_that_capture_a_graph(tmp_path, num_ranks):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip("one GPU")
    run_ranks(tmp_path, "tests.cuda.graphs", num_ranks)


@pytest.mark.parametrize("means", ["cuda ipc", "nccl"])
def test_one_rank(tmp_path, means):
    if means == "nccl" and not nccl.is_available():
        pytest.skip("torch has no NCCL")
    run(tmp_path, 1, "own", means)


def test_a_meeting_that_a_peer_misses_ends():
    """The kernel gives up at its deadline, and names the peer."""
    flags = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    pads = [row.data_ptr() for row in flags]
    torch.ops.flex_model.peer_barrier(flags, [0, 1, 200, state.data_ptr(), *pads])
    torch.cuda.synchronize()
    assert state.tolist() == [2, 0]
    assert flags.tolist() == [[0, 0], [1, 0]]


def test_a_meeting_ends_when_the_host_gives_up():
    flags = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    pads = [row.data_ptr() for row in flags]
    torch.cuda.synchronize()
    torch.ops.flex_model.peer_barrier(flags, [0, 1, 60_000, state.data_ptr(), *pads])
    start = time.monotonic()
    time.sleep(0.1)
    assert not torch.cuda.current_stream().query()
    state[1] = 1
    torch.cuda.synchronize()
    assert time.monotonic() - start < 30
    assert state.tolist() == [2, 1]


def test_a_meeting_of_two_streams():
    """Two ranks of one process, on two streams."""
    flags = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    pads = [row.data_ptr() for row in flags]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(1, 20):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                barrier = [rank, number, 20_000, state.data_ptr(), *pads]
                torch.ops.flex_model.peer_barrier(flags, barrier)
    torch.cuda.synchronize()
    assert state.tolist() == [0, 0]
    assert flags.tolist() == [[0, 19], [19, 0]]


def test_waits_after_one_that_found_nobody_end_at_once():
    """Blocks that run later, and what is queued behind them, do not wait once more."""
    flags = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    pads = [row.data_ptr() for row in flags]
    start = time.monotonic()
    for number, timeout_ms in ((1, 200), (2, 60_000), (3, 60_000)):
        barrier = [0, number, timeout_ms, state.data_ptr(), *pads]
        torch.ops.flex_model.peer_barrier(flags, barrier)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 30
    assert state.tolist() == [2, 0]


@pytest.mark.parametrize("num_shards", [2, 12, 60])
@pytest.mark.parametrize("width", [64, 63, 5000])
def test_a_copy_from_peers_waits_for_them(num_shards, width):
    """Two ranks of one process, on two streams, of which one is late; few and many boxes."""
    sizes, half = (num_shards, width), num_shards // 2
    plan = plan_of(sizes, blocks(sizes, (list(range(1, num_shards)), [])), 2)
    full = torch.randn(sizes).to(torch.bfloat16)
    source, slots = full.cuda(), torch.zeros(sizes, dtype=torch.bfloat16, device="cuda")
    flags = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    pads, addresses = [row.data_ptr() for row in flags], [row.data_ptr() for row in slots]
    pulled = [torch.zeros_like(source) for _ in range(2)]
    # CUDA loads a kernel when it is first launched, and may wait for all that runs meanwhile.
    torch.cuda._sleep(1)
    slots[:half].copy_(source[:half])
    torch.ops.flex_model.pull_(pulled[0], addresses, plan.code, half, [])
    slots.zero_()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for rank, (stream, part) in enumerate(zip(streams, (slice(half), slice(half, None)))):
        with torch.cuda.stream(stream):
            if rank == 1:
                torch.cuda._sleep(200_000_000)
            slots[part].copy_(source[part])
            barrier = [rank, 1, 20_000, state.data_ptr(), *pads]
            torch.ops.flex_model.pull_(pulled[rank], addresses, plan.code, half, barrier)
    torch.cuda.synchronize()
    assert state.tolist() == [0, 0]
    assert all(torch.equal(each.cpu(), full) for each in pulled)


def test_a_barrier_that_is_none_is_refused():
    full = torch.zeros(2, 8, device="cuda")
    state = torch.zeros(2, dtype=torch.int32, pin_memory=True)
    pads = [full.data_ptr()] * 2
    for barrier, message in [
        ([0, 1, 200, state.data_ptr()], "`barrier` must have 4 entries and a signal pad per rank"),
        ([2, 1, 200, state.data_ptr(), *pads], r"rank must be in \[0, 1\], got 2"),
        ([0, 1, -1, state.data_ptr(), *pads], "the timeout of `barrier` must not be negative"),
        ([0, 1, 200, 0, *pads], "its state not 0"),
        ([0, 1, 200, state.data_ptr(), pads[0], 0], "the signal pad of rank 1 has no address"),
        ([0, 1, 200, state.data_ptr(), *([pads[0]] * 129)], "expected at most 128 ranks, got 129"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.flex_model.peer_barrier(full, barrier)


def of_one_rank(kind, store, limit_s=20.0):
    group = SimpleNamespace(rank=0, size=1, timeout_s=60.0, ranks=(0,), number=0, store=store)
    group.bounded_store = BoundedStore(store, limit_s)
    on_cpu = SimpleNamespace(
        group=group, exchange=lambda tensor: tensor.unsqueeze(0), exchange_bytes=lambda data: [data]
    )
    return kind(on_cpu, lambda works: None, torch.device("cuda:0"))


def ipc_of_one_rank():
    buffers = of_one_rank(peer_memory.CudaIpc, dist.HashStore())
    buffers.allocate(1 << 20)
    return buffers


class SilentStore:
    """A store whose host can't be reached any more: calls do not return."""

    def __init__(self):
        self.is_back = threading.Event()

    def __getattr__(self, name):
        return lambda *args: self.is_back.wait()


@pytest.mark.parametrize("kind", [peer_memory.CudaIpc, nccl.Nccl])
def test_a_store_that_does_not_answer_ends_the_set_up(kind):
    store, start = SilentStore(), time.monotonic()
    with pytest.raises(UnavailableError, match=r"ranks \[0\]: .*did not answer in 0.2 s"):
        of_one_rank(kind, store, limit_s=0.2)
    assert time.monotonic() - start < 20
    store.is_back.set()


def test_a_buffer_stays_where_a_store_does_not_say_who_has_it_open():
    """Memory must not be freed while another process has it open."""
    buffers, store = ipc_of_one_rank(), SilentStore()
    buffers.group.bounded_store = BoundedStore(store, 0.2)
    num_kept, start = len(peer_memory._kept), time.monotonic()
    buffers.close()
    assert len(peer_memory._kept) == num_kept + 1
    assert time.monotonic() - start < 20
    store.is_back.set()
    del peer_memory._kept[num_kept:]


def test_buffers_are_freed_after_their_last_transfer():
    """Closing waits a while; then what a kernel may still use is kept until a later close."""
    idle, busy = ipc_of_one_rank(), ipc_of_one_rank()
    for buffers in (idle, busy):
        buffers.begin_transfer()
        if buffers is busy:
            torch.cuda._sleep(10_000_000_000)
        buffers.end_transfer()
        start = time.monotonic()
        buffers.close()
        assert time.monotonic() - start < 4
        assert (buffers._buffer is None) == (buffers is idle)
    torch.cuda.synchronize()
    ipc_of_one_rank().close()
    assert busy._buffer is None
