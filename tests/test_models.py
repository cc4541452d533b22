"""The test models themselves: sharded without the library, they equal their unsharded twins."""

import pytest
from torch.testing import assert_close

import models
from tiers import FOUR_RANKS, ways


@pytest.mark.parametrize("way", ways(*models.TWO_RANKS, grid=FOUR_RANKS))
def test_models_agree(way):
    for model, batch in (
        (models.mlp(), models.random(4, 6)),
        (models.block(), models.random(4, 3, 8)),
    ):
        sharded = way.shard(model)
        output = sharded(way.my_rows(batch))
        output.sin().mean().backward()
        expected = model(batch)
        expected.sin().mean().backward()

        assert_close(output, way.my_rows(expected))
        gradients = way.full_gradients(model, sharded)
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, gradient in gradients.items():
            assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.ranks(2)
def test_llama_agrees_on_two_ranks():
    model = models.llama()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    tokens = models.random(2, 5).argsort()
    assert_close(sharded(tokens).logits, model(tokens).logits)
