"""Hooks over the schedules of torch.distributed.pipelining: the numbers of the unsplit model."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flex_model import FlexModel, HookError, HookFunction, HookMismatchError
from flex_model.pipelining import SplitPoint, current_microbatch, pipeline
from flex_model.pipelining.instrumented_stage import stages_of
from flex_model.runs.stop_request import STOP_REQUEST
from pipelines import (
    ALL,
    SHARED_ROWS,
    Block,
    Scaled,
    Summary,
    Twice,
    alone_group,
    make_mlp,
    make_schedule,
    part,
    unsplit,
)
from shared_edits import mixing_units as mix
from tiers import grid_but, on_ranks

MSE = nn.MSELoss()


def data(rows=8):
    torch.manual_seed(1)
    return torch.randn(rows, 8), torch.randn(rows, 3)


def in_place(module, x, save_ctx, modules):
    x.mul_(0.5)


def hooks_of_all_kinds(flex):
    for i in range(8):
        flex.register_forward_hook(HookFunction(f"layers.{i}.fc1"))
        flex.register_full_backward_pre_hook(
            HookFunction(f"layers.{i}", output_name=f"layers.{i}.grad")
        )
    flex.register_forward_hook(HookFunction("layers.3.act", editing_function=mix))
    flex.register_forward_hook(HookFunction("layers.3", None, in_place, output_name="edge"))
    flex.register_forward_pre_hook(
        HookFunction("layers.4", editing_function=mix, output_name="layers.4.in")
    )
    flex.register_full_backward_pre_hook(
        HookFunction("layers.6.fc1", editing_function=mix, output_name="fc1.grad")
    )
    flex.register_full_backward_hook(
        HookFunction("layers.2.fc2", editing_function=mix, output_name="fc2.grad_in")
    )
    flex.register_full_backward_hook(HookFunction("layers.4", output_name="edge.grad_in"))
    flex.register_hook(
        HookFunction("layers.5.fc1.weight", editing_function=mix, output_name="weight.grad")
    )
    flex.register_hook(HookFunction("head.weight", editing_function=mix))  # FSDP's root has it
    flex.register_forward_hook(HookFunction("head"))
    flex.register_forward_pre_hook(HookFunction("", editing_function=mix, output_name="inputs"))
    flex.register_forward_hook(HookFunction("", editing_function=mix, output_name="outputs"))
    flex.register_full_backward_pre_hook(HookFunction("", None, mix, output_name="outputs.grad"))


def check_records(found, expected, tolerance=1e-6):
    """On rank 0; the others have none."""
    check(found, expected if dist.get_rank() == 0 else {}, tolerance)


def check(found, expected, tolerance):
    assert set(found) == set(expected)
    for name, tensors in expected.items():
        assert len(found[name]) == len(tensors), name
        for one, other in zip(found[name], tensors):
            assert_near(one, other, name, tolerance)


def check_parameters(flex, expected):
    for stage in flex.module.children():
        for name, parameter in stage.named_parameters():
            assert_near(parameter.grad, expected[name], name)


def compare(flex, records, expected, x, y, losses=None):
    """Compare one step with that of the unsplit model; return its output on this rank."""
    flex.zero_grad()
    output = flex(x, target=y, losses=losses)
    if output is not None:
        assert_near(output, expected["output"])
    check_parameters(flex, expected["grads"])
    check_records(records, expected["records"])
    return output


def assert_near(one, other, name="", tolerance=1e-6):
    torch.testing.assert_close(
        one, other, rtol=0, atol=tolerance, msg=lambda message: f"{name}: {message}"
    )


@pytest.mark.parametrize("kind", on_ranks(2, *ALL) + on_ranks(4, grid=ALL))
def test_a_step_gives_what_the_unsplit_model_gives(kind):
    model, num_microbatches = make_mlp(), 2 * dist.get_world_size()
    x, y = data(2 * num_microbatches)
    expected = unsplit(model, hooks_of_all_kinds, x, y, MSE)
    records, losses = {}, []
    with FlexModel(make_schedule(kind, model, num_microbatches, loss_fn=MSE), records) as flex:
        hooks_of_all_kinds(flex)
        for _ in range(2):
            output = compare(flex, records, expected, x, y, losses)
            assert (output is not None) == is_last(flex)
            if is_last(flex):
                assert len(losses) == num_microbatches
                assert_near(torch.stack(losses).mean(), expected["loss"])


def mix_positions(module, x, save_ctx, modules):
    """Its gradient is not contiguous."""
    mixed = torch.tensordot(x, torch.eye(x.shape[1]) + 0.1, dims=([1], [0]))
    return mixed.movedim(-1, 1)


@pytest.mark.parametrize("kind", on_ranks(2, *ALL[4:], grid=ALL))
def test_gradients_of_any_strides_are_sent(kind):
    model = make_mlp()
    torch.manual_seed(1)
    x, y = torch.randn(16, 5, 8), torch.randn(16, 5, 3)

    def hook(flex):
        for name in ("layers.2", "layers.4", "layers.6"):
            flex.register_forward_pre_hook(HookFunction(name, None, mix_positions))

    expected, records = unsplit(model, hook, x, y, MSE), {}
    with FlexModel(make_schedule(kind, model, 8, loss_fn=MSE), records, timeout=10) as flex:
        hook(flex)
        for _ in range(2):
            compare(flex, records, expected, x, y)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ALL[1], ALL[5]])
@pytest.mark.parametrize("scale_grads", [True, False])
def test_gradients_add_up_and_tied_weights_of_one_rank_count_once(kind, scale_grads):
    model, (x, y) = make_mlp(), data()
    schedule = make_schedule(kind, model, loss_fn=MSE, scale_grads=scale_grads)
    stages = stages_of(schedule)
    if len(stages) == 2:  # of a V: rank 0 has the blocks 0, 1, 6 and 7, rank 1 the others
        for one, other in ((0, 6), (2, 4)):
            model.layers[other].fc1 = model.layers[one].fc1
        one, other = ((0, 6), (2, 4))[dist.get_rank()]
        stages[1].submod.layers[other].fc1 = stages[0].submod.layers[one].fc1
    expected = unsplit(model, lambda flex: None, x, y, MSE)["grads"]
    with FlexModel(schedule) as flex:
        for steps in (1, 2, 3):
            flex(x, target=y)
            for stage in stages:
                for name, parameter in stage.submod.named_parameters():
                    if name in expected:
                        wanted = expected[name] * steps * (1 if scale_grads else 4)
                        assert_near(parameter.grad, wanted, name, 5e-6)


# ---- What a step is ------------------------------------------------------------------------------


def is_last(flex):
    return any(stage.is_last for stage in stages_of(flex.schedule))


def rank_of(flex):
    return flex._communicator.mesh.rank


def center(module, x, save_ctx, modules):
    """An edit that mixes rows of the batch."""
    return x - x.mean(0, keepdim=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(ALL, ALL[1], ALL[5]))
def test_full_mode_gives_edits_the_whole_batch(kind):
    def script(flex):
        flex.register_forward_hook(HookFunction("layers.2.fc1", editing_function=center))
        flex.register_full_backward_pre_hook(
            HookFunction("layers.5", editing_function=center, output_name="grad")
        )

    model, (x, y) = make_mlp(), data()
    expected = unsplit(model, script, x, y, MSE)
    records, losses = {}, []
    with FlexModel(
        make_schedule(kind, model, loss_fn=MSE), records, batch_mode="full", return_on="all"
    ) as flex:
        script(flex)
        for mode in ("full", "micro", "full"):
            flex.batch_mode = mode
            if mode == "micro":
                flex(x, target=y, losses=losses)
                continue
            assert not compare(flex, records, expected, x, y, losses).requires_grad
            if is_last(flex):
                assert len(losses) == 1
                assert_near(losses[0], expected["loss"])


@pytest.mark.ranks(2)
def test_forward_only_and_other_batches():
    def script(flex):
        flex.register_forward_hook(HookFunction("layers.6.fc2", editing_function=mix))

    model = make_mlp()
    records, losses = {}, []
    with FlexModel(make_schedule(ALL[0], model, loss_fn=MSE), records) as flex:
        script(flex)
        for rows, forward_only in ((8, True), (8, False), (12, False), (12, True), (4, False)):
            x, y = data(rows)
            expected = unsplit(model, script, x, y, MSE)
            if forward_only:
                with torch.no_grad():
                    flex(x, target=y, losses=losses)
                with torch.inference_mode():
                    output = flex(x)
                check_records(records, expected["records"])
            else:
                output = compare(flex, records, expected, x, y, losses)
            if is_last(flex):
                assert_near(output, expected["output"])
                assert_near(torch.stack(losses).mean(), expected["loss"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("two shared rows", "is not known .lost at ones"),
        ("one shared row", "is not known .lost at ones"),  # it may be the micro-batch's own
        ("two rows for each of the batch", ""),
        ("rows along another dim", ""),
        ("all rows twice", "nor rows of the batch one after the other"),
        ("rows in reverse order", "is not known .lost at flip"),
        ("sums of the rows so far", "is not known .lost at cumsum"),
        ("a sum over rows", "is not known .lost at linear"),
    ],
)
def test_micro_batches_that_are_alike(kind, refusal):
    """Neither sizes nor equal values show what rows a tensor has."""
    model = make_mlp()
    model.layers[6].act = nn.Sequential(nn.Linear(16, 8), Summary(kind), nn.Linear(8, 16))
    name = "layers.6.act.1.inner"

    def script(flex):
        flex.register_forward_hook(HookFunction(name, output_name="summary"))
        flex.register_full_backward_hook(HookFunction("layers.6.act"))
        flex.register_full_backward_pre_hook(HookFunction(name, output_name="gradient"))

    rows = 4 if kind == "one shared row" else 8
    x, y = (one[:1].repeat(rows, 1) for one in data(8))
    expected = unsplit(model, script, x, y, MSE)
    records = {}
    with FlexModel(make_schedule(ALL[0], model, loss_fn=MSE), records) as flex:
        script(flex)
        if refusal:
            with pytest.raises(HookError, match=rf"forward hook on {name!r}: .* {refusal}"):
                flex(x, target=y)
            if kind not in SHARED_ROWS:
                return
            flex.microbatch_dim = {name: None}
        flex(x, target=y)
        check_records(records, expected["records"])


# ---- The rest of FlexModel -----------------------------------------------------------------------


def probe(module, x, save_ctx, modules):
    """Uses a trainable module."""
    return x + modules["probe"](x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", grid_but(ALL, ALL[1], ALL[4]))
@pytest.mark.parametrize("is_frozen", [False, True])
def test_trainable_modules_get_full_gradients_on_every_rank(kind, is_frozen):
    def script(flex):
        torch.manual_seed(7 + rank_of(flex))  # rank 0's values count
        flex.register_trainable_module("probe", nn.Linear(8, 8))
        for i in (1, 3, 6):
            flex.register_forward_hook(HookFunction(f"layers.{i}.fc2", editing_function=probe))

    model, (x, y) = make_mlp().requires_grad_(not is_frozen), data()
    torch.manual_seed(7)
    values = nn.Linear(8, 8).state_dict()

    def reference_script(flex):
        script(flex)
        flex.trainable_modules["probe"].load_state_dict(values)

    expected = unsplit(model, reference_script, x, y, MSE)
    with FlexModel(make_schedule(kind, model, loss_fn=MSE)) as flex:
        script(flex)
        torch.testing.assert_close(
            dict(flex.trainable_modules["probe"].state_dict()), dict(values), rtol=0, atol=0
        )
        for steps in (1, 2):  # gradients add up
            flex(x, target=y)
            for name, parameter in flex.trainable_modules.named_parameters():
                wanted = expected["trainable"][name] * steps
                torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=3e-6)
        assert not is_frozen or all(one.grad is None for one in flex.parameters())


@pytest.mark.ranks(2)
def test_save_ctx_is_merged_on_rank_0():
    def note(name):
        def edit(module, x, save_ctx, modules):
            getattr(save_ctx, name)[current_microbatch()] = [x.norm(), x.shape[0], "text", None]

        return edit

    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        flex.save_ctx.first, flex.save_ctx.second = {}, {}
        flex.register_forward_hook(HookFunction("layers.0", editing_function=note("first")))
        flex.register_forward_hook(HookFunction("layers.7", editing_function=note("second")))
        for _ in range(2):
            flex(x, target=y)
            if rank_of(flex) == 0:
                for found in (flex.save_ctx.first, flex.save_ctx.second):
                    assert set(found) == {0, 1, 2, 3}
                    assert found[3][1:] == [2, "text", None] and found[3][0].dim() == 0
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        flex.save_ctx.both = {}
        for i in (0, 7):
            flex.register_forward_hook(HookFunction(f"layers.{i}", editing_function=note("both")))
        with pytest.raises(ValueError, match=r"both by stage 0 \(rank 0\) and stage 1 \(rank 1\)"):
            flex(x, target=y)


@pytest.mark.ranks(2)
def test_parameters_by_name_from_every_stage():
    model, (x, y) = make_mlp(), data()
    with FlexModel(make_schedule(ALL[2], model, loss_fn=MSE)) as flex:
        assert flex.wrapped_module_names[:3] == ["emb", "layers", "layers.0"]
        for name, parameter in model.named_parameters():
            assert torch.equal(flex.get_module_parameter(name), parameter)
        assert [name for name, _ in flex.iterate_parameters()] == list(
            dict(model.named_parameters())
        )
        assert flex.get_module_gradient("head.weight") is None
        new = torch.randn(16, 8)
        flex.set_module_parameter("layers.5.fc1.weight", new)
        assert torch.equal(flex.get_module_parameter("layers.5.fc1.weight"), new)
        with torch.no_grad():
            model.layers[5].fc1.weight.copy_(new)
        with pytest.raises(
            ValueError, match=r"fc1.weight' has the full shape \(16, 8\), got \(3, 4\)"
        ):
            flex.set_module_parameter("layers.5.fc1.weight", torch.zeros(3, 4))
        with pytest.raises(ValueError, match=r"no parameter 'layers.5.fc1.wait'"):
            flex.get_module_parameter("layers.5.fc1.wait")
        expected = unsplit(model, lambda f: None, x, y, MSE)
        flex(x, target=y)
        for name, grad in expected["grads"].items():
            found = flex.get_module_gradient(name)
            assert_near(found, grad)
        state = flex.state_dict()
        assert all(name.removeprefix("module.") in expected["grads"] for name in state)
        weight = next(name for name in state if name.endswith("fc1.weight"))
        flex.load_state_dict({**state, weight: state[weight] + 1})
        assert_near(
            flex.state_dict()[weight], model.state_dict()[weight.removeprefix("module.")] + 1
        )
        state["module.layers.9.fc1.weight"] = state.pop(weight)
        with pytest.raises(RuntimeError, match=r"Missing.*fc1.weight(?s:.*)module.layers.9"):
            flex.load_state_dict(state)


@pytest.mark.ranks(2)
def test_weights_of_other_stages_in_an_edit():
    seen = {}

    def lens(flex):
        function = HookFunction(
            "layers.1",
            editing_function=lambda m, x, ctx, mods: seen.update(
                logits=x @ function.parameters["head.weight"].T
            ),
            parameters=["head.weight"],
        )
        flex.register_forward_hook(function)

    model, (x, y) = make_mlp(), data()
    unsplit(model, lens, x, y, MSE)
    expected = seen.pop("logits")
    with FlexModel(make_schedule(ALL[0], model, loss_fn=MSE)) as flex:
        lens(flex)
        flex(x, target=y)
        if rank_of(flex) == 0:
            assert_near(seen["logits"], expected[-2:])


@pytest.mark.ranks(2)
def test_groups_active_and_the_schedules_own_step():
    model, (x, y) = make_mlp(), data()
    records = {}
    model.layers[0].act = checkpoint_wrapper(model.layers[0].act)
    schedule = make_schedule(ALL[0], model, loss_fn=MSE)
    with FlexModel(schedule, records) as flex:
        flex.create_hook_group("fc1", "fc1")
        flex.create_hook_group("blocks", nn.ReLU)
        assert len(flex.get_group_hook_functions("fc1")) == 8
        flex(x, target=y, groups="fc1")
        assert set(records) == (
            {f"layers.{i}.fc1" for i in range(8)} if rank_of(flex) == 0 else set()
        )
        schedule.step(x, target=y)
        assert len(records) == (16 if rank_of(flex) == 0 else 0)
        records.clear()
        with flex.active("blocks"):
            schedule.step(x, target=y)
            flex(x, target=y)
        if rank_of(flex) == 0:
            assert set(records) == {f"layers.{i}.act" for i in range(8)}
            assert all(len(found) == 2 for found in records.values())
        with pytest.raises(ValueError, match="no hook group 'fc3'"):
            flex(x, target=y, groups="fc3")
        with pytest.raises(ValueError, match="matches no module type"):
            flex.create_hook_group("convs", nn.Conv2d)
    assert "step" not in vars(schedule) and "forward_one_chunk" not in vars(schedule._stage)
    output = schedule.step(*([x] if schedule._stage.is_first else []), target=y)
    assert (output is not None) == schedule._stage.is_last


@pytest.mark.ranks(2)
def test_expected_shapes_are_those_of_the_whole_batch():
    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE), records := {}) as flex:
        flex.register_forward_hook(HookFunction("layers.1.fc1", (8, 16)))
        flex.register_forward_hook(HookFunction("layers.6.fc1", (8, None), mix))
        flex.register_hook(HookFunction("layers.6.fc2.weight", (8, 16)))
        for mode in ("micro", "full"):
            flex.batch_mode = mode
            flex(x, target=y)
            if rank_of(flex) == 0:
                shapes = {name: tuple(found[0].shape) for name, found in records.items()}
                assert shapes == {
                    "layers.1.fc1": (8, 16),
                    "layers.6.fc1": (8, 16),
                    "layers.6.fc2.weight": (8, 16),
                }
        assert "layers.6.fc1" in str(flex.layouts()) and str(flex.explain())
        flex.batch_mode = "micro"
        for shape in ((8, 17), (2, 16), (4, None)):  # the second is that of a micro-batch
            hook = HookFunction("layers.7.fc1", shape)
            with (
                flex.register_forward_hook(hook),
                pytest.raises(RuntimeError, match=r"layers\.7\.fc1.*expected_shape"),
            ):
                flex(x, target=y)
        flex(x, target=y)


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_names_that_no_stage_can_serve():
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        for name, match in (
            ("layers.3.fc3", "nearest modules: 'layers.3.fc"),
            ("layers", r"spread over the stages \[0, 1\]"),
        ):
            with pytest.raises(ValueError, match=match):
                flex.register_forward_hook(HookFunction(name))
        with pytest.raises(ValueError, match=r"no parameter 'layers.3.fc3.weight'"):
            flex.register_hook(HookFunction("layers.3.fc3.weight"))
        assert flex.stages_of("layers.3") == (0,) and flex.stages_of("layers.4") == (1,)


@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize("kind", grid_but(ALL, ALL[1], ALL[4]))
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_an_edit_brings_every_rank_out(kind, where, error):
    model, (x, y) = make_mlp(), data()
    fails = True

    def edit(module, value, save_ctx, modules):
        if fails and current_microbatch() == 2:
            raise error("boom")
        return value * 0.5

    def script(flex):
        register = {
            "forward": flex.register_forward_hook,
            "backward": flex.register_full_backward_pre_hook,
        }[where]
        register(HookFunction("layers.4.fc1", editing_function=edit))
        flex.register_forward_hook(HookFunction("layers.7.fc1"))

    records = {}
    with FlexModel(make_schedule(kind, model, loss_fn=MSE), records) as flex:
        script(flex)
        (stage,) = flex.stages_of("layers.4.fc1")
        is_mine = stage in [one.stage_index for one in stages_of(flex.schedule)]
        is_interrupt = error is KeyboardInterrupt and is_mine
        with pytest.raises(KeyboardInterrupt if is_interrupt else HookError) as failure:
            flex(x, target=y)
        if error is ZeroDivisionError:
            message = r"rank \d: .*layers.4.fc1.*ZeroDivisionError: boom.*micro-batch 2"
            assert re.search(message, str(failure.value))
        fails = False
        compare(flex, records, unsplit(model, script, x, y, MSE), x, y)


@pytest.mark.ranks(2, timeout=20)
def test_a_request_to_stop_on_one_rank_ends_the_step_on_every_rank():
    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        flex.register_forward_hook(HookFunction("layers.4.fc1", editing_function=mix))
        expected = flex(x, target=y)
        if rank_of(flex) == 1:
            STOP_REQUEST.make()
        with pytest.raises(HookError, match="rank 1: stopped by Ctrl-C"):
            flex(x, target=y)
        flex.zero_grad()
        torch.testing.assert_close(flex(x, target=y), expected)
    STOP_REQUEST.clear()


@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize("kind", grid_but(ALL, ALL[0], ALL[2]))
@pytest.mark.parametrize("where", ["stage", "backward", "loss", "shapes"])
def test_an_error_of_the_model_leaves_nobody_waiting(kind, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("boom")

    model, (x, y) = make_mlp(), data()
    schedule = make_schedule(
        kind, model, loss_fn=lambda o, t: 1 / 0 if fails and where == "loss" else MSE(o, t)
    )
    fails, calls = False, []
    stages = [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages
    for stage in stages:
        block = stage.submod.layers[5]
        if isinstance(block, nn.Module) and hasattr(block, "fc1"):

            def forward(value, block=block):
                calls.append(1)
                if fails and (where == "shapes" or (where == "stage" and len(calls) == 2)):
                    raise ZeroDivisionError("boom")
                if fails and where == "backward" and len(calls) == 3:
                    value = Fails.apply(value)
                return type(block).forward(block, value)

            block.forward = forward
    with FlexModel(schedule) as flex:
        flex.register_forward_hook(HookFunction("layers.0.fc1"))
        if where != "shapes":
            flex(x, target=y)
        calls.clear()
        fails = True
        with pytest.raises((RuntimeError, ZeroDivisionError, ValueError), match=r"boom|zero"):
            flex(x, target=y)
        fails = False
        flex.zero_grad()
        flex(x, target=y)
        check_parameters(flex, unsplit(model, lambda f: None, x, y, MSE)["grads"])


@pytest.mark.ranks(2, timeout=20)
def test_calls_that_cannot_be_run():
    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        flex.register_forward_hook(HookFunction("layers.0.fc1"))
        for keywords, match in (
            ({"mask": y}, "no stage's forward takes a keyword argument 'mask'"),
            ({"losses": ()}, "losses must be a list"),
        ):
            with pytest.raises((ValueError, TypeError), match=match):
                flex(x, target=y, **keywords)
        with pytest.raises(ValueError, match="batch_mode must be"):
            flex.batch_mode = "whole"
        flex.batch_mode = ("micro", "full")[rank_of(flex)]
        with pytest.raises(RuntimeError, match="ranks differ in batch_mode"):
            flex(x, target=y)
        flex.batch_mode = "micro"
        for name in ("compile", "dry_run"):
            with pytest.raises(RuntimeError, match=f"{name} is for a model that runs as a whole"):
                getattr(flex, name)()
        if rank_of(flex) == 0:
            with pytest.raises(RuntimeError, match="outside of a step of its schedule"):
                stages_of(flex.schedule)[0].submod(x)
        flex(x, target=y)


# ---- With other parallelisms ---------------------------------------------------------------------


def hooks_and_probe(flex):
    hooks_of_all_kinds(flex)
    torch.manual_seed(3)
    flex.register_trainable_module("probe", nn.Linear(8, 8))
    for i in (1, 6):
        flex.register_forward_hook(
            HookFunction(f"layers.{i}.fc2", editing_function=probe, output_name=f"probe{i}")
        )


def shard_blocks(model, mesh):
    for layer in model.layers:
        if hasattr(layer, "fc1"):
            parallelize_module(layer, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    return model


def tensor_parallel_schedule(kind, model):
    """Over two stages or four, each on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def cut(*args):
        return shard_blocks(part(*args), mesh["tp"])

    return make_schedule(kind, model, group=mesh["pp"].get_group(), cut=cut, loss_fn=MSE)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", grid_but([ALL[1], ALL[2], ALL[5]], ALL[2]))
def test_pipeline_of_tensor_parallel_stages(kind):
    model, (x, y) = make_mlp(), data()
    expected = unsplit(model, hooks_and_probe, x, y, MSE)
    records = {}
    schedule = tensor_parallel_schedule(kind, model)
    with FlexModel(schedule, records, return_on="all") as flex:
        assert (flex.pp_size, flex.tp_size, flex.dp_size) == (2, 2, 1)
        hooks_and_probe(flex)
        for _ in range(2):
            flex.zero_grad()
            output = flex(x, target=y)
            assert_near(output, expected["output"], "output", 2e-6)
            check_records(records, expected["records"], 2e-6)
            for name, grad in expected["grads"].items():
                assert_near(flex.get_module_gradient(name), grad, name)
            for name, parameter in flex.trainable_modules.named_parameters():
                assert_near(parameter.grad, expected["trainable"][name], name, 3e-6)
        for name, parameter in model.named_parameters():
            assert torch.equal(flex.get_module_parameter(name), parameter)


@pytest.mark.ranks(4, timeout=30)
def test_an_error_on_one_rank_of_a_tensor_parallel_stage():
    model, (x, y) = make_mlp(), data()
    schedule = tensor_parallel_schedule(ALL[1], model)
    fails = True

    def edit(module, value, save_ctx, modules):
        if fails and dist.get_rank() == 3 and current_microbatch() == 2:
            raise ZeroDivisionError("boom")
        return value * 0.5

    with FlexModel(schedule, records := {}) as flex:
        flex.register_forward_hook(HookFunction("layers.4.fc1", editing_function=edit))
        flex.register_full_backward_pre_hook(HookFunction("layers.5", output_name="g"))
        with pytest.raises(RuntimeError, match=r"rank 3: .*layers.4.fc1.*boom.*micro-batch 2"):
            flex(x, target=y)
        fails = False
        flex.zero_grad()
        flex(x, target=y)
        assert (sorted(records) == ["g", "layers.4.fc1"]) == (rank_of(flex) == 0)
        with pytest.raises(HookMismatchError, match="ranks differ in the values of inputs"):
            flex(x + dist.get_rank() % 2, target=y)
        flex(x, target=y)


@pytest.mark.ranks(2, timeout=20)
def test_a_hook_of_one_stage_that_is_refused_at_the_start_is_an_error_in_all():
    """That stage did not take part in the step: the other said that it had ended or died."""

    def register(flex, i):
        return flex.register_forward_hook(HookFunction(f"layers.{i}", editing_function=mix))

    def script(flex):
        return [register(flex, i) for i in (1, 5)]

    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE), records := {}) as flex:
        hooks = script(flex)
        if dist.get_rank() == 1:
            layers = stages_of(flex.schedule)[0].submod.layers
            layers[5] = copy.deepcopy(layers[5])
        with pytest.raises(HookError, match=r"rank 1: forward hook on 'layers.5': the module that"):
            flex(x, target=y)
        hooks[1].remove()
        register(flex, 5)
        compare(flex, records, unsplit(make_mlp(), script, x, y, MSE), x, y)


class Reversed(nn.Module):
    def forward(self, x):
        return x.flip(0)


@pytest.mark.ranks(4, timeout=30)
def test_an_unknown_layout_in_one_stage_is_an_error_in_all():
    """The ranks of the other stage waited until the timeout."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def cut(*args):
        stage = part(*args)
        if mesh["pp"].get_local_rank() == 1:
            stage.layers[5] = Reversed()
        return stage

    x, y = data()
    schedule = make_schedule(ALL[1], make_mlp(), group=mesh["pp"].get_group(), cut=cut, loss_fn=MSE)
    with FlexModel(schedule, records := {}, data_parallel_size=2) as flex:
        unknown = flex.register_forward_hook(HookFunction("layers.6"))
        with unknown, pytest.raises(HookError, match=r"'layers.6'.*lost at flip"):
            flex(x, target=y)
        flex.register_forward_hook(HookFunction("layers.4"))
        flex(x, target=y)
        assert len(records) == (rank_of(flex) == 0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", grid_but([ALL[0], ALL[2], *ALL[4:]], ALL[2]))
@pytest.mark.parametrize("wrap", grid_but(["ddp", "fsdp", "plain"], "fsdp"))
def test_pipeline_of_data_parallel_stages(kind, wrap):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model, (x, y) = make_mlp(), data(16)
    place = mesh["dp"].get_local_rank()

    def cut(*args):
        stage = part(*args)
        if wrap == "ddp":
            return DistributedDataParallel(stage, process_group=mesh["dp"].get_group())
        if wrap == "fsdp":
            for layer in stage.layers:
                if isinstance(layer, Block):
                    fully_shard(layer, mesh=mesh["dp"])
            return fully_shard(stage, mesh=mesh["dp"])
        return stage

    def script(flex):
        hooks_and_probe(flex)
        flex.register_forward_hook(
            HookFunction("layers.5", editing_function=center, output_name="centered")
        )

    # A micro-batch has rows of both ranks: rows 0, 1, 8 and 9 are the first.
    order = torch.cat([x.view(2, 4, 2, 8)[:, i].reshape(4, 8) for i in range(4)])
    targets = torch.cat([y.view(2, 4, 2, 3)[:, i].reshape(4, 3) for i in range(4)])
    expected = _by_microbatch(model, script, order, targets)
    back = torch.arange(16).view(4, 2, 2).transpose(0, 1).reshape(-1)
    wanted = {
        name: [t[back] if t.shape[0] == 16 and name != "weight.grad" else t for t in ts]
        for name, ts in expected["records"].items()
    }
    records = {}
    schedule = make_schedule(kind, model, group=mesh["pp"].get_group(), cut=cut, loss_fn=MSE)
    with FlexModel(schedule, records, pipeline_parallel_size=2, data_parallel_size=2) as flex:
        script(flex)
        for _ in range(2):
            flex.zero_grad()
            flex(x[place * 8 :][:8], target=y[place * 8 :][:8])
            check_records(records, wanted, 2e-6)
            for name, parameter in flex.trainable_modules.named_parameters():
                assert_near(parameter.grad, expected["trainable"][name], name, 3e-6)
            if wrap != "plain":
                for name, grad in expected["grads"].items():
                    assert_near(flex.get_module_gradient(name), grad, name)


def _by_microbatch(model, script, x, y):
    """One process, a schedule of one stage: edits see the same micro-batches."""
    model, alone, records = copy.deepcopy(model), alone_group(), {}
    schedule = make_schedule(ALL[0], model, group=alone, cut=lambda *_: model, loss_fn=MSE)
    with FlexModel(schedule, records, process_group=alone) as flex:
        script(flex)
        flex(x, target=y)
        trainable = {n: p.grad for n, p in flex.trainable_modules.named_parameters()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"records": records, "grads": grads, "trainable": trainable}


# ---- What a hook may be --------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_random_edits_draw_what_one_stage_draws():
    def noisy(module, x, save_ctx, modules):
        return x + torch.randn_like(x)

    def script(flex):
        for i in (1, 6):
            flex.register_forward_hook(HookFunction(f"layers.{i}", editing_function=noisy))

    model, (x, y) = make_mlp(), data()
    found = []
    for group in (alone_group(), None):
        torch.manual_seed(5)
        records = {}
        schedule = make_schedule(ALL[0], model, group=group, loss_fn=MSE)
        with FlexModel(
            schedule, records, process_group=group, return_on="all", output_ranks="all"
        ) as flex:
            script(flex)
            outputs = [flex(x, target=y) for _ in range(2)]
            assert not torch.equal(outputs[0], outputs[1])
            assert list(records) == ["layers.1", "layers.6"]  # on all ranks
            found.append([*outputs, *(records[name][0] for name in sorted(records))])
    for one, other in zip(*found):
        assert_near(one.detach(), other.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [ALL[1], ALL[2]])
def test_checkpointed_blocks_repeat_their_edits(kind, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=use_reentrant)

    def script(flex):
        for i in (0, 3, 5):
            flex.register_forward_hook(HookFunction(f"layers.{i}.block.fc1", editing_function=mix))

    model, (x, y) = make_mlp(), data()
    for i, layer in enumerate(model.layers):
        model.layers[i] = Checkpointed(layer)
    expected = unsplit(model, script, x, y, MSE)
    records = {}
    with FlexModel(make_schedule(kind, model, loss_fn=MSE), records) as flex:
        script(flex)
        compare(flex, records, expected, x, y)


@pytest.mark.ranks(2)
def test_modules_called_again_and_names_shared():
    def script(flex):
        for i in (2, 6):
            flex.register_forward_hook(HookFunction(f"layers.{i}.block", output_name="acts"))
            flex.register_full_backward_pre_hook(
                HookFunction(f"layers.{i}.block", output_name="grads")
            )

    model, (x, y) = make_mlp(), data()
    for i in (2, 6):
        model.layers[i] = Twice(model.layers[i])
    expected = unsplit(model, script, x, y, MSE)
    assert len(expected["records"]["acts"]) == 4
    for kind in (ALL[0], ALL[3]):
        records = {}
        with FlexModel(make_schedule(kind, model, loss_fn=MSE), records) as flex:
            script(flex)
            compare(flex, records, expected, x, y)


@pytest.mark.ranks(2)
def test_inputs_along_the_schedules_own_specs():
    """The batch is dim 1, and a keyword argument has a row for each."""

    model, (x, y) = make_mlp(), data()
    wide, scale = torch.stack([x, x + 1, x - 1]), torch.rand(8, 1)
    expected = unsplit(
        model,
        lambda flex: flex.register_forward_hook(HookFunction("layers.5", editing_function=mix)),
        wide,
        y.expand(3, 8, 3),
        MSE,
    )
    records = {}
    schedule = make_schedule(
        ALL[0],
        model,
        cut=lambda m, i, n: Scaled(part(m, i, n)) if i else part(m, i, n),
        args_chunk_spec=(TensorChunkSpec(1),),
        kwargs_chunk_spec={"scale": TensorChunkSpec(0)},
        output_merge_spec=TensorChunkSpec(1),
    )
    with FlexModel(schedule, records, return_on="all") as flex:
        assert flex.stages_of("model.layers.5") == (1,)
        flex.register_forward_hook(HookFunction("model.layers.5", editing_function=mix))
        with torch.no_grad():
            output = flex(wide, scale=scale)
        assert_near(output, expected["output"] * scale)
        if rank_of(flex) == 0:
            assert_near(records["model.layers.5"][0], expected["records"]["layers.5"][0])


@pytest.mark.ranks(2)
def test_training_mode_leaves_buffers_and_random_numbers_alone():
    model = make_mlp().train()
    model.layers[6].act = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.0))
    x, y = data()
    with FlexModel(make_schedule(ALL[0], model, loss_fn=MSE)) as flex:
        flex.register_forward_hook(HookFunction("layers.0"))
        flex.eval()
        assert not any(module.training for module in flex.module.modules())
        flex.train()
        before = torch.default_generator.get_state()
        flex(x, target=y)
        assert torch.equal(before, torch.default_generator.get_state())
        if rank_of(flex) == 1:
            norm = stages_of(flex.schedule)[0].submod.layers[6].act[1]
            assert norm.num_batches_tracked == 4  # not the run that finds out shapes


@pytest.mark.ranks(2)
def test_wraps_that_are_refused():
    schedule = make_schedule(ALL[0], make_mlp(), loss_fn=MSE)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size|multiply|sharded as"):
        FlexModel(schedule, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="return_on must be 'last' or 'all'"):
        FlexModel(schedule, return_on="first")
    with FlexModel(schedule), pytest.raises(TypeError, match="FlexModel already"):
        FlexModel(schedule)
    with pytest.raises(RuntimeError, match="ranks differ in the settings of a pipeline"):
        FlexModel(schedule, edit_on=("all", "rank0")[dist.get_rank()])
    with FlexModel(schedule) as flex:
        flex(data()[0], target=data()[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["emb.weight", "head.weight"])
def test_a_tied_weight_is_written_on_all_stages(name):
    """Before, the stage that has it under another name kept its own."""
    model = make_mlp()
    model.emb, model.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model.head.weight = model.emb.weight
    whole, (batch, _) = copy.deepcopy(model), data()
    pipe = pipeline(
        model, (batch[:2],), split_spec={"layers.4": SplitPoint.BEGINNING}, method="modules"
    )
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    with FlexModel(ScheduleGPipe(stage, 4), return_on="all") as flex, torch.no_grad():
        full = flex.get_module_parameter(name).flip(0)
        flex.set_module_parameter(name, full)
        whole.emb.weight.copy_(full)
        assert_near(flex(batch), whole(batch))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("edit", [None, mix], ids=["read", "edit"])
def test_hooks_of_torch_at_the_module_of_a_record(kind, comes_first, edit):
    """One that puts the rows in another order, before ours or after it: what follows is unknown."""
    model, (x, y) = make_mlp(), data()
    name = "layers.6.fc1"

    def turn(flex):
        for path, module in flex.module.named_modules():
            if path.endswith(name) and kind == "forward":
                module.register_forward_hook(lambda module, args, output: output.flip(0))
            elif path.endswith(name):
                module.register_forward_pre_hook(lambda module, args: args[0].flip(0))

    with FlexModel(make_schedule(ALL[0], model, loss_fn=MSE)) as flex:
        if comes_first:
            turn(flex)
        getattr(flex, f"register_{kind}_hook")(HookFunction(name, editing_function=edit))
        flex.register_forward_hook(HookFunction("layers.6.act"))
        if not comes_first:
            turn(flex)
        refused = name if comes_first else "layers.6.act"
        with pytest.raises(HookError, match=rf"hook on {refused!r}: .* is not known .lost at flip"):
            flex(x, target=y)
