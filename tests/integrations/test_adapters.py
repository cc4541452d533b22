"""Adapters of PEFT on a hooked model."""

import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction

IDS = 1 + models.random(2, 5, seed=6).argsort()
LAYER = "base_model.model.model.layers.0."
SITES = [
    f"{LAYER}{site}"
    for site in ("mlp.act_fn", "self_attn.q_proj", "mlp.down_proj.lora_A.first", "mlp.down_proj")
]


def mix(module, full, save_ctx, modules):
    """Every row and unit with another."""
    return full + full.flip(0) / 2 + full.flip(-1) / 4


def adapted():
    """A Llama with two adapters, of which "first" is active."""
    peft = pytest.importorskip("peft")
    layers = ["q_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a deprecated attribute
        torch.manual_seed(5)
        model = peft.get_peft_model(models.llama(), config, adapter_name="first")
        model.add_adapter("second", config)
    return model.double().eval()


def expected(adapters=("first",)):
    """Logits by adapter, records, and the gradients, under torch's hooks."""
    model, seen, logits = adapted(), {}, []

    def hook_at(site):
        def hook(module, args, output):
            seen.setdefault(site, []).append(output.detach().clone())
            return mix(module, output, None, None)

        model.get_submodule(site).register_forward_hook(hook)

    for site in SITES:
        hook_at(site)
    for adapter in adapters:
        model.set_adapter(adapter)
        logits.append(model(IDS).logits)
    logits[-1].square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in logits], seen, grads


def check_adapters(model, rows=slice(None)):
    flex = FlexModel(model, {}, output_ranks="all")
    for site in SITES:
        flex.register_forward_hook(HookFunction(site, editing_function=mix))
    adapters = ("first", "second", "first")
    logits, seen, grads = expected(adapters)
    with flex.active():  # one run, in which adapters are switched
        for adapter, one in zip(adapters, logits):
            flex.set_adapter(adapter)
            last = flex(IDS[rows]).logits
            assert_close(last.detach(), one[rows])
    assert_close(flex.output_ptr, seen)
    assert len(seen["base_model.model.model.layers.0.mlp.down_proj.lora_A.first"]) == 2
    last.square().mean().backward()
    assert any("lora_A.first" in name for name in grads)
    for name, grad in grads.items():
        assert_close(flex.get_module_gradient(name), grad, msg=lambda text: f"{name}: {text}")  # noqa: B023
    return flex


def test_adapters_on_one_process():
    check_adapters(adapted())


@pytest.mark.ranks(2)
def test_adapters_under_fsdp2():
    rank, mesh = torch.distributed.get_rank(), models.mesh(2, 1)["dp"]
    model = adapted()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    check_adapters(fully_shard(model, mesh=mesh), slice(rank, rank + 1)).restore()


def test_adapters_that_are_merged():
    """The layers with adapters are replaced by plain ones: their hooks are errors."""
    flex = FlexModel(adapted(), {})
    flex.register_forward_hook(HookFunction(f"{LAYER}mlp.act_fn", editing_function=mix))
    with torch.no_grad():
        before = flex(IDS).logits
        handle = flex.register_forward_hook(HookFunction(f"{LAYER}self_attn.q_proj"))
        base = flex.register_forward_hook(HookFunction(f"{LAYER}mlp.up_proj.base_layer"))
        merged = flex.merge_and_unload()
        with pytest.raises(HookError, match=r"q_proj': the module .* not in the model any more"):
            flex(IDS)
        handle.remove()
        assert_close(flex(IDS).logits, before)
        assert len(flex.output_ptr[base.hook_function.module_name]) == 1  # it is up_proj now
        flex.restore()
        again = FlexModel(merged, {})
        again.register_forward_hook(HookFunction("model.layers.0.mlp.act_fn", editing_function=mix))
        assert_close(again(IDS).logits, before)
