"""Operations without a rule, followed through torch's decomposition of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flex_model.distributed.placement import Shard
from flex_model.layouts.propagation import has_rule, propagate
from flex_model.layouts.propagation.operation import Operand, Operation
from virtual_ranks import P, R, by_name

MEAN, SUM = 1, 2
F = torch.float32


def split(placement, *shape):
    """An operand of two ranks."""
    return Operand((shape, shape), F, placement)


def ask(name, *args, made, full_sizes=None):
    """What is known of the results, whose local shapes are ``made``."""
    assert not has_rule(name)
    arguments = by_name(getattr(torch.ops.aten, name).default._schema, args, {})
    outputs = tuple(Operand((shape, shape), F) for shape in made)
    return propagate(Operation(name, (arguments,) * 2, outputs, "", full_sizes or {}))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_number_of_a_local_size_makes_a_result_unknown(dim):
    """The mean of a rank's part is no summand of the mean, though its sum is one of the sum."""
    x, y = split(Shard(dim), 2, 2), split(Shard(dim), 2, 2)
    assert ask("soft_margin_loss", x, y, MEAN, made=[()]) == [None]
    assert ask("soft_margin_loss", x, y, SUM, made=[()]) == [P]
    assert ask("soft_margin_loss", x, y, 0, made=[(2, 2)]) == [Shard(dim)]


def test_sizes_are_those_of_the_unsharded_program_or_the_result_is_unknown():
    theta, made = split(Shard(0), 1, 2, 3), [(1, 4, 4, 2)]
    args = (theta, [1, 1, 4, 4], False)
    stated = {"size": [2, 1, 4, 4]}
    assert ask("affine_grid_generator", *args, made=made, full_sizes=stated) == [Shard(0)]
    assert ask("affine_grid_generator", *args, made=made) == [None]


def test_without_a_decomposition_only_replicated_operands_are_known():
    args = ([3], [1], [0], [1], False, [0], 1, [True, True, False])
    made = [(2, 3, 5), (3, 3, 1)]
    for rows, known in ((R, [R, R]), (Shard(0), [None, None])):
        x, grad, weight = split(rows, 2, 3, 5), split(rows, 2, 3, 5), split(R, 3, 3, 1)
        assert ask("convolution_backward", grad, x, weight, *args, made=made) == known


def test_modes_of_the_user_see_nothing_of_it():
    class Seen(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names += (func.name(),)
            return func(*args, **(kwargs or {}))

    x = split(Shard(0), 3, 5)
    with Seen() as seen, torch.inference_mode():
        assert ask("soft_margin_loss", x, split(Shard(0), 3, 5), SUM, made=[()]) == [P]
    assert seen.names == ()


def test_layers_of_most_models_are_not_decomposed():
    """The first operation that is decomposed imports sympy or dynamo, if nothing else has."""
    names = (
        "native_layer_norm native_group_norm native_batch_norm _softmax embedding convolution "
        "max_pool2d_with_indices _adaptive_avg_pool2d upsample_bicubic2d im2col pixel_shuffle "
        "nll_loss_forward mse_loss binary_cross_entropy_with_logits"
    )
    assert all(map(has_rule, names.split()))
