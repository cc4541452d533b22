"""Runs inside runs, recomputation, and what happens between forward and backward."""

import contextlib
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
from flex_model import ActivationStore, FlexModel, HookError, HookFunction, HookMismatchError
from flex_model.runs.stop_request import STOP_REQUEST
from tiers import ways

BATCH = models.random(4, 6)


def checkpointed(recompute):
    return FlexModel(models.seeded(models.Checkpointed, recompute).double())


def gradient_of(recompute, run, edits):
    """The input's gradient after ``run(flex, x)``; ``edits`` are hooks by group and kind."""
    flex = checkpointed(recompute)
    for group, (kind, site, edit) in edits.items():
        hook = HookFunction(site, editing_function=edit, output_name=group)
        getattr(flex, f"register_{kind}_hook")(hook)
        flex.update_hook_groups(hook, group)
    x = BATCH.clone().requires_grad_()
    run(flex, x)
    flex.restore()
    return x.grad


def assert_recomputed_alike(run, edits):
    expected = gradient_of(None, run, edits)
    for recompute in ("reentrant", "not reentrant"):
        assert_close(gradient_of(recompute, run, edits), expected)


SINE = ("forward", "b.fc1", lambda module, x, save_ctx, modules: x.sin() * 3)
SQUARE = ("forward", "b.act", lambda module, x, save_ctx, modules: x * x)
TRIPLE = ("full_backward", "b.fc1", lambda module, x, save_ctx, modules: x * 3)


def test_a_recomputation_has_the_choice_of_an_inner_call():
    def run(flex, x):
        with flex.active("sine"):
            y = flex(x, groups="square")
        y.sum().backward()

    assert_recomputed_alike(run, {"sine": SINE, "square": SQUARE})


def test_many_calls_inside_one_run_are_all_recomputed_with_their_edits():
    def run(flex, x):
        with flex.active():
            sum(flex(x * (i + 1)) for i in range(70)).sum().backward()

    assert_recomputed_alike(run, {"sine": SINE})


def test_hooks_that_join_a_run_keep_its_records_of_their_name():
    records = {}
    with FlexModel(models.mlp(), records) as flex:
        first, second = (HookFunction(name, output_name="both") for name in ("fc1", "fc2"))
        with flex.active():
            for hook in (first, second):
                handle = flex.register_forward_hook(hook)
                flex(BATCH)
                handle.remove()
        assert [record.shape[-1] for record in records["both"]] == [
            module.out_features for module in (models.mlp().fc1, models.mlp().fc2)
        ]
        for hook in (first, second):
            flex.register_forward_hook(hook)
            flex.update_hook_groups(hook, hook.module_name)
        with flex.active("fc1"):
            flex(BATCH)
            flex(BATCH, groups="fc2")
            flex(BATCH)
        assert len(records["both"]) == 3


def test_a_recomputation_that_stops_early_keeps_no_inputs():
    inputs = []
    flex = checkpointed("not reentrant")
    flex.register_full_backward_hook(HookFunction("b.fc2"))
    for _ in range(4):
        x = BATCH.clone().requires_grad_()
        output = flex(x)
        inputs += [weakref.ref(x), weakref.ref(output)]
        output.sum().backward()
        del x, output
    assert len([one for one in inputs if one() is not None]) <= 2  # those of the last run


def test_a_recomputation_has_no_backward_hook_that_was_not_chosen():
    def run(flex, x):
        flex(x, groups="square").sum().backward()

    assert_recomputed_alike(run, {"square": SQUARE, "triple": TRIPLE})


def test_a_recomputed_edit_leaves_save_ctx_as_it_is():
    def count(module, x, save_ctx, modules):
        save_ctx.total += x.detach().abs().sum()
        save_ctx.seen["calls"].append(1)
        return x.sin()

    for recompute in ("reentrant", "not reentrant"):
        flex = checkpointed(recompute)
        flex.save_ctx.total, flex.save_ctx.seen = torch.zeros(()).double(), {"calls": []}
        flex.register_forward_hook(HookFunction("b.fc1", editing_function=count))
        y = flex(BATCH.clone().requires_grad_())
        before = flex.save_ctx.total.clone()
        y.sum().backward()
        assert_close(flex.save_ctx.total, before)
        assert flex.save_ctx.seen == {"calls": [1]}


def test_a_run_without_gradients_leaves_parameter_hooks_to_the_graph_before_it():
    records = {}
    model = models.mlp()
    flex = FlexModel(model, records)
    flex.register_hook(HookFunction("fc1.weight"))
    loss = flex(BATCH).sum()
    with torch.no_grad():
        flex(BATCH, groups=())
    loss.backward()
    with torch.no_grad():
        flex(BATCH, groups=())
    assert_close(records["fc1.weight"], [model.fc1.weight.grad])


def test_hooks_on_parameters_alone_are_back_after_a_run_without_them():
    model = models.mlp()
    flex = FlexModel(model, records := {})
    flex.register_hook(HookFunction("fc1.weight"))
    for run in (flex, model):
        flex(BATCH, groups=()).sum().backward()
        assert not records.get("fc1.weight")
        run(BATCH).sum().backward()
        assert len(records.pop("fc1.weight")) == 1


@pytest.mark.ranks(2)
def test_inner_choices_record_as_on_one_rank():
    records = {}
    flex = models.replicas(FlexModel(models.mlp(), records, tensor_parallel_size=2))
    hook = HookFunction("inp")
    flex.register_forward_hook(hook)
    flex.update_hook_groups(hook, "look")
    for _ in range(2):
        with flex.active(()):
            flex(BATCH)
            flex(BATCH, groups="look")
    late = HookFunction("out")
    with flex.active():
        flex.register_forward_hook(late)
        flex(BATCH)
    kept = {name: [tuple(t.shape) for t in tensors] for name, tensors in records.items()}
    assert kept == ({"inp": [(4, 6)], "out": [(4, 5)]} if dist.get_rank() == 0 else {})


@pytest.mark.ranks(2)
def test_a_failed_run_leaves_no_empty_places_and_the_next_may_be_inside_except():
    fails_on = [1, 0]

    def fail(module, x, save_ctx, modules):
        if fails_on and dist.get_rank() == fails_on[0]:
            raise ValueError(f"mine {len(fails_on)}")

    records = {}
    flex = models.replicas(FlexModel(models.mlp(), records, tensor_parallel_size=2, timeout=20))
    flex.register_forward_hook(HookFunction("inp"))
    flex.register_forward_hook(HookFunction("out", editing_function=fail))
    try:
        flex(BATCH)
    except HookError:
        assert not any(record is None for kept in records.values() for record in kept)
        del fails_on[0]
        with pytest.raises(HookError, match=r"rank 0: forward hook on 'out'.*mine 1"):
            flex(BATCH)
    del fails_on[0]
    flex(BATCH)
    assert len(records.get("inp", [])) == (dist.get_rank() == 0)


def records_of_failed_runs(parallelism):
    """What is left of a run whose hook fails in its third call, and of a backward whose hook does:
    by name, the number of records.
    """
    calls = []

    def fail_third(module, x, save_ctx, modules):
        calls.append(x)
        if len(calls) == 3:
            raise ZeroDivisionError

    records, left, model = {}, [], parallelism.shard(models.mlp())
    flex = FlexModel(model, records, **parallelism.sizes)
    flex.register_forward_hook(HookFunction("inp"))
    flex.register_forward_hook(HookFunction("out", editing_function=fail_third))
    rows = parallelism.my_rows(BATCH)

    def run():
        with flex.active():
            for _ in range(4):
                flex(rows)

    with pytest.raises(HookError, match="ZeroDivisionError"):
        run()
    left.append({name: len(found) for name, found in records.items()})
    flex.restore()

    calls.clear()
    flex = FlexModel(model, records, **parallelism.sizes)
    flex.register_forward_hook(HookFunction("inp"))
    for name in ("out", "act", "inp"):
        hook = HookFunction(name, editing_function=fail_third, output_name=f"{name}.grad")
        flex.register_full_backward_pre_hook(hook)
    loss = flex(rows).sum()
    with pytest.raises(HookError, match="ZeroDivisionError"):
        loss.backward()
    left.append({name: len(found) for name, found in records.items()})
    flex.restore()
    return left


@pytest.mark.parametrize("call", ["module", "flex"])
def test_a_direct_call_that_ctrl_c_leaves_is_over(call):
    model, records, interrupted = nn.Sequential(nn.Tanh(), nn.Tanh()), {}, []

    def interrupt(module, args, output):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    with FlexModel(model, records) as flex:
        flex.register_forward_hook(HookFunction("0"))
        model[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(BATCH)
        flex.dry_run(BATCH)
        for _ in range(2):
            (model if call == "module" else flex)(BATCH)
            assert_close(records, {"0": [BATCH.tanh()]})


def test_a_store_keeps_its_batches_after_a_direct_call_that_ctrl_c_left(tmp_path):
    def interrupt(module, args, output):
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    flex = FlexModel(model, ActivationStore(tmp_path / "store"))
    flex.register_forward_hook(HookFunction("0"))
    model(BATCH)
    model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(BATCH)
    flex.restore()
    assert ActivationStore(tmp_path / "store").num_batches == 1


@pytest.mark.ranks(2)
def test_after_an_edit_failed_in_a_direct_call_the_model_runs_again():
    def edit(module, x, save_ctx, modules):
        if save_ctx.fails:
            raise ZeroDivisionError
        return x * 2

    way = models.TWO_RANKS["ddp"]
    model = way.shard(models.mlp())
    with FlexModel(model, **way.sizes) as flex:
        flex.register_forward_hook(HookFunction("act", editing_function=edit))
        for flex.save_ctx.fails in (False, True, True, False):
            ends = (
                pytest.raises(HookError, match="Zero")
                if flex.save_ctx.fails
                else contextlib.nullcontext()
            )
            with ends:
                model(way.my_rows(BATCH))


@pytest.mark.parametrize("way", ways("one", "dtensor", "ddp"))
def test_records_of_a_failed_run_are_dropped(way):
    has_records = way is models.ONE_RANK or dist.get_rank() == 0
    assert records_of_failed_runs(way) == [{}, {"inp": 1} if has_records else {}]


@pytest.mark.ranks(2)
def test_arguments_that_differ_between_ranks_are_a_mismatch_on_both():
    mine = dist.get_rank() == 1
    model = models.TWO_RANKS["tp"].shard(models.mlp())

    def wrap(**settings):
        return FlexModel(model, tensor_parallel_size=2, timeout=20, **settings)

    def double(module, x, save_ctx, modules):
        return x * 2

    for hook, settings in (
        (HookFunction("fc1", (None, 7 if mine else 8)), {}),
        (HookFunction("inp", None, double), {"edit_on": "rank0" if mine else "all"}),
        (HookFunction("inp"), {"output_ranks": "all" if mine else "rank0"}),
    ):
        with wrap(**settings) as flex:
            flex.register_forward_hook(hook)
            with pytest.raises(HookMismatchError, match="the start of a run"):
                flex(BATCH)
    with wrap() as flex:
        weight = flex.get_module_parameter("fc1.weight", (8, 6))
        with pytest.raises(HookMismatchError, match=r"fc1.weight.*\(8, 6\).*\(4, 6\)"):
            flex.set_module_parameter("fc1.weight", weight[:4] if mine else weight)
        if mine:
            model.inp.weight.grad = torch.zeros_like(model.inp.weight)
        with pytest.raises(HookMismatchError, match=r"inp.weight"):
            flex.get_module_gradient("inp.weight")


@pytest.mark.ranks(2)
def test_constant_values_prove_no_layout():
    """All zeros once (a fresh low-rank adapter), and shards later: that they differ is seen, and
    the layout that is stated then is that of both.
    """
    flex = FlexModel(nn.Sequential(nn.Identity()), {}, tensor_parallel_size=2, timeout=20)
    handle = flex.register_forward_hook(HookFunction("0", (4, 6)))
    flex(torch.zeros(4, 6))
    mine = BATCH + dist.get_rank()
    with pytest.raises(ValueError, match=r"given different values.*annotate_layout.*tp=Shard"):
        flex(mine)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    with pytest.raises(ValueError, match=r"expected_shape \(4, 6\) contradicts .* \(4, 12\)"):
        flex(mine)
    handle.remove()
    flex.register_forward_hook(HookFunction("0", (4, 12)))
    records = flex.output_ptr
    whole = torch.cat([BATCH, BATCH + 1], 1)
    for batch, expected in ((torch.zeros(4, 6), torch.zeros(4, 12)), (mine, whole)):
        records.clear()
        flex(batch)
        if dist.get_rank() == 0:
            assert_close(records["0"], [expected])
    flex.restore()


@pytest.mark.ranks(2)
def test_gradients_that_differ_between_replicas_are_not_given_as_one():
    model = models.mlp()
    flex = FlexModel(model, data_parallel_size=2)
    flex(BATCH.chunk(2)[dist.get_rank()]).sum().backward()
    with pytest.raises(
        ValueError, match=r"data-parallel ranks hold different values.*reduce gradients"
    ):
        flex.get_module_gradient("fc1.weight")
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    assert_close(flex.get_module_gradient("fc1.weight"), model.fc1.weight.grad)


@pytest.mark.ranks(2)
def test_gradients_that_ddp_does_not_reduce_for_an_edit_that_leaves_parameters_out():
    mine, plain = BATCH.chunk(2)[dist.get_rank()], models.mlp()
    plain.fc1.register_forward_hook(lambda module, args, output: output.detach())
    plain(BATCH).mean().backward()
    for settings in ({}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(models.mlp(), **settings)
        with FlexModel(model, data_parallel_size=2) as flex:
            flex.register_forward_hook(HookFunction("fc1", None, lambda m, full, *_: full.detach()))
            flex(mine).mean().backward()
            if settings:
                assert_close(flex.get_module_gradient("fc2.weight"), plain.fc2.weight.grad)
                continue
            with pytest.raises(ValueError, match="only with find_unused_parameters=True"):
                flex.get_module_gradient("fc2.weight")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_one_run", [False, True])
def test_a_request_to_stop_ends_the_run_on_all_ranks(in_one_run):
    """Made on one rank only, before a run or inside of one; the next run is right."""

    def mix(module, full, save_ctx, modules):
        return full.flip(-1) * 2

    model = models.TWO_RANKS["tp"].shard(models.mlp())
    flex = FlexModel(model, tensor_parallel_size=2, timeout=20)
    flex.register_forward_hook(HookFunction("fc1", editing_function=mix))
    expected = flex(BATCH)
    with flex.active() if in_one_run else contextlib.nullcontext():
        if in_one_run:
            model(BATCH)
        if dist.get_rank() == 1:
            STOP_REQUEST.make()
        with pytest.raises(HookError, match="rank 1: stopped by Ctrl-C"):
            model(BATCH)
    assert_close(flex(BATCH), expected)
    STOP_REQUEST.make()
    assert not STOP_REQUEST.is_ignored
    STOP_REQUEST.clear()
