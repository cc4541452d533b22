"""The formulas of what moves between hosts: against what real runs, and the kernel, count."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import models
from counted_traffic import counting, hosts, take
from flex_model import FlexModel, HookFunction
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.costs import SUMMED_BYTES, BetweenHosts
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shard, ShardLayout
from flex_model.distributed.transports.transport import Gathered

PREAMBLE_BYTES = 48  # of each message of gloo's


# ---- Real runs -----------------------------------------------------------------------------------


def double(module, full, save_ctx, modules):
    return full * 2


class Model(models.MLP):
    """With a term that is the same on all data-parallel ranks: it does not depend on the batch."""

    columns = ("fc1", "pos")

    def __init__(self):
        super().__init__()
        self.pos = nn.Linear(6, 8)
        self.register_buffer("table", torch.randn(1, 6))

    def forward(self, x):
        return self.out(self.fc2(self.act(self.fc1(self.inp(x)) + self.pos(self.table))))


SITES = {
    "edit": [
        ("fc1", double, "forward"),
        ("act", double, "forward_pre"),
        ("inp", double, "forward"),
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


def check_run(tp, dp, where, settings, sites, monkeypatch):
    made = counting(monkeypatch)
    mesh = models.mesh(dp, tp)
    with hosts(where):
        model = models.seeded(Model).double()
        if tp > 1:
            model = models.tensor_parallel(model, mesh["tp"].get_group())
        flex = FlexModel(model, records := {}, device_mesh=mesh, **settings)
        for i, (name, edit, kind) in enumerate(SITES[sites]):
            flex._register(HookFunction(name, None, edit, output_name=f"{i} {name} {kind}"), kind)
        full = models.random(4 * dp, 6)
        x = full.chunk(dp)[mesh.get_local_rank("dp")]
        dry = flex.dry_run(x)
        assert all(row.layout is not None for row in dry), dry
        communicator = flex._core.communicator
        names = communicator.hosts
        for _ in range(2):  # what the first one has to find out, the second one knows
            records.clear()
            take(made, names)
            output = flex(x)
            forward = take(made, names)
            kept = sum(record.nbytes for of_one in records.values() for record in of_one)
            output.square().sum().backward()
            backward = take(made, names)
        in_all = sum(record.nbytes for of_one in records.values() for record in of_one)
        for predicted, counted in ((dry.forward, forward), (dry.backward, backward)):
            between = predicted.between
            none = (0,) * len(set(names))
            got = tuple(one or none for one in (between.sent, between.received, between.messages))
            assert got == counted, dry
        for row, cost in zip(dry, flex.explain()):
            moved = (row.forward + row.backward).bytes_by_rank or (0,) * tp * dp
            assert moved[dist.get_rank()] == cost.bytes_moved, (row, cost)
        if dist.get_rank() == 0:
            assert dry.forward.record_bytes == kept
            assert dry.backward.record_bytes == in_all - kept
        assert (sum(forward[0]) > 0) == (where != "one host")
        flex.restore()


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
@pytest.mark.parametrize("settings, sites", CASES, ids=str)
@pytest.mark.parametrize("tp, dp", [(2, 1), (1, 2)])
def test_a_run_on_two_ranks_moves_what_is_predicted(tp, dp, settings, sites, monkeypatch):
    for where in ("one host", "two hosts"):
        check_run(tp, dp, where, settings, sites, monkeypatch)


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("settings, sites", CASES, ids=str)
@pytest.mark.parametrize(
    "tp, dp",
    [
        pytest.param(4, 1, marks=pytest.mark.slow),
        (2, 2),
        pytest.param(1, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_four_ranks_moves_what_is_predicted(tp, dp, settings, sites, monkeypatch):
    for where in ("two hosts", "interleaved hosts", "a host of each"):
        check_run(tp, dp, where, settings, sites, monkeypatch)


LARGE = [({}, "all"), ({"edit_on": "rank0"}, "all"), ({"output_ranks": "all"}, "all")]


@pytest.mark.slow
@pytest.mark.ranks(8, timeout=900)
@pytest.mark.parametrize("settings, sites", LARGE, ids=str)
@pytest.mark.parametrize("tp, dp", [(8, 1), (4, 2), (2, 4)])
def test_a_run_on_eight_ranks_moves_what_is_predicted(tp, dp, settings, sites, monkeypatch):
    for where in ("two hosts", "interleaved hosts", "four hosts", "a host of each"):
        check_run(tp, dp, where, settings, sites, monkeypatch)


@pytest.mark.slow
@pytest.mark.ranks(16, timeout=1800)
@pytest.mark.parametrize("settings, sites", LARGE[:2], ids=str)
def test_a_run_on_sixteen_ranks_moves_what_is_predicted(settings, sites, monkeypatch):
    for where in ("four hosts", "interleaved hosts", "a host of each"):
        check_run(4, 4, where, settings, sites, monkeypatch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("where", ["two hosts", "interleaved hosts", "a host of each"])
def test_sums_and_broadcasts_move_what_is_predicted(where, monkeypatch):
    made = counting(monkeypatch)
    with hosts(where):
        communicator = Communicator(Mesh.from_sizes(2, 1, 2), 30.0)
        between = BetweenHosts(communicator.mesh, communicator.hosts)
        for axes in (("dp", "tp"), ("dp",), ("tp",)):
            communicator.transport(axes)
            for size in (3, 3000, 100_003):
                take(made, between.hosts)
                communicator.all_reduce_sum(axes, torch.ones(size))
                of_run = between.all_reduce(axes, [4 * size] * 4)
                none = (0,) * len(set(between.hosts))
                predicted = of_run.sent or none, of_run.received or none, of_run.messages or none
                assert predicted == take(made, between.hosts), (axes, size)
                num_hosts = len(none)
                if size > 10_000 and len(axes) == 2:  # in parts: not each summand to each host
                    parts = (4 // num_hosts + 1) * 4 * size * (num_hosts - 1) / num_hosts
                    assert max(of_run.sent) <= 1.001 * parts
        for size in (3, 3000, 100_003):
            take(made, between.hosts)
            full = torch.arange(size)
            got = communicator.broadcast(full if dist.get_rank() == 0 else None, full * 0)
            assert torch.equal(got, full)
            of_run = between.broadcast(8 * size)
            assert (of_run.sent, of_run.received, of_run.messages) == take(made, between.hosts)
        communicator.close()


def sharded():
    """For the command: the model of ``check_run`` on two data- by two tensor-parallel ranks."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    return models.tensor_parallel(models.seeded(Model).double(), group)


def command(folder, edit_on):
    """What the command predicts of some hooks, by what they are in."""
    hooks = folder / "hooks.txt"
    hooks.write_text(
        "# of all kinds\n\nfc1 edit  # the first\npos read\nac? edit forward_pre\n"
        "fc* read full_backward_pre\n"
    )
    arguments = [f"{__file__}:sharded", "--tp", "2", "--dp", "2", "--hosts", "2", "--json"]
    arguments += ["--input", "8,6:float64", "--hooks", str(hooks), "--edit-on", edit_on]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "flex_model", "inspect", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.ranks(4, timeout=200)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_the_command_predicts_what_a_run_moves(edit_on, tmp_path, monkeypatch):
    made, mesh, rank = counting(monkeypatch), models.mesh(2, 2), dist.get_rank()
    with hosts("two hosts"):
        flex = FlexModel(sharded(), records := {}, device_mesh=mesh, edit_on=edit_on)
        for name, edit, kind in (
            ("fc1", double, "forward"),
            ("pos", None, "forward"),
            ("act", double, "forward_pre"),
            ("fc1", None, "full_backward_pre"),
            ("fc2", None, "full_backward_pre"),
        ):
            flex._register(HookFunction(name, None, edit, output_name=name + kind), kind)
        x = models.random(8, 6).chunk(2)[mesh.get_local_rank("dp")].requires_grad_()
        counter = flex._core.communicator
        for _ in range(2):
            records.clear()
            take(made, counter.hosts)
            numbers = [(counter.sequence, counter.num_payloads)]
            output = flex(x)
            counts = [take(made, counter.hosts)]
            numbers.append((counter.sequence, counter.num_payloads))
            output.square().sum().backward()
            counts.append(take(made, counter.hosts))
            numbers.append((counter.sequence, counter.num_payloads))
        flex.restore()
    if rank > 0:
        return
    rows = command(tmp_path, edit_on)["rows"]
    assert [row["hooks"] for row in rows[-2:]] == ["all hooks, and what they share"] * 2
    for i, row in enumerate(rows[-2:]):
        sent, received, messages = counts[i]
        moved = [after - before for before, after in zip(numbers[i], numbers[i + 1])]
        assert [row["headers"], row["transfers"]] == moved
        assert row["messages"] == max(messages)
        assert row["bytes_on_busiest_link"] == max(*sent, *received)
    kept = sum(record.nbytes for of_one in records.values() for record in of_one)
    assert sum(row["record_bytes"] for row in rows[-2:]) == kept


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


@pytest.mark.ranks(4)
def test_the_kernel_counts_what_the_formulas_of_gloo_say():
    """Four hosts of a rank."""
    with contextlib.ExitStack() as stack, hosts("a host of each"):
        before = tcp_sockets(stack)
        communicator = Communicator(Mesh.from_sizes(4, 1, 1), 30.0)
        stack.callback(communicator.close)
        now = tcp_sockets(stack)
        made = [one for name, one in now.items() if name not in before]
        check_transfers(communicator, made)


def check_transfers(communicator, sockets):
    rank = communicator.mesh.group_rank
    between = BetweenHosts(communicator.mesh, communicator.hosts)
    assert len(set(between.hosts)) == 4
    rows = [20_000, 30_000, 0, 10_000]
    full = torch.arange(60_000)
    shard, held = full.split(rows)[rank], [8 * n for n in rows]
    shapes = [(n,) for n in rows]
    spec = TensorSpec.of(communicator, ShardLayout(tp=Shard(0)), shapes, full.dtype)
    gathered = Gathered(spec.plan, list(range(4)), shard)
    on_first = full if rank == 0 else None
    large = torch.zeros(SUMMED_BYTES // 8 + 1000)

    def transfers(axes):
        yield lambda: communicator.exchange(torch.arange(9)), between.exchange(72)
        yield (
            lambda: communicator.all_gather(axes, shard, spec.plan),
            between.all_gather(axes, held),
        )
        yield (
            lambda: communicator.all_reduce_sum(axes, large.double()),
            between.all_reduce(axes, [8 * large.numel()] * 4),
        )
        yield (
            lambda: communicator.gather_to_first(axes, [gathered]),
            between.to_first(axes, held),
        )
        yield (
            lambda: communicator.scatter_from_first(axes, on_first, shard, spec.plan),
            between.from_first(axes, held),
        )
        yield lambda: communicator.broadcast(on_first, full), between.broadcast(full.nbytes)

    for i, (transfer, predicted) in enumerate(transfers(spec.axes)):
        dist.barrier()
        start = bytes_sent(sockets)
        transfer()
        dist.barrier()
        more = bytes_sent(sockets) - start - predicted.sent[rank]
        # Of each message one is sent before it, and one comes back; or one of them.
        most = 2 * (predicted.messages[rank] + max(predicted.messages))
        assert more % PREAMBLE_BYTES == 0 and 0 <= more <= PREAMBLE_BYTES * most, (i, more)


def test_steps_and_the_time_of_links():
    """Eight hosts of two ranks."""
    names = tuple(f"host {rank // 2}" for rank in range(16))
    mesh = Mesh(tuple(range(16)), 0, 1, 2, 8)
    between = BetweenHosts(mesh, names)
    header = between.exchange(64)
    assert (header.steps, header.waited_bytes, header.most_messages) == (3, 7 * 128, 3)
    assert header.sent == header.received == (7 * 128,) * 8
    small, large = between.broadcast(1000), between.broadcast(80_000)
    sent = small
    assert (large.steps, large.waited_bytes) == (1 + 3, 2 * 70_000)
    assert (sent.steps, sent.waited_bytes) == (3, 3000)
    assert sent.sent == (3000, 2000, 1000, 1000, 0, 0, 0, 0)
    assert sent.received == (0, *[1000] * 7)
    there = between.to_first(("dp", "tp"), [10] * 16)
    back = between.from_first(("dp", "tp"), [10] * 16)
    assert there.received == back.sent == (140, *[0] * 7)
    both = there + back
    assert (both.most_bytes, both.waited_bytes, both.steps) == (140, 280, 2)
    assert both.seconds(1000.0, 0.5) == pytest.approx(0.28 + 1.0)
    # Each pair of data-parallel ranks is on two hosts, and all eight pairs sum at once.
    summed = between.all_reduce(("dp",), [10] * 16)
    assert (summed.steps, summed.sent) == (1, (20,) * 8)
    one = BetweenHosts(mesh, ("host",) * 16)
    assert one.exchange(64) == one.broadcast(9) == one.to_first(("tp",), [9] * 16)
    assert one.exchange(64).most_bytes == one.exchange(64).steps == 0
