"""Every parameter of every framework: read in full and written back, and its gradient, without
``expected_shape``.
"""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close

import frameworks
import models
from flex_model import FlexModel, HookFunction
from tiers import grid_but, on_ranks

ROWS_IN_TEST = ("fsdp1-2", "fsdp1-orig-2", "fairscale-2")  # others: parameters/test_parameters
TWO = (
    "native-tp-2",
    "ddp-2",
    "fsdp2-2",
    "megatron-tp-2",  # a gated ``linear_fc1`` interleaves two halves
    "hf-llama-2",
    "mixture-tp-2-mixtral",  # a lone ``_StridedShard``, which torch itself can't gather
)
ROWS = on_ranks(2, *ROWS_IN_TEST, grid=TWO, timeout=180)
ROWS += on_ranks(4, grid=["hsdp-4", "tp-fsdp2-4"])


@pytest.mark.parametrize("name", ROWS)
def test_parameters_of_frameworks(name, tmp_path):
    """A row of the parity table: its parameters, and its gradients but for those that FSDP1 keeps
    in one flat parameter.
    """
    with frameworks.quiet(), frameworks.CASES[name].build(tmp_path) as pair:
        output = pair.forward(pair.oracle, pair.inputs, pair.keywords)
        (output.sin().sum() / pair.dp).backward()
        pair.start()

        def step(flex):
            found = pair.run_sharded(flex, pair.own_output(output.detach().cos()))
            expected = pair.own_output(output.detach())
            assert_close(found.detach(), expected, rtol=pair.tolerance, atol=pair.tolerance)

        has_gradients = name != "fsdp1-2"
        check(pair.oracle, pair.shard(), step, has_gradients, pair.tolerance, **pair.sizes)


def check(model, sharded, step, has_gradients=True, tolerance=1e-9, **sizes):
    """Values, new values and gradients of all parameters equal those of ``model``; collective.
    ``step(flex)``: a forward and a backward, of which ``model`` has the gradients.
    """
    with FlexModel(sharded, **sizes) as flex:
        same(flex, model)
        for name, parameter in model.named_parameters():
            for new in (2 * parameter.detach(), parameter.detach()):
                flex.set_module_parameter(name, new)
                assert torch.equal(flex.get_module_parameter(name), new), name
        step(flex)
        same(flex, model)
        for name, parameter in model.named_parameters():
            if has_gradients and parameter.grad is not None:
                full, at = flex.get_module_gradient(name), partial("{}: {}".format, name)
                apart = tolerance * max(1.0, parameter.grad.abs().max().item())
                assert_close(full, parameter.grad, rtol=0, atol=apart, msg=at)


def same(flex, model):
    read = dict(flex.iterate_parameters())
    expected = dict(model.named_parameters())
    assert sorted(read) == sorted(expected)
    for name, full in read.items():
        assert torch.equal(full, expected[name]), name
        assert type(full) is torch.Tensor and full.device.type == "cpu"


def stepping(model, batch, mine):
    """The step of ``model`` on a batch, and that of a FlexModel on this rank's rows."""
    model(batch).sin().mean().backward()
    return lambda flex: flex(mine).sin().mean().backward()


@pytest.mark.ranks(2)
def test_parameters_of_which_fsdp2_leaves_some_ranks_no_row():
    model, batch = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1)), models.random(4, 8)
    sharded = fully_shard(copy.deepcopy(model.double()), mesh=models.mesh(2, 1)["dp"])
    assert sharded[2].weight.to_local().shape[0] == 1 - dist.get_rank()
    check(model, sharded, stepping(model, batch, batch.chunk(2)[dist.get_rank()]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_what_fsdp1_does_not_give(use_orig_params):
    sharded = FSDP(models.mlp(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with FlexModel(sharded) as flex:
        if not use_orig_params:
            with pytest.raises(ValueError, match="use_orig_params=True"):
                flex.get_module_gradient("fc1.weight")
        summoned = pytest.raises(ValueError, match="summon_full_params")
        with FSDP.summon_full_params(sharded), summoned:
            flex.get_module_parameter("fc1.weight")


class Fused(nn.Module):
    """One projection of a gate and what it gates."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", grid_but([8, 6], 6))
def test_parameters_of_fsdp2_over_fused_projections(rows):
    """Torch's own placements of these name the wrong rows, so the oracle is the full tensor."""
    mesh, full = models.mesh(2, 2), models.random(2 * rows, 3)
    rank = mesh["tp"].get_local_rank()
    local = torch.cat([part.chunk(2)[rank] for part in full.chunk(2)])
    fused = [_StridedShard(0, split_factor=2)]
    sharded = Fused(DTensor.from_local(local, mesh["tp"], fused, run_check=False))
    fully_shard(sharded, mesh=mesh["dp"])
    flex = FlexModel(sharded, device_mesh=mesh)
    assert torch.equal(flex.get_module_parameter("weight"), full)
    flex.set_module_parameter("weight", 2 * full)
    assert torch.equal(flex.get_module_parameter("weight"), 2 * full)
    flex.restore()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("rows", [24, 7])
def test_parameters_of_dtensors_that_split_one_dim_twice(names, rows):
    """The shards are those of torch's definition: by the mesh's dims in their order."""
    mesh, full = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), models.random(rows, 3)
    kinds = [Shard(0), *(_StridedShard(0, split_factor=n) for n in (2, 3, 4)), Replicate()]
    refused = []
    for placements in itertools.product(kinds, kinds):
        local = full
        for axis, placement in enumerate(placements):
            if placement != Replicate():
                parts, _ = placement._split_tensor(local, 2, with_padding=False, contiguous=False)
                local = parts[mesh.get_local_rank(axis)]
        stated = {"run_check": False, "shape": full.shape, "stride": full.stride()}
        weight = DTensor.from_local(local.clone(), mesh, placements, **stated)
        with FlexModel(Fused(weight), device_mesh=mesh) as flex:
            try:
                assert torch.equal(flex.get_module_parameter("weight"), full), placements
                flex.set_module_parameter("weight", 2 * full)
                assert torch.equal(flex.module.weight.to_local(), 2 * local), placements
            except ValueError:
                refused.append(placements)
    if rows == 24:  # strided both, or of three parts in two shards
        strided = list(itertools.product(kinds[1:4], kinds[1:4]))
        assert set(refused) == {*strided, (kinds[2], kinds[0])}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hidden", grid_but([8, 7], 7))
def test_parameters_of_fsdp2_over_layers_that_shard_by_hand(hidden):
    mesh, model, batch = models.mesh(2, 2), models.mlp(hidden=hidden), models.random(4, 6)
    sharded = models.tensor_parallel(model, mesh["tp"].get_group())
    fully_shard(sharded, mesh=mesh["dp"])
    mine = models.FOUR_RANKS["tp x dp"].my_rows(batch)
    check(model, sharded, stepping(model, batch, mine), device_mesh=mesh)


@pytest.mark.ranks(4)
def test_gradients_that_hooks_see_of_fsdp2_over_layers_that_shard_by_hand():
    mesh, model, rows = models.mesh(2, 2), models.mlp(), models.FOUR_RANKS["tp x dp"].my_rows
    batch, records = models.random(4, 6), {}
    sharded = models.tensor_parallel(model, mesh["tp"].get_group())
    fully_shard(sharded, mesh=mesh["dp"])
    with FlexModel(sharded, records, device_mesh=mesh, output_ranks="all") as flex:
        for name, _ in model.named_parameters():
            flip = lambda module, full, *_: full + full.flip(0)  # noqa: E731
            flex.register_hook(HookFunction(name, editing_function=flip))
        flex(rows(batch)).sin().mean().backward()
        model(batch).sin().mean().backward()
        for name, parameter in model.named_parameters():
            assert_close(records[name], [parameter.grad], msg=partial("{}: {}".format, name))
            edited = flex.get_module_gradient(name)
            assert_close(edited, parameter.grad + parameter.grad.flip(0))


class Heads(nn.Module):
    """A column layer of which the ranks have whole heads, one more than the other."""

    def __init__(self, linear, shares):
        super().__init__()
        rank = dist.get_rank()
        self.weight = nn.Parameter(linear.weight.detach().split(shares)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().split(shares)[rank].clone())
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.ranks(2)
def test_parameters_of_which_ranks_have_unequal_shares():
    """Hooks on their gradients were refused, though their layer states the sizes."""
    linear, x, records = models.seeded(nn.Linear, 6, 12).double(), models.random(4, 6), {}
    with FlexModel(Heads(linear, [8, 4]), records, tensor_parallel_size=2) as flex:
        for name in ("weight", "bias"):
            flip = lambda module, full, *_: full + full.flip(0)  # noqa: E731
            flex.register_hook(HookFunction(name, editing_function=flip))
        flex(x).sin().sum().backward()
        linear(x).sin().sum().backward()
        for name, parameter in linear.named_parameters():
            assert torch.equal(flex.get_module_parameter(name), parameter)
            if dist.get_rank() == 0:
                assert_close(records[name], [parameter.grad])
            edited = flex.get_module_gradient(name)
            assert_close(edited, parameter.grad + parameter.grad.flip(0))
            flex.set_module_parameter(name, 2 * parameter.detach())
            assert torch.equal(flex.get_module_parameter(name), 2 * parameter)


@pytest.mark.ranks(2)
def test_shares_that_do_not_make_up_the_stated_sizes_tell_nothing():
    linear = models.seeded(nn.Linear, 6, 12).double()
    with (
        FlexModel(Heads(linear, [7, 3, 2]), tensor_parallel_size=2) as flex,
        pytest.raises(ValueError, match=r"tp=Shard\(0\)\)  # in full \(10, 6\)"),
    ):
        flex.get_module_parameter("weight")


class Column(nn.Module):
    """A column layer that gathers its output, then adds a bias that is whole on each rank."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = nn.Parameter(models.my_part(linear.weight.detach(), 0, group))
        self.bias, self.group = nn.Parameter(linear.bias.detach().clone()), group
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        part = nn.functional.linear(models.CopyToRanks.apply(x, self.group), self.weight)
        return models.Gather.apply(part, self.group, -1, False) + self.bias


@pytest.mark.ranks(2)
def test_a_whole_bias_beside_a_sharded_weight():
    """It was taken for a shard as the weight is, and given twice as long."""
    linear, x, records = models.seeded(nn.Linear, 6, 8).double(), models.random(4, 6), {}
    with FlexModel(Column(linear, dist.group.WORLD), records, tensor_parallel_size=2) as flex:
        for name in ("weight", "bias"):
            flip = lambda module, full, *_: full + full.flip(0)  # noqa: E731
            flex.register_hook(HookFunction(name, editing_function=flip))
        flex(x).sin().sum().backward()
        linear(x).sin().sum().backward()
        for name, parameter in linear.named_parameters():
            assert torch.equal(flex.get_module_parameter(name), parameter)
            if dist.get_rank() == 0:
                assert_close(records[name], [parameter.grad])
            edited = flex.get_module_gradient(name)
            assert_close(edited, parameter.grad + parameter.grad.flip(0))


@pytest.mark.ranks(2)
def test_a_statement_wins_over_the_sizes_of_a_layer():
    """A weight stored ``(in, out)`` may fit them as ``(out, in)``, and a padded one fits none: they
    were joined along dim 0 as they were, whatever the user stated.
    """
    padded, stored = models.random(10, 3), models.random(6, 12)
    model = nn.ModuleDict({"padded": nn.Module(), "stored": nn.Module()}).double()
    for name, full, dim in (("padded", padded, 0), ("stored", stored, 1)):
        model[name].weight = nn.Parameter(models.my_part(full, dim, dist.group.WORLD))
    model["padded"].num_embeddings, model["padded"].embedding_dim = 9, 3
    model["stored"].in_features, model["stored"].out_features = 6, 12
    with FlexModel(model, tensor_parallel_size=2, timeout=20) as flex:
        with pytest.raises(ValueError, match=r"'padded\.weight'.*is not known"):
            flex.get_module_parameter("padded.weight")
        flex.annotate_layout("padded", kind="parameter", tp=Shard(0))
        flex.annotate_layout("stored", kind="parameter", tp=Shard(1))
        assert torch.equal(flex.get_module_parameter("padded.weight"), padded)
        assert torch.equal(flex.get_module_parameter("stored.weight"), stored)


def _all_reduce_grad(parameter):
    dist.all_reduce(parameter.grad)


def of_ones_own(parameter):
    dist.all_reduce(parameter.grad)


# As transformers registers for a norm of heads ("replicated_with_grad_allreduce").
_all_reduce_grad.__module__ = "transformers.distributed.tensor_parallel"
HOOKS = {"none": None, "transformers": _all_reduce_grad, "own": of_ones_own}


class ScaledHeads(nn.Module):
    """A scale that all heads share, of which each rank has some."""

    def __init__(self, up, hook):
        super().__init__()
        self.up, self.scale = up, nn.Parameter(models.random(3))
        self.hook = hook

    def forward(self, x):
        if self.hook is not None:
            self.scale.register_post_accumulate_grad_hook(self.hook)
            self.hook = None
        return (self.up(x).unflatten(-1, (-1, 3)) * self.scale).flatten(-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_gradient_that_another_hook_has_summed(hook, is_sharded):
    """Before FSDP2 shards it and a hook on it runs; the sum of both ranks was given twice."""
    linear, x, records = models.seeded(nn.Linear, 6, 12).double(), models.random(4, 6), {}
    whole = ScaledHeads(linear, None)
    whole(x).sin().sum().backward()
    up = models.ColumnLinear(linear, dist.group.WORLD)
    up.in_features, up.out_features = 6, 12
    model = ScaledHeads(up, HOOKS[hook])
    if is_sharded:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
        fully_shard(model, mesh=mesh["fsdp"])
    with FlexModel(model, records, tensor_parallel_size=2, timeout=30) as flex:
        flex.register_hook(HookFunction("scale"))
        for _ in range(2):
            flex.zero_grad()
            loss = flex(x).sin().sum()
            if is_sharded and hook == "own":
                with pytest.raises(ValueError, match=r"how the ranks along tp hold the gradient"):
                    loss.backward()
                return
            loss.backward()
            if dist.get_rank() == 0:
                assert_close(records["scale"], [whole.scale.grad])
