"""Mixtures of experts under data parallelism: rows inside of the experts are in their experts'
order, those of the result in that of the inputs. And experts whose units are sharded.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import frameworks
import models
import pipelines
import tiny_models
from flex_model import FlexModel, HookFunction
from flex_model.layouts.contracts import experts
from shared_edits import mixing_features, mixing_rows


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_layers_of_experts_on_halves_of_a_batch(implementation):
    model, tokens = frameworks.huggingface_model("mixtral").float(), frameworks.tokens(4, length=6)
    model.config._experts_implementation = implementation
    half, site = tokens.chunk(2)[dist.get_rank()], "model.layers.0.mlp.experts"
    whole, kept = copy.deepcopy(model), []
    handles = [
        whole.get_submodule(site).register_forward_pre_hook(lambda _, args: kept.append(args[1])),
        whole.get_submodule(site).register_forward_hook(
            lambda module, args, output: mixing_rows(module, output, None, None)
        ),
    ]
    expected = whole(tokens, use_cache=False).logits
    expected.square().mean().backward()
    for handle in handles:
        handle.remove()

    wrapped, records = DistributedDataParallel(copy.deepcopy(model)), {}
    with FlexModel(wrapped, records, data_parallel_size=2, timeout=30) as flex:
        flex.register_forward_hook(HookFunction(site, None, mixing_rows))
        flex.register_forward_pre_hook(HookFunction(site, unpack_idx=1, output_name="chosen"))
        logits = flex(half, use_cache=False).logits
        logits.square().mean().backward()
        chosen = records.get("chosen")
        if implementation == "grouped_mm":
            flex.register_forward_hook(HookFunction(f"{site}.act_fn"))
            with pytest.raises(ValueError, match=r"act_fn'.*data-parallel ranks is not known"):
                flex(half, use_cache=False)
    assert_close(logits, expected.chunk(2)[dist.get_rank()])
    for name, parameter in whole.named_parameters():
        assert_close(wrapped.module.get_parameter(name).grad, parameter.grad)
    if dist.get_rank() == 0:
        assert torch.equal(chosen[0], kept[0])


@pytest.mark.ranks(2, timeout=120)
def test_a_loop_over_the_experts_that_are_hit():
    """A capacity per row of the batch drops tokens of Switch Transformers; NLLB-MoE's is of all."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwitchTransformersConfig(
        vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_heads=2, num_layers=2, num_decoder_layers=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=3, expert_capacity=3
    )  # fmt: skip
    whole = models.seeded(transformers.SwitchTransformersForConditionalGeneration, config).eval()
    for name, weight in whole.named_parameters():
        if "router" in name:
            nn.init.normal_(weight)  # else all tokens are of the first expert
    tokens = frameworks.tokens(4, length=6)
    wrapped = DistributedDataParallel(copy.deepcopy(whole), find_unused_parameters=True)
    site = whole.get_submodule("encoder.block.1.layer.1.mlp")
    site.register_forward_hook(lambda module, args, out: mixing_rows(module, out, None, None))
    seen = []
    whole.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    whole(tokens, decoder_input_ids=tokens).logits.square().mean().backward()
    with FlexModel(wrapped, records := {}, data_parallel_size=2, timeout=30) as flex:
        flex.register_forward_hook(
            HookFunction("encoder.block.1.layer.1.mlp", None, mixing_rows, record=False)
        )
        flex.register_forward_pre_hook(HookFunction("lm_head"))
        half = tokens.chunk(2)[dist.get_rank()]
        flex(half, decoder_input_ids=half).logits.square().mean().backward()
    for name, parameter in whole.named_parameters():
        own = wrapped.module.get_parameter(name).grad
        assert_close(own if own is not None else torch.zeros_like(parameter), parameter.grad)
    if dist.get_rank() == 0:
        assert_close(records["lm_head"], seen)


@pytest.mark.ranks(2, timeout=120)
def test_halves_that_a_plan_calls_consecutive_rows(tmp_path, monkeypatch):
    """Inkling 2's `gate_up_proj` and its gradient were joined in a wrong order: the loader sorts
    each rank's rows by gate and other half, which the placement of its DTensor does not say.
    """
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Inkling2ForCausalLM"):
        pytest.skip("this transformers has no such model")
    monkeypatch.setitem(tiny_models.SIZES, tiny_models.KEY_VALUE_HEADS, 2)
    model, tokens = tiny_models.tiny_model("Inkling2ForCausalLM"), frameworks.tokens(2, length=6)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path)
    dist.barrier()

    def load(**how):
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return type(model).from_pretrained(tmp_path, dtype=torch.float64, **eager, **how).eval()

    whole, name = load(), "model.layers.1.mlp.experts.gate_up_proj"
    block = whole.get_submodule("model.layers.0.mlp")
    block.register_forward_hook(lambda module, args, out: mixing_features(module, out, None, None))
    whole(tokens, use_cache=False).logits.square().mean().backward()
    sharded = load(distributed_config=transformers.distributed.DistributedConfig(tp_size=2))
    with FlexModel(sharded, {}, tensor_parallel_size=2, output_ranks="all") as flex:
        flex.register_forward_hook(HookFunction("model.layers.0.mlp", None, mixing_features))
        flex(tokens, use_cache=False).logits.square().mean().backward()
        assert_close(flex.get_module_parameter(name), whole.get_parameter(name).detach())
        assert_close(
            flex.get_module_gradient(name), whole.get_parameter(name).grad, rtol=1e-5, atol=1e-9
        )


class MoELayer(nn.Module):
    """As Megatron-core's, by its name: rows in the order of a key inside."""

    def __init__(self, capacity):
        super().__init__()
        self.config = type("Config", (), {"moe_expert_capacity_factor": capacity})()

    def forward(self, x):
        order = x.detach()[..., 0].flatten().argsort()
        made = torch.empty_like(x).flatten(0, 1)
        made[order] = x.flatten(0, 1)[order].tanh()
        return made.view_as(x) + 0 * made.cumsum(0).view_as(x), None


@pytest.mark.ranks(2)
def test_a_capacity_makes_rows_depend_on_each_other(monkeypatch):
    monkeypatch.setattr(experts, "_BLOCKS", (f"{__name__}.MoELayer",))
    rows = torch.arange(24.0).view(4, 2, 3).sin()
    half, records = rows.chunk(2, 1)[dist.get_rank()], {}
    for capacity in (None, 1.5):
        model = nn.Sequential(MoELayer(capacity))
        with FlexModel(model, records, data_parallel_size=2, batch_dim=1) as flex:
            flex.register_forward_hook(HookFunction("0"))
            if capacity is None:
                flex(half)
                if dist.get_rank() == 0:
                    assert_close(records["0"], [rows.tanh()])
                continue
            with pytest.raises(ValueError, match=r"moe_expert_capacity_factor.*each other"):
                flex(half)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_gradients_into_sharded_experts_that_a_reentrant_checkpoint_recomputes(name, tmp_path):
    """Where the experts' input was all that a layer reads, its gradient was twice the right one,
    without a word; elsewhere it was refused.
    """
    model, found = frameworks.huggingface_model(name).float(), []
    sharded = models.loaded_by_transformers(model, tmp_path)
    for one, own in (model, pipelines.alone_group()), (sharded, None):
        one.train().activation_checkpointing_enable({"use_reentrant": True})
        records = {}
        with FlexModel(one, records, process_group=own, output_ranks="all", timeout=30) as flex:
            for site in ("model.layers.1.mlp", "model.layers.0"):
                flex.register_full_backward_hook(HookFunction(site, output_name=f"to {site}"))
            flex.register_forward_hook(HookFunction("model.layers.0", None, mixing_features))
            flex(frameworks.tokens(2), use_cache=False).logits.square().mean().backward()
            weight = flex.get_module_gradient("model.layers.0.input_layernorm.weight")
        found.append((records, weight))
    assert_close(*found)
