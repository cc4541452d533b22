"""The test models themselves: sharded without the library, they equal their unsharded twins."""

import pytest
from torch.testing import assert_close

import models


def check(parallelism, model, batch):
    sharded = parallelism.shard(model)
    output = sharded(parallelism.my_rows(batch))
    output.sin().mean().backward()
    expected = model(batch)
    expected.sin().mean().backward()

    assert_close(output, parallelism.my_rows(expected))
    gradients = parallelism.full_gradients(model, sharded)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", models.TWO_RANKS)
def test_models_agree_on_two_ranks(name):
    check(models.TWO_RANKS[name], models.mlp(), models.random(4, 6))
    check(models.TWO_RANKS[name], models.block(), models.random(4, 3, 8))


@pytest.mark.grid
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", models.FOUR_RANKS)
def test_models_agree_on_four_ranks(name):
    check(models.FOUR_RANKS[name], models.mlp(), models.random(4, 6))
    check(models.FOUR_RANKS[name], models.block(), models.random(4, 3, 8))


@pytest.mark.ranks(2)
def test_llama_agrees_on_two_ranks():
    model = models.llama()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    tokens = models.random(2, 5).argsort()
    assert_close(sharded(tokens).logits, model(tokens).logits)
