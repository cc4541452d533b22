"""torch.compile: hooks fire whenever they are registered, and an idle wrapper costs no graph break.

With the "eager" backend, which runs what was captured as it is: capturing is what could lose hooks.
"""

import warnings

import pytest
import torch
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction

BATCH = models.random(4, 6)
SITES = ("inp", "fc1", "act", "fc2", "out")

# Dynamo's own, at any break of a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def double(module, full, save_ctx, modules):
    return full * 2


def compile_whole(model):
    return torch.compile(model, backend="eager")


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def compile_parts(model):
    for site in SITES:
        model.get_submodule(site).compile(backend="eager")
    return model


WAYS = {"whole": compile_whole, "in place": compile_in_place, "parts": compile_parts}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("site", ["", "fc1", "act"])
def test_a_hook_fires_before_and_after_the_first_compiled_call(way, called_before, site):
    expected_model, records, expected = models.mlp(), {}, {}
    plain = FlexModel(expected_model, expected)
    flex = FlexModel(WAYS[way](models.mlp()), records)
    if called_before:
        assert_close(flex(BATCH), plain(BATCH))
    for wrapper in (plain, flex):
        wrapper.register_forward_hook(HookFunction(site, editing_function=double))
    for _ in range(2):
        assert torch.equal(flex(BATCH), plain(BATCH))
        assert torch.equal(records[site][0], expected[site][0])
        assert len(records[site]) == 1


@pytest.mark.parametrize("way", WAYS)
def test_groups_come_and_go(way):
    base = models.mlp()(BATCH)
    records = {}
    flex = FlexModel(WAYS[way](models.mlp()), records)
    flex(BATCH)
    handle = flex.register_forward_hook(HookFunction("fc1", editing_function=double))
    flex.register_forward_hook(HookFunction("act"))
    flex.update_hook_groups("act", "looks")
    edited = flex(BATCH)
    assert not torch.equal(edited, base)
    for groups, seen in (((), []), (["looks"], ["act"]), ("all", ["act", "fc1"]), ((), [])):
        records.clear()
        output = flex(BATCH, groups=groups)
        assert sorted(records) == seen
        assert torch.equal(output, edited if "fc1" in seen else base)
    handle.remove()
    records.clear()
    assert torch.equal(flex(BATCH), base)
    assert sorted(records) == ["act"]
    flex.restore()


@pytest.mark.parametrize("way", WAYS)
def test_backward_hooks_see_the_same_gradients(way):
    seen = []
    for model in (models.mlp(), WAYS[way](models.mlp())):
        records = {}
        flex = FlexModel(model, records)
        flex(BATCH).square().sum().backward()
        flex.register_full_backward_hook(HookFunction("fc2", editing_function=double))
        flex.register_full_backward_pre_hook(HookFunction("act"))
        model.zero_grad()
        flex(BATCH).square().sum().backward()
        weight = next(p for n, p in model.named_parameters() if n.endswith("fc1.weight"))
        seen.append([records["fc2"][0], records["act"][0], weight.grad])
    for plain, compiled in zip(*seen):
        assert_close(compiled, plain)


def test_a_model_compiled_after_it_was_wrapped():
    records = {}
    model = models.mlp()
    flex = FlexModel(model, records)
    model.compile(backend="eager")
    flex(BATCH)
    flex.register_forward_hook(HookFunction("fc1"))
    flex(BATCH)
    assert len(records["fc1"]) == 1


def test_an_idle_wrapper_adds_no_graph_break():
    model = models.mlp()
    flex = FlexModel(model)
    flex.register_forward_hook(HookFunction("fc1")).remove()
    assert torch._dynamo.explain(model)(BATCH).graph_break_count == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_tensor_parallel_model(way):
    with warnings.catch_warnings():  # Dynamo's, of breaks and of autograd functions in the model
        warnings.simplefilter("ignore")
        check_tensor_parallel(way)


def check_tensor_parallel(way):
    parallelism, records = models.TWO_RANKS["tp"], {}
    model = parallelism.shard(models.mlp())
    flex = FlexModel(WAYS[way](model), records, tensor_parallel_size=2)
    flex(BATCH)
    flex.register_forward_hook(HookFunction("fc1", (None, 8), double))
    flex.register_forward_hook(HookFunction("act", (None, 8)))
    expected = {}
    plain = models.mlp()
    plain.fc1.register_forward_hook(lambda m, a, output: expected.update(fc1=output) or output * 2)
    plain.act.register_forward_hook(lambda m, a, output: expected.update(act=output))
    assert_close(flex(BATCH), plain(BATCH))
    for name, tensors in records.items():
        assert_close(tensors[0], expected[name])
    flex.restore()
    torch.compiler.reset()
