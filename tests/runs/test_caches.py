"""Caches that are changed or copied between the calls of a model: as on one process."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import models
import pipelines
from flex_model import FlexModel, HookFunction
from tiers import grid_but

pytest.importorskip("transformers")

SITES = ["model.layers.0.mlp.act_fn", "model.layers.1.self_attn.o_proj", "model.layers.1"]
TOKENS = torch.arange(20).reshape(4, 5) * 7 % 61 + 3


def mix(module, full, save_ctx, modules):
    return full.flip(-1) * 0.5 + full


def beams(flex, tokens):
    how = {"num_beams": 2, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return flex.generate(tokens, eos_token_id=None, **how)


def of_a_prefix(change):
    """Go on from a cache of the first tokens, changed."""

    def run(flex, tokens):
        cache = copy.deepcopy(flex(tokens[:, :4], use_cache=True).past_key_values)
        return flex(change(cache, tokens), past_key_values=cache).logits

    return run


def cropped(cache, tokens):
    cache.crop(-2)
    return tokens[:, 2:]


def repeated(cache, tokens):
    cache.batch_repeat_interleave(2)
    return tokens[:, 4:].repeat_interleave(2, 0)


def reordered(cache, tokens):
    cache.reorder_cache(torch.arange(len(tokens)).flip(0))
    return tokens[:, 4:]


def scaled(cache, tokens):
    for layer in cache.layers:
        layer.values = layer.values * 0.5
    return tokens[:, 4:]


def unhooked(flex, tokens):
    """Along dp such a cache holds rows, by contract."""
    with flex.active(groups=()):
        cache = flex(tokens[:, :4], use_cache=True).past_key_values
    return flex(tokens[:, 4:], past_key_values=cache).logits


CALLS = {"beams": beams, "unhooked": unhooked} | {
    one.__name__: of_a_prefix(one) for one in (cropped, repeated, reordered, scaled)
}


def run(model, call, tokens, sites=SITES, **group):
    records = {}
    with FlexModel(model, records, **group) as flex, torch.no_grad():
        for i, site in enumerate(sites):
            flex.register_forward_hook(HookFunction(site, editing_function=None if i else mix))
        found = call(flex, tokens)
    return found, records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("axis", grid_but(["dp", "tp"], "tp"))
def test_a_cache_that_is_changed(axis, name, tmp_path):
    call, is_dp = CALLS[name], axis == "dp"
    llama = models.llama().float()
    model = copy.deepcopy(llama)
    model = (
        DistributedDataParallel(model) if is_dp else models.loaded_by_transformers(llama, tmp_path)
    )
    rows = TOKENS.chunk(2)[dist.get_rank()] if is_dp else TOKENS
    found, records = run(model, call, rows)
    # Rows reordered, or each a group of its own, on each rank alone.
    parts = TOKENS.chunk(2) if is_dp else [TOKENS]
    alone = [run(llama, call, part, process_group=pipelines.alone_group()) for part in parts]
    torch.testing.assert_close(found, alone[dist.get_rank() * is_dp][0], rtol=1e-4, atol=1e-4)
    if dist.get_rank() == 0:
        for site in SITES:
            expected = [torch.cat(of_parts) for of_parts in zip(*(one[1][site] for one in alone))]
            assert len(records[site]) == len(expected) > 0
            for ours, theirs in zip(records[site], expected):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
def test_a_cache_that_no_hooked_forward_filled_is_named_and_can_be_stated(tmp_path):
    """Its heads are unknown along tp: the error named an ``arange`` of its length."""
    llama = models.llama().float()
    model, site = models.loaded_by_transformers(llama, tmp_path), "model.layers.1.self_attn.o_proj"
    found = []
    for sharded, group in ((model, {}), (llama, {"process_group": pipelines.alone_group()})):
        with FlexModel(sharded, {}, **group) as flex, torch.no_grad():
            flex.register_forward_pre_hook(HookFunction(site, editing_function=mix))
            if sharded is model:
                with pytest.raises(
                    ValueError, match=r"lost at state in 'past_key_values', ten"
                ) as e:
                    unhooked(flex, TOKENS)
                assert "fill a cache by forwards in which a hook is active" in str(e.value)
                (row,) = flex.layouts(why=True)  # which the message names
                assert any("not known: state in" in line for line in row.proof["tp"])
                for index in range(1, 1 + 2 * len(llama.model.layers)):
                    pattern = re.compile("^$")
                    flex.annotate_layout(pattern, kind="forward_pre", index=index, tp=Shard(1))
            found.append(unhooked(flex, TOKENS))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
def test_beams_of_an_encoder_and_a_decoder_with_whole_heads():
    """The caches in an EncoderDecoderCache were not seen, and a reordered one was not known."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    whole = models.seeded(transformers.T5ForConditionalGeneration, config).eval()
    sites = ["decoder.block.0.layer.2.DenseReluDense.wi", "decoder.block.1", "lm_head"]
    plan = {
        name: ColwiseParallel() if name.endswith("wi") else RowwiseParallel()
        for name, _ in whole.named_modules()
        if name.endswith((".wi", ".wo"))
    }
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(copy.deepcopy(whole), mesh, plan)
    found, records = run(model, beams, TOKENS, sites)
    expected, of_twin = run(whole, beams, TOKENS, sites, process_group=pipelines.alone_group())
    assert torch.equal(found, expected)
    if dist.get_rank() == 0:
        torch.testing.assert_close(records, of_twin, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
def test_a_cache_with_a_scale_of_each_rank_is_named(tmp_path):
    """The error named the number of a value. No scale is that of all heads."""
    if not hasattr(pytest.importorskip("transformers").cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no such cache")
    model = models.loaded_by_transformers(models.llama().float(), tmp_path)
    how = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    match = r"lost at amax in 'model.layers.0.self_attn', value \d+ of forward 1\)"
    with FlexModel(model, {}) as flex:
        flex.register_forward_pre_hook(HookFunction("model.layers.0.self_attn.o_proj"))
        with pytest.raises(ValueError, match=match):
            flex.generate(TOKENS, max_new_tokens=2, do_sample=False, pad_token_id=0, **how)
