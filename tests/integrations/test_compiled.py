"""torch.compile: hooks fire whenever they are registered; an idle wrapper breaks no graph."""

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

import compiling
import models
from flex_model import FlexModel, HookError, HookFunction
from shared_edits import double
from tiers import grid_but

BATCH = models.random(4, 6)
# Dynamo's own, at any break of a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def keep_a_function(model):
    """As transformers' ``get_compiled_call``; so may anybody."""
    model._compiled_call = torch.compile(model.__call__, backend="eager")
    return model, model._compiled_call


def compile_forward(model):
    return model, compiling.forward(model)


def compile_outside(model):
    return model, torch.compile(lambda *args: model(*args), backend="eager")


# These failed before: the hook was not called.
@pytest.mark.parametrize("compile_call", [keep_a_function, compile_forward, compile_outside])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("begins_run", grid_but([False, True], True))
def test_a_hook_fires_in_code_that_is_compiled_beside_the_model(
    compile_call, called_before, begins_run
):
    records, expected = {}, {}
    plain = FlexModel(models.mlp(), expected)
    model, call = compile_call(models.mlp())
    flex = FlexModel(model, records)
    if called_before:
        assert_close(call(BATCH), plain(BATCH))
    for wrapper in (plain, flex):
        wrapper.register_forward_hook(HookFunction("fc1", editing_function=double))
        wrapper.update_hook_groups("fc1", "first")
    for site in ("act", "fc2"):
        for groups in ("all", "first", (), "all"):
            records.clear()
            expected.clear()
            output = plain(BATCH, groups=groups)
            with flex.active(groups) if begins_run or groups != "all" else nullcontext():
                assert torch.equal(call(BATCH), output)
            assert records.keys() == expected.keys()
            for name, tensors in expected.items():
                assert_close(records[name], tensors)
        for wrapper in (plain, flex):
            wrapper.register_forward_hook(HookFunction(site, editing_function=double))
    flex.restore()
    assert torch.equal(call(BATCH), models.mlp()(BATCH))


@pytest.mark.parametrize("called_before", [False, True])
def test_a_graph_that_must_not_break(called_before):
    """Dynamo's error says what breaks it, and what to do."""
    model = models.mlp()
    flex = FlexModel(model)
    model.compile(backend="eager", fullgraph=True)
    expected = flex(BATCH) if called_before else models.mlp()(BATCH)
    handle = flex.register_forward_hook(HookFunction("fc1"))
    message = "hooks of a FlexModel .* compile without fullgraph=True, or remove the hooks"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        flex(BATCH)
    handle.remove()
    assert torch.equal(flex(BATCH), expected)


@pytest.mark.ranks(2, alone=True)  # what other tests compiled is not there
@pytest.mark.parametrize("name", grid_but(["dtensor", "ddp", "fsdp2"], "fsdp2"))
def test_a_graph_that_must_not_break_on_ranks(name):
    parallelism = models.TWO_RANKS[name]
    model = parallelism.shard(models.mlp())
    flex = FlexModel(model, **parallelism.sizes)
    model.compile(backend="eager", fullgraph=True)
    flex.register_forward_hook(HookFunction("fc1"))
    message = "hooks of a FlexModel .* compile without fullgraph=True, or remove the hooks"
    for _ in range(2):
        with pytest.raises((HookError, torch._dynamo.exc.Unsupported), match=message):
            flex(parallelism.my_rows(BATCH))
    flex.restore()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sites", [(), ("fc1",)])
def test_a_compiled_flex_model_compiles_the_model_alone(in_place, sites):
    """Before, dynamo traced this library, too, and warned of what it met there."""
    found, flex = [], FlexModel(models.mlp())
    for site in sites:
        flex.register_forward_hook(HookFunction(site, editing_function=double))

    def backend(graph, inputs):
        found.append(graph)
        return graph

    if in_place:
        flex.compile(backend=backend)
    call = flex if in_place else torch.compile(flex, backend=backend)
    expected = models.mlp()
    for site in sites:
        expected.get_submodule(site).register_forward_hook(lambda m, a, output: output * 2)
    for _ in range(2):
        assert torch.equal(call(BATCH), expected(BATCH))
    assert sites or len(found) == 1  # how often a hook breaks a graph is torch's matter
    operations = {node.target for graph in found for node in graph.graph.nodes}
    assert {getattr(one, "__name__", "") for one in operations} <= {"linear", "tanh", ""}


def test_an_idle_wrapper_adds_no_graph_break():
    model = models.mlp()
    flex = FlexModel(model)
    flex.register_forward_hook(HookFunction("fc1")).remove()
    assert torch._dynamo.explain(model)(BATCH).graph_break_count == 0
