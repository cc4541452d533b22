"""Adapters of PEFT on a hooked model."""

import copy
import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import lora
import models
from flex_model import FlexModel, HookError, HookFunction
from oracle import watch
from shared_edits import mixing_ends as mix

IDS = 1 + models.random(2, 5, seed=6).argsort()
LAYER = "base_model.model.model.layers.0."
ALL = lora.COLUMNS + lora.ROWS


def sites_of(layers):
    """Where hooks are, of a model with adapters at these layers."""
    adapter = "down_proj.lora_A" if "down_proj" in layers else "up_proj.lora_B"
    sites = ("mlp.act_fn", "self_attn.q_proj", f"mlp.{adapter}.first", "mlp.down_proj")
    return [f"{LAYER}{site}" for site in sites]


def expected(layers, adapters):
    """Logits by adapter, records, and the gradients, under torch's hooks."""
    model, logits = lora.adapted(models.llama(), layers), []
    seen = {site: watch(model, site, mix) for site in sites_of(layers)}
    for adapter in adapters:
        model.set_adapter(adapter)
        logits.append(model(IDS).logits)
    logits[-1].square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in logits], seen, grads


def check_adapters(model, rows=slice(None), layers=ALL):
    flex = FlexModel(model, {}, output_ranks="all")
    sites = sites_of(layers)
    for site in sites:
        flex.register_forward_hook(HookFunction(site, editing_function=mix))
    adapters = ("first", "second", "first")
    logits, seen, grads = expected(layers, adapters)
    with flex.active():  # one run, in which adapters are switched
        for adapter, one in zip(adapters, logits):
            flex.set_adapter(adapter)
            last = flex(IDS[rows]).logits
            assert_close(last.detach(), one[rows])
    assert_close(flex.output_ptr, seen)
    assert len(seen[sites[2]]) == 2
    last.square().mean().backward()
    assert any("lora_A.first" in name for name in grads)
    for name, grad in grads.items():
        assert_close(flex.get_module_gradient(name), grad, msg=lambda text: f"{name}: {text}")  # noqa: B023
    return flex


def test_adapters_on_one_process():
    check_adapters(lora.adapted(models.llama()))


@pytest.mark.ranks(2)
def test_adapters_under_fsdp2():
    rank, mesh = torch.distributed.get_rank(), models.mesh(2, 1)["dp"]
    model = lora.adapted(models.llama())
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    check_adapters(fully_shard(model, mesh=mesh), slice(rank, rank + 1)).restore()


@pytest.mark.ranks(2)
def test_adapters_that_are_split_with_their_layers():
    model = lora.parallelized(lora.adapted(models.llama()), models.mesh(1, 2)["tp"])
    check_adapters(model).restore()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):  # PEFT's own
        model.merge_and_unload()


@pytest.mark.ranks(2)
def test_adapters_of_a_model_that_transformers_has_sharded(tmp_path):
    """By columns; PEFT 0.21 can't train those of layers that are split by rows there, which run."""
    for layers in (lora.COLUMNS, ALL):
        folder = tmp_path / layers[-1]
        if torch.distributed.get_rank() == 0:
            lora.adapted(models.llama(), layers).save_pretrained(folder / "adapters")
        sharded = models.loaded_by_transformers(models.llama(), folder / "model", torch.float64)
        model = lora.loaded(sharded, folder / "adapters")
        if layers == lora.COLUMNS:
            check_adapters(model, layers=layers).restore()
            continue
        (logits,), seen, _ = expected(layers, ("first",))
        with FlexModel(model, {}, output_ranks="all") as flex, torch.no_grad():
            for site in sites_of(layers):
                flex.register_forward_hook(HookFunction(site, editing_function=mix))
            assert_close(flex(IDS).logits, logits)
            assert_close(flex.output_ptr, seen)


@pytest.mark.ranks(2)
def test_adapters_of_a_model_in_stages(tmp_path):
    """Forwards by the model that has the stages; nothing is trained (rows ``adapters-hf-pp`` of
    the parity table have the numbers).
    """
    if torch.distributed.get_rank() == 0:
        lora.adapted(models.llama(), ALL).save_pretrained(tmp_path / "adapters")
    split = models.loaded_by_transformers(
        models.llama(), tmp_path / "model", torch.float64, {"pp_size": 2}
    )
    model = lora.loaded(split, tmp_path / "adapters")
    with pytest.raises(ValueError, match=r"is inside a PeftModel, .* wrap that one"):
        FlexModel(model)
    site = "model.layers.0.mlp.down_proj.lora_A.first"
    with FlexModel(split, seen := {}) as flex:
        flex.register_forward_hook(HookFunction(site))
        with pytest.raises(ValueError, match="send no gradients"):
            flex.register_full_backward_hook(HookFunction(site, output_name="gradient"))
        with pytest.raises(ValueError, match="send no gradients"):
            flex.register_hook(HookFunction(f"{site}.weight", output_name="weight"))
        logits = flex(IDS).logits
        with torch.no_grad():
            plain = lora.adapted(models.llama(), ALL)(IDS).logits
        assert_close(logits, plain, rtol=1e-5, atol=1e-8)
        with pytest.raises(RuntimeError, match="does not require grad"):
            logits.sum().backward()
    assert len(seen.get(site, [])) == (torch.distributed.get_rank() == 0)


@pytest.mark.ranks(2)
def test_adapters_of_the_size_of_a_shard_are_refused():
    """PEFT over `parallelize_module`: each rank has other adapters than the unsharded model."""
    peft, mesh = pytest.importorskip("peft"), models.mesh(1, 2)["tp"]
    for config in (
        peft.LoraConfig(target_modules=["up_proj"]),
        peft.LoraConfig(target_modules=["down_proj"]),
        peft.LoraConfig(target_modules=["embed_tokens", "up_proj"]),
        peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[]),
    ):
        sharded = models.tensor_parallel_llama(models.llama(), mesh)
        with pytest.raises(ValueError, match=r"proj\..* got .*make LoRA adapters before"):
            FlexModel(quietly_adapted(peft, sharded, config))
    sharded = models.tensor_parallel_llama(models.llama(), mesh)
    with FlexModel(sharded, {}) as flex:  # they are added after the wrap
        flex.register_forward_hook(HookFunction("model.layers.0.mlp"))
        quietly_adapted(peft, sharded, peft.LoraConfig(target_modules=["up_proj"]))
        with pytest.raises(ValueError, match=r"up_proj.lora_B.default' .* the size 24 .* has 48"):
            flex(IDS)
    sharded = models.tensor_parallel_llama(models.llama(), mesh)
    config = peft.LoraConfig(target_modules=["embed_tokens"])  # not sharded
    FlexModel(quietly_adapted(peft, sharded, config)).restore()


def quietly_adapted(peft, model, config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def test_adapters_that_are_merged():
    """The layers with adapters are replaced by plain ones: their hooks are errors."""
    flex = FlexModel(lora.adapted(models.llama()), {})
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


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = torch.nn.Linear(32, 8)

    def forward(self, x):
        return self.head(x + self.attn(x, x, x, need_weights=False)[0])


@pytest.mark.ranks(2)
def test_adapters_of_a_multihead_attention_under_ddp():
    """Refused before: PEFT makes its weights anew whenever its submodules are listed."""
    torch.manual_seed(3)
    model = lora.adapted(Attending(), ["attn"])
    for parameter in model.parameters():
        parameter.data.normal_()
    twin, site, x = copy.deepcopy(model), "base_model.model.head", models.random(4, 7, 32)
    seen = watch(twin, site, mix)
    twin(x).square().mean().backward()
    rank = torch.distributed.get_rank()
    with FlexModel(DistributedDataParallel(model), {}, output_ranks="all") as flex:
        flex.register_forward_hook(HookFunction(site, editing_function=mix))
        for _ in range(2):
            model.zero_grad()
            flex(x[2 * rank : 2 * rank + 2]).square().mean().backward()
            assert_close(flex.output_ptr[site], seen)
        grads = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
        assert len(grads) == 4
        for name, grad in grads.items():
            assert_close(flex.get_module_gradient(name), grad)
