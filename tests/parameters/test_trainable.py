"""Trainable modules across ranks: trained as on one process, sent, compared, saved and resumed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction, HookMismatchError

BLOCKS = ("layers.1.fc1", "layers.6.fc1")  # of different stages, and split over tp ranks


def mixing(module, full, save_ctx, modules):
    """Mixes what tensor-parallel ranks split, before and after the trainable module."""
    mixed = full + 0.5 * full.flip(-1)
    return mixed + modules["probe"](mixed).cumsum(-1) * 0.1


def mixing_gradient(module, grad, save_ctx, modules):
    return grad + 0.5 * grad.flip(-1)


def make_model():
    model = pipelines.make_mlp().double()
    model.columns = tuple(f"layers.{i}.fc1" for i in range(pipelines.LAYERS))
    model.rows = tuple(f"layers.{i}.fc2" for i in range(pipelines.LAYERS))
    return model


def make_optimizer(flex):
    """Adam, whose state has tensors and numbers, in two groups with settings of their own."""
    probe = flex.trainable_modules["probe"]
    return torch.optim.AdamW(
        [
            {"params": [probe[0].weight, probe[0].bias], "lr": 1e-2},
            {"params": probe[2].parameters(), "betas": (0.8, 0.9)},
        ],
        lr=3e-3,
        weight_decay=0.05,
    )


def prepared(flex, seed=11):
    width = 2 * pipelines.WIDTH
    probe = models.seeded(
        nn.Sequential, nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width), seed=seed
    ).double()
    for parameter in probe.parameters():
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))
    flex.register_trainable_module("probe", probe)
    for name in BLOCKS:
        flex.register_forward_hook(HookFunction(name, editing_function=mixing))
        flex.register_full_backward_hook(
            HookFunction(name, editing_function=mixing_gradient, output_name=f"{name}.grad")
        )
    return make_optimizer(flex)


def batch(step):
    return (
        models.random(8, pipelines.WIDTH, seed=100 + step),
        models.random(8, 3, seed=200 + step),
    )


def loss_of(output, target):
    return (output - target).square().mean()


class Whole:
    """One process, or tensor and data parallelism."""

    def __init__(self, parallelism, model, **settings):
        self.parallelism = parallelism
        sharded = parallelism.shard(model)
        alone = parallelism.tp == parallelism.dp == 1
        group = pipelines.alone_group() if alone and dist.is_initialized() else None
        self.flex = FlexModel(sharded, process_group=group, **parallelism.sizes, **settings)

    def backward(self, x, y):
        loss_of(self.flex(self.parallelism.my_rows(x)), self.parallelism.my_rows(y)).backward()


class Stages:
    """A pipeline, in four micro-batches."""

    def __init__(self, kind, model, **settings):
        schedule = pipelines.make_schedule(kind, model, loss_fn=loss_of)
        self.flex = FlexModel(schedule, **settings)

    def backward(self, x, y):
        self.flex(x, target=y)


LAYOUTS = {
    **{name: (Whole, parallelism) for name, parallelism in models.TWO_RANKS.items()},
    **{
        kind.__name__: (Stages, kind)
        for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
    },
}


def train(run, optimizer, steps, rank_0_steps=False):
    """Some steps; with ``rank_0_steps`` rank 0's optimizer makes them, and they are sent."""
    for step in steps:
        optimizer.zero_grad()
        run.backward(*batch(step))
        if not rank_0_steps or dist.get_rank() == 0:
            optimizer.step()
        if rank_0_steps:
            run.flex.sync_trainable_modules()


def values(flex):
    return {name: p.detach().clone() for name, p in flex.trainable_modules.named_parameters()}


def trained_alone(num_steps):
    """The unsharded model's, without this library."""
    model = make_model()
    run = Whole(models.ONE_RANK, model)
    optimizer = prepared(run.flex)
    probe = copy.deepcopy(run.flex.trainable_modules)
    run.flex.restore()
    for name in BLOCKS:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda m, args, out: mixing(m, out, None, probe))
        module.register_full_backward_hook(
            lambda m, grads, _: (mixing_gradient(m, grads[0], None, None),)
        )
    run.flex.trainable_modules.load_state_dict(probe.state_dict())
    optimizer = make_optimizer(Holder(probe))
    for step in range(num_steps):
        optimizer.zero_grad()
        x, y = batch(step)
        loss_of(model(x), y).backward()
        optimizer.step()
    return values(Holder(probe))


class Holder:
    def __init__(self, modules):
        self.trainable_modules = modules


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "edit_on", "rank_0_steps"),
    [(name, "all", False) for name in LAYOUTS]
    + [("tp", "all", True)]
    + [pytest.param(name, "rank0", True, marks=pytest.mark.grid) for name in LAYOUTS],
)
def test_training_gives_the_modules_of_one_process(name, edit_on, rank_0_steps):
    make, layout = LAYOUTS[name]
    run = make(layout, make_model(), edit_on=edit_on)
    optimizer = prepared(run.flex)
    train(run, optimizer, range(3), rank_0_steps)
    assert_close(values(run.flex), trained_alone(3))
    run.flex.restore()


# ---- Ranks that differ ---------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "ScheduleGPipe"])
def test_a_step_that_was_not_sent_is_an_error_before_the_next_run(name):
    make, layout = LAYOUTS[name]
    run = make(layout, make_model())
    optimizer = prepared(run.flex)
    run.backward(*batch(0))
    if dist.get_rank() == 0:
        optimizer.step()
    for _ in range(2):
        with pytest.raises(HookMismatchError, match=r"differ.*probe.0.weight' on ranks \[1\]"):
            run.backward(*batch(1))
    with run.flex.active(()):  # nobody uses them
        run.backward(*batch(1))
    run.flex.sync_trainable_modules()
    run.backward(*batch(1))
    with torch.no_grad():  # whatever changes them
        run.flex.trainable_modules["probe"][2].bias[1] += dist.get_rank()
    with pytest.raises(HookMismatchError, match=r"'probe.2.bias' on ranks \[1\]; make the same"):
        run.backward(*batch(1))
    with torch.no_grad():
        run.flex(batch(0)[0], groups=())  # nobody uses them
    run.flex.restore()


@pytest.mark.ranks(2)
def test_ranks_that_run_no_function_need_not_have_the_values():
    run = Whole(models.TWO_RANKS["tp"], make_model(), edit_on="rank0")
    optimizer = prepared(run.flex)
    for step in range(3):
        optimizer.zero_grad()
        run.backward(*batch(step))
        if dist.get_rank() == 0:
            optimizer.step()
    if dist.get_rank() == 0:
        found = values(run.flex)
    expected = trained_alone(3)
    if dist.get_rank() == 0:
        assert_close(found, expected)
    run.flex.restore()


@pytest.mark.ranks(2)
def test_what_is_not_whole_on_every_rank_is_refused():
    flex = FlexModel(models.mlp(), tensor_parallel_size=2)
    sharded = distribute_module(nn.Linear(4, 4), models.mesh(1, 2)["tp"])
    for module, kind in ((sharded, "DTensor on cpu"), (nn.Linear(4, 4, device="meta"), "meta")):
        with pytest.raises(TypeError, match=rf"'probe'\): 'weight' is a .*{kind}; trainable"):
            flex.register_trainable_module("probe", module)
    flex.register_trainable_module("probe", nn.Linear(4, 4))
    flex.trainable_modules["probe"] = sharded
    with pytest.raises(TypeError, match=r"sync_trainable_modules: 'probe.weight' is a DTensor"):
        flex.sync_trainable_modules()
    flex.restore()


@pytest.mark.ranks(2)
def test_the_models_own_tensors_are_never_written():
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, dist.get_rank())  # a shard of each rank's
    flex, view = FlexModel(model, tensor_parallel_size=2), nn.Linear(4, 2)
    view.weight.data = model.weight.data[:2]
    for module in (nn.Sequential(nn.Tanh(), model), nn.ModuleList([nn.Tanh(), view])):
        with pytest.raises(TypeError, match=r"'probe'\): '1.weight' is the wrapped model's own"):
            flex.register_trainable_module("probe", module)
    assert_close(model.weight, torch.full((4, 4), float(dist.get_rank())), rtol=0, atol=0)
    flex.register_trainable_module("probe", copy.deepcopy(view))
    flex.restore()


class Scaled(nn.Linear):
    """Has a buffer that is not in its state."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("scale", torch.full((4,), 1.0 + dist.get_rank()), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.ranks(2)
def test_all_that_modules_compute_with_is_sent_and_compared_in_each_run():
    x = torch.ones(2, 4)
    flex = FlexModel(DistributedDataParallel(nn.Linear(4, 4)))
    flex.register_trainable_module("probe", Scaled())
    flex.register_forward_hook(
        HookFunction("", editing_function=lambda m, t, c, ms: ms["probe"](t))
    )
    flex(x)
    probe = flex.trainable_modules["probe"]
    for tensor in (probe.weight.data, probe.scale):
        if dist.get_rank() == 0:  # as fused kernels, its version stays; the sum of its bytes, too
            tensor.copy_(tensor.flip(0) + (tensor is probe.scale))
        with pytest.raises(HookMismatchError, match="the trainable modules differ"):
            flex(x)
        flex.sync_trainable_modules()
        flex(x)
    flex.restore()


# ---- Saved and resumed ---------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("first", "second", "edit_on"),
    [
        ("tp", "ScheduleGPipe", "all"),
        ("ScheduleInterleaved1F1B", "dtensor", "all"),
        ("fsdp2", "tp", "all"),
        ("ddp", "one", "all"),
        ("one", "fsdp2", "all"),
        ("tp", "tp", "all"),
        ("tp", "tp", "rank0"),
        ("ScheduleGPipe", "ScheduleGPipe", "all"),
        ("ScheduleGPipe", "ScheduleGPipe", "rank0"),
    ],
)
def test_training_goes_on_from_a_file(first, second, edit_on, tmp_path):
    """In the same layout with the same bits."""
    layouts = LAYOUTS | {"one": (Whole, models.ONE_RANK)}
    rank_0_steps = edit_on == "rank0"
    has_optimizer = not rank_0_steps or dist.get_rank() == 0
    path = tmp_path / "of" / f"probe-{dist.get_rank() if first == 'one' else 0}.pt"
    make, layout = layouts[first]
    run = make(layout, make_model(), edit_on=edit_on)
    optimizer = prepared(run.flex)
    train(run, optimizer, range(2), rank_0_steps)
    saved, state = values(run.flex), copy.deepcopy(optimizer.state_dict())
    extra = {"step": 2, "noise": torch.ones(3)}
    run.flex.save_trainable_modules(path, optimizer if has_optimizer else None, extra=extra)
    train(run, optimizer, range(2, 4), rank_0_steps)
    uninterrupted = values(run.flex)
    run.flex.restore()

    make, layout = layouts[second]
    run = make(layout, make_model(), edit_on=edit_on)
    optimizer = prepared(run.flex, seed=99)
    given = optimizer if has_optimizer else None
    extra = run.flex.load_trainable_modules(path.with_name("probe-0.pt"), given)
    assert extra["step"] == 2 and extra["noise"].eq(1).all()
    assert_close(values(run.flex), saved, rtol=0, atol=0)
    if has_optimizer:
        assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    train(run, optimizer, range(2, 4), rank_0_steps)
    assert_close(values(run.flex), trained_alone(4))
    if first == second:
        assert_close(values(run.flex), uninterrupted, rtol=0, atol=0)
    run.flex.restore()
