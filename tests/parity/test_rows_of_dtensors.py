"""Rows that are split over data-parallel ranks by a DTensor, beside weights that are DTensors, too:
autograd sums gradients over the ranks, and nothing averages them. Against the unsharded twin, whose
loss is the same number, or the sum of the ranks' own.
"""

import copy

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction
from pipelines import alone_group
from shared_edits import mixing
from training_steps import mixing_with_probe, probe_of

BATCH = models.random(4, 6)


class Model(nn.Module):
    """Rows, a tensor that they share, and a layer that computes on plain tensors."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(models.random(8))
        self.rows, self.shared, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.local, self.last = nn.Tanh(), nn.Identity()

    def forward(self, x):
        h = self.rows(x) * self.shared(self.table)
        if not isinstance(h, DTensor):
            return self.last(self.out(self.local(h)))
        plain = self.local(h.to_local())
        h = DTensor.from_local(plain, h.device_mesh, h.placements, run_check=False)
        return self.last(self.out(h))


def model():
    return models.seeded(Model).double()


def on_dp(mesh):
    return distribute_module(model(), mesh["dp"])


def on_both(mesh):
    """The weights of rows along tp, all others whole on every rank."""

    def place(name, module, mesh):
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            dim = {"rows": 0, "out": 1 if leaf == "weight" else None}.get(name)
            along_tp = Replicate() if dim is None else Shard(dim)
            placed = distribute_tensor(parameter.detach(), mesh, [Replicate(), along_tp])
            module.register_parameter(leaf, nn.Parameter(placed))

    return distribute_module(model(), mesh, place)


def rows_on(mesh):
    return distribute_tensor(BATCH, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)])


def of_all(output):
    loss = output.sin().square().mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def own(output):
    """Each rank's of its rows."""
    if not isinstance(output, DTensor):
        return sum(own(half) for half in output.chunk(2)) if len(output) == 4 else of_all(output)
    return of_all(output.to_local())


def step(model, x, site, loss, **options):
    """All that a backward gives, with edits of the site, and of its gradient."""
    records = {}
    with FlexModel(model, records, output_ranks="all", **options) as flex:
        flex.register_trainable_module("probe", probe_of(4 if site in ("out", "last") else 8))
        flex.register_forward_hook(HookFunction(site, None, mixing_with_probe, output_name="edit"))
        for name in ("rows", "shared", "last", "local"):
            flex.register_full_backward_pre_hook(
                HookFunction(name, None, mixing if name == "rows" else None)
            )
        flex.register_hook(HookFunction("rows.weight"))
        loss(flex(x)).backward()
        of_parameters = {n: flex.get_module_gradient(n) for n, _ in Model().named_parameters()}
        probe = flex.trainable_modules["probe"]
        of_probe = {name: parameter.grad for name, parameter in probe.named_parameters()}
    return {name: record[0] for name, record in records.items()} | of_parameters | of_probe


def check(sharded, x, site, loss, **options):
    expected = step(model(), BATCH, site, loss, process_group=alone_group())
    found = step(sharded, x, site, loss, **options)
    if "edit_on" in options and dist.get_rank():  # trainable modules have gradients on rank 0 alone
        found.update(weight=expected["weight"], bias=expected["bias"])
    assert_close(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss", [of_all, own])
@pytest.mark.parametrize("site", ["rows", "shared", "local", "last"])
def test_along_dp(site, loss):
    """Gradients at hooks, and of trainable modules, were the twin's by dp."""
    mesh = models.mesh(2, 1)["dp"]
    check(on_dp(models.mesh(2, 1)), rows_on(mesh), site, loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["rows", "shared"])
def test_edits_on_rank_0(site):
    check(on_dp(models.mesh(2, 1)), rows_on(models.mesh(2, 1)["dp"]), site, of_all, edit_on="rank0")


@pytest.mark.ranks(2)
def test_verify_gives_the_reference_all_rows():
    """It gathered the shards as if each was as large as the whole: a RuntimeError."""
    mesh = models.mesh(2, 1)
    with FlexModel(on_dp(mesh), {}) as flex:
        flex.register_forward_hook(HookFunction("rows"))
        assert flex.verify(model(), rows_on(mesh["dp"])).is_equal


@pytest.mark.ranks(4)
def test_along_dp_and_tp():
    mesh = models.mesh(2, 2)
    for site in ("rows", "shared", "local"):
        check(on_both(mesh), rows_on(mesh), site, of_all)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(1), Replicate()]])
@pytest.mark.parametrize("rows", [4, 2])
def test_rows_and_positions_that_are_joined(placements, rows):
    """The tokens are strided shards, also where as many as tp has ranks."""
    layers = models.seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Flatten(0, 1), nn.Tanh()))
    layers.double()
    batch = models.random(rows, 4, 6)

    def mix(module, tokens, *_):
        return tokens.cumsum(0) + tokens.flip(1)

    def step(model, x, **options):
        records = {}
        with FlexModel(model, records, output_ranks="all", **options) as flex:
            flex.register_forward_hook(HookFunction("1", None, mix, output_name="tokens"))
            flex.register_full_backward_hook(HookFunction("2", None, mix, output_name="gradient"))
            loss = of_all(flex(x))
            loss.backward()
            return loss.detach(), records, flex.get_module_gradient("0.weight")

    want = step(copy.deepcopy(layers), batch, process_group=alone_group())
    mesh = models.mesh(2, 2)
    got = step(distribute_module(layers, mesh), distribute_tensor(batch, mesh, placements))
    assert_close(got, want)


@pytest.mark.ranks(2)
def test_a_plain_weight_beside_them():
    """Users sum its gradients over the ranks."""
    mesh, seen = models.mesh(2, 1), []
    for module, x, options in (
        (model(), BATCH, {"process_group": alone_group()}),
        (on_dp(mesh), rows_on(mesh["dp"]), {}),
    ):
        module.local = models.seeded(nn.Linear, 8, 8).double()
        with FlexModel(module, records := {}, output_ranks="all", **options) as flex:
            flex.register_hook(HookFunction("local.weight", None, mixing))
            of_all(flex(x)).backward()
        grad = module.local.weight.grad
        if not options:
            dist.all_reduce(grad)
        seen.append((records["local.weight"][0], grad))
    assert_close(*seen)


class Headed(nn.Module):
    """Plain weights, and a loss of all rows by a DTensor."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = models.seeded(nn.Linear, 6, 8), nn.Tanh()

    def forward(self, x):
        h = self.fc(x)
        if len(x) < len(BATCH):
            h = DTensor.from_local(h, models.mesh(2, 1)["dp"], [Shard(0)], run_check=False)
        return self.head(h)


def gradients_of(model, x, loss, layer="fc", head="head", **options):
    records = {}
    with FlexModel(model, records, output_ranks="all", **options) as flex:
        flex.register_trainable_module("probe", probe_of(8))
        flex.register_forward_hook(HookFunction(head, None, mixing_with_probe))
        for name in (layer, head):
            flex.register_full_backward_pre_hook(HookFunction(name, output_name=f"{name}.grad"))
        loss(flex(x)).backward()
        found = {name: records[f"{name}.grad"][0] for name in (layer, head)}
        found["weight"] = flex.get_module_gradient(f"{layer}.weight")
        return found | {"probe": flex.trainable_modules["probe"].weight.grad}


def half(x):
    return x.chunk(2)[dist.get_rank()]


def replicate(model):
    """DDP by means of FSDP2: weights are replicated DTensors."""
    module = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    return module.replicate(model, mesh=models.mesh(2, 1)["dp"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [DistributedDataParallel, fully_shard, replicate])
def test_gradients_that_are_averaged(shard):
    """The loss of all, times dp: what DDP and FSDP average."""
    found = gradients_of(shard(Headed().double()), half(BATCH), lambda output: 2 * of_all(output))
    group = alone_group()
    assert_close(found, gradients_of(Headed().double(), BATCH, of_all, process_group=group))


@pytest.mark.ranks(2)
def test_unknown_sums_are_refused():
    """Users may sum or average the gradients of plain weights."""
    with pytest.raises(HookError, match=r"'head': its tensor is a DTensor along dp, and the model"):
        gradients_of(Headed().double(), half(BATCH), of_all, data_parallel_size=2)


def averaging(leaf):
    def plain(module):
        return module._parameters[leaf].to_local(grad_placements=[Partial("avg")])

    return property(plain)


@pytest.mark.ranks(2)
def test_weights_that_average_their_gradients():
    """As torchtitan's SimpleFSDP does it: a layer computes with plain tensors of its DTensors."""
    model = nn.Sequential(models.seeded(nn.Linear, 6, 8), nn.Tanh()).double()
    options = {"layer": "0", "head": "1"}
    expected = gradients_of(model, BATCH, of_all, process_group=alone_group(), **options)
    model.zero_grad()
    distribute_module(model, models.mesh(2, 1)["dp"])
    averaged = {leaf: averaging(leaf) for leaf in ("weight", "bias")}
    model[0].__class__ = type("Averaged", (nn.Linear,), averaged)
    assert_close(gradients_of(model, half(BATCH), of_all, **options), expected)


@pytest.mark.ranks(2)
def test_numbers_that_differ_are_refused():
    """A weight of DTensor's that FSDP2 leaves out."""
    model = distribute_module(models.seeded(nn.Linear, 6, 8), models.mesh(2, 1)["dp"])
    model = nn.Sequential(model, nn.Linear(8, 8))
    fully_shard(model, mesh=models.mesh(2, 1)["dp"], ignored_params={*model[0].parameters()})
    with FlexModel(model, {}) as flex:
        flex.register_full_backward_hook(HookFunction("1"))
        with pytest.raises(HookError, match=r"divided: of '0.bias' by 1, of '' by 2 .*one number"):
            flex(half(BATCH))
