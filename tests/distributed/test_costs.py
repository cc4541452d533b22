"""What is recorded of transfers: against what real runs, and the kernel, count."""

import contextlib
import math
import os
import re
import socket
import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import models
from counted_traffic import hosts
from flex_model import FlexModel, HookFunction, cli
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.costs import SUMMED_BYTES
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import GRID, Mesh
from flex_model.distributed.placement import Replicate, Shard, ShardLayout
from flex_model.distributed.transports.transport import Gathered
from flex_model.inspection.offline import run_on_shapes
from recorded_traffic import TrafficRecorder
from shared_edits import double
from tiers import grid_but

PREAMBLE_BYTES = 48  # of each message of gloo's


# ---- Real runs -----------------------------------------------------------------------------------


def double_both(module, fulls, save_ctx, modules):
    return [full * 2 for full in fulls]


class Pair(nn.Module):
    def forward(self, x):
        return x, x.sin()


class Model(models.MLP):
    """With a term that is the same on all data-parallel ranks: it does not depend on the batch."""

    columns = ("fc1", "pos")

    def __init__(self):
        super().__init__()
        self.pos = nn.Linear(6, 8)
        self.register_buffer("table", torch.randn(1, 6))
        self.pair = Pair()

    def forward(self, x):
        one, other = self.pair(self.act(self.fc1(self.inp(x)) + self.pos(self.table)))
        return self.out(self.fc2(one + other))


SITES = {
    "edit": [
        ("fc1", double, "forward"),
        ("act", double, "forward_pre"),
        ("inp", double, "forward"),
        ("pair", double_both, "forward"),
    ],
    "read": [("fc1", None, "forward"), ("act", None, "forward"), ("inp", None, "forward")],
    "shared": [("pos", double, "forward"), ("pos", None, "forward")],
    "backward": [
        ("fc1", double, "full_backward_pre"),
        ("act", None, "full_backward_pre"),
        ("out", None, "full_backward_pre"),
        ("out.weight", double, "tensor"),
        ("out.bias", None, "tensor"),
    ],
}
SITES["all"] = [site for of_one in SITES.values() for site in of_one]


def check_run(tp, dp, settings, sites):
    mesh = models.mesh(dp, tp)
    model = models.seeded(Model).double()
    if tp > 1:
        model = models.tensor_parallel(model, mesh["tp"].get_group())
    flex = FlexModel(model, records := {}, device_mesh=mesh, **settings)
    for i, (name, edit, kind) in enumerate(SITES[sites]):
        tensors = (0, 1) if name == "pair" else 0
        hook = HookFunction(name, None, edit, tensors, output_name=f"{i} {name} {kind}")
        flex._register(hook, kind)
    full = models.random(4 * dp, 6)
    x = full.chunk(dp)[mesh.get_local_rank("dp")]
    dry = flex.dry_run(x)
    assert all(row.layout is not None for row in dry), dry
    largest = max((math.prod(row.full_shape) for row in dry if row.edits), default=0)
    assert dry.edited_bytes == 2 * 8 * largest
    counter = Counter(flex._core.communicator)
    for _ in range(2):  # what the first one has to find out, the second one knows
        records.clear()
        counter.take()
        output = flex(x)
        forward = counter.take()
        kept = sum(record.nbytes for of_one in records.values() for record in of_one)
        output.square().sum().backward()
        backward = counter.take()
    in_all = sum(record.nbytes for of_one in records.values() for record in of_one)
    for predicted, counted in ((dry.forward, forward), (dry.backward, backward)):
        assert (predicted.headers, predicted.payloads) == counted, dry
    counted = flex.explain()
    assert set(counted.transports.values()) == {("shared_memory", "the ranks are on one host")}
    assert "bytes moved" in str(counted) and "the ranks are on one host" in str(counted)
    for row, cost in zip(dry, counted):
        moved = (row.forward + row.backward).bytes_by_rank or (0,) * tp * dp
        assert moved[dist.get_rank()] == cost.bytes_moved, (row, cost)
    if dist.get_rank() == 0:
        assert dry.forward.record_bytes == kept
        assert dry.backward.record_bytes == in_all - kept
    flex.restore()


class Counter:
    """The headers and payloads of a communicator."""

    def __init__(self, communicator):
        self._communicator, self._before = communicator, (0, 0)

    def take(self):
        """Those since the last call."""
        now = self._communicator.sequence, self._communicator.num_payloads
        before, self._before = self._before, now
        return now[0] - before[0], now[1] - before[1]


CASES = [
    ({}, "edit"),
    ({}, "read"),
    ({}, "shared"),
    ({}, "all"),
    ({"edit_on": "rank0"}, "edit"),
    ({"edit_on": "rank0"}, "all"),
    ({"output_ranks": "all"}, "all"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings, sites", grid_but(CASES, CASES[0], CASES[2], *CASES[5:]), ids=str
)
@pytest.mark.parametrize("tp, dp", [(2, 1), pytest.param(1, 2, marks=pytest.mark.grid)])
def test_a_run_on_two_ranks_moves_what_is_predicted(tp, dp, settings, sites):
    check_run(tp, dp, settings, sites)


def recorded(recorder, transfer, *args):
    """What a transfer of tensors without values moves between hosts."""
    return recorder.record(lambda to: transfer(to, *args))


def broadcast(to, size, dtype=torch.int64):
    full = torch.zeros(size, dtype=dtype)
    return to.broadcast(full + 1 if to.mesh.group_rank == 0 else None, full)


def sharded():
    """For the command: the model of ``check_run`` on two data- by two tensor-parallel ranks."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    return models.tensor_parallel(models.seeded(Model).double(), group)


# ---- The kernel's counts -------------------------------------------------------------------------


def tcp_sockets(stack):
    """The TCP sockets of this process, by what the kernel calls them."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                one = stack.enter_context(socket.socket(fileno=os.dup(int(number))))
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and one.type == socket.SOCK_STREAM:
                    found[name] = one
    return found


def bytes_sent(sockets):
    """As the kernel counts them: tcpi_bytes_sent in tcp_info, without tcpi_bytes_retrans."""
    infos = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216) for one in sockets]
    counts = [struct.unpack_from("<2Q", info, 200) for info in infos]
    return sum(sent - again for sent, again in counts)


@pytest.mark.grid
@pytest.mark.ranks(4)
def test_the_kernel_counts_what_is_recorded_of_gloo():
    """Four hosts of a rank."""
    with contextlib.ExitStack() as stack, hosts("a host of each"):
        before = tcp_sockets(stack)
        communicator = Communicator(Mesh.from_sizes(4, 1, 1), 30.0)
        stack.callback(communicator.close)
        now = tcp_sockets(stack)
        made = [one for name, one in now.items() if name not in before]
        check_transfers(communicator, made)


ROWS = [20_000, 30_000, 0, 10_000]


def transfer(to, number, full=None):
    """One transfer of each kind."""
    full = torch.empty(sum(ROWS), dtype=torch.int64) if full is None else full
    rank, shapes = to.mesh.group_rank, [(n,) for n in ROWS]
    spec = TensorSpec.of(to, ShardLayout(tp=Shard(0)), shapes, full.dtype)
    axes, shard, on_first = spec.axes, full.split(ROWS)[rank], full if rank == 0 else None
    kinds = [
        lambda: to.exchange(torch.arange(9)),
        lambda: to.all_gather(axes, shard, spec.plan),
        lambda: to.all_reduce_sum(axes, torch.zeros(SUMMED_BYTES // 8 + 1000).double()),
        lambda: to.gather_to_first(axes, [Gathered(spec.plan, list(range(4)), shard)]),
        lambda: to.scatter_from_first(axes, on_first, shard, spec.plan),
        lambda: to.broadcast(on_first, full),
    ]
    kinds[number]()
    return number + 1 < len(kinds)


def check_transfers(communicator, sockets):
    rank = communicator.mesh.group_rank
    names = tuple(communicator.transport(GRID).group.hosts.names)
    assert len(set(names)) == 4
    recorder, full = TrafficRecorder(communicator.mesh, names), torch.arange(sum(ROWS))
    number, has_more = 0, True
    while has_more:
        predicted = recorded(recorder, transfer, number)
        assert any(predicted.sent)
        dist.barrier()
        start = bytes_sent(sockets)
        has_more = transfer(communicator, number, full)
        dist.barrier()
        more = bytes_sent(sockets) - start - predicted.sent[rank]
        # Of each message one is sent before it, and one comes back; or one of them.
        most = 2 * (predicted.messages[rank] + max(predicted.messages))
        assert more % PREAMBLE_BYTES == 0 and 0 <= more <= PREAMBLE_BYTES * most, (number, more)
        number += 1


def to_first_and_back(to, back):
    """A gather of 10 bytes of each rank, or their scatter."""
    layout, shapes = ShardLayout(dp=Shard(0), tp=Shard(1)), [(1, 10)] * 16
    spec = TensorSpec.of(to, layout, shapes, torch.uint8)
    shard = torch.empty(1, 10, dtype=torch.uint8)
    if back:
        return spec.scatter_from_first(torch.empty(2, 80, dtype=torch.uint8), shard)
    return spec.gather_to_first(shard)


def test_messages_of_eight_hosts():
    """Eight hosts of two ranks."""
    names = tuple(f"host {rank // 2}" for rank in range(16))
    mesh = Mesh(tuple(range(16)), 0, 1, 2, 8)
    recorder = TrafficRecorder(mesh, names)

    def exchange(to):
        return to.exchange(torch.empty(64, dtype=torch.uint8))

    header = recorded(recorder, exchange)
    assert (header.most_bytes, header.most_messages) == (7 * 128, 3)
    assert header.sent == header.received == (7 * 128,) * 8
    sent, large = (recorded(recorder, broadcast, n, torch.uint8) for n in (1000, 80_000))
    assert (large.most_bytes, large.most_messages) == (2 * 70_000, 7 + 3)
    assert sent.sent == (3000, 2000, 1000, 1000, 0, 0, 0, 0)
    assert sent.received == (0, *[1000] * 7)
    there, back = (recorded(recorder, to_first_and_back, back) for back in (False, True))
    assert there.received == back.sent == (140, *[0] * 7)
    assert (there + back).most_bytes == 140
    # Each pair of data-parallel ranks is on two hosts, and all eight pairs sum at once.
    summed = recorded(recorder, lambda to: to.all_reduce_sum(("dp",), torch.zeros(5).short()))
    assert (summed.messages, summed.sent) == ((2,) * 8, (20,) * 8)
    one = TrafficRecorder(mesh, ("host",) * 16)
    for moved in recorded(one, exchange), recorded(one, broadcast, 9):
        assert moved.most_bytes == moved.most_messages == 0


# ---- The command ---------------------------------------------------------------------------------


class Scrambled(nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten().unfold(0, 8, 1)


class Loses(models.MLP):
    """Ends in a module whose output has no known layout."""

    def __init__(self):
        super().__init__()
        self.loses = Scrambled(5, 8)

    def forward(self, x):
        return self.loses(super().forward(x))


def test_layouts_are_known_on_a_grid():
    """DTensor's caches take the meshes of a grid's rows for one another; here is one process."""
    run = run_on_shapes(f"{__file__}:sharded", 2, 2, [((8, 6), "float64")])
    pairs = {name: {one.pair for one in ranks} for name, kind, ranks in run.calls if kind[0] == "o"}
    assert pairs["fc1"] == {(Shard(0), Shard(1))}
    assert pairs["fc2"] == {(Shard(0), Replicate())}


def test_hooks_without_a_layout_are_in_no_sum(tmp_path, capsys):
    (tmp_path / "hooks.txt").write_text("inp read\nloses read\n")
    command = ["inspect", f"{__file__}:Loses", "--dp", "2", "--input", "8,6"]
    assert cli.main([*command, "--hooks", str(tmp_path / "hooks.txt")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^loses  .* a run would raise an error: ", printed, re.M)
    (sums,) = re.findall("^all hooks: .*", printed, re.M)
    assert "records of 192 B" in sums  # of 8 x 6 numbers
