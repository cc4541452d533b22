"""Full parameters and gradients by name, read and written, on every parallelism."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import models
from flex_model import FlexModel

BATCH = models.random(4, 6)


def full_shape(parallelism, model, name):
    """What the library must be told: the shape, where a rank holds a part as a plain tensor."""
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
    for name, parameter in other.named_parameters():
        flex.set_module_parameter(name, parameter.detach())
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


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_in_one_process(check):
    CHECKS[check](models.ONE_RANK)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", models.TWO_RANKS)
def test_parameters_on_two_ranks(name, check):
    if (name, check) == ("dp", "gradients"):
        pytest.skip("plain replicas average their gradients themselves")
    CHECKS[check](models.TWO_RANKS[name])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("check", ["read", "write"])
@pytest.mark.parametrize("name", models.FOUR_RANKS)
def test_parameters_on_four_ranks(name, check):
    CHECKS[check](models.FOUR_RANKS[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", ["read", "write"])
def test_parameters_of_seven_columns_on_two_ranks(check):
    CHECKS[check](models.TWO_RANKS["tp"], hidden=7)


@pytest.mark.ranks(2)
def test_the_full_parameter_needs_no_hook_and_no_expected_shape_for_dtensor():
    parallelism = models.TWO_RANKS["dtensor"]
    model = models.mlp()
    flex = FlexModel(parallelism.shard(model))
    assert torch.equal(flex.get_module_parameter("fc2.weight"), model.fc2.weight)


@pytest.mark.ranks(2)
def test_a_wrong_expected_shape_of_a_parameter_names_it_on_every_rank():
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(models.mlp()), tensor_parallel_size=2)
    for shape in [(12, 6), (8, 12), (8,)]:
        with pytest.raises(ValueError, match=r"fc1\.weight"):
            flex.get_module_parameter("fc1.weight", shape)
    assert flex.get_module_parameter("fc1.weight", (8, 6)).shape == (8, 6)


def test_writing_a_wrong_shape_names_parameter_expected_and_got():
    flex = FlexModel(models.mlp())
    with pytest.raises(ValueError, match=r"fc1\.weight") as error:
        flex.set_module_parameter("fc1.weight", torch.zeros(6, 8, dtype=torch.float64))
    assert "(8, 6)" in str(error.value)
    assert "(6, 8)" in str(error.value)


@pytest.mark.ranks(2)
def test_writing_a_wrong_shape_is_an_error_on_every_rank():
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(models.mlp()), tensor_parallel_size=2)
    before = flex.get_module_parameter("fc1.weight", (8, 6))
    with pytest.raises(ValueError, match=r"fc1.weight"):
        flex.set_module_parameter("fc1.weight", torch.zeros(9, 6, dtype=torch.float64))
    assert torch.equal(flex.get_module_parameter("fc1.weight", (8, 6)), before)


def test_writing_keeps_the_parameter_object_so_that_optimizers_go_on():
    flex = FlexModel(models.mlp())
    parameter = flex.module.fc1.weight
    flex.set_module_parameter("fc1.weight", torch.ones(8, 6, dtype=torch.float64))
    assert flex.module.fc1.weight is parameter
    assert parameter.requires_grad
    assert parameter.eq(1).all()


@pytest.mark.ranks(2)
def test_clean_names_of_parameters_under_ddp():
    flex = FlexModel(models.TWO_RANKS["ddp"].shard(models.mlp()), data_parallel_size=2)
    for name in ("fc1.weight", "module.fc1.weight"):
        assert torch.equal(flex.get_module_parameter(name), models.mlp().fc1.weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_gradient_read_in_full_is_the_average(name):
    parallelism = models.TWO_RANKS[name]
    flex = FlexModel(parallelism.shard(models.mlp()), **parallelism.sizes)
    flex(parallelism.my_rows(BATCH)).mean().backward()
    oracle = models.mlp()
    oracle(BATCH).mean().backward()
    assert_close(flex.get_module_gradient("fc1.weight"), oracle.fc1.weight.grad)
    assert dist.get_world_size() == 2
