"""Records of GPU tensors on rank 0, with CPU tensors for a GPU's: what differs is who copies, and
when. Copies of the stand-in are made when they are waited for, and to page-locked memory only.
"""

import contextlib
import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import models
from flex_model import _C, FlexModel, HookFunction
from flex_model.distributed import group_pool, memory, process_groups
from flex_model.distributed.transports import choice, host_copies
from flex_model.distributed.transports.by_device import ByDevice
from flex_model.distributed.transports.choice import choose
from flex_model.distributed.transports.host_gather import HostGather
from flex_model.distributed.transports.transport import Gathered, end_to_end
from flex_model.records.snapshots import Snapshots
from tests.distributed.test_transports import check_gathered, sharded_cases, transport
from tests.engine import test_shared_memory
from tests.ops.test_ops import as_bytes, same_bits
from tiers import grid_but

REFUSED = "page_lock: can't be page-locked (for a test)"


class StandIn:
    """A GPU of this rank's.

    Attributes:
        locked: Bytes of page-locked memory, by address.
        num_locks, num_copies, num_events: So far.
    """

    def __init__(self, is_refused=False):
        self.is_refused = is_refused
        self.locked = {}
        self.num_locks = self.num_copies = self.num_events = 0
        self.queue, self.polls = [], 0

    def lock(self, address, num_bytes, device):
        if self.is_refused:
            raise RuntimeError(REFUSED)
        assert address % 4096 == num_bytes % 4096 == 0
        assert address not in self.locked
        self.num_locks += 1
        self.locked[address] = num_bytes

    def unlock(self, address, device):
        assert is_mapped(address, self.locked.pop(address))

    def ready_now(self, tensor):
        self.num_events += 1
        return SimpleNamespace(wait=lambda tensor: None)

    def run(self, start, ready):
        self.num_copies += 1
        self.queue.append(start)

    def is_done(self):
        self.polls += 1
        if self.polls % 3 == 0:
            for start in self.queue:
                start()
            self.queue.clear()
        return not self.queue

    def start_checked(self, copies, shard, address, *args):
        """As ``HostCopies.start``, for memory that is locked."""
        assert any(a <= address < a + size for a, size in self.locked.items())
        return START(copies, shard, address, *args)


START = host_copies.HostCopies.start


def is_mapped(address, num_bytes):
    covered = address
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if first <= covered < last:
                covered = last
    return covered >= address + num_bytes


def is_not_pooled(tensor):
    """What the stand-in takes for a tensor of its GPU."""
    return tensor.numel() == 0 or not _C.arena_segment(tensor.data_ptr())[0]


@contextlib.contextmanager
def gpu(patch, is_refused=False, has_gpu=True):
    """CPU tensors are this rank's GPU's, or are not, and the ranks gather in host memory."""
    gpu = StandIn(is_refused)
    patch.setattr(host_copies, "lock", gpu.lock)
    patch.setattr(host_copies, "unlock", gpu.unlock)
    patch.setattr(host_copies, "of_arena", host_copies.PageLocks())
    patch.setattr(host_copies, "is_on_gpu", is_not_pooled if has_gpu else lambda tensor: False)
    patch.setattr(host_copies, "ready_now", gpu.ready_now)
    patch.setattr(host_copies, "of_process", host_copies.HostCopies())
    patch.setattr(host_copies, "SideStream", lambda device: gpu)
    patch.setattr(host_copies.HostCopies, "start", lambda *args: gpu.start_checked(*args))
    patch.setattr(group_pool, "choose", choose_host_gather)
    yield gpu
    host_copies.of_arena.release()
    for group in process_groups._groups.values():  # kept where a test before left a FlexModel
        group.locks.release()
    assert not gpu.queue


def choose_host_gather(group, wait, device):
    on_cpu, why = choose(group, wait, device)
    reasons = [why]
    gather = choice.connect_host_gather(on_cpu, device, reasons)
    return ByDevice(on_cpu, None, gather), "; ".join(reasons)


def gathers_all(communicator, large):
    """Random tensors, together and one by one, of whole plans and of parts of the ranks."""
    moved = []
    for full, _, _, gathered in sharded_cases(communicator, large):
        whole = as_bytes(full)  # that rank 1 has alone
        mine = whole if communicator.mesh.group_rank == 1 else whole[:0]
        moved += [(full, gathered), (whole, Gathered(end_to_end([whole.nbytes]), [1], mine))]
    for some in (*([one] for one in moved), moved):
        check_gathered(communicator, some)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["shared_memory", "full arena"])
def test_two_ranks(monkeypatch, name, large):
    held = [0, 0]
    dist.all_gather_object(held, _C.arena_bytes()[0])
    has_room = name != "full arena" or held[0] > 0  # a test before may have left some on rank 0
    with gpu(monkeypatch) as stand_in, transport(name) as communicator:
        assert communicator.host_gather is not None
        gathers_all(communicator, large)
        if large or not has_room:
            assert (stand_in.num_copies > 0) == (large and has_room)
        assert stand_in.num_locks < 12


@pytest.mark.ranks(2)
def test_a_forked_child_does_not_touch_the_gpu(monkeypatch):
    with gpu(monkeypatch), transport("shared_memory") as communicator:
        gathers_all(communicator, large=True)
        pid = os.fork()
        if pid == 0:
            monkeypatch.setattr(host_copies, "unlock", lambda *_: os._exit(1))
            host_copies.of_arena.release()
            communicator.host_gather.group.locks.release()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gathers_all(communicator, large=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dp", grid_but([1, 2], 2))
@pytest.mark.parametrize("output_ranks", grid_but(["rank0", "all"], "rank0"))
@pytest.mark.parametrize("max_gpu_bytes", [1 << 30, 700_000])
def test_records_are_what_the_hooks_saw(monkeypatch, dp, output_ranks, max_gpu_bytes):
    """Sharded and replicated, small and large, more than may wait on the GPU."""
    rank = dist.get_rank()
    if max_gpu_bytes != 1 << 30:
        max_gpu_bytes *= 1 + rank % 2  # so that ranks move different shards
    monkeypatch.setattr(Snapshots.__init__, "__defaults__", (max_gpu_bytes,))
    records = {}
    with gpu(monkeypatch) as stand_in, transport("shared_memory"):
        flex = FlexModel(
            models.Overwriting(),
            records,
            tensor_parallel_size=4 // dp,
            data_parallel_size=dp,
            output_ranks=output_ranks,
        )
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        flex.register_forward_hook(HookFunction("wide", expected_shape=(None, 1200)))
        flex.register_forward_hook(HookFunction("narrow", expected_shape=(None, 6)))
        generator = torch.Generator().manual_seed(1)
        for rows in (8, 600, 600):
            wide = torch.randn(rows, 1200, generator=generator)
            narrow = torch.randn(rows, 6, generator=generator)
            parts = wide.chunk(dp)[rank // (4 // dp)].chunk(4 // dp, 1)
            flex(parts[rank % (4 // dp)], narrow.chunk(dp)[rank // (4 // dp)])
            if rank == 0 or output_ranks == "all":
                assert all(not is_stale(tensor) for kept in records.values() for tensor in kept)
                same_bits(records["wide"][0], wide + 1)
                same_bits(records["narrow"][0], narrow * 2)
            else:
                assert not records
        assert stand_in.num_events == 6
        assert stand_in.num_copies > 0 or output_ranks == "all"
        explained = str(flex.explain())
        assert "collected shards go from each GPU to host memory" in explained
        assert ("host_copies" in explained) == (output_ranks == "rank0" and dp < 4)
        flex.restore()


def is_stale(tensor):
    return tensor.device.type != "cpu" or tensor.is_inference() or not tensor.is_contiguous()


@pytest.mark.ranks(2)
def test_the_oldest_snapshots_move_to_the_cpu(monkeypatch):
    """And all do where the GPU is full."""
    with gpu(monkeypatch):
        snapshots = Snapshots(max_gpu_bytes=3_000)
        moved = []
        to_cpu = snapshots.to_cpu
        monkeypatch.setattr(snapshots, "to_cpu", lambda some: (moved.extend(some), to_cpu(some)))
        tensors = [torch.full((1000,), i, dtype=torch.uint8) for i in range(8)]
        taken = [snapshots.take(tensor) for tensor in tensors]
        assert moved == taken[:5]
        snapshots.drop(taken)
        again = [snapshots.take(tensor) for tensor in tensors[:3]]
        assert moved == taken[:5]
        for tensor in tensors:
            tensor.fill_(255)
        assert [int(s.tensor[0]) for s in taken + again] == [*range(8), 0, 1, 2]
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", raise_out_of_memory)
            snapshot = snapshots.take(torch.ones(100_000))
            assert snapshot.ready is None
            assert snapshot.tensor.sum() == 100_000


def raise_out_of_memory(*_, **__):
    raise torch.OutOfMemoryError


def dying_in_between(group, rank, victim, kind):
    """Gathers until one of the ranks ends in the middle of it."""
    with pytest.MonkeyPatch.context() as patch, gpu(patch) as stand_in:
        place = SimpleNamespace(rank=rank, size=group.size, locks=host_copies.PageLocks())
        gather = HostGather(place, group, torch.device("cpu"))
        plan = end_to_end([300_000] * group.size)
        shard = torch.full((300_000,), rank, dtype=torch.uint8)
        tensor = Gathered(plan, list(range(group.size)), shard)
        given = []
        empty = memory.empty
        patch.setattr(memory, "empty", lambda *args: given.append(empty(*args)) or given[-1])
        for _ in range(3):
            fulls = gather.gather_to_first([tensor])
            if rank == 0:
                expected = torch.arange(group.size).repeat_interleave(300_000)
                assert torch.equal(fulls[0].long(), expected)
        given.clear()
        fulls = None
        if rank == victim:

            def end(*_):
                if kind == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("in between")

            patch.setattr(gather._copies, "wait", end)
        try:
            gather.gather_to_first([tensor])
            group.exchange_bytes(b"x")  # who is not rank 0 need not wait before
        except (_C.WaitError, ValueError) as error:
            stand_in.queue.clear()
            group.abort(f"rank {rank}")
            seen = type(error).__name__, error.args[:2]
        if rank == 0:
            (offered,) = (full.data_ptr() for full in given)
            given.clear()
            again = [empty([300_000 * group.size], torch.uint8) for _ in range(8)]
            assert offered not in {tensor.data_ptr() for tensor in again}
        return seen


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dies", "fails"])
def test_a_rank_that_ends_in_between(victim, kind):
    ranks = test_shared_memory.Ranks(3, dying_in_between, victim, kind)
    start = time.monotonic()
    results = ranks.results(but=[victim] if kind == "dies" else [])
    assert time.monotonic() - start < 10
    for rank, (name, arguments) in results.items():
        if rank == victim:
            assert name == "ValueError"
        else:
            reason, who = arguments
            assert name == "WaitError"
            assert reason == "broken" or (reason, who) == ("dead", [victim])


def many_small_and_large(group, rank):
    """More tensors than places in a message; in the pool or not; written early or at the end."""
    choose_ = random.Random(3)
    lengths = [choose_.choice([1, 50, 20_000]) for _ in range(5000)]
    plans = {n: end_to_end([n] * group.size) for n in set(lengths)}
    everyone = list(range(group.size))
    fulls, items, shards = [], [], []
    for i, n in enumerate(lengths):
        pooled = memory.empty([n * group.size], torch.uint8)  # from 64 KiB on
        fulls.append(pooled if i % 50 == 0 else torch.empty(n * group.size, dtype=torch.uint8))
        items.append((plans[n], everyone, fulls[-1] if rank == 0 else None))
        shards.append(torch.full((n,), (i + rank) % 256, dtype=torch.uint8))
    opened = group.open_gather(items)
    left = []
    for i, ((address, segment, num_bytes), shard) in enumerate(zip(opened.targets, shards)):
        left.append(shard)
        if address and (i // 50 + rank) % 2:
            assert segment <= address < segment + num_bytes
            copy = torch.ops.flex_model.copy_to_host
            copy(shard, address, items[i][0].code, rank, "auto")
            left[-1] = None
    no_target = next(i for i, target in enumerate(opened.targets) if not target[0])
    with pytest.raises(ValueError, match="a shard that has no target is missing"):
        opened.end([None if i == no_target else each for i, each in enumerate(left)])
    opened.end(left)
    if rank == 0:
        for i, (n, full) in enumerate(zip(lengths, fulls)):
            expected = (torch.arange(group.size) + i) % 256
            assert torch.equal(full.view(-1, n)[:, -1].long(), expected)
            assert bool((full.view(-1, n) == full.view(-1, n)[:, :1]).all())
    return "done"


@pytest.mark.parametrize("size", [1, 3])
def test_any_number_of_tensors(size):
    ranks = test_shared_memory.Ranks(size, many_small_and_large)
    assert set(ranks.results().values()) == {"done"}
