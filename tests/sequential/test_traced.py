"""Subgraphs equal the model, or are a TraceError."""

from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, images, llama, tokens
from test_engine import BATCHES, Stack, assert_equal, assert_nothing_left
from torch import nn
from torch.fx import GraphModule
from traced_models import Model, called, run_by_hand

from flex_model import FlexModel, HookFunction, TraceError, sequential
from flex_model.sequential import SequentialTracer, Subgraph, trace_subgraphs

TARGETS = {
    "llama": ("LlamaDecoderLayer", 3),
    "gpt2": ("GPT2Block", 3),
    "mixtral": ("MixtralDecoderLayer", 3),
    "qwen3_moe": ("Qwen3MoeDecoderLayer", 3),
    "gemma3": ("Gemma3DecoderLayer", 3),
    "t5": ("T5Block", 4),
    "vit": ("ViTLayer", 3),
    "clip": ("CLIPEncoderLayer", 4),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    pytest.importorskip("transformers")
    make, batches, _ = FAMILIES[name]
    model, (target, count) = make(), TARGETS[name]
    subgraphs = trace_subgraphs(model, batches[0], [target], [])
    assert len(subgraphs) == count + 1
    targets = sequential.match_modules(model, [target])
    in_subgraphs = [sum(m in targets for m in called(model, one)) for one in subgraphs]
    assert in_subgraphs == [1] * count + [0]
    consumed = [name for one in subgraphs for name in one.consumed_names]
    assert len(consumed) == len(set(consumed))
    assert set(consumed) == set().union(*(one.input_names for one in subgraphs))
    others = {"vit": images(5, 7), "clip": tokens(3, 11, 9) | images(2, 8)}.get(name)
    if others is None:
        others = tokens(3, 11, 9)
        others |= {"decoder_input_ids": others["input_ids"][:, :6]} if name == "t5" else {}
    settings = {} if name in ("vit", "clip") else {"use_cache": False}
    with torch.no_grad():
        for batch in [*batches, others]:
            assert_equal(run_by_hand(model, subgraphs, batch), model(**batch, **settings))
    assert_nothing_left(model)


def test_the_names_of_the_reference():
    model = Stack(3)
    targets = sequential.match_modules(model, ["re:blocks"]) - {model.blocks}
    ancestors = sequential.get_sequential_ancestors(model, targets)
    assert ancestors == {model, model.blocks}
    sample = {"x": BATCHES[0]}
    concrete = sequential.populate_concrete_args(model, sample)
    assert concrete == {}
    tracer = SequentialTracer(ancestors, set())
    tracer.sample_input = sample
    graph = GraphModule(model, tracer.trace(model, concrete_args=concrete))
    assert sequential.graph_is_well_formed(graph.graph)
    nodes = sequential.find_target_nodes(graph, targets)
    assert {node.target for node in nodes} == {f"blocks.{i}" for i in range(3)}
    partitions = sequential.topological_partition(graph, targets)
    assert [sum(node in nodes for node in part) for part in partitions] == [1, 1, 1, 0]
    subgraphs = sequential.partition_graph(model, partitions)
    assert all(isinstance(one, Subgraph) and one.consumed_names == set() for one in subgraphs)
    sequential.trace_consumed_names(subgraphs)
    assert [one.consumed_names for one in subgraphs] == [one.input_names for one in subgraphs]
    x = BATCHES[3]
    assert torch.equal(run_by_hand(model, subgraphs, {"x": x}), model(x))
    next(iter(nodes)).users.clear()
    assert not sequential.graph_is_well_formed(graph.graph)


def test_concrete_arguments():
    class Model(nn.Module):
        def forward(self, x, scale=2, *more, use_cache=True, **options):
            return x

    populate = sequential.populate_concrete_args
    expected = {"scale": 2, "more": [], "use_cache": False, "options": {}}
    assert populate(Model(), {"x": 1}) == expected
    with pytest.raises(ValueError, match="forward needs 'x'"):
        populate(Model(), {"scale": 1})


def test_sequential_targets_of_modifiers():
    get, model = sequential.get_sequential_targets, Stack(2)
    nothing = SimpleNamespace(sequential_targets=None)
    one = SimpleNamespace(sequential_targets="Block")
    two = SimpleNamespace(sequential_targets=["A", "B"])
    assert get([], model, nothing) == ["Linear"]
    assert get([nothing, one], model, nothing) == ["Block"]
    assert get([nothing], model, two) == ["A", "B"]
    pytest.importorskip("transformers")
    assert get([], llama(), nothing) == ["LlamaDecoderLayer"]


def test_dispatch_gives_the_same_object():
    model = Stack(2)
    if torch.cuda.is_available():
        pytest.importorskip("accelerate")
        assert sequential.dispatch_for_sequential(model) is model
    else:
        with pytest.warns(UserWarning, match="stays on the CPU"):
            assert sequential.dispatch_for_sequential(model) is model


class Parent(Model):
    """``combine(self, x)`` is the forward."""

    def __init__(self, combine):
        super().__init__()
        self.combine = combine

    def forward(self, x):
        return self.combine(self, x)


def plain(self, x):
    mask = torch.ones(x.shape[0], 1).cumsum(0) / len(x)
    for block in self.blocks:
        x = block(x) * self.scale + self.shift * mask
    return {"x": x, "rows": torch.arange(x.shape[0])}


def test_weights_of_the_parent_and_a_branch_on_them():
    def combine(self, x):
        factor = 2 if self.scale.sum() > 0 and x.shape[0] > 0 else 3  # the same for all inputs
        return (self.blocks[1](self.blocks[0](x)) * factor * self.scale + self.shift,)

    model = Parent(combine)
    subgraphs = trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"])
    assert_equal(run_by_hand(model, subgraphs, {"x": BATCHES[3]}), model(BATCHES[3]))


WRONG = {
    # what is true of the sample only
    "a branch on sizes": (
        lambda self, x: self.blocks[1](self.blocks[0](x)) * (2 if x.shape[0] > 2 else 3),
        "'gt' is True, and it was False where the subgraphs were traced",
    ),
    "a length taken as a constant": (plain, r"'len_\d' is 3, and it was 2"),
    "a loop over rows": (
        lambda self, x: self.blocks[1](torch.stack([self.blocks[0](x)[i] for i in range(len(x))])),
        "called more than once|differs|fail|returns",
    ),
    # targets
    "called twice": (
        lambda self, x: self.blocks[1](self.blocks[0](self.blocks[0](x))),
        "'blocks.0' is called more than once",
    ),
    "never called": (lambda self, x: self.blocks[1](x), "'blocks.0' is never called"),
    # what can't be followed
    "leaves torch": (
        lambda self, x: self.blocks[1](torch.from_numpy(self.blocks[0](x).detach().numpy() * 2)),
        "does not trace|differs|fail",
    ),
    "type questions": (
        lambda self, x: (
            self.blocks[1](self.blocks[0](x)) * (1 if isinstance(x, torch.Tensor) else 2)
        ),
        "differs from the model's",
    ),
    "draws numbers": (
        lambda self, x: self.blocks[1](self.blocks[0](x) + torch.randn(())),
        "differs from the model's",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_equal_the_model_is_an_error(name):
    combine, match = WRONG[name]
    model = Parent(combine)
    attributes = set(vars(model))
    with pytest.raises(TraceError, match=match) as caught:
        trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"])
    assert "sequential.run" in str(caught.value)
    assert_nothing_left(model)
    assert set(vars(model)) == attributes
    if name != "draws numbers":
        outputs = sequential.run(model, BATCHES)
        assert all(assert_equal(o, model(b)) is None for o, b in zip(outputs, BATCHES))


class Optional(Model):
    """Its code asks whether arguments are None. Nodes are named ``add`` and ``blocks_0``, too."""

    def forward(self, x, mask=None, scale=2.0, *, add=None, blocks_0=None, **others):
        if mask is None:
            x = x + 100
        y = self.blocks[1](self.blocks[0](x) * scale)
        return y if add is None and blocks_0 is None else y * 3


X, MASK = BATCHES[0], torch.ones_like(BATCHES[0])


@pytest.mark.parametrize("sample", [{}, {"mask": None, "add": None}])
def test_an_argument_that_the_sample_lacks(sample):
    model = Optional()
    subgraphs = trace_subgraphs(model, {"x": X, **sample}, ["Linear"])
    assert [one.input_names for one in subgraphs[:2]] == [{"x"}, {"blocks_0"}]
    assert any(node.name == "add" for node in subgraphs[0].graph.nodes)
    assert_equal(run_by_hand(model, subgraphs, {"x": X + 1}), model(X + 1))
    same = {"mask": None, "add": None, "blocks_0": None, "scale": 2.0}
    output = subgraphs[0].forward(model, x=X, **same)
    assert_equal(output, subgraphs[0].forward(model, X))
    expected = model.blocks[1](output["blocks_0"] * 2)
    assert_equal(*subgraphs[1].forward(model, **output, **sample).values(), expected)
    for name, value in (("mask", MASK), ("add", 1), ("blocks_0", MASK), ("scale", 3.0)):
        message = f"with a value of '{name}', and sample_input has none.*sequential.run"
        with pytest.raises(TraceError, match=message):
            subgraphs[0].forward(model, x=X, **{name: value})
    with pytest.raises(TraceError, match="with a value of 'mask'"):
        subgraphs[1].forward(model, **output, mask=MASK)
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        subgraphs[0].forward(model, x=X, masks=MASK)


def test_an_argument_that_the_sample_has():
    model = Optional()
    subgraphs = trace_subgraphs(model, {"x": X, "mask": MASK}, ["Linear"])
    assert_equal(run_by_hand(model, subgraphs, {"x": X + 1, "mask": MASK}), model(X + 1, MASK))
    message = "'mask' is None, and it was a Tensor of torch.float32 .*sequential.run"
    with pytest.raises(TraceError, match=message):
        subgraphs[0].forward(model, x=X, mask=None)
    order = [node.name for node in subgraphs[0].graph.find_nodes(op="placeholder")]
    with pytest.raises(TraceError, match=message):
        subgraphs[0].forward(model, *({"x": X}.get(name) for name in order))
    with pytest.raises(TypeError, match="'mask'"):
        subgraphs[0].forward(model, x=X)


NAMES = ("input", "len", "range", "getattr", "torch", "device", "type", "self_", "X", "pixelValues")


@pytest.mark.parametrize("name", [*NAMES, "größe", "x_1", "model", "args"])
def test_arguments_named_as_what_the_code_of_a_graph_uses(name):
    space = {}
    code = f"self.blocks[1](self.blocks[0](x[:, : x.shape[1]]) * {name} - {name}.shape[0])"
    exec(f"def forward(self, x, {name}): return {code}", space)
    model = type("Named", (Model,), {"forward": space["forward"]})()
    subgraphs = trace_subgraphs(model, {"x": X, name: MASK}, ["Linear"])
    first = subgraphs[0]
    assert first.input_names == {"x", name}
    values = {"x": X + 1, name: MASK * 3}
    assert_equal(run_by_hand(model, subgraphs, values), model(**values))
    assert_equal(first.forward(model, *values.values()), first.forward(model, **values))
    with pytest.raises(TraceError, match=f"{name!r} is None, and it was a Tensor"):
        first.forward(model, **values | {name: None})


def test_no_target_and_no_sample():
    with pytest.raises(TypeError, match="expected a dict of the forward's arguments, got list"):
        trace_subgraphs(Stack(), [BATCHES[0]], ["Linear"])
    with pytest.raises(ValueError, match="match no module"):
        trace_subgraphs(Stack(), {"x": BATCHES[0]}, ["Conv2d"])


def test_a_tracer_without_a_sample_is_that_of_torch():
    model = Stack(2)
    ancestors = sequential.get_sequential_ancestors(model, set(model.blocks))
    graph = SequentialTracer(ancestors, {model}).trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == [
        "blocks.0",
        "blocks.1",
    ]


def test_hooks_do_not_run_while_tracing_and_are_there_afterwards():
    flex = FlexModel(model := Stack(2), found := {})
    flex.register_forward_hook(HookFunction("blocks.0"))
    subgraphs = trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"])
    assert found == {}
    run_by_hand(model, subgraphs, {"x": BATCHES[1]})
    assert torch.equal(found["blocks.0"][0], model.blocks[0](BATCHES[1]))


def test_methods_to_ignore_are_single_nodes():
    def combine(self, x):
        return self.blocks[1](self.odd(self.blocks[0](x)))

    class Odd(Parent):
        def odd(self, x):
            return x * 2 if float(x.detach().sum()) > 0 else x * 3

    model = Odd(combine)
    subgraphs = trace_subgraphs(model, {"x": BATCHES[0]}, ["Linear"], ["odd"])
    for batch in BATCHES:
        assert torch.equal(run_by_hand(model, subgraphs, {"x": batch}), model(batch))
