"""Advice about `flex_model.sequential`: runs, weights, stores, harvest and traced subgraphs."""

import contextlib
import copy
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import models
import quantized_folders
import quantized_layers
from advice.triggers import in_a_folder
from flex_model import ActivationStore, FlexModel, HookFunction, sequential
from flex_model.sequential.harvest import harvest
from shared_edits import double

BATCHES = [models.random(rows, 6, seed=rows, dtype=torch.float32) for rows in (2, 3, 1)]


class Stack(nn.Module):
    """Blocks in a ModuleList; ``order`` says which ones are called."""

    def __init__(self, order=(0, 1, 2)):
        super().__init__()
        self.blocks = nn.ModuleList(models.seeded(nn.Linear, 6, 6, seed=i) for i in range(3))
        self.order = order

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x).tanh()
        return x


def on_meta(model):
    return copy.deepcopy(model).to("meta")


def run_quantized(layers="quantised"):
    """Run a model of plain or quantised layers with the weights of quantised ones."""
    model = quantized_layers.build("int8 beside scales")
    weights = sequential.DictWeights(model.state_dict())
    model = model if layers == "quantised" else models.seeded(quantized_layers.Model)
    batch = models.random(2, 8, dtype=torch.float32)
    sequential.run(on_meta(model), [batch], ["re:blocks.[0-9]$"], weights=weights)


def compare(model, *args, expected=None, **settings):
    """A run gives what the model gives by itself."""
    expected = expected or model
    with torch.no_grad():
        wanted = [expected(batch) for batch in BATCHES]
    found = sequential.run(model, BATCHES, *args, **settings)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def hooked(*functions, model=None, records=None):
    flex = FlexModel(Stack() if model is None else model, {} if records is None else records)
    for function in functions or [HookFunction("blocks.1")]:
        flex.register_forward_hook(function)
    return flex


# ---- Arguments and wrappers ----------------------------------------------------------------------


def in_a_run(is_active):
    with hooked() as flex, flex.active() if is_active else contextlib.nullcontext():
        sequential.run(flex, BATCHES)


def changing_hooks(when):
    with hooked() as flex:
        function = HookFunction("blocks.1", output_name="grad")

        def change(module, x, save_ctx, modules):
            if when == "in a batch":
                flex.register_full_backward_hook(function)

        flex.register_forward_pre_hook(HookFunction("blocks.1", None, change, output_name="adds"))
        if when == "before":
            flex.register_full_backward_hook(function)
        sequential.run(flex, BATCHES)


def offloading(grad):
    with torch.set_grad_enabled(grad):
        sequential.run(Stack(), BATCHES, offload_activations="disk")


@in_a_folder
def storing(folder, model):
    sequential.run(model, BATCHES, store=ActivationStore(folder))


@in_a_folder
def two_stores(folder, *, own, given):
    stores = [ActivationStore(folder / name) for name in "ab"]
    with hooked(records=stores[0] if own else None) as flex:
        sequential.run(flex, BATCHES, store=stores[1] if given else None)


@in_a_folder
def other_inputs(folder, batches, name="a"):
    with hooked() as flex:
        sequential.run(flex, BATCHES[:2], store=ActivationStore(folder / "a"))
        sequential.run(flex, batches, store=ActivationStore(folder / name))


def compiled(runs):
    model = torch.compile(Stack(), backend="eager")
    compare(model if runs == "compiled" else model._orig_mod)


def hooked_by_another(how):
    with hooked(HookFunction("blocks.1", editing_function=double)) as other:
        model = FlexModel(other.module)
        if how == "restored":
            other.restore()
        if how == "that one":
            model = other
        compare(model, **({"window": 1} if how == "window" else {}))


# ---- Targets -------------------------------------------------------------------------------------


class TakesAWeight(Stack):
    """It uses a block's weight outside of the block."""

    def forward(self, x):
        return super().forward(x) * self.blocks[1].weight.sum()


def weights_taken(*targets):
    model = TakesAWeight()
    whole = nn.Sequential(model)
    state = whole.state_dict()
    compare(on_meta(whole), list(targets), expected=whole, weights=state, device="cpu")


def edit_with(what):
    model = Stack()
    probe, state = copy.deepcopy(model.blocks[2]), model.state_dict()

    def edit(module, x, save_ctx, modules):
        if what == "target":
            return flex.module.blocks[2](x)
        if what == "module":
            return modules["probe"](x)
        return nn.functional.linear(x, *(hook.parameters[f"blocks.2.{n}"] for n in KINDS))

    names = [f"blocks.2.{name}" for name in KINDS] if what == "parameters" else ()
    hook = HookFunction("blocks.0", editing_function=edit, parameters=names)
    with hooked(hook, model=on_meta(model)) as flex:
        flex.register_trainable_module("probe", probe)
        expected = Stack((0, 2, 1, 2))
        found = sequential.run(flex, BATCHES, weights=state, device="cpu")
        for output, batch in zip(found, BATCHES, strict=True):
            x = nn.functional.linear(expected.blocks[0](batch), *probe.parameters()).tanh()
            for block in expected.blocks[1:]:
                x = block(x).tanh()
            torch.testing.assert_close(output, x)


KINDS = ("weight", "bias")


def elsewhere(is_in_thread):
    def call(model, batch):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(model, batch).result() if is_in_thread else model(batch)

    model = Stack()
    state = model.state_dict()
    compare(on_meta(model), expected=model, weights=state, device="cpu", call=call)


def targets_of(*stated):
    modifiers = [SimpleNamespace(sequential_targets=names) for names in stated]
    nothing = SimpleNamespace(sequential_targets=None)
    assert sequential.get_sequential_targets(modifiers, Stack(), nothing) == ["Linear"]


# ---- Weights -------------------------------------------------------------------------------------


class Table(Stack):
    """With a buffer."""

    def __init__(self, is_persistent=False):
        super().__init__()
        self.register_buffer("table", torch.ones(6), persistent=is_persistent)

    def forward(self, x):
        return super().forward(x) * self.table


def buffers(how=None):
    model = Table(is_persistent=how == "persistent")
    empty, state = on_meta(model), model.state_dict()
    if how == "in the weights":
        state["table"] = model.table
    elif how == "on the CPU":
        empty.table = model.table
    compare(empty, expected=model, weights=state, device="cpu")


def without_a_parameter(how=None):
    model, other = Stack(), Stack()
    nn.init.zeros_(model.blocks[1].bias)
    weights = other.state_dict()
    weights.pop("blocks.1.bias")
    if how == "added":
        other.blocks[1].bias = model.blocks[1].bias
        weights["blocks.1.bias"] = model.blocks[1].bias
    elif how == "none":
        other, weights = model, None
    compare(model, expected=other, weights=weights)


def other_shapes(how=None):
    wide, model = Stack(), Stack()

    wide.blocks[2] = nn.Linear(6, 3)
    given = (wide if how == "model" else model).state_dict()
    built = model if how == "weights" else wide
    compare(on_meta(built), expected=built, weights=given, device="cpu")


@in_a_folder
def from_files(folder, how):
    model = Stack()
    weights = folder
    if how == "no path":
        weights = folder / "nowhere"
    elif how == "torch.save":
        torch.save(model.state_dict(), folder / "model.bin")
    elif how == "no safetensors":
        torch.save(model.state_dict(), folder / "model.safetensors")
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(model.state_dict(), folder / "model.safetensors")
        weights = folder / "model.safetensors" if how == "file" else folder
    compare(on_meta(model), expected=model, weights=weights, device="cpu")


@in_a_folder
def from_two_files(folder, how=None):
    model = Stack()
    safetensors = pytest.importorskip("safetensors.torch")
    for name in "ab":
        safetensors.save_file(model.state_dict(), folder / f"{name}.safetensors")
    if how == "removed":
        (folder / "b.safetensors").unlink()
    weights = folder / "a.safetensors" if how == "one" else folder
    compare(on_meta(model), expected=model, weights=weights, device="cpu")


def tied_with_two_values(how=None):
    model = hugging_face(use_cache=False, tie_word_embeddings=how != "untied")
    state, batch = model.state_dict(), {"input_ids": torch.arange(6)[None]}
    state["lm_head.weight"] = state["lm_head.weight"] * 2
    if how == "removed":
        state.pop("lm_head.weight")
    found = sequential.run(on_meta(model), [batch], weights=state, device="cpu")
    model.load_state_dict(state, strict=how == "untied")
    assert torch.equal(found[0].logits, model(**batch).logits)


@in_a_folder
def of_a_quantised_folder(folder, how, method="torchao"):
    transformers = pytest.importorskip("transformers")
    batch = {"input_ids": torch.arange(9)[None]}
    (folder / "plain").mkdir()
    quantized_folders.fp8(folder, **({} if how == "copy" else {"quant_method": method}))
    if how == "no JSON":
        (folder / "config.json").write_text("{")
    weights = folder
    if how == "copy":
        packed = transformers.AutoModelForCausalLM.from_pretrained(folder)
        plain = quantized_folders.llama().to("meta")
        with FlexModel(packed) as flex:
            state = {n: flex.get_module_parameter(n) for n, _ in plain.named_parameters()}
        weights = folder / "plain"
        plain.save_pretrained(weights, state_dict=state)
    sequential.run(quantized_folders.llama().to("meta"), [batch], weights=weights)


@in_a_folder
def from_shards(folder, index=None, has_files=True):
    model = Stack()
    safetensors = pytest.importorskip("safetensors.torch")
    if has_files:
        safetensors.save_file(model.state_dict(), folder / "a.safetensors")
    index = index or {"weight_map": dict.fromkeys(model.state_dict(), "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    compare(on_meta(model), expected=model, weights=folder, device="cpu")


def of_kind(convert):
    model = Stack()
    weights = {name: convert(value) for name, value in model.state_dict().items()}
    compare(on_meta(model), expected=model, weights=weights, device="cpu")


def bar(has_tqdm, **settings):
    if has_tqdm:
        pytest.importorskip("tqdm")
    modules = {} if has_tqdm else {"tqdm": None}
    with mock.patch.dict(sys.modules, modules), contextlib.redirect_stderr(io.StringIO()):
        sequential.run(Stack(), BATCHES, **settings)


def hugging_face(**settings):
    pytest.importorskip("transformers")
    return models.llama(**settings)


@in_a_folder
def from_hugging_face(folder):
    model, ids = hugging_face(use_cache=False), torch.arange(6).reshape(2, 3)
    model.save_pretrained(folder)
    found = sequential.run(on_meta(model), [{"input_ids": ids}], weights=folder, device="cpu")
    assert torch.equal(found[0].logits, model(ids).logits)


# ---- Harvest and subgraphs -----------------------------------------------------------------------


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "one", "two"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>"
    )


@in_a_folder
def harvested(folder, *parts, names=("model.norm",)):
    (folder / "lines.txt").write_text("one two\ntwo")
    model = folder / "model"
    model.mkdir()
    for part in parts:
        part.save_pretrained(model)
    harvest(model, list(names), folder / "lines.txt", folder / "out", progress=False)
    for name in ActivationStore(folder / "out").names:
        assert len(list(ActivationStore(folder / "out").tensors(name))) == 1


def t5():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **sizes))


def run_t5():
    ids = torch.arange(6)[None]
    sequential.run(t5(), [{"input_ids": ids, "decoder_input_ids": ids}])


def traced(sample=None, model=None):
    sequential.trace_subgraphs(
        Stack() if model is None else model,
        {"x": BATCHES[0]} if sample is None else sample,
        "Linear",
    )


def subgraph_of(sample, **arguments):
    class Masked(Stack):
        def forward(self, x, mask=None):
            return super().forward(x) if mask is None else super().forward(x * mask)

    model = Masked()
    sample = {"x": BATCHES[0]} | ({"mask": BATCHES[0]} if "mask" in sample else {})
    first = sequential.trace_subgraphs(model, sample, ["Linear"])[0]
    first.forward(model, x=BATCHES[1], **arguments)


def subgraphs_of_another_factor(*, is_traced_again):
    class Scaled(Stack):
        def forward(self, x):
            return super().forward(x) * self.factor

    model = Scaled()
    for factor in (2.0, 3.0):
        model.factor = factor
        if factor == 2.0 or is_traced_again:
            subgraphs = sequential.trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"])
        values = {"x": BATCHES[1]}
        for subgraph in subgraphs:
            output = subgraph.forward(model, **values)
            values |= output if isinstance(output, dict) else {}
        assert torch.equal(output, model(BATCHES[1]))


def of_meta(how):
    model = Stack()
    if how == "run":
        compare(on_meta(model), expected=model, weights=model.state_dict(), device="cpu")
    else:
        traced(model=model if how == "loaded" else on_meta(model))


ROWS = {
    "call it outside of forward, ": (lambda: in_a_run(True), lambda: in_a_run(False)),
    "register and remove hooks before or after the run": (
        lambda: changing_hooks("in a batch"),
        lambda: changing_hooks("before"),
    ),
    "give 'cpu' or a device that torch has here, or leave device= out": (
        lambda: compare(Stack(), device="xx"),
        lambda: (compare(Stack(), device="cpu"), compare(Stack())),
    ),
    "since a graph holds activations where they are; run it under": (
        lambda: offloading(grad=True),
        lambda: offloading(grad=False),
    ),
    "and a plain module has none; give a FlexModel with hooks": (
        lambda: storing(Stack()),
        lambda: storing(hooked()),
    ),
    "and store= is {}; give one of them": (
        lambda: two_stores(own=True, given=True),
        lambda: (two_stores(own=True, given=False), two_stores(own=False, given=True)),
    ),
    "give the same batches in the same order, or another folder": (
        lambda: other_inputs(BATCHES[:1] + BATCHES[2:]),
        lambda: (other_inputs(BATCHES), other_inputs(BATCHES[:1] + BATCHES[2:], "b")),
    ),
    "run the module that was compiled (._orig_mod)": (
        lambda: compiled("compiled"),
        lambda: compiled("original"),
    ),
    "has hooks of a FlexModel that is not the one that is run": (
        lambda: hooked_by_another(None),
        lambda: [hooked_by_another(how) for how in ("that one", "restored", "window")],
    ),
    # Targets.
    "targets='auto' found neither": (
        lambda: compare(nn.Sequential(nn.Linear(6, 6))),
        lambda: compare(nn.Sequential(nn.Linear(6, 6)), ["0"]),
    ),
    "targets is empty; name some modules, or leave it at 'auto'": (
        lambda: compare(Stack(), []),
        lambda: (compare(Stack(), ["blocks.0"]), compare(Stack(), "auto")),
    ),
    "choose targets=[...] without that target": (
        lambda: weights_taken("0.blocks.1", "0.blocks.2"),
        lambda: (weights_taken("0.blocks.0", "0.blocks.2"), weights_taken("0")),
    ),
    "compute with HookFunction(parameters=[...]), whose": (
        lambda: edit_with("target"),
        lambda: (edit_with("parameters"), edit_with("module")),
    ),
    "call it in the batch's own forward": (
        lambda: elsewhere(is_in_thread=True),
        lambda: elsewhere(is_in_thread=False),
    ),
    "all have sequential_targets; give them": (
        lambda: targets_of("Linear", "Linear"),
        lambda: targets_of("Linear", None),
    ),
    # Weights.
    "can't compute it; make it persistent, add it": (
        buffers,
        lambda: [buffers(how) for how in ("persistent", "in the weights", "on the CPU")],
    ),
    "add it to weights, or leave weights= out": (
        without_a_parameter,
        lambda: [without_a_parameter(how) for how in ("added", "none")],
    ),
    "build the model of quantised layers": (lambda: run_quantized("plain"), run_quantized),
    "save a dequantised copy once, as in": (
        lambda: of_a_quantised_folder("itself"),
        lambda: of_a_quantised_folder("copy"),
    ),
    "is no JSON ({}); download the checkpoint again": (
        lambda: of_a_quantised_folder("no JSON"),
        lambda: of_a_quantised_folder("copy"),
    ),
    "give the weights of this model, or build it": (
        other_shapes,
        lambda: (other_shapes("weights"), other_shapes("model")),
    ),
    "CheckpointWeights: there is no": (
        lambda: from_files("no path"),
        lambda: (from_files("file"), from_hugging_face()),
    ),
    "has no .safetensors file; save the model with save_pretrained": (
        lambda: from_files("torch.save"),
        from_hugging_face,
    ),
    "is not a safetensors file ({}); save": (
        lambda: from_files("no safetensors"),
        lambda: (from_hugging_face(), from_files("safetensors")),
    ),
    "not an index of safetensors files beside it": (
        lambda: from_shards({"weights": {}}),
        from_shards,
    ),
    "which its index lists; download the checkpoint again": (
        lambda: from_shards(has_files=False),
        from_shards,
    ),
    "give one of the files, or remove the other": (
        from_two_files,
        lambda: [from_two_files(how) for how in ("one", "removed")],
    ),
    "set tie_word_embeddings=False in the configuration": (
        tied_with_two_values,
        lambda: [tied_with_two_values(how) for how in ("untied", "removed")],
    ),
    "read() must return a torch.Tensor": (
        lambda: of_kind(torch.Tensor.tolist),
        lambda: of_kind(torch.Tensor.clone),
    ),
    "pip install tqdm, or use on_target_end": (
        lambda: bar(False, progress=True),
        lambda: (bar(True, progress=True), bar(False, on_target_end=lambda *args: None)),
    ),
    # Harvest and subgraphs.
    "has no config.json; give a folder": (
        lambda: harvested(tokenizer()),
        lambda: harvested(tokenizer(), hugging_face()),
    ),
    "harvest: no tokenizer in": (
        lambda: harvested(hugging_face()),
        lambda: (harvested(tokenizer(), hugging_face()), from_hugging_face()),
    ),
    "is a list or dict of modules, which is never called; give": (
        lambda: harvested(tokenizer(), hugging_face(), names=["model.layers"]),
        lambda: harvested(tokenizer(), hugging_face(), names=[r"re:model.layers\.[^.]+$"]),
    ),
    "call sequential.run with batches that have its decoder's": (
        lambda: harvested(tokenizer(), t5(), names=["encoder.block.0"]),
        run_t5,
    ),
    "give a FlexModel, or leave groups= out": (
        lambda: sequential.run(Stack(), BATCHES, groups="some"),
        lambda: (sequential.run(hooked(), BATCHES, groups="all"), compare(Stack())),
    ),
    "is on meta; load the model, or use sequential.run": (
        lambda: of_meta(None),
        lambda: (of_meta("loaded"), of_meta("run")),
    ),
    "and sample_input has only {}; add it": (lambda: traced({}), traced),
    "give a sample_input that has one, too": (
        lambda: subgraph_of([], mask=BATCHES[1]),
        lambda: subgraph_of(["mask"], mask=BATCHES[1]),
    ),
    "reads it; call trace_subgraphs again": (
        lambda: subgraphs_of_another_factor(is_traced_again=False),
        lambda: subgraphs_of_another_factor(is_traced_again=True),
    ),
}
