"""What a forward's hooks do in the backward of its graph, whatever became of them in between: each
case fell silently back to the unedited model before.
"""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
from flex_model import ActivationStore, FlexModel, HookError, HookFunction
from models import torch_hooks
from tiers import grid_but

BATCH = models.random(4, 6)
HOW = ["reentrant", "not reentrant"]
KINDS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


def noisy_tanh(module, full, save_ctx, modules):
    return 3 * torch.tanh(full) * torch.rand_like(full)


def plus_square(module, full, save_ctx, modules):
    return full + full * full


def nothing(flex, handles, run):
    return run()


def restore(flex, handles, run):
    result = run()
    flex.restore()
    return result


def leave_a_context(flex, handles, run):
    with flex:
        return run()


def remove_the_first(flex, handles, run):
    result = run()
    handles[0].remove()
    return result


def remove_all(flex, handles, run):
    result = run()
    for handle in handles:
        handle.remove()
    return result


def remove_and_register_again(flex, handles, run):
    result = run()
    handles[0].remove()
    flex.register_forward_hook(handles[0].hook_function)
    return result


def register_more(flex, handles, run):
    result = run()
    flex.register_forward_hook(
        HookFunction("b.act", editing_function=plus_square, output_name="more")
    )
    return result


def run_many_more(flex, handles, run):
    result = run()
    for _ in range(70):
        flex(BATCH)
    for handle in handles[:1]:
        handle.remove()
    return result


def run_without_hooks_in_another_thread(flex, handles, run):
    """Each thread numbers its own nodes."""
    results = []
    for call in (run, lambda: flex(BATCH, groups=())):
        thread = threading.Thread(target=lambda call=call: results.append(call()))
        thread.start()
        thread.join()
    return results[0]


AFTER = [restore, leave_a_context, remove_the_first, remove_all, remove_and_register_again]
AFTER += [register_more, run_many_more, run_without_hooks_in_another_thread]


def hooked(parallelism, recompute, **settings):
    model, records = models.seeded(models.Checkpointed, recompute).double(), {}
    flex = FlexModel(parallelism.shard(model), records, **parallelism.sizes, **settings)
    shape = (None, 8) if parallelism.by_hand else None
    handles = [
        flex.register_forward_hook(HookFunction("b.act", shape, noisy_tanh)),
        flex.register_forward_pre_hook(
            HookFunction("b.fc1", editing_function=plus_square, output_name="pre")
        ),
        flex.register_forward_hook(HookFunction("b.act", shape, plus_square)),
    ]
    return model, flex, records, handles


def gradients(parallelism, recompute, after, **settings):
    """Of all parameters, of a forward whose hooks are gone ``after`` it."""
    model, flex, records, handles = hooked(parallelism, recompute, **settings)
    rows, sharded = parallelism.my_rows(BATCH), flex.module
    hooks_before = len(torch_hooks(sharded))

    def run():
        torch.manual_seed(4)
        return flex(rows)

    output = after(flex, handles, run)
    kept = {name: list(tensors) for name, tensors in records.items()}
    hooks_between = len(torch_hooks(sharded))
    output.sin().mean().backward()
    assert len(torch_hooks(sharded)) == hooks_between, "hooks of the backward stay"
    if after in (restore, leave_a_context, remove_all):
        assert hooks_between < hooks_before
    assert {name: len(tensors) for name, tensors in records.items()} == {
        name: len(tensors) for name, tensors in kept.items()
    }
    return parallelism.full_gradients(model, sharded)


@pytest.mark.parametrize("recompute", HOW)
@pytest.mark.parametrize("after", AFTER)
def test_recomputation_has_the_edits_of_its_forward(after, recompute):
    expected = gradients(models.ONE_RANK, None, nothing)
    assert_close(gradients(models.ONE_RANK, recompute, after), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", grid_but(["all", "rank0"], "all"))
@pytest.mark.parametrize("recompute", HOW)
@pytest.mark.parametrize("after", [restore, remove_the_first, register_more])
@pytest.mark.parametrize("name", grid_but(["tp", "dp"], "tp"))
def test_recomputation_has_the_edits_of_its_forward_on_two_ranks(name, after, recompute, edit_on):
    parallelism = models.TWO_RANKS[name]
    expected = gradients(parallelism, None, nothing, edit_on=edit_on)
    got = gradients(parallelism, recompute, after, edit_on=edit_on)
    assert_close(got, expected)


@pytest.mark.parametrize("recompute", HOW)
@pytest.mark.parametrize("has_first", [True, False])
def test_backward_inside_a_run_of_other_groups(has_first, recompute):
    """The recomputation has the groups of its forward, and the run keeps its own."""
    found = []
    for how in (recompute, None):
        model, flex, records, handles = hooked(models.ONE_RANK, how)
        for handle, group in zip(handles, ("first", "second", "second")):
            flex.update_hook_groups(handle.hook_function, group)
        torch.manual_seed(4)
        output = flex(BATCH, groups=["first", "second"] if has_first else "second")
        with flex.active("first"):
            flex(BATCH)
            output.sin().mean().backward()
            inside = flex(BATCH)
        assert len(records["b.act"]) == 2
        found.append((inside, {name: p.grad for name, p in model.named_parameters()}))
        flex.module.zero_grad()
    assert_close(*found)


class Ends(nn.Module):
    """A model behind whose recomputed part there is more."""

    def __init__(self, recompute):
        super().__init__()
        self.first, self.last = models.Checkpointed(recompute), nn.Linear(5, 5)

    def forward(self, x):
        return self.last(self.first(x))


def gradients_from_inside(recompute, after, keeps_output=True, site="first"):
    """Of a backward that begins at the result of the part that is recomputed, or inside of it."""
    model, kept = models.seeded(Ends, recompute).double(), []
    flex = FlexModel(model, {})
    flex.create_hook_group("edits", "first.b.act", editing_function=plus_square)
    flex.module.get_submodule(site).register_forward_hook(
        lambda module, args, output: kept.append(output)
    )

    def run():
        return flex(BATCH)

    output = after(flex, [], run)
    kept = kept[:1]  # of the forward itself
    if not keeps_output:
        del output
    kept[0].sin().mean().backward()
    return [parameter.grad for parameter in model.first.parameters()]


def choose_no_group(flex, handles, run):
    result = run()
    flex(BATCH, groups=())
    return result


@pytest.mark.parametrize("keeps_output", [True, False])
@pytest.mark.parametrize("after", [restore, choose_no_group, run_many_more])
@pytest.mark.parametrize("recompute", HOW)
def test_backward_that_begins_inside_has_the_edits_of_its_forward(recompute, after, keeps_output):
    """The part was recomputed without its edit: only the model's outputs were watched."""
    expected = gradients_from_inside(None, nothing)
    assert_close(gradients_from_inside(recompute, after, keeps_output), expected)


def test_backward_that_begins_inside_of_what_is_recomputed():
    expected = gradients_from_inside(None, nothing, site="first.b.fc2")
    assert_close(gradients_from_inside("not reentrant", restore, site="first.b.fc2"), expected)


def test_a_backward_from_inside_leaves_the_rest_of_its_graph_in_use():
    """A graph is not used up by a pass through a part of it: the hooks that are removed then count
    in the next.
    """
    found = []
    for how in ("not reentrant", None):
        model, kept = models.seeded(Ends, how).double(), []
        flex = FlexModel(model, {})
        flex.register_forward_hook(HookFunction("first.b.act", editing_function=plus_square))
        model.first.a.register_forward_hook(lambda *given, kept=kept: kept.append(given[2]))
        output = flex(BATCH)
        kept[0].sin().mean().backward(inputs=[model.first.a.fc1.weight])
        flex.restore()
        output.sin().mean().backward(inputs=[model.first.b.fc1.weight])
        found.append(model.first.b.fc1.weight.grad)
    assert_close(*found)


class Answer:
    def __init__(self, logits):
        self.logits = logits


class Answering(models.Checkpointed):
    """A model whose output is an object of the user's, which torch does not look into."""

    def forward(self, x):
        return Answer(super().forward(x))


@pytest.mark.parametrize("after", [restore, choose_no_group])
@pytest.mark.parametrize("recompute", HOW)
def test_an_output_of_a_class_of_the_user(recompute, after):
    """The part was recomputed without its edit: no tensor was found that a backward begins at."""
    found = []
    for how, then in ((None, nothing), (recompute, after)):
        model = models.seeded(Answering, how).double()
        flex = FlexModel(model, {})
        flex.register_forward_hook(HookFunction("b.act", editing_function=plus_square))
        answer = then(flex, [], lambda flex=flex: flex(BATCH))
        answer.logits.sin().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert_close(*found)


@pytest.mark.parametrize("recompute", HOW)
def test_an_error_in_the_backward_leaves_no_hook_behind(recompute):
    def fail(grad):
        raise ArithmeticError("of the model's own")

    model, flex, _, _ = hooked(models.ONE_RANK, recompute)
    flex(BATCH)
    output = flex(BATCH)
    flex.restore()
    handle = flex.module.a.fc1.weight.register_hook(fail)
    loss = output.sum()
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    assert len(torch_hooks(flex.module)) == 0
    assert torch.equal(flex.module(BATCH), model.double()(BATCH))


# ---- A wrapper that is gone ----------------------------------------------------------------------


def halve(module, full, save_ctx, modules):
    save_ctx.seen = getattr(save_ctx, "seen", 0) + 1
    return full / 2


def drop(flex):
    del flex
    gc.collect()


def backward_values(parallelism, end, edit, **settings):
    """Records and gradients of one backward, after the wrapper's ``end``."""
    model, records = models.mlp(), {}
    sharded = parallelism.shard(model)
    own = len(torch_hooks(sharded))
    flex = FlexModel(sharded, records, **parallelism.sizes, **settings)
    shape = (None, 8) if parallelism.by_hand else None
    flex.register_full_backward_hook(HookFunction("fc2", shape, edit, output_name="in"))
    flex.register_full_backward_pre_hook(HookFunction("fc1", shape, edit, output_name="out"))
    flex.register_forward_hook(HookFunction("act", shape, plus_square))
    flex.register_hook(HookFunction("inp.weight", editing_function=edit))
    output = flex(parallelism.my_rows(BATCH))
    if end == "drop":
        del flex
        gc.collect()
    elif end == "restore":
        flex.restore()
    if end is not None:
        assert len(torch_hooks(sharded)) == own
    output.sin().mean().backward()
    if end is not None:
        assert len(torch_hooks(sharded)) == own
    return records, parallelism.full_gradients(model, sharded)


@pytest.mark.parametrize("edit", [None, halve])
@pytest.mark.parametrize("end", ["drop", "restore"])
def test_a_wrapper_that_is_gone_serves_the_backward_of_its_graphs(end, edit):
    expected = backward_values(models.ONE_RANK, None, edit)
    assert_close(backward_values(models.ONE_RANK, end, edit), expected, rtol=0, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
@pytest.mark.parametrize("end", grid_but(["drop", "restore"], "drop"))
@pytest.mark.parametrize("name", grid_but(["tp", "dp", "ddp", "fsdp2", "dtensor"], "tp", "ddp"))
def test_a_wrapper_that_is_gone_serves_the_backward_of_its_graphs_on_two_ranks(name, end, edit_on):
    parallelism = models.TWO_RANKS[name]
    expected = backward_values(parallelism, None, halve, edit_on=edit_on)
    got = backward_values(parallelism, end, halve, edit_on=edit_on)
    assert_close(got, expected, rtol=0, atol=0)


def test_model_and_wrapper_may_be_gone():
    def forward(records):
        flex = FlexModel(models.mlp(), records)
        flex.register_full_backward_hook(HookFunction("fc2"))
        return flex(BATCH).sin().mean()

    records = {}
    loss = forward(records)
    gc.collect()
    loss.backward()
    expected = backward_values(models.ONE_RANK, None, None)[0]["in"]
    assert [tensor.shape for tensor in records["fc2"]] == [tensor.shape for tensor in expected]


@pytest.mark.parametrize("kind", grid_but(KINDS, "forward", "full_backward"))
@pytest.mark.parametrize("site", grid_but(["", "fc1"], "fc1"))
@pytest.mark.parametrize("is_before", [True, False])
def test_a_wrapper_is_collected_while_torch_calls_the_hooks_of_its_module(kind, site, is_before):
    """Torch lists the hooks of a call, and passes those removed since no keyword arguments."""
    model, kept = models.mlp(), []

    def hooked():
        flex = FlexModel(model, records := {})
        getattr(flex, f"register_{kind}_hook")(HookFunction(site))
        return flex, records

    kept.append(hooked()[0])

    def drop(module, *arguments):
        kept.clear()
        gc.collect()

    module = model.get_submodule(site)
    register = module.register_forward_pre_hook if is_before else module.register_forward_hook
    register(drop, prepend=True)
    flex, records = hooked()
    flex(BATCH.clone().requires_grad_()).sum().backward()
    assert not kept
    assert [len(tensors) for tensors in records.values()] == [1]


@pytest.mark.ranks(2, alone=True)  # with a wrapper that another test left it would share a group
def test_a_wrapper_that_is_gone_gives_its_groups_back_with_its_last_graph():
    from flex_model.distributed import process_groups

    before = len(process_groups._groups)
    for backward, retain in ((True, False), (True, True), (False, False)):
        flex = models.replicas(FlexModel(models.mlp(), {}, tensor_parallel_size=2))
        flex.register_full_backward_hook(HookFunction("fc2"))
        output = flex(BATCH)
        assert len(process_groups._groups) == before + 1
        flex.restore()
        if backward:
            assert len(process_groups._groups) == before + 1
            output.sum().backward(retain_graph=retain)
        if retain:
            output.sum().backward()
        if not backward:
            del output
        assert len(process_groups._groups) == before
        dist.barrier()


def test_a_backward_after_the_store_of_its_records_was_closed_is_an_error(tmp_path):
    """Its records went nowhere before."""
    pytest.importorskip("safetensors")
    flex = FlexModel(models.mlp(), ActivationStore(tmp_path / "store"))
    flex.register_full_backward_hook(HookFunction("fc2"))
    output = flex(BATCH)
    flex.restore()
    with pytest.raises(HookError, match=r"when the store .* is closed; run backward before"):
        output.sum().backward()
