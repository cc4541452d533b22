"""Hooks over pipelines where it is easy to go wrong: modes that change, calls that differ from rank
to rank, odd edits, and stages that torch traced.
"""

import copy
import datetime
import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flex_model import FlexModel, HookFunction
from flex_model.errors import HookError, HookMismatchError
from flex_model.pipelining import PassThrough, SplitPoint, pipeline
from flex_model.pipelining.instrumented_stage import stages_of
from pipelines import ALL, SINGLE, Transposed, make_mlp, make_schedule, my_indices, part, unsplit
from test_pipelining import MSE, assert_near, compare, data, is_last, mix, rank_of
from tiers import grid_but

every = pytest.mark.parametrize("kind", grid_but(ALL, ALL[1], ALL[4]))


# ---- Edits ---------------------------------------------------------------------------------------


def nothing(module, x, save_ctx, modules):
    return None


@pytest.mark.ranks(2)
def test_integer_inputs_can_be_edited():
    model, ids, y = make_mlp(), torch.arange(8), data()[1]
    model.emb = nn.Embedding(10, 8)

    def script(flex):
        flex.register_forward_pre_hook(
            HookFunction("emb", editing_function=lambda m, x, ctx, mods: (x + 1) % 10)
        )
        flex.register_forward_hook(HookFunction("emb", output_name="embedded"))

    with FlexModel(make_schedule(ALL[4], model, loss_fn=MSE), records := {}) as flex:
        script(flex)
        compare(flex, records, unsplit(model, script, ids, y, MSE), ids, y)
        if rank_of(flex) == 0:
            assert records["emb"][0].dtype == torch.int64


# ---- Modes ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_autocast_and_dtypes_may_change_between_steps():
    def script(flex):
        flex.register_forward_hook(HookFunction("layers.4", editing_function=mix))

    model, ids, y = make_mlp(), torch.arange(8), data()[1]
    model.emb = nn.Embedding(10, 8)
    with FlexModel(make_schedule(ALL[1], model, loss_fn=MSE), return_on="all") as flex:
        script(flex)
        for enabled in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                expected = unsplit(model, script, ids, y, MSE)["output"]
                output = flex(ids, target=y)
            assert output.dtype == expected.dtype
            assert_near(output.float(), expected.float(), "", 3e-2 if enabled else 1e-6)
        for dtype in (torch.bfloat16, torch.float64):  # of the same integer inputs
            flex.to(dtype)
            model.to(dtype)
            y = y.to(dtype)
            expected = unsplit(model, script, ids, y, MSE)["output"]
            tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-6
            assert_near(flex(ids, target=y), expected, str(dtype), tolerance)


@pytest.mark.ranks(2)
def test_losses_and_outputs_that_are_asked_for():
    class Several(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            output = self.inner(x)
            return output, output.sum(-1), torch.ones(len(x), dtype=torch.int64)

    def cut(model, index, size):
        stage = part(model, index, size)
        return Several(stage) if index == size - 1 else stage

    def summed(outputs, target):
        return (outputs[0] - target).square().sum()

    model, (x, y) = make_mlp(), data()
    expected = unsplit(model, lambda flex: None, x, y, nn.MSELoss(reduction="sum"))
    schedule = make_schedule(ALL[1], model, cut=cut, loss_fn=summed, scale_grads=False)
    with FlexModel(schedule, return_on="all") as flex:
        losses = ["of before"]
        assert flex(x, target=y, losses=losses, return_outputs=False) is None
        if is_last(flex):
            assert_near(torch.stack(losses).sum(), expected["loss"], "", 1e-4)
        for stage in flex.module.children():
            for name, parameter in stage.named_parameters():
                name = name.removeprefix("inner.")
                assert_near(parameter.grad, expected["grads"][name], name, 2e-5)
        with torch.no_grad():
            outputs = flex(x, losses=losses)
        assert losses == ([] if is_last(flex) else ["of before"])
        assert isinstance(outputs, tuple)
        assert_near(outputs[0], expected["output"])
        assert torch.equal(outputs[2], torch.ones(8, dtype=torch.int64))


# ---- Calls that go wrong -------------------------------------------------------------------------


@pytest.mark.ranks(2, timeout=30)
def test_ranks_that_do_not_do_the_same():
    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE), timeout=3) as flex:
        rank = rank_of(flex)
        if rank == 0:
            with pytest.raises(ValueError, match="nearest modules"):
                flex.register_forward_hook(HookFunction("layers.3.fc9"))
        else:
            flex.register_forward_hook(HookFunction("layers.3.fc1"))
        with pytest.raises(HookMismatchError, match=r"registered hooks.* on 'layers.3.fc1'"):
            flex(x, target=y)
        if rank == 0:
            flex.register_forward_hook(HookFunction("layers.3.fc1"))
        for one in (0, 1):
            with pytest.raises(HookMismatchError, match="ranks differ in names of keyword"):
                flex(x, target=y, **({"mask": y} if rank == one else {}))
        flex(x, target=y)
        if rank == 0:
            with pytest.raises(HookError, match="rank 1"):
                flex(x, target=y)
        else:
            time.sleep(4)


@pytest.mark.ranks(2, timeout=20)
def test_where_a_schedule_fails_its_error_is_the_cause():
    """The other rank waits in the schedule until the timeout of its group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    schedule, (x, y) = make_schedule(ALL[0], make_mlp(), group=group, loss_fn=MSE), data()
    with FlexModel(schedule, timeout=2) as flex:
        flex(x, target=y)
        (stage,) = stages_of(schedule)
        if stage.is_first:
            stage.get_fwd_send_ops = lambda microbatch: 1 / 0
        with pytest.raises(HookError, match=r"waited 2 s at") as failure:
            flex(x, target=y)
        assert isinstance(failure.value.__cause__, ZeroDivisionError) or not stage.is_first


@pytest.mark.ranks(2, timeout=20)
def test_dims_of_micro_batches_by_name():
    def script(flex):
        for i in (2, 6):
            flex.register_forward_hook(HookFunction(f"layers.{i}.act.inner"))
        flex.register_forward_hook(HookFunction("layers.5"))

    model, (x, y) = make_mlp(), data()
    model.layers[2].act, model.layers[6].act = Transposed(), Transposed()
    dims = {"layers.2.act.inner": 1, "layers.6.act.inner": -1}
    schedule = make_schedule(ALL[0], model, loss_fn=MSE)
    expected = unsplit(model, script, x, y, MSE)
    for stated in (dims, None):  # None: proven
        with FlexModel(schedule, records := {}, microbatch_dim=stated) as flex:
            script(flex)
            compare(flex, records, expected, x, y)
    with FlexModel(schedule, microbatch_dim=dims | {"layers.2.act.inner": 0}) as flex:
        script(flex)
        with pytest.raises(HookError, match="along dim 1 by the operations that made them, and"):
            flex(x, target=y)
    with pytest.raises(TypeError, match="microbatch_dim must be an int"):
        FlexModel(schedule, microbatch_dim="0")
    with pytest.raises(ValueError, match=r"nearest modules: 'layers.2.act"):
        FlexModel(schedule, microbatch_dim={"layers.2.act.iner": 1})
    with FlexModel(schedule) as flex:
        flex(x, target=y)


@pytest.mark.ranks(2)
def test_what_cannot_be_sent_to_rank_0():
    def note(module, x, save_ctx, modules):
        save_ctx.odd = object()

    x, y = data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        handle = flex.register_forward_hook(HookFunction("layers.7", editing_function=note))
        with pytest.raises(ValueError, match=r"save_ctx.odd is a builtins.object on rank 1"):
            flex(x, target=y)
        handle.remove()
        with flex.register_forward_hook(HookFunction("layers.0", editing_function=note)):
            flex(x, target=y)


# ---- The schedule after its FlexModel, and stages that torch traced ------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ALL[1], ALL[2]])
def test_a_schedule_is_left_as_it_was(kind):
    model, (x, y) = make_mlp(), data()

    def plain_step(schedule):
        stages = stages_of(schedule)
        for stage in stages:
            stage.submod.zero_grad()
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        targets = {"target": y} if any(stage.is_last for stage in stages) else {}
        output = schedule.step(*inputs, **targets)
        return [output, *(p.grad for stage in stages for p in stage.submod.parameters())]

    expected = plain_step(make_schedule(kind, model, loss_fn=MSE))
    schedule = make_schedule(kind, model, loss_fn=MSE)
    before = [set(vars(one)) for one in (schedule, *stages_of(schedule))]
    for restores in (True, False):
        flex = FlexModel(schedule)
        flex.register_forward_hook(HookFunction("layers.4", editing_function=mix))
        flex(x, target=y)
        if restores:
            flex.restore()
        del flex
        gc.collect()
        assert before == [set(vars(one)) for one in (schedule, *stages_of(schedule))]
        for one, other in zip(plain_step(schedule), expected):
            assert one is other or torch.equal(one, other)


class Plain(nn.Module):
    """What torch's tracer splits: one module is called twice, another does nothing."""

    def __init__(self):
        super().__init__()
        self.stem, self.again, self.nothing = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()
        self.middle, self.deep = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.again(torch.relu(self.again(self.stem(x))))
        return self.head(self.deep(torch.tanh(self.middle(self.nothing(x)))))


@pytest.mark.ranks(2)
@every
def test_stages_that_torch_traced(kind):
    def script(flex):
        for name in ("stem", "again", "middle", "deep", "deep.0", "head"):
            edit = mix if name in ("again", "deep") else None
            for register in (
                flex.register_forward_hook,
                flex.register_forward_pre_hook,
                flex.register_full_backward_hook,
                flex.register_full_backward_pre_hook,
            ):
                output_name = f"{register.__name__}.{name}"
                register(HookFunction(name, editing_function=edit, output_name=output_name))

    torch.manual_seed(0)
    model, (x, y) = Plain(), data()
    points = ["middle"] if kind in SINGLE else ["middle", "deep", "head"]
    splits = dict.fromkeys(points, SplitPoint.BEGINNING)
    pipe = pipeline(model, (x[:2],), split_spec=splits, method="trace")
    device, indices = torch.device("cpu"), my_indices(kind, dist.get_rank(), 2)
    stages = [pipe.build_stage(index, device) for index in indices]
    schedule = kind(stages[0] if kind in SINGLE else stages, 4, loss_fn=MSE)
    with FlexModel(schedule, records := {}, return_on="all") as flex:
        script(flex)
        assert not any("@" in name for name in flex.wrapped_module_names)
        with pytest.raises(ValueError, match="'again', whose records hold every call"):
            flex.register_forward_hook(HookFunction("again@1"))
        with pytest.raises(ValueError, match="leaves out modules that do nothing"):
            flex.register_forward_hook(HookFunction("nothing"))
        expected = unsplit(model, script, x, y, MSE)
        for _ in range(2):
            compare(flex, records, expected, x, y)
        with torch.no_grad():
            assert_near(flex(x), expected["output"])
        with pytest.raises(ValueError, match=r"can't run these inputs: stage 0: .*its example"):
            flex(torch.cat([x, x]), target=torch.cat([y, y]))


# ---- Gradients and inputs as torch's own steps and the unsplit model have them -------------------


@pytest.mark.ranks(2)
def test_a_leaf_that_an_edit_closes_over_gets_the_gradient_of_the_mean_loss():
    model, (x, y) = make_mlp(), data()
    vectors = [torch.zeros(8, requires_grad=True) for _ in range(2)]
    for schedule, vector in (
        (make_schedule(ALL[0], model, loss_fn=MSE), vectors[0]),
        (None, vectors[1]),
    ):

        def script(flex, vector=vector):
            flex.register_forward_hook(
                HookFunction("layers.1", editing_function=lambda m, x, ctx, mods: x + vector)
            )

        if schedule is None:
            unsplit(model, script, x, y, MSE)
        else:
            with FlexModel(schedule) as flex:
                script(flex)
                flex(x, target=y)
                has_first = 0 in flex.module.by_index
    if has_first:
        assert_near(vectors[0].grad, vectors[1].grad, "", 1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["input", "prompt", "outside"])
def test_leaves_behind_the_inputs_get_the_gradient_of_the_mean_loss(what):
    """An input that an edit reads, too; a trainable prompt in the input; a module of others."""
    model, (x, y) = make_mlp(), data()
    found = []
    for schedule in (make_schedule(ALL[0], model, loss_fn=MSE), None):
        leaf = torch.full_like(x[:1], 0.5).requires_grad_()
        inputs = x.clone().requires_grad_() if what == "input" else x + leaf
        edit = (lambda m, t, *_, own=inputs: t + own.mean()) if what == "input" else None
        if schedule is None:
            whole = copy.deepcopy(model)
            if edit is not None:
                whole.layers[0].register_forward_hook(lambda m, args, t, edit=edit: edit(m, t))
            MSE(whole(inputs), y).backward()
        else:
            with FlexModel(schedule) as flex:
                if what == "prompt":
                    flex.register_trainable_module("prompt", nn.ParameterList([leaf]))
                flex.register_forward_hook(HookFunction("layers.0", editing_function=edit))
                flex(inputs, target=y)
                has_first = 0 in flex.module.by_index
        found.append(inputs.grad if what == "input" else leaf.grad)
    if has_first:
        assert_near(*found, "", 1e-6)


@pytest.mark.ranks(2)
def test_an_edit_that_reads_what_an_input_is_computed_from_is_refused():
    leaf, (x, y) = torch.ones(1, requires_grad=True), data()
    with FlexModel(make_schedule(ALL[0], make_mlp(), loss_fn=MSE)) as flex:
        edit = HookFunction("layers.0", editing_function=lambda m, t, *_: t * leaf)
        flex.register_forward_hook(edit)
        with pytest.raises(HookError, match="one that inputs of the step are computed from"):
            flex(x * leaf, target=y)


class Penalty(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss in its backward, as losses of routers are added."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


class Penalised(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return Penalty.apply(x, x.pow(2).mean())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_edited", [False, True])
def test_gradients_that_do_not_come_from_the_loss_are_those_of_the_mean_too(is_edited):
    model, (x, y) = make_mlp(), data()
    model.layers[1] = Penalised(8, 8)

    def script(flex):
        torch.manual_seed(2)
        flex.register_trainable_module("learned", Penalised(8, 8))
        flex.register_full_backward_hook(HookFunction("layers.1", output_name="gradient"))
        if is_edited:
            learned = HookFunction("layers.4", editing_function=lambda m, x, c, d: d["learned"](x))
            flex.register_forward_hook(learned)

    with FlexModel(make_schedule(ALL[0], model, loss_fn=MSE), records := {}) as flex:
        script(flex)
        compare(flex, records, expected := unsplit(model, script, x, y, MSE), x, y)
        for name, parameter in flex.trainable_modules.named_parameters() if is_edited else ():
            assert_near(parameter.grad, expected["trainable"][name], name, 1e-6)


@pytest.mark.ranks(2)
def test_a_split_backward_reaches_what_replaces_an_activation():
    def script(flex):
        torch.manual_seed(2)
        flex.register_trainable_module("learned", nn.Linear(8, 8))
        flex.register_forward_hook(
            HookFunction(
                "layers.4",
                editing_function=lambda m, x, c, mods: mods["learned"](torch.ones_like(x)),
            )
        )

    model, (x, y) = make_mlp(), data()
    expected = unsplit(model, script, x, y, MSE)
    with FlexModel(make_schedule(ScheduleInterleavedZeroBubble, model, loss_fn=MSE)) as flex:
        script(flex)
        flex(x, target=y)
        for name, parameter in flex.trainable_modules.named_parameters():
            assert_near(parameter.grad, expected["trainable"][name], name, 1e-6)
        for name, parameter in flex.module.named_parameters():
            if expected["grads"][name] is not None:  # a stage in front receives zeros
                assert_near(parameter.grad, expected["grads"][name], name, 1e-6)


@pytest.mark.ranks(2)
def test_another_schedule_over_the_stage_is_torchs_own():
    model, (x, y) = make_mlp(), data()

    def step(schedule):
        is_first = schedule._stage.is_first
        schedule._stage.submod.zero_grad()
        schedule.step(x) if is_first else schedule.step(target=y)
        return [p.grad for p in schedule._stage.submod.parameters()]

    expected = step(make_schedule(ALL[0], model, loss_fn=MSE))
    first = make_schedule(ALL[1], model, loss_fn=MSE)
    second = ALL[0](first._stage, 4, loss_fn=MSE)
    with FlexModel(first) as flex:
        flex(x, target=y)
        for one, other in zip(step(second), expected, strict=True):
            assert_near(one, other, "", 1e-6)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask=None):
        keys = x[:, None]
        return flex_attention(self.linear(x)[:, None], keys, keys, block_mask=mask)[:, 0]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_is_split_as_rows_are():
    torch.manual_seed(0)
    layers, x = [Attends(), Attends()], torch.randn(4, 16, 8)
    ends = torch.tensor([2, 5, 8, 11])
    documents = (torch.arange(16) >= ends[:, None]).long()
    mask = create_block_mask(
        lambda b, h, q, k: documents[b, q] == documents[b, k], 4, None, 16, 16, "cpu", 16
    )
    rank = dist.get_rank()
    stage = PipelineStage(copy.deepcopy(layers[rank]), rank, 2, torch.device("cpu"))
    with torch.no_grad(), FlexModel(ScheduleGPipe(stage, 2), return_on="all") as flex:
        assert_near(flex(x, mask=mask), layers[1](layers[0](x, mask), mask), "", 1e-6)


@pytest.mark.ranks(2)
def test_parameters_of_stages_whose_names_collide():
    rank = dist.get_rank()
    stages = [
        PipelineStage(nn.Sequential(nn.Linear(4, 4)), index, 4, torch.device("cpu"))
        for index in (rank, rank + 2)
    ]
    with FlexModel(ScheduleInterleaved1F1B(stages, 4, loss_fn=MSE)) as flex:
        for call in (
            lambda: flex.state_dict(),
            lambda: flex.get_module_parameter("0.weight"),
            lambda: flex.set_module_parameter("0.weight", torch.ones(4, 4)),
            lambda: flex.register_forward_hook(HookFunction("0")),
        ):
            with pytest.raises(ValueError, match="PassThrough"):
                call()


class Counted(nn.Linear):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


@pytest.mark.ranks(2)
def test_the_state_of_several_stages_holds_whatever_torch_puts_there():
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    for kind in (nn.Linear, Counted):
        torch.manual_seed(0)
        blocks, stages = [kind(4, 4) for _ in range(4)], []
        for own in (rank, rank + 2):
            held = nn.Sequential(*[blocks[i] if i == own else PassThrough() for i in range(4)])
            if kind is nn.Linear:
                fully_shard(held, mesh=mesh["dp"])
            stages.append(PipelineStage(held, own, 4, torch.device("cpu")))
        with FlexModel(ScheduleInterleaved1F1B(stages, 4, loss_fn=MSE)) as flex:
            state = flex.state_dict()
            assert len(state) == (4 if kind is nn.Linear else 6)
            flex.load_state_dict(state)


class TiedEnds(nn.Module):
    def __init__(self, emb, is_last):
        super().__init__()
        self.emb, self.is_last = emb, is_last

    def forward(self, x):
        return x @ self.emb.weight.T if self.is_last else self.emb(x)


@pytest.mark.ranks(4)
def test_a_tied_weight_that_stages_wrap_differently_is_read_after_an_evaluation():
    pp, dp = divmod(dist.get_rank(), 2)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    module, ids = TiedEnds(nn.Embedding(10, 6), pp == 1), torch.randint(0, 10, (8, 3))
    weight = module.emb.weight.detach().clone()
    if pp == 0:
        fully_shard(module.emb, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(module, pp, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    with FlexModel(ScheduleGPipe(stage, 2)) as flex, torch.no_grad():
        flex(ids[4 * dp : 4 * dp + 4])
        assert torch.equal(flex.get_module_parameter("emb.weight"), weight)


class Averages(nn.Module):
    """Assigns a buffer, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


@pytest.mark.ranks(2)
def test_inferring_shapes_leaves_no_marks():
    model, (x, y) = make_mlp(), data()
    model.layers[6] = Averages()
    twin = copy.deepcopy(model)
    with FlexModel(make_schedule(ALL[0], model, 1, loss_fn=MSE), return_on="all") as flex:
        for _ in range(2):
            for is_training in (True, False):
                flex.train(is_training), twin.train(is_training)
                assert_near(flex(x, target=y), twin(x), "", 1e-6)
        held = [m for m in flex.module.modules() if isinstance(m, Averages)]
        assert all(module.calls == twin.layers[6].calls for module in held)
