"""What is predicted of transfers, against what real runs count; and what leaves a host."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import models
from counted_traffic import counting, hosts, take
from flex_model import FlexModel, HookFunction, cli
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.costs import SUMMED_BYTES
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import GRID, Mesh
from flex_model.distributed.placement import Replicate, Shard, ShardLayout
from flex_model.distributed.transports.transport import Gathered
from flex_model.inspection.offline import run_on_shapes
from shared_edits import double
from tiers import grid_but

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


def sharded():
    """For the command: the model of ``check_run`` on two data- by two tensor-parallel ranks."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    return models.tensor_parallel(models.seeded(Model).double(), group)


# ---- Between hosts -------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("where", ["two hosts", "a host of each"])
def test_what_leaves_a_host(where, monkeypatch):
    """As docs/transports.md has it: by hosts, what gloo sends."""
    made = counting(monkeypatch)
    with hosts(where):
        to = Communicator(Mesh.from_sizes(4, 1, 1), 30.0)
    names = to.transport(GRID).group.hosts.names
    rank, num_hosts = to.mesh.group_rank, len(set(names))
    rows, full = [80, 40, 0, 60], torch.arange(180 * 64).reshape(180, 64)
    of_hosts = [sum(part) * 512 for part in (rows[:2], rows[2:])]
    shard, on_first = full.split(rows)[rank], full if rank == 0 else None
    shapes = [(n, 64) for n in rows]
    spec = TensorSpec.of(to, ShardLayout(tp=Shard(0)), shapes, full.dtype)
    axes, plan = spec.axes, spec.plan

    def moved(transfer):
        take(made, names)
        transfer()
        return take(made, names)

    _, _, messages = moved(lambda: to.check_consistency(Header("tensor", site=7), "a header"))
    assert set(messages) == {math.ceil(math.log2(num_hosts))}
    sent, received, messages = moved(lambda: to.all_gather(axes, shard, plan))
    assert max(messages) == math.ceil(math.log2(num_hosts))  # none of what is empty
    there = moved(lambda: to.gather_to_first(axes, [Gathered(plan, list(range(4)), shard)]))
    back = moved(lambda: to.scatter_from_first(axes, on_first, shard, plan))
    if num_hosts == 2:
        assert sent == (of_hosts[0], of_hosts[1]) == received[::-1]
        assert there[0] == (0, of_hosts[1]) and there[2] == (0, 1)
        assert back[0] == (of_hosts[1], 0)
    summand = torch.zeros(SUMMED_BYTES // 8 + 1000).double()
    sent, _, _ = moved(lambda: to.all_reduce_sum(axes, summand))
    parts = 4 / num_hosts * (num_hosts - 1) / num_hosts
    assert max(sent) <= 1.01 * (parts + 1) * summand.nbytes
    sent, _, _ = moved(lambda: to.broadcast(on_first, torch.empty_like(full)))
    assert full.nbytes <= sent[0] < 2 * full.nbytes
    to.close()


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
    pairs = {ranks[0].hook: {one.pair for one in ranks} for ranks in run.calls}
    assert pairs["fc1", "output"] == {(Shard(0), Shard(1))}
    assert pairs["fc2", "output"] == {(Shard(0), Replicate())}


def test_hooks_without_a_layout_are_in_no_sum(tmp_path, capsys):
    (tmp_path / "hooks.txt").write_text("inp read\nloses read\n")
    command = ["inspect", f"{__file__}:Loses", "--dp", "2", "--input", "8,6"]
    assert cli.main([*command, "--hooks", str(tmp_path / "hooks.txt")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^loses  .* a run would raise an error: ", printed, re.M)
    (sums,) = re.findall("^all hooks: .*", printed, re.M)
    assert "records of 192 B" in sums  # of 8 x 6 numbers
