"""A Llama over two tensor-parallel ranks that is checkpointed, and that generates."""

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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_edit_of_llama_is_recomputed_by_its_own_checkpointing(use_reentrant):
    model = models.llama().train()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    sharded.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    cell = Cell("forward", "model.layers.1.mlp.act_fn", mixing_features)
    with torch_hook(model, cell, {}, []):
        model(tokens(), labels=tokens()).loss.backward()
    records = {}
    with FlexModel(sharded, records, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction(cell.site, editing_function=cell.edit))
        flex(tokens(), labels=tokens(), use_cache=False).loss.backward()
    assert len(records.get(cell.site, [])) == (dist.get_rank() == 0)
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert_close(full, model.get_parameter(name).grad)


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
