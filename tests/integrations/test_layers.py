"""What layers that shard by hand state of their parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import models
from flex_model import FlexModel, HookFunction
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shard
from flex_model.integrations.layers import (
    dims_smaller_than_stated,
    marked_placement,
    share_by_sizes,
    states_tensor_parallelism,
)

TP_2 = Mesh(ranks=(0, 1), tp_size=2)


class Layer(nn.Module):
    """A weight and a bias beside sizes that the layer states."""

    def __init__(self, weight, bias=None, **sizes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weight))
        self.bias = None if bias is None else nn.Parameter(torch.zeros(bias))
        for name, size in sizes.items():
            setattr(self, name, size)

    def marks(self, mesh=TP_2):
        return [marked_placement(self, name, p, mesh) for name, p in self.named_parameters()]

    def shares(self):
        found = [share_by_sizes(self, name, p, TP_2) for name, p in self.named_parameters()]
        return [share and share[0] for share in found]


@pytest.mark.parametrize(
    "layer, expected",
    [
        (Layer((4, 6), 4, out_features=8, in_features=6), [Shard(0), Shard(0)]),
        (Layer((8, 3), 8, out_features=8, in_features=6), [Shard(1), None]),
        (Layer((4, 6), 8, out_features=8, in_features=6), [Shard(0), None]),  # a whole bias
        (Layer((4, 6), output_size=8, input_size=6, out_features=4, in_features=6), [Shard(0)]),
        (Layer((4, 6), 4, output_size=8, input_size=6), [Shard(0), Shard(0)]),
        (Layer((5, 6), num_embeddings=10, embedding_dim=6), [Shard(0)]),
        (Layer((10, 3), num_embeddings=10, embedding_dim=6), [Shard(1)]),
        (Layer((49, 6), out_features=97, in_features=6), [Shard(0)]),
    ],
)
def test_sizes_stated_beside_a_smaller_weight_tell_its_layout(layer, expected):
    assert layer.shares() == expected
    assert states_tensor_parallelism(layer, TP_2)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),  # it may state its own, local sizes
        nn.LayerNorm(4),
        nn.Bilinear(4, 4, 4),
        Layer((4, 3), out_features=8, in_features=6),  # smaller both ways
        Layer((24, 1), out_features=8, in_features=6),  # packed
        Layer((4, 6), out_features=8),
        Layer((4, 6), out_features="8", in_features="6"),
    ],
)
def test_nothing_is_told_where_nothing_is_stated(layer):
    for name, parameter in layer.named_parameters():
        assert marked_placement(layer, name, parameter, TP_2) is None
        assert share_by_sizes(layer, name, parameter, TP_2) is None
    assert not states_tensor_parallelism(layer, TP_2)


def test_an_uneven_share_is_no_replica():
    """Whole heads, of which some ranks have more: was taken for a weight that all share."""
    layer = Layer((8, 6), 8, out_features=12, in_features=6)
    assert share_by_sizes(layer, "weight", layer.weight, TP_2) == (Shard(0), (12, 6))
    assert share_by_sizes(layer, "bias", layer.bias, TP_2) == (Shard(0), (12,))
    assert states_tensor_parallelism(layer, TP_2)  # two heads of three: rank 0's share
    assert not states_tensor_parallelism(Layer((4, 6), out_features=12, in_features=6), TP_2)
    assert not states_tensor_parallelism(Layer((2, 6), out_features=8, in_features=6), TP_2)
    assert not states_tensor_parallelism(Layer((9, 6), out_features=12, in_features=6), TP_2)
    both = Layer((8, 3), out_features=12, in_features=6)
    assert share_by_sizes(both, "weight", both.weight, TP_2) is None
    assert dims_smaller_than_stated(both, "weight", both.weight, TP_2) == [0, 1]
    packed = Layer((24, 1), out_features=8, in_features=6)
    assert dims_smaller_than_stated(packed, "weight", packed.weight, TP_2) == []


def marked(dim, stride, **sizes):
    layer = Layer((4, 6), 4, **sizes)
    layer.weight.tensor_model_parallel = True
    layer.weight.partition_dim, layer.weight.partition_stride = dim, stride
    if dim == 0:
        vars(layer.bias).update(vars(layer.weight))
    return layer


def test_megatrons_marks_tell_dim_and_parts():
    assert marked(0, 1).marks() == [Shard(0), Shard(0)]
    assert marked(0, 2, output_size=8).marks() == [Shard(0, parts=2)] * 2
    assert marked(1, 1).marks() == [Shard(1), Replicate()]
    tied = marked(0, 1)  # an output layer that computes with the embedding's weight
    tied.weight = None
    assert tied.marks() == [Shard(0)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mark", ["tp_group", "allreduce"])
def test_megatrons_marks_of_experts_are_not_along_tp(mark):
    """A group of one rank splits nothing, and under expert parallelism each rank has other experts
    by the same name: their halves were joined.
    """
    model = nn.ModuleDict({"expert": marked(0, 1), "dense": marked(1, 1)})
    expert = model["expert"]
    if mark == "tp_group":
        expert.tp_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    else:
        expert.weight.allreduce = expert.bias.allreduce = False
    assert expert.marks() == [None, None]
    with FlexModel(model, tensor_parallel_size=2) as flex:
        assert flex.get_module_parameter("dense.weight").shape == (4, 12)
        for name in ("expert.weight", "expert.bias"):
            with pytest.raises(ValueError, match="over the tensor-parallel ranks is not known"):
                flex.get_module_parameter(name)
    if mark == "allreduce":
        with FlexModel(model, data_parallel_size=2) as flex:
            assert flex.get_module_parameter("dense.weight").shape == (4, 6)
            with pytest.raises(
                ValueError, match=r"data-parallel ranks is not known .*others by this name"
            ):
                flex.get_module_parameter("expert.weight")


def test_a_megatron_parameter_that_lost_its_marks_is_not_guessed():
    """A new parameter in its place may have parts, as a gated ``linear_fc1``, which no size
    shows.
    """
    layer = Layer((4, 6), output_size=8, input_size=6)
    layer.__class__ = type("ColumnParallelLinear", (Layer,), {"__module__": "megatron.core.layers"})
    assert layer.marks() == layer.shares() == [None]


def test_other_parameters_and_a_single_rank_tell_nothing():
    layer = marked(0, 1)
    layer.weight1 = nn.Parameter(torch.zeros(4, 6))  # of a grouped expert: another order of rows
    vars(layer.weight1).update(vars(layer.weight))
    assert marked_placement(layer, "weight1", layer.weight1, TP_2) is None
    assert layer.marks(Mesh()) == [None, None, None]


class Drawn(nn.Module):
    """Draws noise on a weight, and counts."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight + torch.randn_like(weight)


@pytest.mark.ranks(2)
def test_a_parametrized_weight_is_computed_by_its_layer_alone():
    """Whatever else reads it changes what the model computes."""
    drawn, model = Drawn(), models.TWO_RANKS["dtensor"].shard(models.mlp())
    register_parametrization(model.inp, "weight", drawn)
    with FlexModel(model, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("act"))
        flex.register_forward_hook(HookFunction("inp.parametrizations.weight.0"))
        flex.register_forward_hook(HookFunction("inp.parametrizations.weight"))
        drawn.calls = 0
        for rows in (4, 2):
            flex(models.random(rows, 6)).sum().backward()
        assert drawn.calls == 2
        for read in (flex.get_module_parameter, flex.get_module_gradient):
            with pytest.raises(ValueError, match=r"no parameter 'inp\.weight'"):
                read("inp.weight")
        assert drawn.calls == 2
        assert flex.inp.weight.shape == (6, 6) and drawn.calls == 3
