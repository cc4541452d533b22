"""Full parameters and gradients by name, read and written, on every parallelism."""

import sys
import types
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from tiers import ways

BATCH = models.random(4, 6)


def full_shape(parallelism, model, name):
    """The shape that the user must pass, where a rank holds a shard as a plain tensor."""
    is_part = parallelism.by_hand and models.split_dim(model, name) is not None
    return tuple(model.get_parameter(name).shape) if is_part else None


def check_reading(parallelism, hidden=8):
    model = models.mlp(hidden=hidden)
    flex = FlexModel(parallelism.shard(model), **parallelism.sizes)
    for name, parameter in model.named_parameters():
        full = flex.get_module_parameter(name, full_shape(parallelism, model, name))
        assert torch.equal(full, parameter)
        assert full.device.type == "cpu"
        assert not full.requires_grad
        full.zero_()  # ours to keep
    for name, full in parallelism.full_parameters(model, flex.module).items():
        assert torch.equal(full, model.get_parameter(name))


def check_writing(parallelism, hidden=8):
    model, other = models.mlp(hidden=hidden), models.seeded(models.MLP, 6, hidden, seed=9).double()
    flex = FlexModel(parallelism.shard(model), **parallelism.sizes)
    before = list(flex.module.parameters())
    for name, parameter in other.named_parameters():
        flex.set_module_parameter(name, parameter.detach())
    for one, same in zip(flex.module.parameters(), before, strict=True):
        assert one is same and one.requires_grad  # optimizers go on
    for name, full in parallelism.full_parameters(model, flex.module).items():
        assert torch.equal(full, other.get_parameter(name))
    with torch.no_grad():
        output = flex(parallelism.my_rows(BATCH))
        assert_close(output, parallelism.my_rows(other(BATCH)))


def check_gradients(parallelism):
    model = models.mlp()
    model(BATCH).sin().mean().backward()
    flex = FlexModel(parallelism.shard(model), **parallelism.sizes)
    flex.zero_grad()
    flex(parallelism.my_rows(BATCH)).sin().mean().backward()
    for name, parameter in model.named_parameters():
        if full_shape(parallelism, model, name) is None:
            assert_close(flex.get_module_gradient(name), parameter.grad)


CHECKS = {"read": check_reading, "write": check_writing, "gradients": check_gradients}


FOUR = ("tp of 4", "tp x ddp", "dtensor x fsdp2")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("way", ways("one", *models.TWO_RANKS, "tp x dp", grid=FOUR))
def test_parameters(way, check):
    if check == "gradients" and way.name in ("dp", "tp x dp"):
        pytest.skip("plain replicas average their gradients themselves")
    CHECKS[check](way)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", ["read", "write"])
def test_parameters_of_seven_columns_on_two_ranks(check):
    CHECKS[check](models.TWO_RANKS["tp"], hidden=7)


@pytest.mark.ranks(2)
def test_a_wrong_expected_shape_of_a_parameter_names_it_on_every_rank():
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(models.mlp()), tensor_parallel_size=2)
    for shape in [(12, 6), (8, 12), (8,)]:
        with pytest.raises(ValueError, match=r"fc1\.weight"):
            flex.get_module_parameter("fc1.weight", shape)
    assert flex.get_module_parameter("fc1.weight", (8, 6)).shape == (8, 6)


@pytest.mark.ranks(2)
def test_writing_a_wrong_shape_is_an_error_on_every_rank():
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(models.mlp()), tensor_parallel_size=2)
    before = flex.get_module_parameter("fc1.weight", (8, 6))
    with pytest.raises(ValueError, match=r"'fc1.weight' has the full shape \(8, 6\), got \(9, 6\)"):
        flex.set_module_parameter("fc1.weight", torch.zeros(9, 6, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"'fc1.weight' is torch.float64, got torch.complex64"):
        flex.set_module_parameter("fc1.weight", torch.zeros(8, 6, dtype=torch.complex64))
    with pytest.raises(HookMismatchError, match=r"rank 1 is at a new full value .* of shape None"):
        flex.set_module_parameter("fc1.weight", before if dist.get_rank() == 0 else None)
    assert torch.equal(flex.get_module_parameter("fc1.weight", (8, 6)), before)


@pytest.mark.ranks(2)
def test_clean_names_of_parameters_under_ddp():
    flex = FlexModel(models.TWO_RANKS["ddp"].shard(models.mlp()), data_parallel_size=2)
    for name in ("fc1.weight", "module.fc1.weight"):
        assert torch.equal(flex.get_module_parameter(name), models.mlp().fc1.weight)


# ---- One process: offloaded weights, tied ones, buffers ------------------------------------------


def offloaded(kind, model, folder):
    """``model`` with its weights on the CPU or disk between forwards, by accelerate."""
    accelerate = pytest.importorskip("accelerate")
    if kind == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif kind == "disk":
        accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    else:
        places = dict.fromkeys(("inp", "fc1", "act", "fc2", "out"), "disk") | {"inp": "cpu"}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)
    return model


@pytest.mark.parametrize("kind", ["cpu", "disk", "dispatch"])
def test_offloaded_parameters_are_read_and_written_where_they_are_kept(kind, tmp_path):
    model, other = models.mlp(), models.seeded(models.MLP, 6, 8, seed=9).double()
    flex = FlexModel(offloaded(kind, models.mlp(), tmp_path))
    assert flex.module.fc1.weight.is_meta
    for _ in range(2):  # a forward leaves things as they were
        for name, full in flex.iterate_parameters():
            assert torch.equal(full, model.get_parameter(name))
        assert torch.equal(flex(BATCH), model(BATCH))
    for name, parameter in other.named_parameters():
        flex.set_module_parameter(name, parameter.detach())
        assert torch.equal(flex.get_module_parameter(name), parameter)
    assert torch.equal(flex(BATCH), other(BATCH))
    with pytest.raises(ValueError, match=r"accelerate offloads 'fc1\.weight'"):
        flex.get_module_gradient("fc1.weight")


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_a_hook_gets_offloaded_parameters(kind, tmp_path):
    model, seen = models.mlp(), []

    def look(module, full, save_ctx, modules):
        assert module.weight.is_meta
        seen.append(hook.parameters["fc1.weight"])

    flex = FlexModel(offloaded(kind, models.mlp(), tmp_path))
    for register in (flex.register_forward_hook, flex.register_forward_pre_hook):
        hook = HookFunction("fc1", editing_function=look, parameters="fc1.weight")
        hook.output_name = str(register)
        handle = register(hook)
        flex(BATCH)
        handle.remove()
        assert torch.equal(seen.pop(), model.fc1.weight)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_a_tied_parameter_that_is_offloaded_is_written_under_all_its_names(kind, tmp_path):
    model = offloaded(kind, models.llama(1, tie_word_embeddings=True), tmp_path)
    flex = FlexModel(model)
    names = "model.embed_tokens.weight", "lm_head.weight"
    assert len({name for name, _ in flex.iterate_parameters()} & set(names)) == 1
    for name in names:
        new = models.random(64, 32, seed=len(name))
        flex.set_module_parameter(name, new)
        for other in names:
            assert torch.equal(flex.get_module_parameter(other), new)


def test_a_parameter_offloaded_to_the_checkpoint_itself_is_not_written(tmp_path):
    pytest.importorskip("accelerate")
    model = models.llama(1)
    model.save_pretrained(tmp_path / "checkpoint")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"lm_head": "cpu", "model.layers.0": "disk"}
    loaded = type(model).from_pretrained(
        tmp_path / "checkpoint",
        device_map=places,
        offload_folder=tmp_path / "offload",
        dtype=torch.float64,
    )
    flex, name = FlexModel(loaded), "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(flex.get_module_parameter(name), model.get_parameter(name))
    with pytest.raises(ValueError, match=r"up_proj.weight.*safetensors.*checkpoint"):
        flex.set_module_parameter(name, torch.zeros(48, 32))
    assert torch.equal(flex.get_module_parameter(name), model.get_parameter(name))


def test_a_tied_parameter_has_one_value_under_all_its_names():
    model = models.llama(1, tie_word_embeddings=True)
    flex = FlexModel(model)
    new = models.random(64, 32)
    flex.set_module_parameter("lm_head.weight", new)
    assert torch.equal(flex.get_module_parameter("model.embed_tokens.weight"), new)
    names = [name for name, _ in flex.iterate_parameters()]
    assert "lm_head.weight" not in names
    assert names == [name for name, _ in model.named_parameters()]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = models.seeded(nn.Embedding, 32, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids).tanh())


def shard_tied(kind):
    model = Tied()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model, mesh=models.mesh(2, 1)["dp"])
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, models.mesh(1, 2)["tp"], plan)
    model.head.weight = model.embed.weight
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "dtensor"])
def test_a_tied_parameter_and_its_gradient_by_each_name(kind, name):
    ids, twin = torch.arange(8).view(2, 4), Tied()
    twin(ids).sin().sum(-1).square().mean().backward()
    flex = FlexModel(shard_tied(kind), records := {})
    flex.register_hook(HookFunction(name))
    output = flex(ids if kind == "dtensor" else ids.chunk(2)[dist.get_rank()])
    output.sin().sum(-1).square().mean().backward()
    assert_close(flex.get_module_gradient(name), twin.embed.weight.grad)
    assert_close(records.get(name, []), [twin.embed.weight.grad] * (dist.get_rank() == 0))
    flex.set_module_parameter(name, twin.embed.weight.detach() * 2)
    for each in ("embed.weight", "head.weight"):
        assert torch.equal(flex.get_module_parameter(each), twin.embed.weight * 2)
    flex.restore()


@pytest.mark.parametrize("way", ways("one", "ddp"))
def test_a_sparse_gradient_is_refused(way):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
    flex = FlexModel(way.shard(model), batch_dim={"input": 0})
    flex(torch.arange(4).view(2, 2)).sum().backward()
    with pytest.raises(TypeError, match=r"get_module_gradient: .*'0.weight' is .*sparse=False"):
        flex.get_module_gradient("0.weight")
    flex.register_hook(HookFunction("0.weight"))
    with pytest.raises(HookError, match=r"'0.weight': the tensor is torch.sparse.*sparse=False"):
        flex(torch.arange(4).view(2, 2)).sum().backward()


def test_a_buffer_is_refused_as_a_parameter():
    flex = FlexModel(nn.Sequential(nn.BatchNorm1d(3)))
    for read in (flex.get_module_parameter, flex.get_module_gradient):
        with pytest.raises(ValueError, match=r"'0.running_mean' is a buffer.*get_buffer"):
            read("0.running_mean")


@pytest.mark.ranks(2)
def test_iterating_over_parameters_needs_known_layouts():
    parallelism, model = models.TWO_RANKS["tp"], models.mlp()
    group = parallelism.mesh["tp"].get_group()
    sharded = models.tensor_parallel(model, group, states_sizes=False)
    flex = FlexModel(sharded, **parallelism.sizes)
    with pytest.raises(ValueError, match=r"inp\.weight.*not known(?s:.*)kind='parameter'"):
        dict(flex.iterate_parameters())
    models.state_layouts(flex, model)
    for name, full in flex.iterate_parameters():
        assert torch.equal(full, model.get_parameter(name))


@pytest.mark.ranks(2)
def test_a_parameter_that_only_one_rank_has_is_an_error_on_all():
    """A row-parallel layer may have its bias on one rank: the others waited, or met other calls."""
    model = nn.Linear(2, 4, bias=dist.get_rank() == 0)
    with FlexModel(model, tensor_parallel_size=2, timeout=20) as flex:
        flex.annotate_layout("", kind="parameter", tp=Replicate())
        calls = [
            lambda: list(flex.iterate_parameters()),
            lambda: flex.get_module_parameter("bias"),
            lambda: flex.get_module_gradient("bias"),
            lambda: flex.set_module_parameter("bias", torch.ones(4)),
        ]
        for call in calls:
            with pytest.raises(HookMismatchError, match=r"'bias'.*that all ranks have"):
                call()
        with pytest.raises(ValueError, match="has no parameter 'biass'; nearest"):
            flex.get_module_parameter("biass")
        assert flex.get_module_parameter("weight").shape == (4, 2)


@pytest.mark.ranks(2)
def test_ranks_that_should_share_a_parameter_and_differ_are_an_error():
    model = models.TWO_RANKS["dtensor"].shard(models.mlp())
    with torch.no_grad():
        model.inp.weight += dist.get_rank()
    flex = FlexModel(model)
    with pytest.raises(ValueError, match=r"'inp.weight'.*tensor-parallel ranks hold different"):
        flex.get_module_parameter("inp.weight")
    assert flex.get_module_parameter("fc1.weight").shape == (8, 6)


@pytest.mark.ranks(2)
def test_a_partial_sum_is_written_as_one():
    mesh, full = models.mesh(1, 2)["tp"], models.random(4, 2)
    model = nn.Linear(2, 4, bias=False)
    part = DTensor.from_local(full * (0.25, 0.75)[dist.get_rank()], mesh, [Partial()])
    model.weight = nn.Parameter(part)
    with FlexModel(model) as flex:
        assert torch.equal(flex.get_module_parameter("weight"), full)
        flex.set_module_parameter("weight", 2 * full)
        assert torch.equal(flex.get_module_parameter("weight"), 2 * full)
    assert torch.equal(model.weight.full_tensor(), 2 * full)
    model.weight = nn.Parameter(DTensor.from_local(full, mesh, [Partial("avg")]))
    with FlexModel(model) as flex:
        assert torch.equal(flex.get_module_parameter("weight"), full)
        with pytest.raises(ValueError, match=r"'weight'.*Partial\(avg\).*redistribute it"):
            flex.set_module_parameter("weight", full)


@pytest.mark.ranks(2)
def test_dtensors_on_a_mesh_in_descending_order_are_an_error():
    """``distribute_tensor`` gives the first shard to the lowest rank, ``from_local`` to the first
    of the mesh.
    """
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
    model = nn.Linear(2, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    flex = FlexModel(model)
    with pytest.raises(ValueError, match=r"ranks \[1, 0\], not in ascending order"):
        flex.get_module_parameter("weight")


@pytest.mark.ranks(2)
def test_parameters_of_fsdp2_are_read_in_their_own_dtype_after_a_forward():
    """The root stays gathered, in the dtype that mixed precision computes in."""
    model = models.mlp()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = fully_shard(models.mlp(), mesh=models.mesh(2, 1)["dp"], mp_policy=policy)
    flex = FlexModel(sharded)
    with torch.no_grad():
        flex(BATCH)
    assert sharded.fc1.weight.dtype == torch.bfloat16
    assert torch.equal(flex.get_module_parameter("fc1.weight"), model.fc1.weight)


@pytest.mark.ranks(4)
def test_parameters_of_fsdp2_over_dtensors_are_written_where_they_are_kept_after_a_forward():
    """The root stays gathered: DTensors of tensor parallelism alone, that FSDP2 drops."""
    parallelism, new = models.FOUR_RANKS["dtensor x fsdp2"], models.random(8, 6, seed=8)
    sharded = models.Parallelism("dtensor", tp=2, dp=2).shard(models.mlp())
    fully_shard(sharded, mesh=parallelism.mesh["dp"])
    flex = FlexModel(sharded, device_mesh=parallelism.mesh)
    with torch.no_grad():
        flex(parallelism.my_rows(BATCH))
    assert sharded.fc1.weight.device_mesh.ndim == 1
    flex.set_module_parameter("fc1.weight", new)
    sharded.reshard()
    assert torch.equal(flex.get_module_parameter("fc1.weight"), new)
    flex.restore()


# ---- FSDP1 while it runs -------------------------------------------------------------------------


def fsdp1(model, use_orig_params=True, units=(models.Attention, models.MLP)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(
            model,
            process_group=models.mesh(2, 1)["dp"].get_group(),
            use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy(units),
            device_id=torch.device("cpu"),
        )


@pytest.mark.ranks(2)
def test_an_inner_unit_of_fsdp1_is_read_before_the_first_forward():
    """The first unit that FSDP1 meets becomes its root, or the whole can't run."""
    model = models.block()
    flex = FlexModel(fsdp1(models.block()))
    assert torch.equal(flex.get_module_parameter("mlp.fc1.weight"), model.mlp.fc1.weight)
    batch = models.random(4, 5, 8)
    assert_close(flex(batch.chunk(2)[dist.get_rank()]), model(batch).chunk(2)[dist.get_rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_clean_and_wrapped_names_of_parameters_under_fsdp1(use_orig_params):
    flex = FlexModel(fsdp1(models.block(), use_orig_params))
    wrapped = "_fsdp_wrapped_module."
    names = f"{wrapped}mlp.{wrapped}fc1.bias", f"mlp.{wrapped}fc1.bias", "mlp.fc1.bias"
    for name in names:
        new = models.random(12, seed=len(name))
        flex.set_module_parameter(name, new)
        for other in names:
            assert torch.equal(flex.get_module_parameter(other), new)


@pytest.mark.ranks(2)
def test_ranks_that_ask_fsdp1_for_different_parameters_are_told():
    flex = FlexModel(fsdp1(models.block()))
    name = ("norm.weight", "mlp.fc1.weight")[dist.get_rank()]
    with pytest.raises(HookMismatchError, match=r"rank 0 .*norm.weight.* rank 1 .*mlp.fc1.weight"):
        flex.get_module_parameter(name)


@pytest.mark.ranks(2)
def test_a_hook_under_fsdp1_gets_parameters_of_units_that_do_not_run():
    model, batch = models.block(), models.random(4, 5, 8)
    flex = FlexModel(fsdp1(models.block()))

    def look(module, full, save_ctx, modules):
        assert torch.equal(hook.parameters["mlp.fc1.weight"], model.mlp.fc1.weight)
        return full * 2

    hook = HookFunction("attn", editing_function=look, parameters="mlp.fc1.weight")
    flex.register_forward_hook(hook)
    model.attn.register_forward_hook(lambda module, args, output: (output[0] * 2, output[1]))
    flex(batch.chunk(2)[dist.get_rank()]).sin().mean().backward()
    model(batch).sin().mean().backward()
    flex.restore()
    flex = FlexModel(flex.module)
    for name, parameter in model.named_parameters():
        assert_close(flex.get_module_gradient(name), parameter.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward_pre"])
def test_a_hook_under_fsdp1_gets_parameters_of_the_units_that_run(kind, use_orig_params):
    model, seen = models.block(), []
    names = "attn.q.weight", "attn.o.bias", "norm.weight"

    def look(*_):
        seen.extend(name for name in names if torch.equal(hook.parameters[name], want(name)))

    want = model.get_parameter
    with FlexModel(fsdp1(models.block(), use_orig_params)) as flex:
        hook = HookFunction("attn.q", editing_function=look, parameters=names)
        getattr(flex, f"register_{kind}_hook")(hook)
        flex(models.random(2, 5, 8)).mean().backward()
    assert seen == list(names)


@pytest.mark.ranks(2)
def test_a_parameter_that_fsdp1_has_given_up_while_it_runs_is_an_error():
    flex = FlexModel(fsdp1(models.block()))
    hook = HookFunction("norm", editing_function=lambda *_: None, parameters="mlp.fc1.weight")
    flex.register_full_backward_pre_hook(hook)
    with pytest.raises(HookError, match=r"mlp.fc1.weight.*FSDP1.*while it runs"):
        flex(models.random(2, 5, 8)).mean().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_hooks_on_gradients_of_parameters_under_fsdp1(use_orig_params):
    model, batch = models.block(), models.random(4, 5, 8)
    names, expected = ("mlp.fc1.weight", "norm.weight", "attn.q.weight"), {}

    def mix(full):
        return full + full.flip(0).cumsum(0)

    for name in names:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda grad, name=name: mix(expected.setdefault(name, grad)))
    model(batch).sin().mean().backward()
    flex = FlexModel(fsdp1(models.block(), use_orig_params), {})
    own = batch.chunk(2)[dist.get_rank()]
    with torch.no_grad():
        flex(own)  # its outermost unit stays gathered
    for name in names:
        flex.register_hook(HookFunction(name, editing_function=lambda m, full, s, ms: mix(full)))
    flex(own).sin().mean().backward()
    if dist.get_rank() == 0:
        assert_close({name: flex.output_ptr[name][0] for name in names}, expected)
    if use_orig_params:
        for name, parameter in model.named_parameters():
            assert_close(flex.get_module_gradient(name), parameter.grad)


class Scaled(nn.Module):
    """Has a parameter of its own, and a layer that is a unit of FSDP1."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.fc(x) * self.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameters_that_a_unit_of_fsdp1_itself_has(use_orig_params):
    """Wrong before: refused for other reasons, or said to be none."""
    model, records, names = models.seeded(Scaled).double(), {}, ("scale", "fc.weight")
    flex = FlexModel(fsdp1(models.seeded(Scaled).double(), use_orig_params, {nn.Linear}), records)

    def mix(full, scale, weight):
        return full @ weight * scale + full.flip(0)

    def edit(module, full, save_ctx, modules):
        return mix(full, *(hook.parameters[name].detach() for name in names))

    hook = HookFunction("fc", editing_function=edit, parameters=names)
    flex.register_forward_hook(hook)
    own = [model.get_parameter(name) for name in names]
    model.fc.register_forward_hook(lambda m, x, out: mix(out, *(one.detach() for one in own)))
    model(BATCH).sin().mean().backward()
    for name in names:
        flex.register_hook(HookFunction(name, editing_function=lambda m, full, *_: full.flip(0)))
    flex(BATCH.chunk(2)[dist.get_rank()]).sin().mean().backward()
    if dist.get_rank() == 0:
        assert_close([records[name][0] for name in names], [one.grad for one in own])
    for name, one in zip(names, own) if use_orig_params else ():
        assert_close(flex.get_module_gradient(name), one.grad.flip(0))
    flex.restore()


@pytest.mark.ranks(2)
def test_hooks_on_gradients_of_parameters_under_fsdp1_and_tensor_parallelism():
    group = models.mesh(1, 2)["dp"].get_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one rank
        model = FSDP(models.block(), process_group=group, device_id=torch.device("cpu"))
    flex = FlexModel(model, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"norm.weight.*FSDP1.*over tensor-parallel ranks"):
        flex.register_hook(HookFunction("norm.weight"))


# ---- FSDP2 ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_module_whose_parameters_fsdp2_shards_over_two_meshes():
    """It was torch's AssertionError, which expects one group of parameters."""
    torch_fsdp = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(torch_fsdp, "ShardPlacementResult"):
        pytest.skip("this torch shards a module over one mesh")
    twin, model, names = models.mlp(), models.mlp(), ("fc1.weight", "fc1.bias")
    mesh, hybrid = models.mesh(2, 1)["dp"], models.mesh(2, 1)
    kinds = torch_fsdp.HSDPMeshInfo(hybrid, 1, 0), torch_fsdp.FSDPMeshInfo(mesh, 0)

    def place(parameter):
        return torch_fsdp.ShardPlacementResult(Shard(0), kinds[parameter.ndim - 1])

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    edit = models.random(8, 8)
    twin.fc1.register_forward_hook(lambda module, args, out: out @ edit)
    twin(BATCH).sin().mean().backward()
    rows = BATCH.chunk(2)[dist.get_rank()]
    with FlexModel(model, records := {}, output_ranks="all") as flex:
        flex.register_forward_hook(HookFunction("fc1", None, lambda m, out, s, ms: out @ edit))
        flex.run_until("fc1", rows)
        for name in names:
            flex.register_hook(HookFunction(name))
        flex(rows).sin().mean().backward()
        assert_close(records["fc1"], [twin.fc1.forward(twin.inp(BATCH))])
        for name, parameter in twin.named_parameters():
            assert torch.equal(flex.get_module_parameter(name), parameter)
            assert_close(flex.get_module_gradient(name), parameter.grad)
    assert_close([records[name][0] for name in names], [twin.get_parameter(n).grad for n in names])


# ---- What FSDP2 accumulates ----------------------------------------------------------------------

HOOKED = ["inp.weight", "fc1.weight"]  # of the root, and of a layer that is sharded by itself


def flip_signs(module, full, save_ctx, modules):
    return full.sign() + full.flip(0)


def halve(module, full, save_ctx, modules):
    return full.square() / 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_synced", [True, False])
def test_hooks_get_the_gradient_of_each_backward_that_fsdp2_accumulates(is_synced, is_late):
    """They got the sum, or were refused."""
    way, twin, expected = models.TWO_RANKS["fsdp2"], models.mlp(), {name: [] for name in HOOKED}
    for name in HOOKED:
        parameter = twin.get_parameter(name)
        parameter.register_hook(lambda grad, name=name: expected[name].append(grad.clone()))
        parameter.register_hook(lambda grad: halve(0, flip_signs(0, grad, 0, 0), 0, 0))
    sharded, records = way.shard(twin), {}
    with FlexModel(sharded, records, output_ranks="all") as flex, FlexModel(sharded) as other:
        if is_late:
            flex(way.my_rows(BATCH))
        for one, edit in ((flex, flip_signs), (other, halve)):
            for name in HOOKED:
                one.register_hook(HookFunction(name, editing_function=edit))
        for number in range(3):
            batch = models.random(4, 6, seed=number)
            twin(batch).sin().mean().backward()
            loss = flex(way.my_rows(batch)).sin().mean()
            flex.set_requires_gradient_sync(is_synced or number == 2)
            loss.backward()
            for name in HOOKED:
                assert_close(records[name], expected[name][number:])
                assert_close(flex.get_module_gradient(name), twin.get_parameter(name).grad)
            if not is_synced and number < 2:
                with pytest.raises(ValueError, match=r"'fc2.weight' waits for FSDP2 to average"):
                    flex.get_module_gradient("fc2.weight")
        assert_close(flex.get_module_gradient("fc2.weight"), twin.fc2.weight.grad)
        flex.zero_grad()
        twin.zero_grad()
        twin(BATCH).sin().mean().backward()
        flex(way.my_rows(BATCH)).sin().mean().backward()
        for name in HOOKED:
            assert_close(flex.get_module_gradient(name), twin.get_parameter(name).grad)


@pytest.mark.ranks(2)
def test_a_parameter_that_fsdp2_ignores_accumulates():
    way, twin, expected = models.TWO_RANKS["fsdp2"], models.mlp(), []
    twin.fc1.weight.register_hook(lambda grad: expected.append(grad.clone()))
    sharded = models.mlp()
    fully_shard(sharded, mesh=way.mesh["dp"], ignored_params={sharded.fc1.weight})
    with FlexModel(sharded, records := {}, output_ranks="all") as flex:
        flex.register_hook(HookFunction("fc1.weight"))
        for number in range(2):
            flex(way.my_rows(BATCH)).sin().mean().backward()
            twin(BATCH).sin().mean().backward()
            assert_close(records["fc1.weight"], expected[number:])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_after_a_backward_that_was_not_synchronized_is_refused(name):
    way = models.TWO_RANKS["fsdp2"]
    with FlexModel(way.shard(models.mlp()), {}) as flex:
        flex.set_requires_gradient_sync(False)
        flex(way.my_rows(BATCH)).mean().backward()
        flex.register_hook(HookFunction(name))
        with pytest.raises(ValueError, match=r"without the hook, wait for FSDP2 to average"):
            flex(way.my_rows(BATCH)).mean().backward()


@pytest.mark.ranks(2)
def test_what_is_recomputed_in_a_backward_of_its_own_does_not_accumulate():
    """FSDP2 averages it later, when the earlier gradient is back already."""
    way = models.TWO_RANKS["fsdp2"]
    sharded = way.shard(models.mlp())
    sharded.fc1.forward = partial(checkpoint, sharded.fc1.forward, use_reentrant=True)
    with FlexModel(sharded, {}) as flex:
        flex.register_hook(HookFunction("fc1.weight"))
        first, second, third = (flex(way.my_rows(BATCH)).sin().mean() for _ in range(3))
        first.backward()
        with pytest.raises(ValueError, match=r"FSDP2 has added.*set gradients to None"):
            second.backward()
        flex.zero_grad()
        third.backward()


@pytest.mark.ranks(2)
def test_gradients_of_before_a_backward_that_failed_are_put_back():
    way = models.TWO_RANKS["fsdp2"]
    with FlexModel(way.shard(models.mlp()), {}) as flex:
        parameter = flex.module.out.weight
        flex.register_hook(HookFunction("out.weight"))
        flex(way.my_rows(BATCH)).mean().backward()
        before, seen = parameter.grad, []

        def fail(grad):
            seen.append(parameter.grad)
            raise ZeroDivisionError

        flex.module.fc2.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            flex(way.my_rows(BATCH)).mean().backward()
        assert seen == [None] and parameter.grad is before


# ---- ZeRO-3 --------------------------------------------------------------------------------------


class GatheredParameters:
    """``deepspeed.zero.GatheredParameters``, as far as it is documented: inside, a parameter is
    whole; after it each rank has its part of ``modifier_rank``'s values, or of the old ones.
    """

    def __init__(self, params, modifier_rank=None):
        self.params, self.modifier_rank = params, modifier_rank

    def __enter__(self):
        for parameter in self.params:
            parts = [torch.empty_like(parameter.part) for _ in range(2)]
            dist.all_gather(parts, parameter.part)
            parameter.data = torch.cat(parts)[: parameter.ds_shape.numel()].view(parameter.ds_shape)

    def __exit__(self, *exc_info):
        for parameter in self.params:
            if self.modifier_rank is not None:
                dist.broadcast(parameter.data, self.modifier_rank)
                partition(parameter)
            parameter.data = torch.empty(0, dtype=parameter.dtype)


def partition(parameter):
    flat = parameter.data.flatten()
    flat = torch.cat([flat, flat.new_zeros(len(flat) % 2)])
    parameter.part = flat.chunk(2)[dist.get_rank()].clone()


@pytest.mark.ranks(2)
def test_parameters_of_zero_3():
    """On a fake of DeepSpeed's public surface, which is not installed: ``ds_shape``,
    ``ds_process_group``, ``zero.GatheredParameters`` and ``utils.safe_get_full_grad``.
    """
    fake = types.ModuleType("deepspeed")
    fake.zero = types.SimpleNamespace(GatheredParameters=GatheredParameters)
    fake.utils = types.SimpleNamespace(safe_get_full_grad=lambda parameter: parameter.full_grad)
    model, sharded = models.mlp(hidden=7), models.mlp(hidden=7)
    for name, parameter in sharded.named_parameters():
        parameter.ds_shape, parameter.ds_process_group = parameter.shape, dist.group.WORLD
        parameter.full_grad = models.random(*parameter.shape) if name != "fc1.bias" else None
        partition(parameter)
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", fake)
        flex = FlexModel(sharded, data_parallel_size=2)
        for name, full in flex.iterate_parameters():
            assert torch.equal(full, model.get_parameter(name))
        for name, parameter in model.named_parameters():
            new = models.random(*parameter.shape, seed=8)
            flex.set_module_parameter(name, new)
            assert sharded.get_parameter(name).shape == (0,)
            assert torch.equal(flex.get_module_parameter(name), new)
            gradient = flex.get_module_gradient(name)
            if name == "fc1.bias":
                assert gradient is None
            else:
                assert torch.equal(gradient, models.random(*parameter.shape))
        with GatheredParameters([sharded.fc1.weight]):  # in use: read as it is, and left so
            assert flex.get_module_parameter("fc1.weight").shape == (7, 6)
            assert sharded.fc1.weight.shape == (7, 6)
        flex.restore()


def test_a_parameter_without_elements_beside_stated_sizes_is_an_error():
    """Before, it was read as an empty tensor: DeepSpeed, for one, leaves such parameters."""
    model = models.mlp()
    model.fc1.weight.data = torch.empty(0, dtype=torch.float64)
    model.fc1.bias.data = torch.empty(0, dtype=torch.float64)
    flex = FlexModel(model)
    for name, sizes in (("fc1.weight", r"\(8, 6\)"), ("fc1.bias", r"\(8,\)")):
        with pytest.raises(ValueError, match=rf"{name}.*no elements.*states the sizes {sizes}"):
            flex.get_module_parameter(name)
    with pytest.raises(ValueError, match="no elements"):
        dict(flex.iterate_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing = nn.Linear(0, 3)
    assert FlexModel(nothing).get_module_parameter("weight").shape == (3, 0)


@pytest.mark.ranks(2)
def test_a_parameter_without_elements_on_one_rank_is_an_error_on_all():
    model = models.mlp()
    if dist.get_rank() == 1:
        model.fc1.bias.data = torch.empty(0, dtype=torch.float64)
    flex = models.replicas(FlexModel(model, tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"fc1\.bias.*rank 1 holds no elements"):
        flex.get_module_parameter("fc1.bias")
    assert torch.equal(flex.get_module_parameter("fc2.bias"), model.fc2.bias)
