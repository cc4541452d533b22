"""run_until: what comes after the last needed site is not computed, and the next run is as ever."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction
from flex_model.pipelining.instrumented_stage import stages_of

BATCH = models.random(4, 6)


def count_calls(model):
    """How often each layer is called from now on, by name."""
    calls = {}
    for name, module in model.named_modules():
        name = name.removeprefix("module.")
        if isinstance(module, nn.Linear) or "fc" in name:
            calls[name] = 0

            def note(module, args, output, name=name):
                calls[name] += 1

            module.register_forward_hook(note)
    return calls


def triple(module, full, save_ctx, modules):
    return full * 3 + full.flip(-1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", models.TWO_RANKS)
def test_sharded(name):
    """Records and edits up to there are those of a whole forward; after it, training goes on."""
    parallelism = models.TWO_RANKS[name]
    model = models.mlp()
    seen = {}
    model.inp.register_forward_hook(lambda m, a, out: out * 3 + out.flip(-1))
    model.fc1.register_forward_hook(lambda m, a, out: seen.update(fc1=out.detach()))
    expected = model(BATCH)
    expected.mean().backward()
    records = {}
    sharded = parallelism.shard(models.mlp())
    calls = count_calls(sharded)
    with FlexModel(sharded, records, **parallelism.sizes, output_ranks="all") as flex:
        flex.register_forward_hook(HookFunction("inp", editing_function=triple))
        flex.register_forward_hook(HookFunction("fc1"))
        mine = parallelism.my_rows(BATCH)
        for _ in range(2):
            assert flex.run_until(None, mine) is None
            assert_close(records["fc1"][0], seen["fc1"])
        with torch.no_grad():
            flex.run_until("inp", mine)
        assert "fc1" not in records
        assert calls["inp"] == 3 and calls["fc1"] == 2 and not calls["fc2"] and not calls["out"]
        output = flex(mine)
        assert_close(output, parallelism.my_rows(expected))
        assert_close(records["fc1"][0], seen["fc1"])
        output.mean().backward()
    gradients = parallelism.full_gradients(models.mlp(), sharded)
    for parameter_name, parameter in model.named_parameters():
        assert_close(gradients[parameter_name], parameter.grad)


@pytest.mark.ranks(2)
def test_the_forward_is_over_for_the_run_that_it_is_in():
    """A part that was called after it was taken to be in it, and was not followed."""
    whole, ways = models.mlp(), models.TWO_RANKS["ddp"]
    records, model = {}, ways.shard(models.mlp())
    with FlexModel(model, records, output_ranks="all") as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction("fc1"))
        with flex.active():
            flex.run_until("inp", ways.my_rows(BATCH))
            model.module.fc1(ways.my_rows(BATCH))
    assert_close(records["fc1"], [whole.fc1(BATCH).detach()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stop", [None, "fc2"])
@pytest.mark.parametrize("detaches", [False, True])
def test_a_backward_that_ddp_would_not_average_is_an_error(stop, detaches):
    def keep(module, full, save_ctx, modules):
        save_ctx.kept = full
        return full.detach() if detaches else None

    way = models.TWO_RANKS["ddp"]
    mine = way.my_rows(BATCH).requires_grad_()
    with FlexModel(way.shard(models.mlp()), **way.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc1", editing_function=keep))
        loss = flex(mine, groups=[]).mean()
        flex.run_until(stop, mine)
        loss.backward()  # of another forward, which is averaged
        expected = flex.get_module_gradient("inp.weight")
        mine.grad = None
        (grad,) = torch.autograd.grad(flex.save_ctx.kept.sum(), mine, retain_graph=True)
        assert grad.ne(0).any()  # reaches no parameter
        with pytest.raises(RuntimeError, match="would not average the gradients"):
            flex.save_ctx.kept.sum().backward()
        with torch.no_grad():
            flex.run_until(stop, mine)
        flex.zero_grad()
        flex(mine, groups=[]).mean().backward()
        assert_close(flex.get_module_gradient("inp.weight"), expected)
        flex.zero_grad()
        with flex.module.no_sync():
            flex.run_until(stop, mine)
            flex.save_ctx.kept.sum().backward()
        for parameter in flex.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad.div_(2))
        model = models.mlp()
        model.fc1(model.inp(BATCH)).sum().backward()
        assert_close(flex.get_module_gradient("inp.weight"), model.inp.weight.grad)


def test_which_sites():
    model = models.mlp()
    calls = count_calls(model)
    records = {}
    with FlexModel(model, records) as flex:
        with pytest.raises(ValueError, match="no module can be run to"):
            flex.run_until(None, BATCH)
        with pytest.raises(ValueError, match="no module 'fc3'"):
            flex.run_until("fc3", BATCH)
        flex.register_forward_pre_hook(HookFunction("fc2", output_name="before"))
        flex.create_hook_group("late", "out")
        flex.run_until(None, BATCH, groups="late", complement=True)
        assert list(records) == ["before"] and not calls["fc2"]  # the pre-hook comes before it
        flex.run_until(None, BATCH)
        assert set(records) == {"before", "out"} and calls["out"] == 1
        with flex.active("late"):
            flex.run_until("fc1", BATCH)
            flex.run_until("out", BATCH)
        assert len(records["out"]) == 1 and calls["fc1"] == 4


@pytest.mark.ranks(2)
def test_an_error_before_the_end_is_raised():
    def fails(module, full, save_ctx, modules):
        if torch.distributed.get_rank() == 1:
            raise ValueError("no")
        return full * 2

    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes) as flex:
        hook = flex.register_forward_hook(HookFunction("inp", editing_function=fails))
        with pytest.raises(HookError, match="rank 1"):
            flex.run_until("fc1", BATCH)
        hook.remove()
        flex.run_until("fc1", BATCH)
        flex(BATCH)


def test_hugging_face():
    """Whatever its forward does around the layers is undone, too."""
    model = models.llama(layers=3)
    tokens = torch.arange(10).reshape(2, 5)
    expected = model(tokens, output_hidden_states=True)
    records = {}
    with FlexModel(model, records) as flex, torch.no_grad():
        flex.register_forward_hook(HookFunction("model.layers.1"))
        flex.run_until(None, tokens)
        assert_close(records["model.layers.1"][0], expected.hidden_states[2])
        again = flex(tokens, output_hidden_states=True)
        assert_close(again.logits, expected.logits)
        assert len(again.hidden_states) == len(expected.hidden_states)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "ddp"])
def test_a_run_of_another_flex_model_ends_with_the_forward_that_it_cuts(name):
    parallelism = models.TWO_RANKS[name]
    module, records, seen = parallelism.shard(models.mlp()), {}, {}
    mine = parallelism.my_rows(BATCH)
    with (
        FlexModel(module, seen, **parallelism.sizes, output_ranks="all") as other,
        FlexModel(module, records, **parallelism.sizes, output_ranks="all") as flex,
    ):
        other.register_forward_hook(HookFunction("inp", editing_function=triple))
        other.register_forward_hook(HookFunction("out"))
        flex.register_forward_hook(HookFunction("fc1"))
        module(mine)
        whole, expected = seen["inp"], records["fc1"]
        flex.run_until(None, mine)
        assert_close((seen, records), ({"inp": whole}, {"fc1": expected}))
        module(mine)
        assert len(seen["out"]) == 1
        assert_close((seen["inp"], records["fc1"]), (whole, expected))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B])
def test_pipelines(kind):
    """Stages behind the last needed one compute nothing."""
    model = pipelines.make_mlp()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    seen, records = {}, {}
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    first, middle, last = names[0], names[len(names) // 2], names[-1]
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: out.detach()})
        )
    expected = model(x)
    schedule = pipelines.make_schedule(kind, pipelines.make_mlp(), 4)
    with FlexModel(schedule, records, return_on="all") as flex:
        calls = [count_calls(stage.submod) for stage in stages_of(flex.schedule)]
        flex.register_forward_hook(HookFunction(first))
        flex.register_forward_hook(HookFunction(middle))
        late = flex.register_forward_hook(HookFunction(last))
        for name, wanted in [(first, [first]), (middle, [first, middle]), (None, names)]:
            records.clear()
            assert flex.run_until(name, x) is None
            if torch.distributed.get_rank() == 0:
                assert set(records) == {first, middle, last} & set(wanted)
            for recorded in records:
                assert_close(records[recorded][0], seen[recorded])
        late.remove()
        before = [sum(counts.values()) for counts in calls]
        flex.run_until(first, x)
        made = [sum(counts.values()) for counts in calls]
        assert sum(made) - sum(before) == (4 if torch.distributed.get_rank() == 0 else 0)
        with pytest.raises(ValueError, match="no module 'fc3'"):
            flex.run_until("fc3", x)
        with torch.no_grad():
            assert_close(flex(x), expected)
