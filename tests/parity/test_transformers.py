"""Hugging Face models: Llama over two tensor-parallel ranks, GPT-2 over two halves of a batch."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import models
from cells import Cell, elementwise, in_place, mixing_features, torch_hook
from flex_model import FlexModel, HookFunction

# Where Llama's tensor parallelism leaves a plain tensor with a part of the last dim.


def tokens(batch=2, length=5):
    return 1 + models.random(batch, length, seed=6).argsort()  # 0 is for padding


def oracle(model, site, edit, call, kind="forward"):
    records = []
    with torch.no_grad(), torch_hook(model, Cell(kind, site, edit), {}, records):
        return call(model), records


@pytest.mark.ranks(2)
def test_every_module_of_llama_is_seen_in_full():
    model = models.llama()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    skipped = ("rotary_emb",)  # its two outputs are constants of the positions
    sites = [name for name, _ in model.named_modules() if not name.endswith(skipped)]
    sites = [name for name in sites if name != "model.layers"]  # a list is never called
    records = {}
    flex = FlexModel(sharded, records, tensor_parallel_size=2)
    for site in sites:
        flex.register_forward_hook(HookFunction(site))
    with torch.no_grad():
        result = flex(tokens())
    for site in sites:
        output, expected = oracle(model, site, None, lambda model: model(tokens()))
        assert_close(result.logits, output.logits)
        assert_close(records.get(site, []), expected if dist.get_rank() == 0 else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [elementwise, mixing_features, in_place])
def test_edits_of_llama_equal_the_unsharded_model(edit):
    model = models.llama()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    for site in ("model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.0.mlp.act_fn"):
        expected, _ = oracle(model, site, edit, lambda model: model(tokens()))
        with FlexModel(sharded, tensor_parallel_size=2) as flex, torch.no_grad():
            flex.register_forward_hook(HookFunction(site, editing_function=edit))
            result = flex(tokens())
        assert type(result) is type(expected)
        assert_close(result.logits, expected.logits)


@pytest.mark.ranks(2)
def test_gradients_through_an_edit_of_llama_equal_the_unsharded_model():
    model = models.llama()
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    cell = Cell("forward", "model.layers.1.mlp.act_fn", mixing_features)
    with torch_hook(model, cell, {}, []):
        model(tokens(), labels=tokens()).loss.backward()
    with FlexModel(sharded, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction(cell.site, editing_function=cell.edit))
        flex(tokens(), labels=tokens()).loss.backward()
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert_close(full, model.get_parameter(name).grad, msg=lambda m, name=name: f"{name}: {m}")


LINEAR = [
    ("forward", "model.layers.0.self_attn.q_proj"),
    ("forward", "model.layers.1.mlp.up_proj"),
    ("forward_pre", "model.layers.0.self_attn.o_proj"),
    ("forward_pre", "model.layers.1.mlp.down_proj"),
    ("full_backward_pre", "model.layers.1.mlp.gate_proj"),
    ("full_backward", "model.layers.0.mlp.down_proj"),
    ("forward", "model.layers.0.self_attn.o_proj"),
    ("full_backward", "model.layers.1.self_attn.v_proj"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "site"), LINEAR)
def test_linear_layers_of_llama_need_no_expected_shape(kind, site):
    """Their DTensor weights tell how their plain inputs and outputs are split."""
    model, expected_records = models.llama(), []
    sharded = models.tensor_parallel_llama(model, models.mesh(1, 2)["tp"])
    cell = Cell(kind, site, mixing_features)
    with torch_hook(model, cell, {}, expected_records):
        expected = model(tokens(), labels=tokens())
        expected.loss.backward()
    records = {}
    with FlexModel(sharded, records) as flex:
        getattr(flex, f"register_{kind}_hook")(HookFunction(site, editing_function=cell.edit))
        result = flex(tokens(), labels=tokens())
        result.loss.backward()
        gradients = {name: flex.get_module_gradient(name) for name, _ in model.named_parameters()}
    assert_close(result.logits, expected.logits)
    assert_close(records.get(site, []), expected_records if dist.get_rank() == 0 else [])
    for name, parameter in model.named_parameters():
        assert_close(gradients[name], parameter.grad, msg=lambda m, name=name: f"{name}: {m}")


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


@pytest.mark.ranks(2)
def test_gpt2_on_two_halves_of_a_batch():
    model, batch = models.gpt2(), tokens(4)
    half = batch.chunk(2)[dist.get_rank()]
    for site in ("transformer.h.0.attn", "transformer.h.1.mlp.act", "lm_head", ""):
        for edit in (None, elementwise, mixing_features):
            expected, seen = oracle(model, site, edit, lambda model: model(batch))
            records = {}
            with FlexModel(model, records, data_parallel_size=2) as flex, torch.no_grad():
                flex.register_forward_hook(HookFunction(site, editing_function=edit))
                result = flex(half)
            assert_close(result.logits, expected.logits.chunk(2)[dist.get_rank()])
            assert_close(records.get(site, []), seen if dist.get_rank() == 0 else [])


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=120)
def test_llama_sharded_by_transformers_itself(tmp_path):
    """``from_pretrained`` with a tensor-parallel plan."""
    model = models.llama().float()
    sharded = models.loaded_by_transformers(model, tmp_path)
    for site in ("model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.0.mlp.act_fn"):
        for edit in (None, mixing_features):
            expected, seen = oracle(model, site, edit, lambda model: model(tokens()))
            records = {}
            with FlexModel(sharded, records, tensor_parallel_size=2) as flex, torch.no_grad():
                flex.register_forward_hook(HookFunction(site, editing_function=edit))
                result = flex(tokens())
            assert_close(result.logits, expected.logits)
            assert_close(records.get(site, []), seen if dist.get_rank() == 0 else [])
