"""The mesh of a wrap is the one that its model was sharded over, in whatever order of ranks."""

import contextlib
import io
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import models
from flex_model import FlexModel
from flex_model.distributed.mesh import AXES, Mesh
from flex_model.integrations import dtensor, model_mesh
from flex_model.integrations.mesh_sources import Source, axes_of_dims
from flex_model.integrations.model_mesh import ModelGroups, merge

BATCH = models.random(4, 6)
PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


# ---- Grids of ranks, without processes -----------------------------------------------------------


def line_of(table, rank, dim):
    """The ranks of ``table`` that differ from ``rank`` along ``dim`` only."""
    place = [slice(int(i), int(i) + 1) for i in (table == rank).nonzero()[0]]
    place[dim] = slice(None)
    return tuple(table[tuple(place)].flatten().tolist())


@pytest.mark.parametrize("order", list(itertools.permutations(AXES)))
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 3, 4)])
def test_every_rank_finds_the_same_grid_from_its_own_groups(order, sizes):
    """``order``: slowest first, as fairscale's (dp, pp, tp) and Megatron's ``order=`` read
    backwards."""
    size = dict(zip(AXES, sizes))
    world = math.prod(sizes)
    counted = torch.arange(world).reshape([size[axis] for axis in order])
    table = counted.permute([order.index(axis) for axis in AXES])  # (pp, dp, tp)
    for rank in range(world):
        lines = [line_of(table, rank, dim) for dim in range(3)]
        mesh = Mesh.from_lines(*lines, rank, world)
        assert mesh.ranks == tuple(table.flatten().tolist())
        assert mesh.ranks[mesh.rank] == rank
        assert (mesh.pp_size, mesh.dp_size, mesh.tp_size) == sizes
        assert [mesh.axis_ranks(axis) for axis in AXES] == lines


def test_a_grid_of_some_ranks_of_the_world():
    mesh = Mesh.from_lines((5,), (5, 7), (4, 5), 5, 8)
    assert mesh.ranks == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("dp", "tp", "me"),
    [
        ((0, 3), (0, 1), 0),  # 3 + 1 is not a rank
        ((1, 2), (0, 1), 1),  # rank 1 twice
        ((0, 3), (2, 3), 3),  # -1
        ((0, 2), (2, 3), 0),  # rank 0 is not in its own group
    ],
)
def test_groups_that_are_no_regular_grid(dp, tp, me):
    with pytest.raises(ValueError, match="not a regular grid of the 4 ranks; give device_mesh="):
        Mesh.from_lines((me,), dp, tp, me, 4)


def test_a_table_of_ranks_with_two_dims_of_one_axis():
    """HSDP with tensor parallelism; the dims of dp are one axis, the first slowest."""
    table = torch.arange(8).reshape(2, 2, 2)
    mesh = replace(Mesh.from_table(table, ("dp", "dp", "tp")), rank=5)
    assert (mesh.ranks, mesh.dp_size, mesh.tp_size) == (tuple(range(8)), 4, 2)
    assert (mesh.axis_ranks("dp"), mesh.axis_ranks("tp")) == ((1, 3, 5, 7), (4, 5))
    mesh = Mesh.from_table(table, ("tp", "dp", "dp"))
    mesh = replace(mesh, rank=mesh.ranks.index(5))
    assert (mesh.axis_ranks("dp"), mesh.axis_ranks("tp")) == ((4, 5, 6, 7), (1, 5))
    with pytest.raises(ValueError, match="global rank 0 is not one of the ranks of this model"):
        Mesh.from_table(table + 1, ("dp", "dp", "tp"))


@pytest.mark.parametrize(
    ("names", "sizes", "is_fsdp2", "replicates_first", "axes"),
    [
        (("pp", "fsdp", "tp"), (2, 2, 2), False, False, ("pp", "dp", "tp")),
        (("dp_replicate", "dp_shard", "tp"), (2, 2, 2), True, True, ("dp", "dp", "tp")),
        (("TP",), (2,), True, False, ("tp",)),  # a tensor-parallel parameter that FSDP2 ignores
        (None, (2,), False, False, ("tp",)),
        (None, (2,), True, False, ("dp",)),
        (("outer", "inner"), (2, 2), True, True, ("dp", "dp")),
        (("outer", "inner"), (2, 2), True, False, ("dp", "tp")),
        (("rows", "tp"), (2, 2), True, False, ("dp", "tp")),
        (("seq", "tp"), (2, 2), True, False, None),  # parts of sequences are no rows
        (("seq",), (2,), False, False, ("tp",)),
        (("rows", "dp"), (2, 2), True, False, None),  # its second dim would be tp
        (("outer", "inner"), (2, 2), False, False, None),
        (("dp_shard_cp", "tp"), (2, 2), True, False, None),
        (("ep",), (2,), False, False, None),
        (("efsdp", "ep"), (2, 2), True, False, None),
        # dims of size 1 don't count, whatever their name: these were refused before
        (("pp", "fsdp", "ep"), (1, 2, 1), True, False, ("pp", "dp", "dp")),
        (("dp_shard_cp", "tp"), (1, 2), True, False, ("dp", "tp")),
        (("anything", "tp"), (1, 2), False, False, ("dp", "tp")),
        (("outer", "inner"), (1, 2), True, False, ("dp", "tp")),
        (("outer", "middle", "inner"), (2, 1, 1), True, False, ("dp", "tp", "tp")),
    ],
)
def test_axes_of_the_dims_of_a_mesh(names, sizes, is_fsdp2, replicates_first, axes):
    found = axes_of_dims(names, sizes, is_fsdp2=is_fsdp2, replicates_first=replicates_first)
    assert found == axes


def groups(*sources):
    """What a model says, from ``(name, mesh)``."""
    sources = [Source(name, mesh) for name, mesh in sources]
    return ModelGroups(*merge(sources), tuple(source.mesh for source in sources))


TP = Mesh((2, 3), 0, tp_size=2)
DP = Mesh((0, 2), 1, dp_size=2)


def test_sources_are_put_together():
    found = groups(("fc1.weight", TP), ("DDP", DP), ("the root", Mesh((2,), 0)))
    assert found.lines == {"tp": (2, 3), "dp": (0, 2)}
    assert found.sizes == {"pp": 1, "dp": 2, "tp": 2}
    assert found.describe() == "tp over ranks [2, 3] (fc1.weight), dp over ranks [0, 2] (DDP)"


def test_along_dp_the_largest_group_counts():
    part, whole = Mesh((2, 3), 0, dp_size=2), Mesh((0, 1, 2, 3), 2, dp_size=4)
    for sources in ((part, whole), (whole, part)):
        assert groups(*(("x", mesh) for mesh in sources)).lines == {"dp": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    "other",
    [Mesh((2, 4), 0, tp_size=2), Mesh((0, 1, 2, 3), 2, tp_size=4), Mesh((3, 2), 1, 1, 1, 2)],
)
def test_sources_that_contradict_each_other(other):
    with pytest.raises(ValueError, match=r"tp is over ranks \[2, 3\] by a, .* \[.*\] by b"):
        groups(("a", TP), ("b", other))


def test_a_mesh_is_checked_against_the_groups_of_the_model():
    found = groups(("fc1.weight", TP), ("DDP", DP))
    found.check(Mesh((0, 1, 2, 3), 2, dp_size=2, tp_size=2), "sizes say")
    with pytest.raises(ValueError, match="sizes say: pp 1 x dp 2 x tp 2") as error:
        found.check(Mesh((0, 2, 1, 3), 1, dp_size=2, tp_size=2), "sizes say")
    assert "global rank 2 in tp over ranks [0, 2], dp over ranks [2, 3]" in str(error.value)
    assert found.describe() in str(error.value)


# ---- Frameworks ----------------------------------------------------------------------------------


def lines(flex):
    return {
        axis: flex.mesh.axis_ranks(axis) for axis in AXES if len(flex.mesh.axis_ranks(axis)) > 1
    }


def of_two_by_two():
    """This rank's lines in a grid (dp, tp) of four ranks, tp fastest."""
    row, column = divmod(dist.get_rank(), 2)
    return {"dp": (column, 2 + column), "tp": (2 * row, 2 * row + 1)}


@contextlib.contextmanager
def fairscale(tp, pp=1):
    state = pytest.importorskip("fairscale.nn.model_parallel.initialize")
    with contextlib.redirect_stdout(io.StringIO()):
        state.initialize_model_parallel(tp, pp)
    try:
        yield
    finally:
        state.destroy_model_parallel()


def fairscale_mlp(model):
    from fairscale.nn.model_parallel.initialize import get_model_parallel_group
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    group = get_model_parallel_group()
    for name, layer, dim, settings in (
        ("fc1", ColumnParallelLinear, 0, {"gather_output": False}),
        ("fc2", RowParallelLinear, 1, {"input_is_parallel": True}),
    ):
        linear = model.get_submodule(name)
        sharded = layer(linear.in_features, linear.out_features, **settings).double()
        with torch.no_grad():
            sharded.weight.copy_(models.my_part(linear.weight, dim, group))
            bias = linear.bias if dim else models.my_part(linear.bias, 0, group)
            sharded.bias.copy_(bias)
        model.set_submodule(name, sharded)
    return model


@pytest.mark.ranks(4)
def test_fairscale_needs_no_sizes():
    with fairscale(tp=2):
        flex = FlexModel(fairscale_mlp(models.mlp()))
        assert lines(flex) == of_two_by_two()
        for sizes in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
            assert FlexModel(fairscale_mlp(models.mlp()), **sizes).mesh == flex.mesh
        with pytest.raises(ValueError, match="contradict the model itself") as error:
            FlexModel(fairscale_mlp(models.mlp()), tensor_parallel_size=4)
        assert "(4, 1, 1) over the ranks [0, 1, 2, 3]" in str(error.value)
        assert f"tp over ranks {list(flex.mesh.axis_ranks('tp'))} (fairscale" in str(error.value)


@pytest.mark.ranks(4)
def test_fairscale_counts_stages_before_replicas():
    with fairscale(tp=1, pp=2):
        model = fairscale_mlp(models.mlp())
        mesh = model_mesh.find(model).mesh(60.0)
        assert mesh.ranks == (0, 2, 1, 3)
        assert (mesh.pp_size, mesh.dp_size, mesh.tp_size) == (2, 2, 1)
        assert mesh.stage_ranks == ((0, 2), (1, 3))[dist.get_rank() % 2]
        assert model_mesh.find(models.mlp()) is None  # the state alone says nothing of a model
        with pytest.raises(ValueError, match="pipeline_parallel_size is 2, but a module alone"):
            FlexModel(model)


@contextlib.contextmanager
def megatron(**settings):
    state = pytest.importorskip("megatron.core.parallel_state")
    state.initialize_model_parallel(**settings)
    try:
        yield state
    finally:
        state.destroy_model_parallel()


def megatron_layer():
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float64)
    settings = {"config": config, "init_method": nn.init.xavier_uniform_}
    settings["tp_group"] = get_tensor_model_parallel_group()
    return nn.Sequential(ColumnParallelLinear(6, 8, **settings))


@pytest.mark.grid  # Megatron's imports
@pytest.mark.ranks(4)
def test_megatron_tells_its_groups():
    with megatron(tensor_model_parallel_size=2):
        flex = FlexModel(megatron_layer())
        assert lines(flex) == of_two_by_two()
        assert flex.mesh.ranks == (0, 1, 2, 3)
        with pytest.raises(ValueError, match=r"contradict the model itself.*Megatron"):
            FlexModel(megatron_layer(), data_parallel_size=4)
        slow = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        with pytest.raises(ValueError, match=r"the device_mesh gives.*sharded as tp .*Megatron"):
            FlexModel(megatron_layer(), device_mesh=slow)
    with megatron(pipeline_model_parallel_size=2, order="tp-cp-ep-pp-dp"):
        assert model_mesh.find(megatron_layer()).mesh(60.0).ranks == (0, 2, 1, 3)
    with megatron(pipeline_model_parallel_size=2):
        assert model_mesh.find(megatron_layer()).mesh(60.0).ranks == (0, 1, 2, 3)
    with (
        megatron(context_parallel_size=2),
        pytest.raises(ValueError, match=r"context parallelism \(size 2\)"),
    ):
        FlexModel(megatron_layer())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard"), ("outer", "inner")])
def test_hsdp_is_one_axis(names):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    sharded = fully_shard(models.mlp(), mesh=mesh)
    with torch.no_grad():
        sharded(BATCH)  # its parameters stay whole after this
    assert lines(FlexModel(sharded)) == {"dp": (0, 1, 2, 3)}
    with pytest.raises(ValueError, match=r"sharded as dp over ranks \[0, 1, 2, 3\] \(FSDP2"):
        FlexModel(sharded, tensor_parallel_size=2, data_parallel_size=2)


@pytest.mark.ranks(4)
def test_hybrid_fsdp1_is_one_axis():
    mesh = models.mesh(2, 2)  # its groups: shards next to each other, replicas apart
    shards, replicas = mesh["tp"].get_group(), mesh["dp"].get_group()
    sharded = FullyShardedDataParallel(
        models.mlp(),
        process_group=(shards, replicas),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    assert lines(FlexModel(sharded)) == {"dp": (0, 1, 2, 3)}
    sharded._inter_node_pg = None  # private: it may not be there in another torch
    message = "does not expose the group it replicates over; give device_mesh= .* dp_replicate"
    with pytest.raises(ValueError, match=message):
        FlexModel(sharded)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    assert FlexModel(sharded, device_mesh=named).dp_size == 4  # the first error again, before


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_dtensors_in_a_data_parallel_wrapper(wrapper):
    """DDP and FSDP1 hide the DTensors; the mesh that theirs was cut from still tells."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(models.mlp(), mesh["tp"], PLAN)
    if wrapper == "ddp":
        model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    elif wrapper == "fsdp1":
        model = FullyShardedDataParallel(
            model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True
        )
    else:
        fully_shard(model.fc1, mesh=mesh["dp"])  # the other layers only know of tp, or of nothing
    flex = FlexModel(model)
    assert lines(flex) == of_two_by_two()


@pytest.mark.ranks(4)
def test_groups_that_different_layers_know():
    """No mesh has both axes, so the ranks ask each other whether they found the same grid."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = parallelize_module(models.mlp(), mesh["tp"], PLAN)
    model.out = DistributedDataParallel(model.out, process_group=mesh["dp"].get_group())
    flex = FlexModel(model)
    assert flex.mesh.ranks == (0, 2, 1, 3)
    assert (flex.dp_size, flex.tp_size) == (2, 2)
    with pytest.raises(ValueError, match="the device_mesh gives"):
        FlexModel(model, device_mesh=models.mesh(2, 2))
    # groups that cross: (0, 1) and (2, 3) against (0, 3) and (1, 2)
    model = models.mlp()
    model = parallelize_module(model, models.mesh(2, 2)["tp"], PLAN)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    model.out = DistributedDataParallel(model.out, process_group=crossed)
    with pytest.raises(ValueError, match=r"regular grid .* shard the model over the dims of one"):
        FlexModel(model)


@pytest.mark.ranks(4)
def test_groups_of_a_mesh_in_no_order():
    mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("a", "b"))
    model = models.mlp()
    for name, dim in (("fc1", "a"), ("out", "b")):
        layer = model.get_submodule(name)
        if dim == "a":
            model.set_submodule(
                name, DistributedDataParallel(layer, process_group=mesh.get_group(dim))
            )
        else:
            parallelize_module(layer, mesh[dim], ColwiseParallel())
    named = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match='give the device_mesh= whose dims "dp" and "tp" they are'):
        FlexModel(model)
    # Which rows rank 3 has depends on whether get_local_rank or get_coordinate chose them.
    with pytest.raises(
        ValueError, match="device_mesh dim 'dp' has ranks that are not in ascending"
    ):
        FlexModel(model, device_mesh=named)


class MeshOfExperts:
    """The mesh (efsdp, ep) of rank 0 among eight, as far as it is read."""

    ndim = 2

    def __init__(self, ep):
        self.mesh = torch.arange(8).view(8 // ep, ep)

    def size(self, dim):
        return self.mesh.shape[dim]

    def get_coordinate(self):
        return [0, 0]


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_experts_over_tp_and_a_part_of_dp_are_refused(ep):
    mesh = Mesh(tuple(range(8)), dp_size=4, tp_size=2)
    if ep == 4:
        text = r"^'experts': its DTensor is on ranks \[0, 1, 2, 3\], which span tp and a part of dp"
        with pytest.raises(ValueError, match=f"{text} .*choose another ep_size"):
            dtensor.axes_of(MeshOfExperts(ep), mesh, "'experts'")
        return
    found = dtensor.axes_of(MeshOfExperts(ep), mesh, "'experts'")
    assert found == {2: ["dp", "tp"], 8: [None, dtensor.BOTH]}[ep]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("differing", [None, 0, 3])
@pytest.mark.parametrize("found", [(), (0, 1, 3, 2)])
def test_one_rank_that_found_another_grid_is_known_to_all(differing, found):
    groups = [of_two_by_two()[axis] for axis in ("tp", "dp")]
    ranks = found if dist.get_rank() == differing else (0, 1, 2, 3)
    assert model_mesh.is_agreed(ranks, groups, 60.0) == (differing is None)


@pytest.mark.ranks(4)
def test_sizes_fill_in_what_the_model_does_not_say():
    group = models.mesh(2, 2)["dp"].get_group()
    by_hand = models.tensor_parallel(models.mlp(), models.mesh(2, 2)["tp"].get_group())
    model = DistributedDataParallel(by_hand, process_group=group)
    assert FlexModel(model, tensor_parallel_size=2).mesh.ranks == (0, 1, 2, 3)
    # DDP does not expose that its model is tensor parallel too
    with pytest.raises(ValueError, match="does not state the axes of the other ranks"):
        FlexModel(model)
    slow = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    by_hand = models.tensor_parallel(models.mlp(), slow["tp"].get_group())
    model = DistributedDataParallel(by_hand, process_group=slow["dp"].get_group())
    with pytest.raises(ValueError, match=r"sizes and process_group give.*DistributedDataParallel"):
        FlexModel(model, tensor_parallel_size=2)
    assert FlexModel(model, device_mesh=slow).mesh.ranks == (0, 2, 1, 3)


@pytest.mark.ranks(4)
def test_a_model_on_some_ranks_of_the_world():
    half = dist.new_group([1, 2])
    mesh = dist.DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",))
    model = parallelize_module(models.mlp(), mesh, PLAN)
    if dist.get_rank() in (1, 2):
        assert FlexModel(model).mesh.ranks == (1, 2)
        assert FlexModel(model, process_group=half).mesh.ranks == (1, 2)
        ddp = DistributedDataParallel(models.mlp(), process_group=half)
        assert lines(FlexModel(ddp, process_group=half)) == {"dp": (1, 2)}
        with pytest.raises(ValueError, match=r"over the ranks \[0, 1, 2, 3\] contradict the model"):
            FlexModel(model, tensor_parallel_size=2)
    else:
        with pytest.raises(ValueError, match=r"is not one of the ranks of this model, \[1, 2\]"):
            FlexModel(model)
        with pytest.raises(ValueError, match="not a member of the process_group"):
            FlexModel(models.mlp(), process_group=half)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("keeps_mesh", [True, False])
def test_hugging_face_tells_its_mesh(tmp_path, keeps_mesh):
    distributed = pytest.importorskip("transformers.distributed")
    if dist.get_rank() == 0:
        models.llama(layers=1).save_pretrained(tmp_path)
    dist.barrier()
    from transformers import AutoModelForCausalLM

    config = distributed.DistributedConfig(tp_size=2, fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config)
    if not keeps_mesh:
        del model._device_mesh
    flex = FlexModel(model)
    assert lines(flex) == of_two_by_two()
    assert FlexModel(model, data_parallel_size=2).mesh == flex.mesh
    with pytest.raises(ValueError, match="contradict the model itself"):
        FlexModel(model, tensor_parallel_size=4)
