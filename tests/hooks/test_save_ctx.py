"""save_ctx across ranks: where it is written, where it goes, and what is not seen silently."""

import copy
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookError, HookFunction, sequential
from flex_model.hooks import save_ctx as contexts
from flex_model.pipelining import current_microbatch
from pipelines import alone_group, make_mlp, make_schedule

MSE = torch.nn.MSELoss()


def batch():
    return models.random(8, 8).float(), models.random(8, 3).float()


def capture(name):
    """Keeps the full activation, and counts its calls."""

    def edit(module, full, save_ctx, modules):
        setattr(save_ctx, name, full.detach().clone())
        setattr(save_ctx, f"{name}_calls", getattr(save_ctx, f"{name}_calls", 0) + 1)

    return edit


def patch(name):
    """Mixes in, in full, what was captured elsewhere."""

    def edit(module, full, save_ctx, modules):
        return full + getattr(save_ctx, name).flip(-1)

    return edit


def test_a_value_is_new_wherever_it_is_in_memory():
    context = contexts.StageContext()
    context.kept, context.items, context.odd = torch.zeros(3), [torch.zeros(3)], object()
    assert contexts.written(context, contexts.begin_step(context)) == []
    for _ in range(20):  # one may be where the first was
        before = contexts.begin_step(context)
        context.kept = torch.zeros(3)
        context.items = [torch.zeros(3)]
        context.odd = object()
        assert contexts.written(context, before) == ["kept", "items", "odd"]
    plain = Namespace(odd=[object()])
    before = contexts.snapshot(plain)
    for _ in range(20):
        plain.odd[0] = object()
        assert contexts.written(plain, before) == ["odd"]


def test_values_of_another_type_are_new_and_equal_ones_are_not():
    for value, other in ((1, True), (1, 1.0), ([1], (1,)), ({"a": 1}, Namespace(a=1)), (0.0, -0.0)):
        context = Namespace(kept=[value])
        before = contexts.snapshot(context)
        context.kept[0] = other
        assert contexts.written(context, before) == ["kept"]
    key = torch.zeros(2)
    context = Namespace(number=float("nan"), tensor=torch.tensor(float("nan")), keys={key: 1})
    before = contexts.snapshot(context)
    context.number, context.tensor = float("nan"), torch.tensor(float("nan"))
    assert contexts.written(context, before) == []
    context.keys = {torch.ones(2): 1}
    assert contexts.written(context, before) == ["keys"]


@dataclass
class Data:
    items: list = field(default_factory=list)


def test_what_is_changed_in_place_was_written():
    numpy = pytest.importorskip("numpy")
    context = Namespace(
        tensor=torch.zeros(3), array=numpy.zeros(3), items=[[1]], of_names={"a": {2}}, plain=1,
        recent=deque([1], maxlen=2), data=Data(),
    )  # fmt: skip
    for name, change in {
        "tensor": lambda: context.tensor.add_(1),
        "array": lambda: context.array.__setitem__(1, 5),
        "items": lambda: context.items[0].append(2),
        "of_names": lambda: context.of_names["a"].add(3),
        "recent": lambda: context.recent.append(1),
        "data": lambda: context.data.items.append(1),
    }.items():
        before = contexts.snapshot(context)
        change()
        assert contexts.written(context, before) == [name]
        before = contexts.snapshot(context)
        delattr(context, name)
        assert contexts.written(context, before) == [name]


def test_what_torch_does_not_count_as_a_change_was_written_too():
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    kept = {
        "plain": torch.zeros(3),
        "parameter": torch.nn.Parameter(torch.zeros(3)),
        "part": torch.zeros(3, 4)[:, 1],
        "expanded": torch.zeros(1, 3).expand(2**40, 3),
        "number": torch.zeros(()),
        "half": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "complex": torch.zeros(3, dtype=torch.complex64).conj(),
    }
    others = {"sparse": torch.eye(3).to_sparse(), "meta": torch.zeros(3, device="meta")}
    context = Namespace(
        **kept, **others, freed=freed, empty=torch.zeros(0), list=list(kept.values())
    )
    for name, tensor in kept.items():
        before = contexts.snapshot(context)
        found = [contexts.written(context, before)]
        tensor.data[(0,) * tensor.dim()].fill_(1)
        found.append(contexts.written(context, before))
        assert found == [[], [name, "list"]]


def test_what_is_changed_in_place_in_inference_mode_was_written():
    with torch.inference_mode():
        context = Namespace(sums=torch.zeros(3), of_names={"a": torch.zeros(3).conj()})
        for name, tensor in (("sums", context.sums), ("of_names", context.of_names["a"])):
            before = contexts.snapshot(context)
            assert contexts.written(context, before) == []
            tensor.add_(1)
            assert contexts.written(context, before) == [name]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_counted", [True, False])
def test_a_sum_of_another_stage_goes_on_over_steps(mode, is_counted):
    def add_up(module, full, save_ctx, modules):
        if not hasattr(save_ctx, "sums"):
            save_ctx.sums = torch.zeros(8)
        (save_ctx.sums if is_counted else save_ctx.sums.data).add_(full.sum(0))

    x, _ = batch()
    found = []
    alone = FlexModel(make_mlp(), process_group=alone_group())
    for flex in (alone, FlexModel(make_schedule(ScheduleGPipe, make_mlp()))):
        flex.register_forward_hook(HookFunction("layers.7", editing_function=add_up))
        with mode():
            for _ in range(3):
                flex(x)
            if flex is alone or dist.get_rank() == 0:
                found.append(flex.save_ctx.sums)
        flex.restore()
    assert_close(found[-1], found[0])


# ---- edit_on="rank0" -----------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("save_ctx_on", ["all", "rank0"])
@pytest.mark.parametrize("name", ["tp", "ddp"])
def test_what_rank_0_wrote_goes_to_all_or_stays(name, save_ctx_on):
    def in_backward(module, grad, save_ctx, modules):
        save_ctx.grad = (grad, {"norm": float(grad.norm())})
        if hasattr(save_ctx, "once"):
            del save_ctx.once

    def hooked(model, **settings):
        flex = FlexModel(model, **settings)
        flex.register_forward_hook(HookFunction("fc1", editing_function=capture("kept")))
        flex.register_full_backward_hook(
            HookFunction("fc1", editing_function=in_backward, output_name="grad")
        )
        return flex

    parallelism, (model, x) = models.TWO_RANKS[name], (models.mlp(), models.random(4, 6))
    flex = hooked(
        parallelism.shard(model), edit_on="rank0", save_ctx_on=save_ctx_on, **parallelism.sizes
    )
    alone = hooked(model, process_group=alone_group())
    flex.save_ctx.script = object()  # the script's own, set on every rank, is not sent
    flex.save_ctx.once = True
    for calls in (1, 2):
        flex(parallelism.my_rows(x)).sin().mean().backward()
        alone(x).sin().mean().backward()
        if dist.get_rank() == 0 or save_ctx_on == "all":
            assert flex.save_ctx.kept_calls == calls and not hasattr(flex.save_ctx, "once")
            assert_close(flex.save_ctx.kept, alone.save_ctx.kept)
            assert_close(flex.save_ctx.grad, alone.save_ctx.grad)
        else:
            assert list(vars(flex.save_ctx)) == ["script", "once"]
    flex.restore()
    alone.restore()


def circle():
    found = {}
    found["itself"] = found
    return found


UNSENDABLE = {
    "a builtins.object": object,
    "a torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "a container of itself": circle,
    "a collections.defaultdict of something other than list, int or the like": lambda: defaultdict(
        lambda: [0]
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", UNSENDABLE)
def test_what_cannot_be_sent_is_an_error_on_every_rank_and_the_next_run_works(what):
    def keep(module, full, save_ctx, modules):
        save_ctx.odd, save_ctx.even = UNSENDABLE[what](), 2

    flex = models.replicas(
        FlexModel(models.mlp(), tensor_parallel_size=2, edit_on="rank0", save_ctx_on="all")
    )
    handle = flex.register_forward_hook(HookFunction("fc1", editing_function=keep))
    with pytest.raises(ValueError, match=f"save_ctx.odd is {what} on rank 0, and can't"):
        flex(models.random(4, 6))
    assert flex.save_ctx.even == 2
    handle.remove()
    flex.register_forward_hook(HookFunction("fc1", editing_function=capture("kept")))
    flex(models.random(4, 6))
    assert flex.save_ctx.kept.shape == (4, 8)
    flex.restore()


@pytest.mark.ranks(2)
def test_dicts_of_other_types_stay_what_they_are():
    kept = [Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1]), defaultdict(None, a=1)]

    def keep(module, full, save_ctx, modules):
        save_ctx.kept = kept

    with FlexModel(
        models.mlp(), tensor_parallel_size=2, edit_on="rank0", save_ctx_on="all"
    ) as flex:
        flex.register_forward_hook(HookFunction("fc1", editing_function=keep))
        models.replicas(flex)(models.random(4, 6))
        found = flex.save_ctx.kept
        assert found == kept and list(map(type, found)) == list(map(type, kept))
        assert found[0]["c"] == 0 and found[2]["b"] == []


@pytest.mark.ranks(2)
def test_what_a_failed_run_wrote_is_sent_after_the_next_one():
    """It never was, where the next run wrote the same."""

    class Fails(nn.Module):
        def forward(self, x):
            if x.isnan().any():
                raise RuntimeError("out of memory")
            return x

    def write(module, full, save_ctx, modules):
        save_ctx.kept = numpy.array([full.numel(), 1], dtype=">f4"), numpy.float64(2)

    model = nn.Sequential(nn.Identity(), Fails())
    with FlexModel(model, data_parallel_size=2, edit_on="rank0", save_ctx_on="all") as flex:
        flex.register_forward_hook(HookFunction("0", editing_function=write))
        with pytest.raises(RuntimeError, match="out of memory"):
            flex(torch.full((2, 3), torch.nan))
        flex(torch.ones(2, 3))
        array, number = flex.save_ctx.kept
        assert array.tolist() == [12, 1] and isinstance(number, numpy.float64)


@pytest.mark.ranks(2)
def test_batches_of_a_sequential_run_have_their_own_on_every_rank():
    batches = [models.random(rows, 6, seed=rows) for rows in (2, 4, 6)]

    def mix(module, full, save_ctx, modules):
        return full + 0.5 * save_ctx.kept.flip(-1)

    def run(model, **settings):
        with FlexModel(model, **settings) as flex:
            flex.register_forward_hook(HookFunction("fc1", editing_function=capture("kept")))
            flex.register_forward_hook(HookFunction("act", editing_function=mix))
            return sequential.run(flex, batches, targets=["fc1", "fc2"], window=2)

    parallelism, model = models.TWO_RANKS["tp"], models.mlp()
    expected = run(model, process_group=alone_group())
    sharded, sizes = parallelism.shard(model), parallelism.sizes
    found = run(sharded, edit_on="rank0", save_ctx_on="all", **sizes)
    assert_close(list(found), list(expected))
    for one, other in zip(found.save_ctxs, expected.save_ctxs, strict=True):
        assert_close(vars(one), vars(other))


def test_it_is_checked_and_costs_nothing_on_one_process():
    with pytest.raises(ValueError, match="save_ctx_on must be 'rank0' or 'all', got 'each'"):
        FlexModel(models.mlp(), save_ctx_on="each")
    flex = FlexModel(models.mlp(), edit_on="rank0", save_ctx_on="all")
    flex.register_forward_hook(HookFunction("fc1", editing_function=capture("kept")))
    flex(models.random(4, 6))
    assert flex.save_ctx.kept.shape == (4, 8)


# ---- Pipelines -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_an_activation_of_one_stage_is_patched_into_another_in_the_next_step(kind):
    def script(flex):
        flex.create_hook_group("capture", "layers.7.fc2", None, capture("late"))
        flex.create_hook_group("capture", "layers.0.act", None, capture("early"))
        flex.create_hook_group("patch", "layers.1.fc2", None, patch("late"))
        flex.create_hook_group("patch", "layers.6.act", None, patch("early"))

    x, y = batch()
    alone = FlexModel(make_mlp(), process_group=alone_group())
    script(alone)
    alone(x, groups="capture")
    expected = alone(x, groups="patch")
    flex = FlexModel(
        make_schedule(kind, make_mlp(), loss_fn=MSE),
        batch_mode="full",
        return_on="all",
        save_ctx_on="all",
    )
    script(flex)
    flex(x, target=y, groups="capture")
    assert_close(flex.save_ctx.late, alone.save_ctx.late)
    assert flex.save_ctx.early_calls == flex.save_ctx.late_calls == 1
    assert_close(flex(x, target=y, groups="patch"), expected.detach())
    flex.restore()
    alone.restore()


@pytest.mark.ranks(2)
def test_an_older_value_is_not_taken_for_the_new_one():
    def count(module, full, save_ctx, modules):
        save_ctx.calls += 1

    x, _ = batch()
    for save_ctx_on in ("rank0", "all"):
        flex = FlexModel(make_schedule(ScheduleGPipe, make_mlp()), save_ctx_on=save_ctx_on)
        flex.save_ctx.calls = 0
        assert copy.deepcopy(flex.save_ctx) == flex.save_ctx
        flex.register_forward_hook(HookFunction("layers.0", editing_function=count))
        for steps in (1, 2):
            flex(x)
            if dist.get_rank() == 0 or save_ctx_on == "all":
                assert flex.save_ctx.calls == 4 * steps
            else:
                with pytest.raises(AttributeError, match=r"save_ctx.calls is not set on this rank"):
                    flex.save_ctx.calls  # noqa: B018
        flex.restore()


@pytest.mark.ranks(2)
def test_a_value_that_is_written_once_more_is_sent_once_more():
    def write(value):
        def edit(module, full, save_ctx, modules):
            save_ctx.found = value

        return edit

    x, _ = batch()
    flex = FlexModel(make_schedule(ScheduleGPipe, make_mlp()))
    flex.create_hook_group("early", "layers.0.fc2", None, write(5))
    flex.create_hook_group("late", "layers.7.fc2", None, write(7))
    for group, value in 2 * (("early", 5), ("late", 7)):  # each rank still has its own
        flex(x, groups=group)
        if dist.get_rank() == 0:
            assert flex.save_ctx.found == value
    for _ in range(2):
        with pytest.raises(ValueError, match=r"several stages wrote one attribute: save_ctx.found"):
            flex(x)
    flex.restore()


def append(save_ctx, full):
    save_ctx.kept["stack"].append(full)


def keep_by_microbatch(save_ctx, full):
    save_ctx.kept["of"][current_microbatch()] = full
    save_ctx.kept["calls"] += 1


CASES = {  # what a forward keeps, and what its backward takes
    "first of a list": (append, lambda kept: kept["stack"].pop(0)),
    "popped": (keep_by_microbatch, lambda kept: kept["of"].pop(current_microbatch())),
    "read": (keep_by_microbatch, lambda kept: kept["of"][current_microbatch()]),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
@pytest.mark.parametrize("case", CASES)
def test_a_forward_keeps_a_value_for_its_backward_by_microbatch(kind, case):
    keep, take = CASES[case]

    def script(flex):
        def use(module, grad, save_ctx, modules):
            return grad * take(save_ctx.kept).flip(-1)

        flex.save_ctx.kept = {"stack": [], "of": {}, "calls": 0}
        for edit, register in (
            (lambda m, full, c, mods: keep(c, full.detach()), flex.register_forward_hook),
            (use, flex.register_full_backward_pre_hook),
        ):
            name = register.__name__
            register(HookFunction("layers.1.fc1", editing_function=edit, output_name=name))

    x, y = batch()
    alone = FlexModel(make_mlp(), process_group=alone_group())
    script(alone)
    MSE(alone(x), y).backward()
    expected = alone.module.emb.weight.grad
    alone.restore()
    flex = FlexModel(make_schedule(kind, make_mlp(), loss_fn=MSE))
    script(flex)
    for steps in (1, 2):
        flex(x, target=y)
        found = flex.get_module_gradient("emb.weight")
        assert_close(found, steps * expected, rtol=1e-5, atol=1e-6)
    flex.restore()


@pytest.mark.ranks(2)
def test_a_plain_read_of_what_is_missing_names_it_on_every_rank():
    x, y = batch()
    with FlexModel(make_schedule(ScheduleGPipe, make_mlp(), loss_fn=MSE)) as flex:
        flex.register_forward_hook(HookFunction("layers.0", editing_function=capture("first")))
        flex.register_forward_hook(HookFunction("layers.7", editing_function=patch("first")))
        with pytest.raises(HookError, match=r"rank 1: .*save_ctx.first is not set on this rank of"):
            flex(x, target=y)
        assert not hasattr(flex.save_ctx, "last")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_all_ranks_of_all_stages_have_it(edit_on):
    x, _ = batch()
    group = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    schedule = make_schedule(ScheduleGPipe, make_mlp(), group=group)
    flex = FlexModel(schedule, data_parallel_size=2, edit_on=edit_on, save_ctx_on="all")
    for name in ("layers.0", "layers.7"):
        edit = capture(name.replace(".", "_"))
        flex.register_forward_hook(HookFunction(name, editing_function=edit))
    place = dist.get_rank() % 2
    flex(x[4 * place : 4 * place + 4])
    assert flex.save_ctx.layers_0_calls == flex.save_ctx.layers_7_calls == 4
    assert flex.save_ctx.layers_0.shape == flex.save_ctx.layers_7.shape == (2, 8)
    gathered = [None] * 4
    dist.all_gather_object(gathered, vars(flex.save_ctx))
    for of_rank in gathered:
        assert_close(of_rank, gathered[0], rtol=0, atol=0)
    flex.restore()
