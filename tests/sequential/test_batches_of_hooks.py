"""Hooks in sequential runs: as in one forward after the other."""

import contextlib
from argparse import Namespace

import families
import pytest
import torch
from test_engine import BATCHES, Stack, halve
from torch import nn
from torch.testing import assert_close

from flex_model import FlexModel, HookError, HookFunction, sequential


def hook(name, edit=None, **settings):
    return HookFunction(name, editing_function=edit, **settings)


def test_save_ctx_is_each_batchs_own_and_shared_ctx_is_one():
    def keep(module, x, save_ctx, modules):
        assert flex.save_ctx is save_ctx
        save_ctx.total = x.detach().sum()
        save_ctx.begun_as.append(len(x))

    def record(module, x, save_ctx, modules):
        flex.shared_ctx.totals.append(float(save_ctx.total))
        return x + save_ctx.total

    model = Stack(4)
    flex = FlexModel(model)
    flex.register_forward_hook(hook("blocks.0", keep))
    flex.register_forward_hook(hook("blocks.2", record))
    flex.save_ctx.begun_as = []
    flex.shared_ctx.totals = []
    outputs = sequential.run(flex, BATCHES)
    totals, flex.shared_ctx.totals = flex.shared_ctx.totals, []
    assert vars(flex.save_ctx) == {"begun_as": [len(batch) for batch in BATCHES]}
    for i, (output, batch) in enumerate(zip(outputs, BATCHES)):
        assert torch.equal(output, flex(batch))
        assert isinstance(outputs.save_ctxs[i], Namespace)
        assert torch.equal(outputs.save_ctxs[i].total, flex.save_ctx.total)
    assert totals == flex.shared_ctx.totals


def test_records_are_in_batch_order_then_call_order():
    model = Stack(3, order=(0, 1, 0, 2))
    flex = FlexModel(model, found := {"mine": [1]})
    flex.register_forward_hook(hook("blocks.0"))
    flex.register_forward_pre_hook(hook("blocks.2", output_name="before"))
    flex.register_forward_hook(hook("blocks.2", halve))
    lengths = []
    sequential.run(
        flex, BATCHES, window=2, on_output=lambda i, o: lengths.append(len(found["blocks.0"]))
    )
    assert lengths == [2, 4, 6, 8, 10]  # a batch's records are there with its output
    expected = {"blocks.0": [], "before": [], "blocks.2": []}
    records = {name: list(found[name]) for name in expected}
    for batch in BATCHES:
        flex(batch)
        for name, values in expected.items():
            values += found[name]
    for name, values in expected.items():
        assert len(records[name]) == len(values)
        assert all(torch.equal(one, other) for one, other in zip(records[name], values))
    assert found["mine"] == [1]
    sequential.run(flex, BATCHES[:1])
    assert len(found["blocks.0"]) == 2  # begun afresh


def test_the_root_inputs_of_targets_and_generation():
    pytest.importorskip("transformers")

    def generate(model, batch):
        return model.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=0)

    flex = FlexModel(families.llama(), found := {})
    flex.register_forward_hook(hook(""))
    flex.register_forward_pre_hook(hook("model.layers.1", halve, output_name="before"))
    flex.register_forward_hook(hook("model.layers.1", halve))
    with torch.no_grad():
        outputs = sequential.run(flex, families.TEXTS, call=generate, window=3)
        records = {name: iter(list(values)) for name, values in found.items()}
        for output, batch in zip(outputs, families.TEXTS):
            assert torch.equal(output, generate(flex, batch))
            for name, values in found.items():
                assert len(values) == 3
                assert all(torch.equal(value, next(records[name])) for value in values)
    assert all(next(rest, None) is None for rest in records.values())


@pytest.mark.parametrize(
    "settings", [{"groups": "edits"}, {"groups": ()}, {"groups": "edits", "complement": True}]
)
def test_groups_are_those_of_a_forward(settings):
    flex = FlexModel(Stack(3), found := {})
    edit = hook("blocks.1", halve)
    flex.register_forward_hook(edit)
    flex.update_hook_groups(edit, "edits")
    flex.register_forward_hook(hook("blocks.2"))
    outputs = sequential.run(flex, BATCHES, window=2, **settings)
    names = set(found)
    for output, batch in zip(outputs, BATCHES):
        assert torch.equal(output, flex(batch, **settings))
        assert set(found) == names
    with pytest.raises(ValueError, match=r"'edit'.*nearest"):
        sequential.run(flex, BATCHES, groups="edit")


def test_a_choice_inside_a_batch_is_its_own():
    """The hooks of a module change while a batch waits to enter it."""
    flex = FlexModel(Stack(3), {})
    flex.register_forward_hook(zero := hook("blocks.0", halve))
    flex.update_hook_groups(zero, "zero")
    flex.register_forward_pre_hook(one := hook("blocks.1", halve))
    flex.register_full_backward_hook(two := hook("blocks.1", halve, output_name="grad"))
    flex.update_hook_groups(one, "one")
    flex.update_hook_groups(two, "two")

    def call(model, batch):
        return model(model(batch, groups=("one", "two", "zero", ())[len(batch) % 4]))

    gradients = []
    for run in (sequential.run, lambda model, batches, call: [call(model, b) for b in batches]):
        with flex.active() if run is not sequential.run else contextlib.nullcontext():
            outputs = run(flex, BATCHES, call=call)
        flex.zero_grad()
        for output in outputs:
            output.square().sum().backward()
        gradients.append([p.grad for p in flex.module.parameters()])
        gradients[-1] += outputs
    for one, other in zip(*gradients):
        assert_close(one, other)


def test_a_hook_that_removes_itself():
    flex = FlexModel(Stack(3))

    def once(module, x, save_ctx, modules):
        handle.remove()
        return x * 2

    outputs = []
    for run in (sequential.run, lambda model, batches: [model(batch) for batch in batches]):
        handle = flex.register_forward_pre_hook(hook("blocks.1", once))
        outputs.append(run(flex, BATCHES))
    for one, other in zip(*outputs):
        assert torch.equal(one, other)


def test_an_edit_may_call_a_target():
    def call_next(module, x, save_ctx, modules):
        return flex.module.blocks[2](x) * 2

    flex = FlexModel(Stack(3))
    flex.register_forward_hook(hook("blocks.0", call_next))
    outputs = sequential.run(flex, BATCHES, window=2)
    for output, batch in zip(outputs, BATCHES):
        assert torch.equal(output, flex(batch))


def test_trainable_modules_and_gradients():
    def use(module, x, save_ctx, modules):
        return x + modules["probe"](x)

    def double(module, grad, save_ctx, modules):
        save_ctx.grad = grad
        return grad * 2

    gradients = []
    for way in ("loop", "sequential"):
        flex = FlexModel(Stack(3), found := {})
        torch.manual_seed(0)
        flex.register_trainable_module("probe", nn.Linear(6, 6))
        flex.register_forward_hook(hook("blocks.1", use))
        flex.register_full_backward_hook(hook("blocks.2", double, output_name="grad"))
        if way == "loop":
            outputs = [flex(batch) for batch in BATCHES]
        else:
            outputs = sequential.run(flex, BATCHES, window=3)
        for output in outputs:
            output.square().sum().backward()
        if way == "sequential":
            assert len(found["grad"]) == len(BATCHES)
            for ctx, record in zip(outputs.save_ctxs, found["grad"]):
                assert torch.equal(ctx.grad, record)
        parameters = [*flex.module.parameters(), *flex.trainable_modules.parameters()]
        gradients.append([parameter.grad for parameter in parameters])
    for one, other in zip(*gradients):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_records_of_one_backward_are_in_batch_order():
    flex = FlexModel(Stack(3, order=(0, 1, 0, 2)), found := {})
    flex.register_full_backward_pre_hook(hook("blocks.0", output_name="looked"))
    flex.register_full_backward_hook(hook("blocks.2", halve, output_name="edited"))
    outputs = sequential.run(flex, BATCHES)
    sum(output.square().sum() for output in outputs).backward()
    records = {name: list(values) for name, values in found.items()}
    assert [len(x) for x in records["edited"]] == [len(batch) for batch in BATCHES]
    assert [len(x) for x in records["looked"]] == [len(b) for b in BATCHES for _ in range(2)]
    for i, batch in enumerate(BATCHES):
        flex(batch).square().sum().backward()
        assert_close(found["edited"], records["edited"][i : i + 1])
        assert_close(found["looked"], records["looked"][2 * i : 2 * i + 2])


def test_random_edits_draw_what_they_draw_in_a_loop():
    def noise(module, x, save_ctx, modules):
        return x + torch.randn_like(x) + torch.rand(())

    flex = FlexModel(Stack(3))
    flex.register_forward_hook(hook("blocks.0", noise))
    flex.register_forward_hook(hook("blocks.2", noise))
    torch.manual_seed(5)
    expected = [flex(batch) for batch in BATCHES]
    state = torch.get_rng_state()
    for window in (1, 2, None):
        torch.manual_seed(5)
        outputs = sequential.run(flex, BATCHES, window=window)
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected))
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("backward", ["in each batch", "of each output", "of all outputs"])
@pytest.mark.parametrize("window", [None, 2])
def test_checkpointed_edits_are_those_of_their_batch(backward, window):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def edit(module, x, save_ctx, modules):
        noise = torch.rand_like(x)
        return (x * save_ctx.factor + noise).sin() * x

    def keep(module, x, save_ctx, modules):
        save_ctx.factor = float(len(x))

    def chosen(model, batch):  # a part of each batch's run makes a choice of its own
        return model(model(batch, groups="edit") if len(batch) % 2 else batch)

    def step(model, batch):
        loss = chosen(model, batch).square().sum()
        loss.backward()
        return loss.detach()

    flex = FlexModel(Checkpointed(3))
    flex.register_forward_pre_hook(first := hook("blocks.0", keep))
    flex.register_forward_hook(second := hook("blocks.1", edit))
    flex.register_forward_pre_hook(hook("blocks.2", halve))
    flex.update_hook_groups([first, second], "edit")
    torch.manual_seed(7)
    expected = []
    for batch in BATCHES:
        with flex.active():
            expected.append(step(flex, batch))
    gradients = [parameter.grad.clone() for parameter in flex.module.parameters()]
    flex.zero_grad()
    torch.manual_seed(7)
    if backward == "in each batch":
        losses = sequential.run(flex, BATCHES, call=step, window=window)
    else:
        outputs = sequential.run(flex, BATCHES, call=chosen, window=window)
        losses = [output.square().sum() for output in outputs]
        for loss in losses if backward == "of each output" else [sum(losses)]:
            loss.backward()
    assert [float(loss.detach()) for loss in losses] == [float(loss) for loss in expected]
    for parameter, gradient in zip(flex.module.parameters(), gradients):
        assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


class CheckpointedAtOnce(Stack):
    """Its blocks are one checkpointed part, and it adds something behind."""

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        self.inside = checkpoint(super().forward, x, use_reentrant=False)
        return self.inside + 1


def test_a_backward_has_the_edits_of_its_batch_however_many_came_after():
    gradients = []
    for way in ("at once", "long after", "restored"):
        model = CheckpointedAtOnce(2)
        flex = FlexModel(model)
        flex.register_forward_hook(hook("blocks.0", lambda module, x, save_ctx, modules: x.sin()))
        batches = [BATCHES[0]] * (1 if way == "at once" else 70)
        outputs = sequential.run(flex, batches)
        if way == "restored":
            flex.restore()
        outputs[0].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(gradients[1], gradients[0])
    assert_close(gradients[2], gradients[0])


def test_an_exception_leaves_the_wrapper_as_it_was():
    def fail(module, x, save_ctx, modules):
        if len(x) == 1:
            raise ValueError("one row")

    flex = FlexModel(Stack(3), found := {})
    failing = flex.register_forward_hook(hook("blocks.1", fail, output_name="failing"))
    flex.register_forward_hook(hook("blocks.2"))
    with pytest.raises(HookError, match="one row") as caught:
        sequential.run(flex, BATCHES, groups="all", window=2)
    assert caught.value.batch_index == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(found["blocks.2"]) == 2  # of the batches that were over
    failing.remove()
    outputs = sequential.run(flex, BATCHES)
    assert len(outputs) == len(found["blocks.2"]) == 5
    flex(BATCHES[0])
    assert len(found["blocks.2"]) == 1
