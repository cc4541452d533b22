"""The engine's shared memory among processes of one host: rounds, transfers, and what becomes of
ranks that stop, die or fork. Here without torch.distributed; in a model see test_transports.py.
"""

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import time
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from flex_model import _C
from flex_model._C import GatherPlan
from flex_model.distributed import memory
from flex_model.distributed.notices import Board
from flex_model.distributed.transports.transport import end_to_end, stacking
from tiers import grid_but

OUTER_TIMEOUT_S = 50


class Ranks:
    """``body(group, rank, *arguments)`` in forked processes; what each returned or raised."""

    def __init__(self, size, body, *arguments, timeout=20.0):
        self.pipes, self.pids = [], []
        for rank in range(size):
            here, there = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                self._work(rank, size, there, body, arguments, timeout)
            there.close()
            self.pipes.append(here)
            self.pids.append(pid)
        tables = [self._receive(rank) for rank in range(size)]
        self.pipes[0].send(tables)
        block = self._receive(0)
        for pipe in self.pipes[1:]:
            pipe.send((block, tables))

    @staticmethod
    def _work(rank, size, pipe, body, arguments, timeout):
        signal.alarm(OUTER_TIMEOUT_S)  # nothing outlives the test
        try:
            pipe.send(_C.arena_table())
            if rank == 0:
                tables, block = pipe.recv(), _C.ControlBlock(size)
                address = block.address
                group = _C.HostGroup.made(block, tables, 0)
                pipe.send(address)
            else:
                block, tables = pipe.recv()
                group = _C.HostGroup.open(block, tables, rank)
            group.set_timeout(timeout)
            group.exchange_bytes(b"all have opened it")
            result = body(group, rank, *arguments)
        except _C.WaitError as error:
            group.abort(f"rank {rank}: {error.args[0]}")
            result = error.args
        except BaseException as error:
            result = (type(error).__name__, traceback.format_exc())
            group.abort(result[0])
        pipe.send(result)
        os._exit(0)

    def _receive(self, rank, seconds=OUTER_TIMEOUT_S):
        assert self.pipes[rank].poll(seconds), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def results(self, but=()):
        """Of all ranks but those that were killed."""
        found = {rank: self._receive(rank) for rank in range(len(self.pids)) if rank not in but}
        for pid in self.pids:
            os.waitpid(pid, 0)
        return found


def numbers(rank, size):
    return torch.arange(size, dtype=torch.int32) * 7 + rank


def any_transfers(group, rank, seed, count):
    """The same random sequence of transfers on all ranks, each checked."""
    choose = random.Random(seed)
    size = group.size
    for step in range(count):
        kinds = ["bytes", "exchange", "all_gather", "at once", "first", "scatter", "broadcast"]
        kind = choose.choice(kinds)
        lengths = [choose.choice([0, 1, 100, 16_384, 16_385, 40_000]) for _ in range(size)]
        pooled = choose.random() < 0.7
        dice = random.Random(seed * 1000 + step * 10 + rank)  # ranks come at different times
        if dice.random() < 0.05:
            time.sleep(dice.random() * 0.003)

        def empty(length, pooled=pooled):
            return (
                memory.empty([length], torch.int32)
                if pooled
                else torch.empty(length, dtype=torch.int32)
            )

        plan = end_to_end([4 * length for length in lengths])
        mine = numbers(rank, lengths[rank])
        whole = torch.cat([numbers(r, length) for r, length in enumerate(lengths)])
        if kind == "bytes":
            got = group.exchange_bytes(bytes([rank, step % 256]))
            assert got == [bytes([r, step % 256]) for r in range(size)]
        elif kind == "exchange":
            length = lengths[0]
            everyone = torch.empty(size, length, dtype=torch.int32)
            part = numbers(rank, length)
            group.exchange(part, part.nbytes, everyone)
            assert torch.equal(everyone, torch.stack([numbers(r, length) for r in range(size)]))
        elif kind == "at once":
            lengths = [min(length, 16_000) for length in lengths]
            plan, mine = end_to_end([4 * length for length in lengths]), mine[: lengths[rank]]
            whole = torch.cat([numbers(r, length) for r, length in enumerate(lengths)])
            differing = choose.choice([None, None, *range(size)]) if size > 1 else None
            sends_shard = rank != differing or dice.random() < 0.5
            headers = [
                bytes([r == differing] * 24 + [r] * 8 + [step % 256] * 32) for r in range(size)
            ]
            fulls = [torch.full_like(whole, -1) for _ in range(dice.randrange(3))]
            if sends_shard:
                places = list(range(size))
                got = group.gather_at_once(headers[rank], (24, 32), plan, places, mine, fulls)
            else:
                got = group.exchange_bytes(headers[rank])
            assert got == headers
            for full in fulls:
                assert torch.equal(full, whole if differing is None else torch.full_like(full, -1))
        elif kind == "all_gather":
            fulls = [empty(len(whole)) for _ in range(dice.randrange(3))]
            group.all_gather(plan, mine, fulls)
            for full in fulls:
                assert torch.equal(full, whole)
        elif kind == "first":
            full = empty(len(whole)) if rank == 0 else None
            again = torch.empty_like(whole) if rank == 0 else None
            group.gather_to_first(
                [(plan, list(range(size)), mine, full), (plan, list(range(size)), mine, again)]
            )
            if rank == 0:
                assert torch.equal(full, whole)
                assert torch.equal(again, whole)
        elif kind == "scatter":
            source = empty(len(whole)).copy_(whole) if rank == 0 else None
            got = torch.empty_like(mine)
            group.scatter_from_first(plan, source, got)
            if source is not None:
                source.zero_()  # it may change from now on
            assert torch.equal(got, mine)
        else:
            expected = numbers(0, lengths[0])
            source = empty(lengths[0]).copy_(expected) if rank == 0 else None
            got = torch.empty_like(expected)
            group.broadcast(source, expected.nbytes, got)
            if source is not None:
                source.zero_()
            else:
                assert torch.equal(got, expected)
    return "done"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_sequence_of_transfers(size):
    """More ranks than cores included, and tensors in the arena or not."""
    for seed in range(2):
        assert set(Ranks(size, any_transfers, seed, 150).results().values()) == {"done"}


def viewed(group, plan, shard, number, fulls=()):
    """``number`` full int32 tensors whose memory the ranks share."""
    sizes = plan.full_sizes
    capsules = group.all_gather_views(plan, shard, list(fulls), number, sizes, 0, 32)
    return [from_dlpack(capsule) for capsule in capsules]


def any_views(group, rank, seed, with_notes):
    """Tensors whose memory is shared, held for some time and written to by some: each keeps its own
    values, and none shows what was written to another that had its place before.
    """
    _C.views_without_notes(not with_notes)
    choose, dice = random.Random(seed), random.Random(seed * 10 + rank)
    held = []
    for step in range(120):
        lengths = [choose.choice([0, 1, 5_000, 16_384, 40_000, 300_000]) for _ in range(group.size)]
        plan = GatherPlan(
            [sum(lengths)],
            [[length] for length in lengths],
            [(r, [sum(lengths[:r])], [0], [n]) for r, n in enumerate(lengths)],
            4,
        )
        whole = torch.cat([numbers(r, n) + 1000 * step for r, n in enumerate(lengths)])
        mine = numbers(rank, lengths[rank]) + 1000 * step
        fulls = [memory.empty([len(whole)], torch.int32) for _ in range(dice.randrange(2))]
        views = viewed(group, plan, mine, dice.choice([0, 1, 1, 2, 3]), fulls)
        held += [(tensor, whole.clone()) for tensor in (*fulls, *views)]
        for tensor, expected in held:
            assert torch.equal(tensor, expected)
            if len(expected) and dice.random() < 0.2:
                at = dice.randrange(len(expected))
                length = dice.choice([1, 5_000, len(expected)])
                tensor[at : at + length] = step
                expected[at : at + length] = step
        while (held and dice.random() < 0.6) or len(held) > 12:
            held.pop(dice.randrange(len(held)))
    del held, fulls, views, tensor
    group.exchange_bytes(b"all have given theirs back")
    assert _C.arena_bytes()[1] == 0
    return "done"


@pytest.mark.parametrize("with_notes", [True, False])
@pytest.mark.parametrize("size", grid_but([1, 2, 3, 5], 2))
def test_tensors_that_share_memory_belong_to_each_rank_alone(size, with_notes):
    """As the kernel tells of writes, or as its table of pages does."""
    assert _C.worthwhile_view_bytes() > 0
    for seed in range(2):
        assert set(Ranks(size, any_views, seed, with_notes).results().values()) == {"done"}


def views_with_a_full_arena(group, rank):
    """No room on the first rank, or on the others: copies, and the same values."""
    plan, shard = stacking(2, 400_000, 4), numbers(rank, 400_000)
    expected = torch.stack([numbers(r, 400_000) for r in range(2)])
    for full_on in range(2):
        _C.set_arena_limit(0 if rank == full_on else -1)
        for _ in range(3):
            for view in viewed(group, plan, shard, 2):
                assert torch.equal(view, expected)
                view.zero_()
    return "done"


def test_views_without_room_are_copies():
    assert set(Ranks(2, views_with_a_full_arena).results().values()) == {"done"}


def views_in_a_forked_child(group, rank):
    """It keeps what it has seen and written, while the parent's memory is used again."""
    plan, shard = stacking(2, 400_000, 4), numbers(rank, 400_000)
    expected = torch.stack([numbers(r, 400_000) for r in range(2)])
    leased = memory.empty([2, 400_000], torch.int32)
    seen, written = viewed(group, plan, shard, 2, [leased])
    written[0, 7] = -1
    parents, childs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(childs)
            os.read(parents, 1)  # until the parent's end is closed
            with pytest.raises(RuntimeError, match="forked"):
                group.exchange_bytes(b"x")  # it takes no part
            assert torch.equal(leased, expected)
            assert torch.equal(seen, expected)
            assert written[0, 7] == -1
            written[0, 7] = expected[0, 7]
            assert torch.equal(written, expected)
            del leased, seen, written
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    address = seen.data_ptr()
    leased.zero_()
    del seen, written
    group.exchange_bytes(b"given back")
    others = viewed(group, plan, torch.full_like(shard, 5), 2)
    assert address in [other.data_ptr() for other in others]  # the same place
    assert all(other.eq(5).all() for other in others)
    os.close(childs)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(other.eq(5).all() for other in others)
    return "done"


def test_a_forked_child_keeps_its_views():
    assert set(Ranks(2, views_in_a_forked_child).results().values()) == {"done"}


def views_of_locked_memory(group, rank, flags, with_notes):
    """mlockall makes every page of the views' mappings a copy, also where no view is."""
    _C.views_without_notes(not with_notes)
    libc = ctypes.CDLL(None, use_errno=True)
    plan, shard = stacking(2, 400_000, 4), numbers(rank, 400_000)
    kept = viewed(group, stacking(2, 200_000, 4), numbers(rank, 200_000), 1)
    del kept
    group.exchange_bytes(b"given back")
    for step in range(4):
        if step == 1 and rank == 1 and libc.mlockall(flags) != 0:
            return "not allowed"
        if step == 3:
            libc.munlockall()
        group.exchange_bytes(b"locked")
        views = viewed(group, plan, shard + step, 2)
        for view in views:
            assert torch.equal(view, torch.stack([numbers(r, 400_000) for r in range(2)]) + step)
        views[0].zero_()
        del view, views
        group.exchange_bytes(b"given back")
    return "done"


@pytest.mark.parametrize("with_notes", [True, False])
@pytest.mark.parametrize("flags", [1, 3])  # MCL_CURRENT, and MCL_FUTURE too
def test_views_show_no_copies_that_a_lock_made(flags, with_notes):
    results = Ranks(2, views_of_locked_memory, flags, with_notes).results()
    if "not allowed" in results.values():
        pytest.skip("memory can't be locked here")
    assert list(results.values()) == ["done", "done"], results


def views_after_the_last_group(group, rank):
    """Nothing of them stays in the first rank's pool, whoever holds them and for how long."""
    plan, shard = stacking(2, 400_000, 4), numbers(rank, 400_000)
    expected = torch.stack([numbers(r, 400_000) for r in range(2)])
    views = viewed(group, plan, shard, 2)
    own = memory.empty([400_000], torch.int32).fill_(rank)  # of the same segment, on rank 0
    group.exchange_bytes(b"have them")
    _C.close_arena()
    group.exchange_bytes(b"closed")
    del own
    assert _C.arena_bytes() == (0, 0)
    _C.arena_table()  # of another wrap, whose tensors have no place that is still seen
    others = [memory.empty([800_000], torch.int32).fill_(7) for _ in range(6)]
    group.exchange_bytes(b"written")
    for view in views:
        assert torch.equal(view, expected)
    views[0].zero_()
    assert torch.equal(views[1], expected)
    del others, view
    if rank == 0:
        views.clear()
    group.exchange_bytes(b"the first rank has none")
    assert not views or torch.equal(views[1], expected)
    return "done"


def test_views_outlive_the_last_group_and_hold_no_pool():
    results = Ranks(2, views_after_the_last_group).results()
    assert set(results.values()) == {"done"}, results


def drop_in_a_child(group, rank):
    """What a child does not have of a group, it does not unmap: something else lies there."""
    block = _C.ControlBlock(4)
    parents = _C.HostGroup.made(block, [_C.arena_table()] * 4, 0)
    pid = os.fork()
    if pid == 0:
        others = [mmap.mmap(-1, 4096 * pages) for pages in (1, 10, 100, 130, 140, 200) * 20]
        for other in others:
            other[:1] = b"a"
        del parents, block
        os._exit(0 if all(other[:1] == b"a" for other in others) else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return "done"


def test_a_forked_child_may_drop_its_parents_groups():
    assert set(Ranks(1, drop_in_a_child).results().values()) == {"done"}


def shared_files(pid):
    """What a process has open of the memory that ranks share."""
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # listdir's own is closed by now
            file = os.readlink(f"/proc/{pid}/fd/{number}")
            if any(kind in file for kind in ("memfd:flex_model", "[userfaultfd]")):
                found.append(file)
    return sorted(found)


def fork_with_open_files(group, rank):
    """A child has nothing of the group: it would keep the memory when the ranks have ended."""
    plan, shard = stacking(2, 400_000, 4), numbers(rank, 400_000)
    views = viewed(group, plan, shard, 1)
    before = shared_files("self")
    assert any("memfd" in file for file in before)
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        there.send(b"x")
        there.recv(1)  # until the parent has looked
        os._exit(0)
    here.recv(1)
    assert shared_files(pid) == []
    assert "memfd:flex_model" not in Path(f"/proc/{pid}/maps").read_text()
    assert shared_files("self") == before
    here.send(b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    views += viewed(group, plan, shard, 1)  # the parent's still serve
    for view in views:
        assert torch.equal(view, torch.stack([numbers(r, 400_000) for r in range(2)]))
    return "done"


def test_a_forked_child_has_no_file_and_no_memory_of_the_group():
    results = Ranks(2, fork_with_open_files).results()
    assert set(results.values()) == {"done"}, results


def fork_without_a_file_to_spare(group, rank):
    """The child has copied what it keeps before the parent's memory is used again."""
    plan, shard = stacking(2, 8_000_000, 4), numbers(rank, 8_000_000)
    views = [viewed(group, plan, shard, 1)[0] for _ in range(6)]
    if rank == 0:
        expected, last = views[-1].clone(), views[-1]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(number) for number in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        spare = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        pid = os.fork()
        if pid == 0:
            os._exit(0 if torch.equal(last, expected) else 1)
        for number in spare:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        del last
    views.clear()
    others = [viewed(group, plan, torch.zeros_like(shard), 1)[0] for _ in range(7)]
    assert not any(other.any() for other in others)
    if rank == 0:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    return "done"


def test_a_fork_that_may_open_no_more_files():
    results = Ranks(2, fork_without_a_file_to_spare).results()
    assert set(results.values()) == {"done"}, results


def run_until_stopped(group, rank, *_):
    plan = stacking(group.size, 50_000, 4)
    shard = numbers(rank, 50_000)
    while True:
        full = memory.empty([group.size, 50_000], torch.int32)
        group.all_gather(plan, shard, [full])
        group.exchange_bytes(b"x" * 64)


def publish_and_read(group, rank):
    """Notices of the first rank, as long as real ones, read all the time by the second."""
    written = [json.dumps({"run": [n, 100 + n], "hooks": str(n) * 200}) for n in (1, 2)]
    if rank == 0:
        while group.published(1) != "enough" and not group.is_broken:
            for notice in written:
                group.publish(notice)
        return "done"
    while not group.published(0):
        pass
    read = Counter(group.published(0) for _ in range(20_000))
    group.publish("enough")
    assert set(read) <= {*written, None}, [text for text in read if text not in written]
    assert set(read) & set(written)
    return "done"


def test_a_notice_is_never_read_while_it_is_half_written():
    results = Ranks(2, publish_and_read).results()
    assert set(results.values()) == {"done"}, results


def test_a_notice_that_is_being_written_is_not_taken_for_none():
    hosts = SimpleNamespace(here=SimpleNamespace(published=lambda rank: None), is_one=True)
    assert Board(0, 2, hosts, store=None).read("hooks", 1) is None


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_at_once(victim):
    segments = set(os.listdir("/dev/shm"))
    ranks = Ranks(3, run_until_stopped)
    time.sleep(random.random() * 0.2)
    os.kill(ranks.pids[victim], signal.SIGKILL)
    start = time.monotonic()
    results = ranks.results(but=[victim])
    assert time.monotonic() - start < 3
    assert all(
        result[:2] == ("dead", [victim]) or result[0] == "broken" for result in results.values()
    ), results
    assert any(result[0] == "dead" for result in results.values())
    assert set(os.listdir("/dev/shm")) <= segments


def test_a_stopped_rank_is_named_at_the_deadline_and_a_short_stop_is_no_error():
    ranks = Ranks(2, run_until_stopped, timeout=1.0)
    time.sleep(0.1)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(ranks.pids[1], signal.SIGCONT)
    time.sleep(0.2)
    assert not any(pipe.poll(0) for pipe in ranks.pipes)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    start = time.monotonic()
    assert ranks.pipes[0].poll(5)
    assert 0.5 < time.monotonic() - start < 2.5
    assert ranks.pipes[0].recv()[:2] == ("late", [1])
    os.kill(ranks.pids[1], signal.SIGCONT)  # it hears that the others have given up
    assert ranks.pipes[1].poll(5)
    reason, _, text = ranks.pipes[1].recv()
    assert (reason, text) in [("broken", "rank 0: late"), ("dead", "")]


def test_ctrl_c_ends_a_wait_and_the_others_are_told():
    def body(group, rank):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if rank == 1:
            while not group.is_broken:
                time.sleep(0.01)
        group.exchange_bytes(b"x")

    ranks = Ranks(2, body)
    time.sleep(0.2)
    start = time.monotonic()
    os.kill(ranks.pids[0], signal.SIGINT)
    results = ranks.results()
    assert time.monotonic() - start < 1.5
    assert results[0][0] == "KeyboardInterrupt"
    assert results[1][0] == "broken"
    assert results[1][2] == "KeyboardInterrupt"


@pytest.mark.parametrize("differs", ["the transfer", "its detail"])
def test_transfers_out_of_step_are_told(differs):
    def body(group, rank):
        if rank == 0 or differs == "its detail":
            group.exchange_bytes(b"x" * (rank + 1))
        else:
            group.broadcast(None, 10, torch.empty(10, dtype=torch.uint8))

    results = Ranks(2, body).results()
    assert {result[0] for result in results.values()} <= {"out of step", "broken"}
    texts = [result[2] for result in results.values() if result[0] == "out of step"]
    sides = [re.findall(r"transfer (\d+), kind (\d+), detail (\d+)", text) for text in texts]
    assert texts and all(here != there for here, there in sides)


def a_pool_of_any_leases(group, rank):
    """Leases of random sizes, ended in random order: each keeps its own values."""
    choose = random.Random(5)
    held = {}
    for i in range(600):
        if held and choose.random() < 0.45:
            number, tensor = held.popitem() if choose.random() < 0.5 else next(iter(held.items()))
            held.pop(number, None)
            assert tensor.eq(number).all()
        else:
            size = choose.choice([20_000, 70_000, 300_000])
            held[i] = memory.empty([size], torch.int32).fill_(i)
    for number, tensor in held.items():
        assert tensor.eq(number).all()
    bytes_held = _C.arena_bytes()[0]
    held.clear()
    del tensor
    assert _C.arena_bytes() == (bytes_held, 0)
    last = memory.empty([100_000], torch.int32).fill_(1)
    _C.close_arena()  # no group is left: memory goes as its tensors do
    assert 0 < _C.arena_bytes()[0] <= bytes_held
    assert last.sum() == 100_000
    del last
    assert _C.arena_bytes() == (0, 0)
    assert memory.empty([100_000], torch.int32).fill_(1).sum() == 100_000
    assert _C.arena_bytes() == (0, 0)
    return "done"


def test_leases_never_overlap_and_all_memory_comes_back():
    assert set(Ranks(1, a_pool_of_any_leases).results().values()) == {"done"}


def a_limited_pool(group, rank):
    _C.set_arena_limit(20 << 20)
    tensors = [memory.empty([1 << 20], torch.int32).fill_(i) for i in range(10)]
    assert _C.arena_bytes()[0] <= 20 << 20
    assert 4 << 20 <= _C.arena_bytes()[1] <= 20 << 20  # the others are the allocator's
    for i, tensor in enumerate(tensors):
        assert tensor.eq(i).all()
    return "done"


def test_the_pool_has_a_limit():
    assert set(Ranks(1, a_limited_pool).results().values()) == {"done"}


def test_memory_of_a_process_that_is_another_one_is_refused():
    def body(group, rank):
        pid, fd, token, size = _C.arena_table()
        for wrong in ((pid, fd, token + 1, size), (pid, fd, token, size + 4096), (pid, 999, 1, 1)):
            with pytest.raises(RuntimeError, match="shared memory"):
                _C.HostGroup.open(wrong, [_C.arena_table()], 0)
        return "done"

    assert set(Ranks(1, body).results().values()) == {"done"}
