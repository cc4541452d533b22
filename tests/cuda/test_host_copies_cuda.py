"""Shards of a GPU in one page-locked full tensor on the host. Needs a GPU."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.cuda.processes import run_ranks, waits_are_errors
from tests.ops.test_ops import as_bytes, blocks, plan_of, random_tensor

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ops = torch.ops.flex_model

CASES = [
    ((64, 4096), ([32], [])),  # one run
    ((64, 4096), ([], [2048])),  # long rows
    ((300, 34), ([], [3, 17])),  # short rows
    ((6, 10, 20, 30), ([2], [], [7], [11])),  # several levels
    ((2, 40, 3, 2048), ([], [], [1], [])),  # copies of rows in a loop
    ((4, 6), ([], [0, 6])),  # empty shards
]


@pytest.fixture
def page_locked():
    """A tensor that CUDA knows by its address alone, as the arena of a host's ranks."""
    from flex_model.distributed.transports import host_copies

    buffer = torch.full((8 << 20,), 255, dtype=torch.uint8)
    device = torch.device("cuda", torch.cuda.current_device())
    host_copies.lock(buffer.data_ptr(), buffer.nbytes, device)
    yield buffer
    torch.cuda.synchronize()
    host_copies.unlock(buffer.data_ptr(), device)


@pytest.mark.parametrize("how", ["auto", "copy engine", "kernel"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes, cuts", CASES)
def test_shards_meet_in_final_layout(page_locked, sizes, cuts, dtype, how):
    full = random_tensor(sizes, dtype)
    slices = blocks(sizes, cuts)
    plan = plan_of(sizes, slices, dtype.itemsize)
    start = 64 * dtype.itemsize + dtype.itemsize  # off the alignment of wide stores
    for rank, block in enumerate(slices):
        shard = full[block].contiguous().cuda()
        ops.copy_to_host(shard, page_locked.data_ptr() + start, plan.code, rank, how)
    torch.cuda.synchronize()
    assert torch.equal(page_locked[start : start + full.nbytes], as_bytes(full))
    assert bool((page_locked[:start] == 255).all())
    assert bool((page_locked[start + full.nbytes :] == 255).all())


def test_memory_that_is_not_page_locked_is_refused():
    full = torch.zeros(4, 6)
    plan = plan_of((4, 6), blocks((4, 6), ([], [3])), 4)
    with pytest.raises(RuntimeError, match=r"copy_to_host: the host memory .* not page-locked"):
        ops.copy_to_host(torch.zeros(4, 3, device="cuda"), full.data_ptr(), plan.code, 0, "auto")


def test_what_is_copied_is_what_it_was(page_locked):
    """The model writes over its output at once; and the host waits for nothing before the end."""
    from flex_model.distributed.transports.host_copies import HostCopies
    from flex_model.records.snapshots import Snapshots

    device = torch.device("cuda", torch.cuda.current_device())
    copies, snapshots = HostCopies(), Snapshots()
    sizes = (512, 1024)
    plan = plan_of(sizes, blocks(sizes, ([], [])), 2)
    shard = torch.empty(sizes, dtype=torch.bfloat16, device=device)
    with waits_are_errors():
        for i in range(8):
            torch.cuda._sleep(1_000_000)
            shard.fill_(i)
            taken = snapshots.take(shard)
            shard.fill_(-1)
            address = page_locked.data_ptr() + i * shard.nbytes
            copies.start(taken.tensor, address, plan, 0, taken.ready)
    copies.wait()
    assert copies.is_completed()
    got = page_locked.view(torch.bfloat16).reshape(8, -1)
    for i in range(8):
        assert bool((got[i] == i).all())


def test_a_shard_that_is_made_contiguous_stays_until_it_is_copied(page_locked, monkeypatch):
    """What is copied is memory that nothing else refers to."""
    from flex_model.distributed.transports import host_copies
    from flex_model.distributed.transports.transport import end_to_end

    run = host_copies.SideStream.run

    def late(self, start, ready):
        run(self, lambda: torch.cuda._sleep(400_000_000), ready)
        run(self, start, ready)

    monkeypatch.setattr(host_copies.SideStream, "run", late)
    copies, full = host_copies.HostCopies(), torch.randn(512, 256)
    shard = full.cuda()
    copies.start(shard.t(), page_locked.data_ptr(), end_to_end([shard.nbytes]), 0)
    torch.zeros_like(shard)  # where the contiguous one was, if that is freed
    copies.wait()
    got = page_locked[: shard.nbytes].view(torch.float32).view(256, 512)
    assert torch.equal(got, full.t())


@pytest.fixture
def interrupt(monkeypatch):
    """The next wait for the GPU is interrupted by Ctrl-C, while the GPU is late."""
    from flex_model.distributed.transports import host_copies

    def sleeps(is_done, *_):
        assert not is_done()
        raise KeyboardInterrupt

    monkeypatch.setattr(host_copies, "sleeps", sleeps)
    return lambda: torch.cuda._sleep(1_000_000_000)


@pytest.fixture
def arena():
    from flex_model import _C
    from flex_model.distributed.transports import host_copies

    _C.arena_table()  # memory is pooled, as with peers
    yield
    torch.cuda.synchronize()
    host_copies.of_arena.release()
    _C.close_arena()


def test_memory_of_an_interrupted_copy_is_given_to_nobody(arena, interrupt):
    from flex_model import _C
    from flex_model.distributed import memory
    from flex_model.distributed.transports import host_copies
    from flex_model.distributed.transports.host_gather import to_host

    sevens = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    segment = _C.arena_segment(memory.empty([1 << 20], torch.uint8).data_ptr())
    assert host_copies.of_arena.has(*segment, sevens.device)  # which waits for the GPU
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        to_host([(sevens, host_copies.ready_now(sevens))])
    del sevens
    on_host = [memory.empty([1 << 20], torch.uint8).fill_(1) for _ in range(4)]
    on_gpu = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert all(bool((tensor == 1).all()) for tensor in on_host)
    assert not on_gpu.any()


def test_records_of_one_process_are_in_page_locked_memory_while_it_is_wrapped():
    from flex_model import _C, FlexModel, HookFunction
    from flex_model.distributed.transports import host_copies

    model, records = torch.nn.Linear(64, 512, bias=False).cuda(), {}
    x = torch.randn(64, 64, device="cuda")
    with FlexModel(model, records) as flex:
        flex.register_forward_hook(HookFunction(""))
        expected = flex(x)
        record = records[""][0]
        segment, num_bytes = _C.arena_segment(record.data_ptr())
        assert num_bytes and host_copies.of_arena.has(segment, num_bytes, x.device)
    assert torch.equal(record, expected.cpu())
    records.clear()
    del record
    assert _C.arena_bytes()[0] == 0


def test_memory_stays_locked_and_mapped_until_the_gpu_has_written(interrupt, monkeypatch):
    """A group that is released after a failed wait, for example."""
    from flex_model.distributed import process_groups
    from flex_model.distributed.hosts import Hosts
    from flex_model.distributed.transports import host_copies
    from flex_model.distributed.transports.transport import end_to_end

    meeting = SimpleNamespace(ranks=(0,), me=0, timeout_s=1, store=None, bounded_store=None)
    group, later = (
        process_groups.PrivateGroup(meeting, 0, Hosts([""], None, None, [])) for _ in range(2)
    )
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    sevens = torch.full_like(buffer, 7, device="cuda")
    assert group.locks.has(buffer.data_ptr(), buffer.nbytes, sevens.device)
    copies = host_copies.of_process
    interrupt()
    copies.start(sevens, buffer.data_ptr(), end_to_end([buffer.nbytes]), 0)
    with pytest.raises(KeyboardInterrupt):
        copies.wait()
    is_freed = weakref.ref(group.hosts)
    group.release()
    del group
    assert buffer.is_pinned() and is_freed() is not None
    torch.cuda.synchronize()
    assert bool((buffer == 7).all())
    with monkeypatch.context() as patch:
        patch.setattr(host_copies.SideStream, "is_done", cuda_error)
        later.release()
        assert buffer.is_pinned()
    later.release()
    assert not buffer.is_pinned() and is_freed() is None


def cuda_error(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_snapshot_is_not_overwritten_while_another_stream_reads_it():
    from flex_model.records.snapshots import Snapshots

    ones, side = torch.ones(512, 1024, device="cuda"), torch.cuda.Stream()
    snapshot = Snapshots().take(ones)
    with torch.cuda.stream(side):  # the run ends there
        torch.cuda._sleep(1_000_000_000)
        snapshot.wait()
        snapshot.change(lambda tensor: tensor[:, ::2])
    torch.zeros_like(ones)
    torch.cuda.synchronize()
    assert bool((snapshot.tensor == 1).all())


def test_a_refused_lock_leaves_no_error_behind(page_locked):
    """Locked already: the error is raised, and no later launch finds it."""
    from flex_model.distributed.transports import host_copies

    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(RuntimeError, match=r"page_lock: .* can't be page-locked"):
        host_copies.lock(page_locked.data_ptr(), page_locked.nbytes, device)
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_records_of_processes_that_share_a_gpu(tmp_path, num_ranks):
    run_ranks(tmp_path, "tests.cuda.records", num_ranks, "share")


def test_records_of_processes_with_a_gpu_each(tmp_path):
    num_ranks = min(torch.cuda.device_count(), 8) // 2 * 2
    if num_ranks < 2:
        pytest.skip("one GPU")
    run_ranks(tmp_path, "tests.cuda.records", num_ranks, "own")
