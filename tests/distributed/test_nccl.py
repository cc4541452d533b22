"""The NCCL transport's plans and buffers, with gloo and CPU tensors in NCCL's place."""

import contextlib
import os
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flex_model.distributed import process_groups
from flex_model.distributed.transports import nccl
from flex_model.distributed.transports.by_device import ByDevice
from flex_model.distributed.transports.gloo import BetweenHosts, Gloo
from flex_model.distributed.transports.nccl import Nccl
from flex_model.distributed.transports.transport import Gathered
from tests.distributed.gpu_transfers import check_transfers
from tests.ops.test_ops import blocks, plan_of, random_tensor, same_bits


def wait(works):
    for work in works:
        work.wait()


class OverGloo(Nccl):
    """All but how to connect, and how several messages make one call."""

    def _make(self):
        return self.group.messages._backend

    def _connect(self):
        pass

    def _grouped(self, sends, receives):
        works = [self._backend.send([data], rank, 0) for data, rank in sends]
        works += [self._backend.recv([data], rank, 0) for data, rank in receives]
        self._queue(works)


@contextlib.contextmanager
def connected():
    with mock.patch.dict(os.environ, FLEX_MODEL_TRANSPORT="gloo"):
        group, _ = process_groups.acquire(tuple(range(dist.get_world_size())), 20.0)
    yield OverGloo(Gloo(group, BetweenHosts(group, wait)), wait, torch.device("cpu"))
    group.release()


def case(dtype, sizes=(5, 7), cuts=([2], [])):
    full = random_tensor(sizes, dtype)
    slices = blocks(sizes, cuts)
    return full, plan_of(sizes, slices, full.itemsize), [full[block] for block in slices]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ((5, 7), ([2], [])),
        ((5, 7), ([], [3])),
        ((5, 7), ([], [7])),
        ((4, 6), ([2], [])),
        ((4, 6), ([], [3])),
        ((4, 6), ([], [6])),
        ((0, 6), ([], [3])),
    ],
)
def test_transfers(dtype, sizes, cuts):
    with connected() as transport:
        check_transfers(transport, *case(dtype, sizes, cuts))


@pytest.mark.ranks(2)
def test_several_tensors_go_to_the_first_rank_together():
    cases = [
        case(torch.bool),
        case(torch.bfloat16, (5, 7), ([], [3])),
        case(torch.float32, (0, 2), ([], [1])),
        case(torch.complex128, (3, 3), ([3], [])),
    ]
    some = [Gathered(plan, [0, 1], shards[dist.get_rank()]) for _, plan, shards in cases]
    whole, other = random_tensor((3, 3)), plan_of((3, 3), blocks((3, 3), ([], [])), 4)
    some.append(Gathered(other, [1], whole if dist.get_rank() == 1 else whole[:0], 2))
    cases += [(whole,), (whole,)]
    with connected() as transport:
        got = transport.gather_to_first(some)
    if dist.get_rank() != 0:
        assert got is None
        return
    for (full, *_), tensor in zip(cases, got, strict=True):
        same_bits(tensor, full)


class Ending:
    """An NCCL backend, for what ends it."""

    def __init__(self):
        self.calls, self.peers_have_closed = [], threading.Event()

    def shutdown(self):
        self.calls.append("shutdown")
        self.peers_have_closed.wait()

    def abort(self):
        self.calls.append("abort")
        raise RuntimeError("aborted before")


@pytest.mark.ranks(2)
def test_closing_waits_for_peers_but_not_without_end():
    patch = pytest.MonkeyPatch()
    backends = [Ending(), Ending(), Ending()]
    patch.setattr(nccl, "_CLOSE_S", 0.1)
    with connected() as transport:
        backends[0].peers_have_closed.set()
        for backend in backends:
            transport._backend = backend
            if backend is backends[2]:
                transport.group.abort("a rank is missing")
            transport.close()
            transport.close()
    patch.undo()
    assert [backend.calls for backend in backends] == [["shutdown"], ["shutdown"], ["abort"]]
    backends[1].peers_have_closed.set()


@pytest.mark.ranks(2)
def test_a_wait_that_fails_aborts():
    def interrupted(works):
        raise KeyboardInterrupt

    with connected() as transport:
        backend = transport._backend = Ending()
        transport._host_wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            transport.finish()
    assert backend.calls == ["abort"]


class Named:
    """A transport that tells that it was asked."""

    exchange = exchange_bytes = None

    def __init__(self, name, group=None):
        self.name, self.group = name, group

    def all_gather(self, shard, plan, num_copies, num_read):
        return [self.name] * num_copies

    def gather_to_first(self, tensors):
        return [(self.name, t.plan) for t in tensors for _ in range(t.num_copies)]


class OnGpu:
    """What a tensor of a GPU looks like here."""

    is_cuda = True


def on_gpu(plan):
    gathered = Gathered(plan, [0], torch.zeros(1))
    gathered.shard = OnGpu()
    return gathered


def test_tensors_go_by_their_device():
    group = SimpleNamespace(rank=0, size=1)
    way = ByDevice(Named("cpu", group), Named("gpu"))
    assert way.name == "gpu"
    assert way.all_gather(torch.zeros(1), None, 2) == ["cpu", "cpu"]
    assert way.all_gather(OnGpu(), None, 1) == ["gpu"]
    some = [on_gpu("a"), Gathered("b", [0], torch.zeros(1), 2), on_gpu("c")]
    expected = [("gpu", "a"), ("cpu", "b"), ("cpu", "b"), ("gpu", "c")]
    assert way.gather_to_first(some) == expected
    assert way.gather_to_first(some[::2]) == [("gpu", "a"), ("gpu", "c")]
    group.rank = 1
    assert way.gather_to_first(some) is None
