"""Models on meta, run from files: equal to the loaded model, each weight read once per window."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import FAMILIES
from test_engine import BATCHES, Stack, assert_equal, assert_nothing_left, halve
from torch import nn
from torch.utils.checkpoint import checkpoint

import models
from flex_model import FlexModel, HookFunction, sequential
from flex_model.sequential.weights import loader

safetensors = pytest.importorskip("safetensors.torch")


def on_meta(model):
    return copy.deepcopy(model).to("meta")


def saved(model, folder):
    safetensors.save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
    )
    return folder


def assert_as_before(model, state):
    assert_nothing_left(model)
    assert {name: id(tensor) for name, tensor in state} == {
        name: id(tensor) for name, tensor in tensors_of(model)
    }


def tensors_of(model):
    return [*model.named_parameters(), *model.named_buffers()]


def stack_weights(model):
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize("name", FAMILIES)
def test_families_from_a_folder(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    make, batches, sites = FAMILIES[name]
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(config).eval()
    state = tensors_of(empty)

    def script(flex):
        for site in sites:
            flex.register_forward_hook(HookFunction(site))
        flex.register_forward_hook(HookFunction(sites[-1], None, halve, output_name="edited"))

    with FlexModel(empty, found := {}) as flex:
        script(flex)
        outputs = sequential.run(flex, batches, weights=tmp_path, window=3)
    with torch.no_grad(), FlexModel(model, expected := {}) as whole:
        script(whole)
        for i, batch in enumerate(batches):
            assert_equal(outputs[i], whole(**batch))
            for site in [*sites, "edited"]:
                assert torch.equal(found[site][i], expected[site][0])
    assert set(outputs.loads.values()) == {2}  # 4 batches, 3 at a time
    assert_as_before(empty, state)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("per_step", [1, 3])
def test_each_target_is_read_once_per_window(tmp_path, monkeypatch, prefetch, per_step):
    made, init = [], loader._Buffer.__init__
    monkeypatch.setattr(
        loader._Buffer, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1]
    )
    model = Stack(4)
    empty = on_meta(model)
    state = tensors_of(empty)
    outputs = sequential.run(
        empty,
        BATCHES,
        weights=saved(model, tmp_path),
        window=2,
        prefetch=prefetch,
        targets_per_step=per_step,
    )
    assert all(torch.equal(output, model(batch)) for output, batch in zip(outputs, BATCHES))
    assert outputs.loads == {f"blocks.{i}": 3 for i in range(4)}
    assert outputs.bytes_read == 3 * stack_weights(model)
    num_steps = -(-4 // per_step)
    assert len(made) == min(prefetch, num_steps - 1) + 1  # their memory is reused
    assert_as_before(empty, state)


def test_targets_inside_targets_keep_the_outer_ones_weights():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 6), Stack(2), nn.Linear(6, 6)

        def forward(self, x):
            return self.last(self.inner(self.first(x)))

    model = models.seeded(nn.Sequential, Outer(), Outer())
    outputs = sequential.run(
        on_meta(model), BATCHES, ["0", "1", "re:.*blocks"], weights=model.state_dict(), window=2
    )
    for output, batch in zip(outputs, BATCHES):
        assert torch.equal(output, model(batch))
    assert outputs.loads["0"] == outputs.loads["1"] == outputs.loads["0.inner.blocks.1"] == 3


class Tied(nn.Module):
    """Weights shared by targets, and by a target and the rest; buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Stack(1), Stack(1), Stack(1)])
        self.blocks[2].blocks[0].weight = self.blocks[0].blocks[0].weight
        self.blocks[1].blocks[0].weight = self.inp.weight
        self.blocks[1].register_buffer("scale", torch.full((6,), 3.0))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) * self.blocks[1].blocks[0].weight.sum()
        return x


def test_tied_weights_are_read_once(tmp_path):
    model = models.seeded(Tied)
    with torch.device("meta"):
        empty = Tied()
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    safetensors.save_file({n: t.detach() for n, t in names.items()}, tmp_path / "w.safetensors")
    read = []

    class Counting(sequential.CheckpointWeights):
        def read(self, name):
            read.append(name)
            return super().read(name)

    weights = Counting(tmp_path / "w.safetensors")
    outputs = sequential.run(empty, BATCHES, ["re:blocks.[0-9]$"], weights=weights)
    assert all(torch.equal(output, model(batch)) for output, batch in zip(outputs, BATCHES))
    assert sorted(read) == sorted(names)  # those that are tied have one name there


def test_dtypes_are_the_models(tmp_path):
    model = Stack(3)
    saved(model, tmp_path)
    empty = on_meta(model).bfloat16()
    batches = [batch.bfloat16() for batch in BATCHES]
    outputs = sequential.run(empty, batches, weights=tmp_path)
    model = model.bfloat16()
    assert all(torch.equal(output, model(batch)) for output, batch in zip(outputs, batches))
    assert outputs.bytes_read == 2 * stack_weights(model)


def test_names_in_the_file_may_be_others(tmp_path):
    model = Stack(2)
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    safetensors.save_file(state, tmp_path / "other.safetensors")
    weights = sequential.CheckpointWeights(tmp_path, rename=lambda name: f"net.{name}")
    outputs = sequential.run(on_meta(model), BATCHES, weights=weights)
    assert torch.equal(outputs[0], model(BATCHES[0]))


def test_a_model_in_memory_gets_its_own_weights_back(tmp_path):
    model, other = Stack(3), models.seeded(lambda: Stack(3).apply(redrawn))
    before = {name: (id(t), t.clone()) for name, t in tensors_of(model)}
    outputs = sequential.run(model, BATCHES, weights=saved(other, tmp_path))
    assert torch.equal(outputs[1], other(BATCHES[1]))
    for name, tensor in tensors_of(model):
        assert before[name][0] == id(tensor) and torch.equal(before[name][1], tensor)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not outputs[0].requires_grad


def test_tied_weights_in_memory_need_one_of_their_names():
    model = models.seeded(Tied)
    state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    names = ["inp.weight", "blocks.1.blocks.0.weight"]
    for name in names:
        weights = {n: tensor for n, tensor in state.items() if n not in names or n == name}
        loaded = copy.deepcopy(model)
        loaded.load_state_dict(weights, strict=False)
        outputs = sequential.run(model, BATCHES, ["re:blocks.[0-9]$"], weights=weights)
        assert all(torch.equal(output, loaded(batch)) for output, batch in zip(outputs, BATCHES))
    weights = {n: tensor for n, tensor in state.items() if n not in names}
    with pytest.raises(ValueError, match=f"no source for '{names[0]}': the weights"):
        sequential.run(model, BATCHES, ["re:blocks.[0-9]$"], weights=weights)


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_weights_with_two_values_are_refused(is_tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**models.SIZES, tie_word_embeddings=is_tied)
    model = transformers.LlamaForCausalLM(config).eval()
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    state = model.state_dict() | {names[1]: model.get_parameter(names[0]) * 2}
    if is_tied:
        with pytest.raises(ValueError, match=f"{names[0]}' and '{names[1]}' are one weight"):
            sequential.run(on_meta(model), [{"input_ids": torch.arange(6)[None]}], weights=state)
        state[names[1]] = state[names[0]].clone()
    model.load_state_dict(state)
    batch = {"input_ids": torch.arange(6)[None]}
    outputs = sequential.run(on_meta(model), [batch], weights=state)
    assert torch.equal(outputs[0].logits, model(**batch).logits)


def test_a_second_file_in_a_folder(tmp_path):
    model, other = Stack(2), models.seeded(lambda: Stack(2).apply(redrawn))
    path = saved(other, tmp_path) / "model.safetensors"
    path.rename(tmp_path / "old.safetensors")
    saved(model, tmp_path)
    outputs = sequential.run(on_meta(model), BATCHES, weights=tmp_path)
    assert torch.equal(outputs[0], model(BATCHES[0]))
    path.rename(tmp_path / "new.safetensors")
    with pytest.raises(ValueError, match=r"has 'blocks.0.\w+' in new.safetensors and in old.safet"):
        sequential.CheckpointWeights(tmp_path)


def redrawn(module):
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def test_an_explicit_device_copies_a_model_in_memory_there():
    model = Stack(2)
    outputs = sequential.run(model, BATCHES, device="cpu")
    assert outputs.loads == {} and outputs[0].requires_grad
    device = "cuda" if torch.cuda.is_available() else "meta"
    outputs = sequential.run(model, BATCHES, device=device)
    assert outputs[0].device.type == device and outputs.loads == {"blocks.0": 1, "blocks.1": 1}
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_model_that_accelerate_dispatched_is_run_as_it_is():
    accelerate = pytest.importorskip("accelerate")
    model = Stack(3)
    expected = [model(batch).detach() for batch in BATCHES]
    accelerate.cpu_offload(model, torch.device("cpu"))
    with torch.no_grad():
        outputs = sequential.run(model, BATCHES, window=2)
    assert all(torch.equal(one, other) for one, other in zip(outputs, expected))
    with pytest.raises(ValueError, match="can't replace those that accelerate loads"):
        sequential.run(model, BATCHES, weights=Stack(3).state_dict())


class CountsIn(nn.Module):
    """Writes into its batch, and reads what the model keeps on its weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.blocks[0].weight.factor = 2.0

    def forward(self, x, seen):
        seen.append(len(seen))
        return self.blocks[0](x) * self.blocks[0].weight.factor


def test_a_batch_is_the_callers_own_and_weights_keep_their_attributes():
    model, seen = CountsIn(), []
    x = models.random(2, 6, dtype=torch.float32)
    outputs = sequential.run(model, [(x, seen)] * 2, weights=model.state_dict(), window=1)
    assert seen == [0, 1]
    assert all(torch.equal(one, model(x, [])) for one in outputs)


class Grows(nn.Module):
    """A table that the first longer input scales, and the attribute that says for what length."""

    def __init__(self, is_persistent):
        super().__init__()
        self.lin, self.longest = nn.Linear(6, 6), 1
        self.register_buffer("scale", torch.ones(1), persistent=is_persistent)

    def forward(self, x):
        if x.shape[0] > self.longest:
            self.longest, self.scale = x.shape[0], self.scale / x.shape[0]
        return self.lin(x) * self.scale


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_a_buffer_that_a_forward_replaces_stays_with_its_attributes(is_persistent, window):
    model = Stack(2)
    model.blocks = nn.ModuleList(Grows(is_persistent) for _ in range(2))
    looped = copy.deepcopy(model)
    with torch.no_grad():
        expected = [looped(batch) for batch in [*BATCHES, BATCHES[0]]]
    outputs = sequential.run(model, BATCHES, weights=model.state_dict(), window=window)
    assert_equal([*outputs, model(BATCHES[0])], expected)


def test_llama_with_dynamic_rope_on_meta_runs_twice():
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = transformers.LlamaConfig(
        **(models.SIZES | {"max_position_embeddings": 8}), rope_parameters=rope
    )
    model = transformers.LlamaForCausalLM(config).eval()
    batches = [
        {"input_ids": torch.arange(2 * n).view(2, n), "use_cache": False} for n in (16, 4, 16)
    ]
    empty, state = on_meta(model), model.state_dict()
    with torch.no_grad():
        expected = [model(**batch).logits for batch in batches * 2]
    found = [sequential.run(empty, batches, weights=state) for _ in range(2)]
    assert_equal([output.logits for outputs in found for output in outputs], expected)


# ---- what goes wrong ---------------------------------------------------------------------------


def test_what_nothing_gives_is_named_before_the_first_batch(tmp_path):
    model = Stack(2)
    state = model.state_dict()
    del state["blocks.1.bias"]

    def batches():
        raise AssertionError("a batch was asked for")
        yield

    empty = on_meta(model)
    with pytest.raises(ValueError, match=r"no source for 'blocks.1.bias': it is on meta"):
        sequential.run(empty, batches(), weights=state)
    with pytest.raises(ValueError, match=r"'blocks.0.weight' and 3 more"):
        sequential.run(empty, batches())
    empty.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="no source for the buffer 'table'"):
        sequential.run(empty, batches(), weights=model.state_dict())
    assert_nothing_left(empty)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("where", ["source", "batch"])
def test_an_exception_leaves_no_weight_and_no_thread(where, prefetch):
    class Failing(sequential.DictWeights):
        def read(self, name):
            if where == "source" and name == "blocks.2.weight":
                raise ConnectionError("the disk is gone")
            return super().read(name)

    def fail(*_):
        raise ConnectionError("of the batch")

    model = Stack(4)
    empty = on_meta(model)
    state, weights = tensors_of(empty), Failing(model.state_dict())
    handle = empty.blocks[2].register_forward_hook(fail)
    with pytest.raises(ConnectionError, match="gone" if where == "source" else "of the batch"):
        sequential.run(empty, BATCHES, weights=weights, prefetch=prefetch)
    handle.remove()
    assert_as_before(empty, state)
    assert threading.active_count() < 20


@pytest.mark.parametrize("where", ["thread", "run inside", "callback", "recomputation"])
def test_a_target_that_is_called_where_its_weights_are_not_is_refused(where):
    """It would be computed with what the model had before."""
    model = Stack(3)
    weights = {name: tensor * 2 for name, tensor in model.state_dict().items()}

    def in_thread(model, batch):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(model, batch).result()

    def recomputed(model, batch):
        with torch.enable_grad():
            x = first = batch.clone().requires_grad_()
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return torch.autograd.grad(x.sum(), first)

    settings = {
        "thread": {"call": in_thread},
        "run inside": {"call": lambda m, batch: sequential.run(m, [batch] * 2, "blocks.0")},
        "callback": {"on_output": lambda index, output: model(output)},
        "recomputation": {"call": recomputed},
    }
    with pytest.raises(RuntimeError, match="whose weights are not there now"):
        sequential.run(model, BATCHES, weights=weights, **settings[where])
    assert_nothing_left(model)


class UsesWeightsOutside(Stack):
    """With the weight of a block that is used when it is not that block's turn."""

    def __init__(self, is_taken_before):
        super().__init__(3)
        self.is_taken_before = is_taken_before

    def forward(self, x):
        own = next(self.blocks[1].parameters())
        assert isinstance(own, nn.Parameter) and own.dtype == torch.float32 and own.numel() > 0
        copy.deepcopy(self.blocks[1])
        x = super().forward(x)
        return x * (own if self.is_taken_before else next(self.blocks[1].parameters())).sum()


@pytest.mark.parametrize("is_taken_before", [False, True])
@pytest.mark.parametrize("window", [1, None])
@pytest.mark.parametrize("is_on_meta", [False, True])
def test_a_weight_that_is_used_outside_of_its_target_is_there_or_an_error(
    is_taken_before, window, is_on_meta
):
    model = UsesWeightsOutside(is_taken_before)
    weights = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(weights)
    with torch.no_grad():
        expected = [loaded(batch) for batch in BATCHES]
    empty = on_meta(model) if is_on_meta else model
    state = tensors_of(empty)
    settings = {"weights": weights, "window": window, "device": "cpu"}
    with pytest.raises(RuntimeError, match=r"the weight 'blocks\.1\.\S+' is used outside of the"):
        sequential.run(empty, BATCHES, **settings)
    assert_as_before(empty, state)
    found = sequential.run(empty, BATCHES, ["blocks.0", "blocks.2"], **settings)
    assert_equal(found, expected)
    assert_as_before(empty, state)


class KeepsWeights(nn.Module):
    """A block that gives on its weights by a side way, which later blocks use."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x, kept):
        kept += [self.fc.weight, self.fc.bias.view(2, 3)]
        return self.fc(x)


class UsesKeptWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(KeepsWeights() for _ in range(5))

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x, kept)
        return x @ kept[0] + kept[3].sum()


@pytest.mark.parametrize("window", [1, 2, None])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_weights_that_a_target_keeps_stay_what_they_are(window, prefetch):
    model = models.seeded(UsesKeptWeights)
    with torch.no_grad():
        expected = [model(batch) for batch in BATCHES]
    settings = {"weights": model.state_dict(), "window": window, "prefetch": prefetch}
    found = sequential.run(on_meta(model), BATCHES, device="cpu", **settings)
    assert_equal(found, expected)


def test_what_needs_a_backward_is_an_error_while_weights_are_loaded():
    model = Stack()
    settings = {"weights": model.state_dict(), "device": "cpu"}
    with FlexModel(on_meta(model), {}) as flex:
        flex.register_forward_hook(HookFunction("blocks.0", None, halve))
        with pytest.raises(RuntimeError, match="the batch runs a backward, but gradients are off"):
            sequential.run(flex, BATCHES, call=lambda m, x: m(x).sum().backward(), **settings)
        flex.create_hook_group("gradients", "blocks.1", hook_type="full_backward")
        with pytest.raises(
            ValueError, match=r"blocks\.1.* needs a backward, but gradients are off"
        ):
            sequential.run(flex, BATCHES, **settings)
        outputs = sequential.run(flex, BATCHES, groups="gradients", complement=True, **settings)
    with torch.no_grad(), FlexModel(model, {}) as whole:
        whole.register_forward_hook(HookFunction("blocks.0", None, halve))
        assert_equal(outputs, [whole(batch) for batch in BATCHES])
