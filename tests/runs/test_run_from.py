"""run_from: the rest of a forward gives what the whole one gives; what needs more is an error."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

import models
import pipelines
from flex_model import FlexModel, HookFunction

TOKENS = torch.arange(10).reshape(2, 5) % 7


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2, dropout_rate=0
    )
    return T5ForConditionalGeneration(config).eval()


def mix(module, full, save_ctx, modules):
    return full + full.flip(-1) - 0.5 * full.flip(0)


def returned(model, name, *args, **inputs):
    """What a module returns."""
    seen = []
    hook = model.get_submodule(name).register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        model(*args, **inputs)
    hook.remove()
    return seen[0]


CASES = {
    "llama": (lambda: models.llama(layers=3), "model.layers.1", "model.layers.2.mlp.up_proj", {}),
    "gpt2": (lambda: models.gpt2(layers=3), "transformer.h.1", "transformer.h.2.mlp.c_fc", {}),
    "t5": (t5, "decoder.block.1", "decoder.block.2", {"decoder_input_ids": TOKENS}),
    "t5 encoder": (t5, "encoder", "decoder.block.0", {"decoder_input_ids": TOKENS}),
}


@pytest.mark.parametrize("case", CASES)
def test_models_of_transformers(case):
    make, name, late, more = CASES[case]
    model = make().eval()
    inputs = {"input_ids": TOKENS, "use_cache": False, **more}
    value = returned(model, name, **inputs)
    first = model.get_submodule(name.replace(".1", ".0"))
    calls = []
    first.register_forward_hook(lambda *_: calls.append(1))
    skipped = next(module for module in first.modules() if isinstance(module, nn.Linear | Conv1D))
    skipped.register_forward_hook(lambda *_: calls.append(1))
    with FlexModel(model, records := {}) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction(late, editing_function=mix))
        whole = flex(**inputs)
        expected = records[late][0].clone()
        calls.clear()
        got = flex.run_from(name, value, **inputs)
        assert len(calls) == 1  # the module, whose forward is another one
        assert_close(records[late][0], expected, rtol=0, atol=0)
        assert_close(got.logits, whole.logits, rtol=0, atol=0)
        again = flex(**inputs)
    assert len(calls) > 2
    assert_close(again.logits, whole.logits, rtol=0, atol=0)


class Deep(nn.Module):
    """Layers in a list, one of which is shared, and ways around them."""

    def __init__(self, bypass=""):
        super().__init__()
        self.layers = nn.ModuleList(models.seeded(nn.Linear, 6, 6, seed=i) for i in range(4))
        self.bypass = bypass
        self.double()

    def forward(self, x):
        first = x
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            first = x if i == 0 else first
        assert first.ndim == x.dim() and first.dtype == x.dtype  # which they share
        if self.bypass == "size":
            return x * first.shape[0]
        if self.bypass == "as":
            return x + x.new_ones(()).expand_as(first)
        if self.bypass == "like":
            return x + torch.ones_like(first.tanh())
        if self.bypass == "read" and first.sum() > 0:
            return x
        return x + first if self.bypass == "skip" else x


class DeepMLP(nn.Module):
    """Whole layers, of which the first are skipped, and split ones after them."""

    columns, rows = ("later",), ("last",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(models.seeded(nn.Linear, 6, 6, seed=i) for i in range(3))
        self.later, self.last = models.seeded(nn.Linear, 6, 8), models.seeded(nn.Linear, 8, 6)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(self.later(x))


BATCH = models.random(4, 6)


def test_the_gradient_of_the_value_and_hooks_on_it():
    model = Deep()
    value = returned(model, "layers.1", BATCH).requires_grad_()
    hidden = value * 2
    for layer in model.layers[2:]:
        hidden = layer(hidden.tanh())
    (expected,) = torch.autograd.grad(hidden.tanh().square().sum(), value)
    with FlexModel(model, records := {}) as flex:
        double = lambda module, full, save_ctx, modules: full.mul_(2)  # noqa: E731
        flex.register_forward_hook(HookFunction("layers.1", editing_function=double))
        output = flex.run_from("layers.1", value, BATCH)
        (got,) = torch.autograd.grad(output.square().sum(), value)
    assert_close(output, hidden.tanh())
    assert_close(got, expected)
    assert_close(records["layers.1"][0], value)


@pytest.mark.parametrize(
    ("bypass", "error", "message"),
    [
        ("skip", RuntimeError, "depends on the output of 'layers.0'"),
        ("read", RuntimeError, "does not have .*the output of 'layers.0', which run_from skips"),
        *((name, RuntimeError, "sizes .* of 'layers.0',") for name in ("size", "as", "like")),
    ],
)
def test_what_needs_more_than_the_value_is_an_error(bypass, error, message):
    model = Deep(bypass)
    expected = model(BATCH)
    with FlexModel(model) as flex:
        with pytest.raises(error, match=message):
            flex.run_from("layers.2", BATCH, BATCH)
        assert_close(flex(BATCH), expected)


def test_what_is_refused():
    model = models.llama(layers=3)
    value = returned(model, "model.layers.1", TOKENS)
    with FlexModel(model, {}) as flex, torch.no_grad():
        with pytest.raises(ValueError, match=r"must be what 'model.layers.1' returns"):
            flex.run_from("model.layers.1", 3, TOKENS, use_cache=False)
        flex.register_forward_hook(HookFunction("model.layers.0.mlp"))
        with pytest.raises(ValueError, match=r"hook on 'model.layers.0.mlp' is active"):
            flex.run_from("model.layers.1", value, TOKENS, use_cache=False)
        flex.run_from("model.layers.1", value, TOKENS, use_cache=False, groups=())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp", "ddp", "fsdp2"])
def test_sharded(name):
    parallelism = models.TWO_RANKS[name]
    model = DeepMLP()
    model.later.register_forward_hook(lambda m, a, out: mix(m, out, None, None))
    expected = model(BATCH)
    value = returned(model, "layers.1", BATCH).requires_grad_()
    model.last(model.later(model.layers[2](value.tanh()).tanh())).square().mean().backward()
    later = DeepMLP()
    later.layers[:2].requires_grad_(False)  # DDP waits for gradients of all others
    with FlexModel(parallelism.shard(later), **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("later", editing_function=mix))
        mine = parallelism.my_rows(value).detach().requires_grad_()
        for _ in range(2):
            mine.grad = None
            got = flex.run_from("layers.1", mine, parallelism.my_rows(BATCH))
            assert_close(got, parallelism.my_rows(expected))
            got.square().mean().backward()
            assert_close(mine.grad / parallelism.dp, parallelism.my_rows(value.grad))
        assert_close(flex(parallelism.my_rows(BATCH)), parallelism.my_rows(expected))
        # Each of the two was followed once; a value of another module's is another forward.
        followed = flex._core.tracking.num_followed
        flex.run_from("layers.1", mine, parallelism.my_rows(BATCH))
        assert flex._core.tracking.num_followed == followed == 2
        flex.run_from("layers.0", mine, parallelism.my_rows(BATCH))
        assert flex._core.tracking.num_followed == 3
        if name == "tp":
            other = value.detach() + torch.distributed.get_rank()
            with pytest.raises(ValueError, match=r"'value_of_run_from'.*different values"):
                flex.run_from("layers.1", other, BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("output", [Shard(0), Partial()])
def test_a_module_that_returns_a_part_on_each_rank_is_refused(output):
    plan = {"0.0": ColwiseParallel(), "0.1": RowwiseParallel(output_layouts=output)}
    plan |= {"1.0": ColwiseParallel(input_layouts=output), "1.1": RowwiseParallel()}
    layer = lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))  # noqa: E731
    torch.manual_seed(0)
    whole = nn.Sequential(layer(), layer())
    model = parallelize_module(copy.deepcopy(whole), init_device_mesh("cpu", (2,)), plan)
    x = torch.ones(4, 6)
    with FlexModel(model, records := {}, output_ranks="all") as flex:
        with flex.register_forward_hook(HookFunction("0")):
            flex(x)
        value = records["0"][0].flip(0)
    with FlexModel(model, records := {}, output_ranks="all") as flex:  # no hook has seen it
        with pytest.raises(ValueError, match="returns a part on each tensor-parallel rank"):
            flex.run_from("0", value, x)
        flex.register_forward_hook(HookFunction("0", editing_function=lambda *_: value))
        assert_close(flex(x), whole[1](value))


@pytest.mark.ranks(2)
def test_the_value_of_a_module_that_returns_a_dtensor():
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
    model = parallelize_module(model, mesh, plan | {"2": RowwiseParallel()})
    with FlexModel(model, records := {}, output_ranks="all") as flex:
        flex.register_forward_hook(HookFunction("0", editing_function=mix))
        expected = flex(BATCH.float())
        value = distribute_tensor(records["0"][0], mesh, [Shard(0)])
        assert_close(flex.run_from("0", value, BATCH.float()), expected)


@pytest.mark.ranks(2)
def test_a_pipeline_is_refused():
    schedule = pipelines.make_schedule(Schedule1F1B, pipelines.make_mlp(), 4)
    flex = FlexModel(schedule, {})
    with pytest.raises(RuntimeError, match="run_from is for a model that runs as a whole"):
        flex.run_from("layers.0", BATCH, BATCH)
