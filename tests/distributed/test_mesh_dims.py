"""Names of mesh dims as accelerate, torchtitan and Hugging Face give them: dims of size 1 don't
count, and context parallelism is refused by name. Before, most of these were refused without need,
or parts of sequences were joined as rows of the batch.
"""

import contextlib
import warnings

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import models
from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed.mesh import Mesh
from tests.integrations.test_model_mesh import PLAN, lines, of_two_by_two
from tiers import grid_but


def accelerate_mesh(**sizes):
    """Its mesh, and the part that FSDP shards over."""
    config = pytest.importorskip("accelerate").ParallelismConfig(**sizes)
    mesh = config.build_device_mesh("cpu")
    with warnings.catch_warnings():  # torch's, of slicing a flattened dim
        warnings.simplefilter("ignore")
        return mesh, mesh[tuple(config.fsdp_dim_names)]


@pytest.mark.ranks(4)
def test_accelerate_without_context_parallelism():
    mesh, shards = accelerate_mesh(dp_shard_size=2, tp_size=2)
    assert shards.mesh_dim_names == ("dp_shard_cp",)
    model = parallelize_module(models.mlp(), mesh["tp"], PLAN)
    model = fully_shard(model, mesh=shards)
    flex = FlexModel(model)
    assert lines(flex) == of_two_by_two()
    assert FlexModel(model, device_mesh=mesh).mesh == flex.mesh


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_accelerate_with_context_parallelism(sizes):
    mesh, shards = accelerate_mesh(dp_shard_size=sizes[0], cp_size=sizes[1])
    model = fully_shard(models.mlp(), mesh=shards)
    message = f"dim 'cp', a part of 'dp_shard_cp', splits the sequence over {sizes[1]} ranks"
    with pytest.raises(ValueError, match=message):
        FlexModel(model)
    with pytest.raises(ValueError, match="dim 'cp' splits the sequence"):
        FlexModel(models.mlp(), device_mesh=mesh)
    ddp = DistributedDataParallel(models.mlp(), device_mesh=shards)
    with pytest.raises(ValueError, match="context parallelism is not supported"):
        FlexModel(ddp)


def torchtitan_meshes(dp_shard, cp, tp, ep, shards="fsdp"):
    """The views that its ``ParallelDims.build_mesh`` makes of one world."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    rows = world._unflatten(0, (1, dp_shard, cp, tp), ("pp", "batch", "cp", "tp"))
    rows["batch", "cp"]._flatten("loss")
    dense = world._unflatten(0, (1, 1, dp_shard * cp, tp), ("pp", "dp_replicate", shards, "tp"))
    size = dp_shard * cp * tp // ep
    names = ("pp", "dp_replicate", "efsdp", "ep")
    return dense, world._unflatten(0, (1, 1, size, ep), names)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shards", grid_but(["fsdp", "dp_shard_cp"], "fsdp"))
@pytest.mark.parametrize("ep", grid_but([2, 4], 2))
def test_torchtitan_without_context_parallelism(shards, ep):
    dense, sparse = torchtitan_meshes(2, 1, 2, ep, shards)
    model = parallelize_module(models.mlp(), dense["tp"], PLAN)
    expert = parallelize_module(nn.Linear(4, 4), sparse["ep"], ColwiseParallel())
    model.expert = fully_shard(expert, mesh=sparse["efsdp"])
    model = fully_shard(model, mesh=dense[shards])
    assert lines(FlexModel(model)) == of_two_by_two()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("dp_shard", "cp", "tp"), [(2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("shards", grid_but(["fsdp", "dp_shard_cp"], "fsdp"))
def test_torchtitan_with_context_parallelism(dp_shard, cp, tp, shards):
    dense, _ = torchtitan_meshes(dp_shard, cp, tp, 1, shards)
    model = parallelize_module(models.mlp(), dense["tp"], PLAN)
    model = fully_shard(model, mesh=dense[shards])
    with pytest.raises(ValueError, match=f"dim 'cp', a part of '{shards}', splits the sequence"):
        FlexModel(model)
    with pytest.raises(ValueError, match="over 2 ranks: context parallelism is not supported"):
        FlexModel(models.mlp(), device_mesh=dense)


@pytest.mark.ranks(4)
def test_a_flattened_dim_that_may_hold_parts_of_sequences():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard_cp",))
    model = fully_shard(models.mlp(), mesh=mesh)
    with pytest.raises(ValueError, match=r"dims \('dp_shard_cp',\), which are not known axes"):
        FlexModel(model)
    named = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))  # as the message says
    assert FlexModel(model, device_mesh=named).dp_size == 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", grid_but(["seq", "domain", "dp_seq", "tokens"], "seq"))
def test_dims_that_may_hold_parts_of_sequences(name):
    """No list has all their names. Before, their parts were joined as rows of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", name))[name]
    fsdp2 = fully_shard(models.mlp(), mesh=mesh)
    with pytest.raises(ValueError, match=rf"dims \('{name}',\), which are not known axes"):
        FlexModel(fsdp2)
    wrapped = [
        DistributedDataParallel(models.mlp(), device_mesh=mesh),
        DistributedDataParallel(models.mlp(), process_group=mesh.get_group()),
    ]
    for model in wrapped:
        with pytest.raises(ValueError, match=f"over the mesh dim '{name}', which may hold no rows"):
            FlexModel(model)
    settled = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    for model in (fsdp2, *wrapped):  # as the messages say
        assert FlexModel(model, device_mesh=settled).dp_size == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", grid_but(["data", "fsdp", "dp0", "rep", "world", "x"], "world"))
def test_dims_that_hold_rows(name):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    assert FlexModel(fully_shard(models.mlp(), mesh=mesh)).dp_size == 2
    assert FlexModel(DistributedDataParallel(models.mlp(), device_mesh=mesh)).dp_size == 2


@pytest.mark.ranks(2)
def test_dims_of_one_rank_may_have_any_name():
    names = ("cp", "anything", "tp", "ep")
    mesh = init_device_mesh("cpu", (1, 1, 2, 1), mesh_dim_names=names)
    assert Mesh.from_device_mesh(mesh).tp_size == 2
    assert FlexModel(models.mlp(), device_mesh=mesh).tp_size == 2
    model = fully_shard(parallelize_module(models.mlp(), mesh["tp"], PLAN), mesh=mesh["cp"])
    assert lines(FlexModel(model)) == {"tp": (0, 1)}


class Attention(nn.Module):
    context = staticmethod(lambda x: contextlib.nullcontext())  # in which its forward runs

    def forward(self, x):
        with self.context(x):
            return self.attention(x)

    def attention(self, x):
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.ranks(2)
def test_a_run_in_torchs_context_parallelism():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    flex = FlexModel(Attention(), data_parallel_size=2)
    x = models.random(2, 8, 16)
    flex(x)
    handle = flex.register_forward_hook(HookFunction(""))
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        pytest.raises(HookError, match=r"context_parallel\(...\) splits the sequence over 2 ranks"),
    ):
        flex(x)
    flex(models.random(2, 8, 16))  # without it
    handle.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_forward_that_enters_torchs_context_parallelism(axis):
    """Also in a run whose hooks have settled. Before, records had the sequence in another order."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, records = nn.Sequential(nn.Identity(), Attention()), {}
    flex = FlexModel(model, records, **{f"{axis}_parallel_size": 2})
    flex.register_forward_hook(HookFunction("0"))
    x = models.random(2, 8, 16)
    for _ in range(3):
        flex(x)
    model[1].context = lambda x: context_parallel(mesh, buffers=[x], buffer_seq_dims=[1])
    with pytest.raises(HookError, match=r"context_parallel\(...\) splits .* over 2 ranks"):
        flex(x)
    assert not records.get("0")
    del model[1].context
    flex(x)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):  # over one rank
        flex(x)
    flex.restore()


@pytest.mark.ranks(2)
def test_a_model_made_context_parallel():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    style = _ContextParallel(2, _ContextParallel.AttentionType.SDPA)
    model = parallelize_module(nn.Sequential(Attention()), mesh, {"0": style})
    with pytest.raises(ValueError, match="the module '0' splits the sequence over 2 ranks"):
        FlexModel(model, data_parallel_size=2)


@pytest.mark.ranks(2)
def test_hugging_faces_pipeline_inside_of_another_module(tmp_path):
    distributed = pytest.importorskip("transformers.distributed")
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        models.llama().save_pretrained(tmp_path)
    dist.barrier()

    config = distributed.DistributedConfig(pp_size=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config)
    text = "loaded with pp_size=2 is inside a Sequential, .* returned; wrap that one"
    with pytest.raises(ValueError, match=text):
        FlexModel(nn.Sequential(model))
