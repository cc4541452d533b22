"""Every parameter of every framework: read in full and written back, and its gradient, without
``expected_shape``.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close

import by_hand
import models
from flex_model import FlexModel, HookFunction
from tiers import grid_but

BATCH = models.random(4, 5, 8)
TOKENS = 1 + models.random(2, 5, seed=6).argsort()


def block():
    """A Block with a constant bias, beside its norm's: constant values alone tell no layout."""
    model = models.block()
    nn.init.zeros_(model.mlp.inp.bias)
    return model


def check(model, sharded, forward, my_rows=lambda full: full, gradients=True, **sizes):
    """Values, new values and gradients of all parameters equal those of ``model``; collective."""
    flex = FlexModel(sharded, **sizes)
    same(flex, model)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        shape = tuple(parameter.shape)
        new = 0.3 * models.random(*shape, seed=50 + index, dtype=parameter.dtype)
        parameter.data.copy_(new)
        flex.set_module_parameter(name, new)
        assert torch.equal(flex.get_module_parameter(name), new), name
    expected = forward(model, lambda full: full)
    output = forward(flex, my_rows)
    assert_close(output.detach(), my_rows(expected.detach()))
    same(flex, model)  # between forward and backward
    expected.sin().mean().backward()
    output.sin().mean().backward()
    same(flex, model)
    for name, parameter in model.named_parameters():
        if gradients:
            full = flex.get_module_gradient(name)
            assert_close(full, parameter.grad, msg=partial("{}: {}".format, name))
    flex.restore()


def same(flex, model):
    read = dict(flex.iterate_parameters())
    expected = dict(model.named_parameters())
    assert sorted(read) == sorted(expected)
    for name, full in read.items():
        assert torch.equal(full, expected[name]), name
        assert type(full) is torch.Tensor and full.device.type == "cpu"


def call(model, rows, batch=BATCH):
    return model(rows(batch))


def half(full):
    return full.chunk(2)[dist.get_rank() % 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dtensor", "ddp", "fsdp2"])
def test_parameters_of_torch_on_two_ranks(name):
    parallelism, model = models.TWO_RANKS[name], block()
    check(model, parallelism.shard(model), call, parallelism.my_rows)


@pytest.mark.ranks(4)
def test_parameters_of_fsdp2_over_tensor_parallelism():
    parallelism, model = models.FOUR_RANKS["dtensor x fsdp2"], block()
    check(model, parallelism.shard(model), call, parallelism.my_rows)


@pytest.mark.grid
@pytest.mark.ranks(4)
def test_parameters_of_hsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = block()
    sharded = copy.deepcopy(model)
    fully_shard(sharded.mlp, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    check(model, sharded, call, lambda full: full.chunk(4)[dist.get_rank()])


@pytest.mark.ranks(2)
def test_parameters_of_which_fsdp2_leaves_some_ranks_no_row():
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    sharded = fully_shard(copy.deepcopy(model), mesh=models.mesh(2, 1)["dp"])
    assert sharded[2].weight.to_local().shape[0] == 1 - dist.get_rank()
    check(model, sharded, call, half)


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameters_of_fsdp1(use_orig_params, strategy):
    check_fsdp1(models.mesh(2, 1)["dp"].get_group(), use_orig_params, strategy, half)


@pytest.mark.grid
@pytest.mark.ranks(4)
def test_parameters_of_fsdp1_with_replicas():
    mesh = models.mesh(2, 2)
    groups = mesh["tp"].get_group(), mesh["dp"].get_group()
    rows = lambda full: full.chunk(4)[dist.get_rank()]  # noqa: E731
    check_fsdp1(groups, True, "HYBRID_SHARD", rows, data_parallel_size=4)


def check_fsdp1(group, use_orig_params, strategy, rows, **sizes):
    def shard():
        return FSDP(
            copy.deepcopy(model),
            process_group=group,
            use_orig_params=use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({models.Attention, models.MLP}),
            device_id=torch.device("cpu"),
        )

    model = block()
    sharded = by_hand.quietly(shard)
    check(model, sharded, call, rows, gradients=use_orig_params, **sizes)
    flex = FlexModel(sharded, **sizes)
    if not use_orig_params:
        with pytest.raises(ValueError, match="use_orig_params=True"):
            flex.get_module_gradient("norm.weight")
    with FSDP.summon_full_params(sharded), pytest.raises(ValueError, match="summon_full_params"):
        flex.get_module_parameter("norm.weight")
    flex.restore()


@pytest.mark.ranks(2)
def test_parameters_of_fairscale():
    model = models.seeded(by_hand.Tokens).double()
    sharded = by_hand.quietly(lambda: by_hand.fairscale_tokens(model))
    check(model, sharded, partial(call, batch=TOKENS), tensor_parallel_size=2)


@pytest.mark.grid
@pytest.mark.ranks(2)
def test_parameters_of_megatron():
    """The oracle is the same model on one rank; a gated ``linear_fc1`` interleaves two halves."""
    positions = torch.arange(5).expand(2, 5)
    mask = torch.ones(1, 1, 5, 5).triu(1).bool()

    with by_hand.megatron():
        model = by_hand.megatron_gpt(1)
        sharded = by_hand.megatron_gpt(2)
        assert sharded.decoder.layers[0].mlp.linear_fc1.weight.partition_stride == 2

        def forward(model, rows):
            return by_hand.quietly(lambda: model(TOKENS, positions, mask))

        check(model, sharded, forward, tensor_parallel_size=2)


@pytest.mark.grid
@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_parameters_of_transformers(family, tmp_path):
    """Mixtral's ``gate_up_proj`` is a lone ``_StridedShard``, which torch itself can't gather."""
    from transformers import MixtralConfig, MixtralForCausalLM

    if family == "llama":
        model = models.llama(1, tie_word_embeddings=True).float()
    else:
        config = MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            attn_implementation="eager",
            bos_token_id=1,
            eos_token_id=2,
        )
        model = models.seeded(MixtralForCausalLM, config).eval()
    sharded = models.loaded_by_transformers(model, tmp_path)
    check(model, sharded, lambda model, rows: model(TOKENS).logits)


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
@pytest.mark.parametrize("hidden", grid_but([8, 7], 7))
def test_parameters_of_fsdp2_over_layers_that_shard_by_hand(hidden):
    mesh, model = models.mesh(2, 2), models.mlp(width=8, hidden=hidden)
    sharded = models.tensor_parallel(model, mesh["tp"].get_group())
    fully_shard(sharded, mesh=mesh["dp"])
    check(model, sharded, call, models.FOUR_RANKS["tp x dp"].my_rows, device_mesh=mesh)


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
