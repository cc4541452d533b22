"""A model that accelerate spreads over devices, or offloads, with hooks: each case returns what the
same model gives on one device. For integrations/test_device_map.py and cuda/test_devices_cuda.py.
"""

import torch
from torch import nn
from torch.testing import assert_close

from flex_model import FlexModel, HookFunction, editing
from tests import models

IDS = torch.arange(12).reshape(2, 6) + 1
LAYERS = [f"model.layers.{i}" for i in range(3)]
SITES = [f"{layer}{part}" for layer in LAYERS for part in ("", ".mlp", ".self_attn.o_proj")]
SITES += ["model.embed_tokens", "model.norm"]
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def mix(module, full, save_ctx, modules):
    return full.flip(0).cumsum(-1) / 2


def mix_gradient(module, full, save_ctx, modules):
    return full.flip(0) * 1.5 + full.roll(1, -1)


def backward(flex):
    logits = flex(IDS).logits
    logits.pow(2).sum().backward()
    return logits


def read_only(flex):
    for site in SITES:
        flex.register_forward_hook(HookFunction(site))
        flex.register_forward_pre_hook(HookFunction(site, output_name=f"into {site}"))
    with torch.no_grad():
        return flex(IDS).logits


def edits(flex):
    for site in SITES:
        flex.register_forward_hook(HookFunction(site, editing_function=mix))
    for layer in LAYERS:  # the input, which accelerate moves after the hook
        hook = HookFunction(layer, editing_function=mix, output_name=f"into {layer}")
        flex.register_forward_pre_hook(hook)
    return flex(input_ids=IDS).logits


def gradients(flex):
    for i, site in enumerate(SITES[:-2]):
        hook = HookFunction(site, editing_function=mix_gradient, output_name=f"gradient {i}")
        flex.register_full_backward_hook(hook)
        flex.register_full_backward_pre_hook(HookFunction(site, output_name=f"before {i}"))
        flex.register_forward_hook(HookFunction(site, editing_function=mix))
    flex.wrapped_module_requires_grad(False)
    embedded = models.random(2, 6, 32).requires_grad_()
    logits = flex(inputs_embeds=embedded).logits
    logits.pow(2).sum().backward()
    return logits, embedded.grad


def recomputed(flex):
    flex.module.train()
    flex.activation_checkpointing_enable()
    for site in LAYERS:
        flex.register_forward_hook(HookFunction(f"{site}.mlp", editing_function=mix))
        hook = HookFunction(site, editing_function=mix_gradient, output_name=f"gradient {site}")
        flex.register_full_backward_hook(hook)
    return backward(flex)


def spliced(flex):
    """One autoencoder and one vector at layers of all devices."""
    autoencoder, vector = models.seeded(models.Autoencoder, 32, 48).double(), nn.Module()
    vector.values = nn.Parameter(models.random(32))
    flex.register_trainable_module("sae", autoencoder)
    flex.register_trainable_module("vector", vector)
    latents = editing.clamp(0.5, 0.5, units=3)
    edit = editing.splice("sae", error=True, latents=latents) | editing.steer("vector", 0.5)
    for layer in LAYERS:
        flex.register_forward_hook(edit.at(layer))
        adapter = editing.splice("sae", add=True, positions="last")
        flex.register_forward_pre_hook(adapter.at(f"{layer}.mlp", output_name=f"{layer} mlp"))
    logits = backward(flex)
    return logits, vector.values.grad, [p.grad for p in autoencoder.parameters()]


def lenses(flex):
    translator = models.seeded(nn.Linear, 32, 32).double()
    flex.register_trainable_module("translator", translator)
    names = {"unembed": "lm_head.weight", "norm": "model.norm.weight"}
    plain, tuned = editing.logit_lens(**names), editing.tuned_lens("translator", **names)
    for layer in LAYERS:
        flex.register_forward_hook(plain.at(layer))
        flex.register_forward_hook(tuned.at(layer, output_name=f"tuned {layer}"))
    flex(IDS)
    read, trained = plain.take(flex), tuned.take(flex)
    sum(call.pow(2).sum().cpu() for (call,) in trained.values()).backward()
    return read, trained, translator.weight.grad


def patches(flex):
    kept, source, results = editing.capture(), models.random(2, 6, 32), []
    with flex.register_forward_hook(kept.at(LAYERS[0])):
        flex(IDS)
    for edit in (
        editing.patch(kept, positions=[0, 1]) | editing.noise(0.1, seed=0),
        editing.resample(kept, seed=0) | editing.patch(source, rows=1),
        editing.mean(source.mean((0, 1)), positions="last") | editing.project_out(source[0, 0]),
    ):
        for layer in LAYERS[1:]:
            with flex.register_forward_hook(edit.at(layer, record=False)):
                results.append(flex(IDS.flip(0)).logits)
    return results


def parameters(flex):
    before = dict(flex.iterate_parameters())
    for name, full in before.items():
        flex.set_module_parameter(name, full.flip(0) * 1.25)
    after = {name: flex.get_module_parameter(name) for name in before}

    def add_to(layer):
        def add(module, full, save_ctx, modules):
            return full + hook.parameters[WEIGHT].mean(0)

        hook = HookFunction(layer, editing_function=add, parameters=WEIGHT)
        flex.register_forward_hook(hook)

    add_to(LAYERS[0])
    add_to(LAYERS[2])
    return before, after, flex(IDS).logits


def generated(flex):
    for layer in LAYERS:
        flex.register_forward_hook(HookFunction(layer, editing_function=mix))
    return flex.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)


def attention(flex):
    def first(module, pattern, save_ctx, modules):
        return pattern.flip(0)

    for layer in LAYERS:
        hook = flex.attention(f"{layer}.self_attn", first, heads=[1, 3], output_name=layer)
        flex.register_forward_hook(hook)
    return flex(IDS).logits


CASES = {
    case.__name__: case
    for case in (
        read_only,
        edits,
        gradients,
        recomputed,
        spliced,
        lenses,
        patches,
        parameters,
        generated,
        attention,
    )
}


def on_cpu(results):
    if isinstance(results, torch.Tensor):
        return results.detach().cpu()
    if isinstance(results, dict):
        return {name: on_cpu(one) for name, one in results.items()}
    return [on_cpu(one) for one in results]


def check(case, dispatch):
    """The case gives the same where ``dispatch`` spreads the model, after it is wrapped and before
    it is.
    """
    expected = CASES[case](FlexModel(models.llama(3), whole := {})), whole
    first, then = {}, {}
    flex = FlexModel(dispatch(models.llama(3)), first)
    assert_close(on_cpu((CASES[case](flex), first)), on_cpu(expected))
    model = models.llama(3)
    flex = FlexModel(model, then)
    dispatch(model)
    assert_close(on_cpu((CASES[case](flex), then)), on_cpu(expected))


def device_map(*places):
    """The places of the three layers, of what comes before and of what comes after."""
    names = dict(zip(LAYERS, places))
    names |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), places[0])
    return names | dict.fromkeys(("model.norm", "lm_head"), places[-1])
