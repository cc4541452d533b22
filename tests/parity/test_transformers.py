"""A Llama that generates, over two tensor-parallel or data-parallel ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import models
from cells import Cell, torch_hook
from flex_model import FlexModel, HookFunction
from shared_edits import mixing_features


def tokens(batch=2, length=5):
    return 1 + models.random(batch, length, seed=6).argsort()  # 0 is for padding


def oracle(model, site, edit, call, kind="forward"):
    records = []
    with torch.no_grad(), torch_hook(model, Cell(kind, site, edit), {}, records):
        return call(model), records


def generate(model):
    return model.generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [None, mixing_features])
def test_generate_under_the_wrapper(edit):
    """One record for the prompt and one per new token; a second call begins afresh."""
    model = models.llama()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    site, records = "model.layers.0.mlp", {}
    expected, seen = oracle(model, site, edit, generate)
    flex = FlexModel(sharded, records, tensor_parallel_size=2)
    flex.register_forward_hook(HookFunction(site, editing_function=edit))
    for _ in range(2):
        assert torch.equal(generate(flex), expected)
        assert_close(records.get(site, []), seen if dist.get_rank() == 0 else [])
    assert [record.shape[1] for record in seen] == [5, 1, 1, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dp_batch", [None, "global"])
def test_generate_where_one_rank_has_no_padding(dp_batch):
    """transformers drops a mask of ones: the other rank's forwards have one tensor more."""

    def padded():
        model = models.llama()
        model.set_attn_implementation("sdpa")  # eager attention to a padded row is NaN in float64
        return model

    def generate(model, rows):
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids[rows], attention_mask=mask[rows], **settings)

    mask = torch.arange(5).expand(4, 5) >= torch.tensor([2, 1, 0, 0])[:, None]
    ids, mask = tokens(4) * mask, mask.long()
    site, records = "model.layers.0.mlp", {}
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    call = functools.partial(generate, rows=slice(None))
    expected, seen = oracle(padded(), site, mixing_features, call)
    with FlexModel(padded(), records, data_parallel_size=2, dp_batch=dp_batch) as flex:
        flex.register_forward_hook(HookFunction(site, editing_function=mixing_features))
        for _ in range(2):
            assert torch.equal(generate(flex, mine), expected[mine])
            assert_close(records.get(site, []), seen if dist.get_rank() == 0 else [])
