"""The costs of hooks in the steps of a pipeline: what is predicted, and what real steps count."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import models
from counted_traffic import counting, hosts, names_of, take
from flex_model import FlexModel, HookFunction, cli
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.placement import Replicate, Shard
from flex_model.inspection import hook_costs, step_costs
from flex_model.inspection.offline import run_on_shapes
from pipelines import Block, make_schedule, part

ROWS, NUMBER, LAYERS = 4, 3, 4  # rows of a micro-batch and data-parallel rank
HOOKS = """
emb read
layers.*.fc1 edit        # sharded over tp, on every stage
layers.*.fc2 read        # the same on all tp ranks
layers.1.act read forward_pre
layers.*.act edit full_backward
layers.2 read full_backward_pre
layers.3.shift edit      # no rows of the batch
layers.3.shift read
head read
"""


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8))

    def forward(self, ones):
        return ones * self.weight


class ShiftedBlock(Block):
    """Adds what is the same in all rows."""

    def __init__(self, width):
        super().__init__(width)
        self.shift = Shift()
        self.register_buffer("ones", torch.ones(1, width))

    def forward(self, x):
        return super().forward(x) + self.shift(self.ones)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(8, 8)
        self.layers = nn.ModuleList(ShiftedBlock(8) for _ in range(LAYERS))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Loses(Model):
    """Behind its blocks is a module whose output has no known layout."""

    def __init__(self):
        super().__init__()
        self.loses = Scrambled(8, 8)

    def forward(self, x):
        return self.loses(super().forward(x) @ x.new_ones(3, 8))


class Scrambled(nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten().unfold(0, 8, 1)


def whole():
    return models.seeded(Model)


def sharded(model, mesh):
    """Over tp, if there is more than one rank along it."""
    for layer in model.layers if mesh.size() > 1 else ():
        if isinstance(layer, Block):
            parallelize_module(layer, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    return model


def for_one_stage():
    """For the command: the unsplit model on the ranks of a stage, all of them along tp."""
    if not dist.is_initialized():
        return whole()
    tp = int(os.environ.get("TP", "1"))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    return sharded(whole(), mesh["tp"])


def predicted(folder, pp, dp, tp):
    """What is predicted, by where the ranks are and edit: of another process, for a run on shapes
    makes its own groups.
    """
    (folder / "hooks.txt").write_text(HOOKS)
    done = subprocess.run(
        [sys.executable, __file__, str(folder / "hooks.txt"), *map(str, (pp, dp, tp))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TP": str(tp)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def print_predictions(path, pp, dp, tp):
    size = pp * dp * tp
    lines = hook_costs.read(path)
    inputs = [((dp * ROWS, 8), "float32")]
    run = run_on_shapes(f"{__file__}:for_one_stage", tp, dp, inputs)
    link, found = hook_costs.Link(1e9, 1e-5), {}
    for where in names_of(size):
        for edit_on in ("all", "rank0"):
            of_all = step_costs.predict_step(
                run, lines, names_of(size)[where], edit_on, link, pp, NUMBER
            )
            costs = {part.name: part.cost for part in of_all.parts if part.when == "step"}
            (total,) = (cost for name, cost in costs.items() if name == "all stages")
            between = total.between
            found[f"{where}, {edit_on}"] = {
                "traffic": [between.sent, between.received, between.messages],
                "headers": [cost.headers for cost in costs.values()],
                "transfers": total.payloads,
                "record_bytes": total.record_bytes,
            }
    print(json.dumps(found))


def double(module, full, save_ctx, modules):
    return full * 2


def register(flex):
    for i, line in enumerate(HOOKS.strip().splitlines()):
        name, what, *kind = line.partition("#")[0].split()
        edit = double if what == "edit" else None
        for one in [name.replace("*", str(n)) for n in range(LAYERS if "*" in name else 1)]:
            flex._register(
                HookFunction(one, None, edit, output_name=f"{i} {one}"), *kind or ["forward"]
            )


def counted(where, edit_on, kind, mesh, monkeypatch):
    """What the third step of a FlexModel moves."""
    made, widths = counting(monkeypatch), []
    pad = Communicator.exchange_padded

    def exchange_padded(communicator, data, width):
        widths.append(width)
        return pad(communicator, data, width)

    monkeypatch.setattr(Communicator, "exchange_padded", exchange_padded)
    x = models.random(mesh["dp"].size() * ROWS * NUMBER, 8, dtype=torch.float32)
    x = x.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    with hosts(where):
        schedule = make_schedule(
            kind,
            whole(),
            NUMBER,
            mesh["pp"].get_group(),
            cut=lambda *args: sharded(part(*args), mesh["tp"]),
            loss_fn=lambda out, target: out.square().mean(),
        )
        sizes = {
            f"{axis}_parallel_size": mesh[name].size()
            for axis, name in (("pipeline", "pp"), ("data", "dp"), ("tensor", "tp"))
        }
        records = {}
        with FlexModel(schedule, records, edit_on=edit_on, **sizes) as flex:
            register(flex)
            communicators = flex._runner.communicators
            names = communicators["all"].hosts
            for _ in range(3):
                widths.clear()
                take(made, names)
                before = [(one.sequence, one.num_payloads) for one in communicators.values()]
                flex(x, target=torch.zeros(len(x)))
                traffic = take(made, names)
            after = [(one.sequence, one.num_payloads) for one in communicators.values()]
            numbers = {
                name: [new - old for new, old in zip(now, then)]
                for name, now, then in zip(communicators, after, before)
            }
            assert numbers.pop("line", [0, 0]) == [0, 0]
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, numbers)
    kept = sum(record.nbytes for of_one in records.values() for record in of_one)
    return traffic, list(widths), of_ranks, kept


def check(folder, kind, pp, dp, tp, monkeypatch):
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    size, found = pp * dp * tp, {}
    for where in names_of(size):
        for edit_on in ("all", "rank0"):
            with monkeypatch.context() as context:
                found[f"{where}, {edit_on}"] = counted(where, edit_on, kind, mesh, context)
    if dist.get_rank() > 0:
        return
    expected = predicted(folder, pp, dp, tp)
    for case, (traffic, widths, of_ranks, kept) in found.items():
        predicted_one = expected[case]
        names = names_of(size)[case.partition(",")[0]]
        assert len(widths) == 2  # the texts at the start and the end, whose bytes are not predicted
        world = step_costs.Step(None, names, True, NUMBER, 0).world
        sent, received, messages = map(list, predicted_one["traffic"])
        for width in widths:
            text = world.exchange(width)
            sent = [a + b for a, b in zip(sent, text.sent or [0] * len(sent))]
            received = [a + b for a, b in zip(received, text.received or [0] * len(sent))]
        assert [list(one) for one in traffic] == [sent, received, messages], case
        of_stages = [of_ranks[stage * dp * tp].get("stage", [0, 0]) for stage in range(pp)]
        if dp * tp == 1:  # alone, without headers
            of_stages = [[0, 0]] * pp
        both = [*of_stages, of_ranks[0]["all"]]
        headers = [number for number, _ in both]
        assert predicted_one["headers"] == [*headers, sum(headers)], case
        assert predicted_one["transfers"] == sum(number for _, number in both), case
        assert predicted_one["record_bytes"] == kept, case


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    "kind",
    [ScheduleGPipe, pytest.param(Schedule1F1B, marks=pytest.mark.slow)],
    ids=lambda kind: kind.__name__,
)
def test_a_step_on_two_ranks_moves_what_is_predicted(kind, tmp_path, monkeypatch):
    check(tmp_path, kind, 2, 1, 1, monkeypatch)


@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("dp, tp", [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_step_on_four_ranks_moves_what_is_predicted(dp, tp, tmp_path, monkeypatch):
    check(tmp_path, Schedule1F1B, 2, dp, tp, monkeypatch)


@pytest.mark.slow
@pytest.mark.ranks(8, timeout=600)
def test_a_step_on_eight_ranks_moves_what_is_predicted(tmp_path, monkeypatch):
    check(tmp_path, Schedule1F1B, 2, 2, 2, monkeypatch)


def test_layouts_are_known_on_a_grid(monkeypatch):
    """DTensor's caches take the meshes of a grid's rows for one another; here is one process."""
    monkeypatch.setenv("TP", "2")
    run = run_on_shapes(f"{__file__}:for_one_stage", 2, 2, [((8, 8), "float32")])
    pairs = {name: {one.pair for one in ranks} for name, _, ranks in run.calls}
    for layer in range(LAYERS):
        assert pairs[f"layers.{layer}"] == {(Shard(0), Replicate())}
        assert pairs[f"layers.{layer}.fc1"] == {(Shard(0), Shard(1))}


def test_hooks_without_a_layout_are_in_no_sum(tmp_path, capsys):
    (tmp_path / "hooks.txt").write_text("emb read\nloses read\n")
    command = ["inspect", f"{__file__}:Loses", "--dp", "2", "--pp", "2", "--input", "8,8"]
    assert cli.main([*command, "--hooks", str(tmp_path / "hooks.txt"), "--microbatches", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^\?: loses \(forward, read\), stage 1: a run would raise .*; no sum", printed, re.M
    )
    (sums,) = re.findall("^all stages .*", printed, re.M)
    assert "256 B" in sums  # of 8 x 8 numbers


def test_the_command_prints_the_stages(tmp_path, capsys):
    (tmp_path / "hooks.txt").write_text("layers.*.fc1 edit\nhead read\n")
    command = ["inspect", f"{__file__}:for_one_stage", "--dp", "2", "--pp", "2", "--hosts", "4"]
    command += ["--input", f"{2 * ROWS * NUMBER},8", "--microbatches", str(NUMBER)]
    command += ["--hooks", str(tmp_path / "hooks.txt")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    title = "2 stages x 2 ranks, 3 micro-batches; stages begin at the inputs, layers.2 on 4 hosts"
    assert printed.startswith(title)
    for row in (
        r"layers\.\*\.fc1 \(forward, edit\), stage 1 +forward +6 ",
        r"head \(forward, read\), stage 1 +forward +3 ",
        "stage 0, with what its hooks share +step ",
        "start and end, of all ranks +step .* 2 +1 ",
        "all stages +step ",
    ):
        assert re.search(row, printed), (row, printed)


@pytest.mark.parametrize(
    "hooks, more, message",
    [
        ("* read", [], "spread over the stages; hook a module that one of them has"),
        ("layers.0.fc1 read", ["--pp", "3"], "have no 3 equal parts"),
        ("layers.0.fc1 read", ["--microbatches", "12"], "micro-batches of one row"),
        ("layers.0.fc1 read", ["--microbatches", "5"], "5 micro-batches of one size"),
        ("layers.0.fc1 read", ["--pp", "1", "--microbatches", "2"], "is for --pp"),
        ("layers.0.fc1 read", ["--hosts", "3"], "2 ranks do not fill 3 hosts"),
        ("layers.1.shift read full_backward_pre", [], "have no rows of the batch"),
    ],
)
def test_what_cant_be_predicted_is_refused(hooks, more, message, tmp_path, capsys):
    (tmp_path / "hooks.txt").write_text(hooks)
    command = ["inspect", f"{__file__}:for_one_stage", "--pp", "2", "--input", "12,8"]
    assert cli.main([*command, "--hooks", str(tmp_path / "hooks.txt"), *more]) == 1
    assert message in capsys.readouterr().err


if __name__ == "__main__":
    print_predictions(sys.argv[1], *map(int, sys.argv[2:]))
