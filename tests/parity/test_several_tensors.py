"""Hooks on several tensors of one site: one call sees and edits them all."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
import pipelines
from flex_model import FlexModel, HookError, HookFunction, Select, editing

BATCH = models.random(5, 6)


class Pair(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.left, self.right = nn.Linear(width, hidden), nn.Linear(width, hidden)

    def forward(self, x):
        return {"left": self.left(x), "right": (self.right(x), "no tensor")}


class Gated(nn.Module):
    columns, rows = ("pair.left", "pair.right"), ("out",)

    def __init__(self, recomputes=False, width=6):
        super().__init__()
        self.pair, self.out = Pair(width, 8), nn.Linear(8, width)
        self.recomputes = recomputes

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputes else self.run(x)

    def run(self, x):
        pair = self.pair(x)
        return self.out(pair["left"] * pair["right"][0].sigmoid())


def gated(**settings):
    return models.seeded(Gated, **settings).double()


def both(module, inputs, save_ctx, modules):
    """Every number of both depends on numbers of both that other ranks hold."""
    left, right = inputs
    probe = modules["probe"].weight.sum()
    return left + right.flip(-1) * probe + right.flip(0), right * left.sum(-1, keepdim=True) * probe


def in_place(module, inputs, save_ctx, modules):
    left, right = inputs
    right.mul_(left.flip(0)).add_(modules["probe"](left[:, :2]).sum())


def only_the_first(module, inputs, save_ctx, modules):
    left, right = inputs
    return left + right.flip(0).flip(-1) * modules["probe"].weight.sum(), None


def from_nothing(module, inputs, save_ctx, modules):
    """No gradient flows back through the site, but one to the module."""
    return [modules["probe"].weight.sum().expand_as(inputs[0]).clone(), inputs[1].detach()]


EDITS = {"both": both, "in place": in_place, "first": only_the_first, "nothing": from_nothing}
KINDS = {"all": {}, "rank0": {"edit_on": "rank0"}}


def probe():
    return models.seeded(nn.Linear, 2, 2).double()


def reference(edit, order=(0, 1)):
    model, module, seen = gated(), nn.ModuleDict({"probe": probe()}), []

    def hook(pair, args, output):
        given = [output["left"].clone(), output["right"][0].clone()]
        seen.append([tensor.detach().clone() for tensor in given])
        if edit is None:
            return None
        results = edit(pair, tuple(given[i] for i in order), None, module)
        if results is not None:
            for i, result in zip(order, results):
                given[i] = given[i] if result is None else result
        return {"left": given[0], "right": (given[1], "no tensor")}

    model.pair.register_forward_hook(hook)
    output = model(BATCH)
    output.mean().backward()
    return seen, output, model, module["probe"]


def check(parallelism, edit, order=(0, 1), recomputes=False, names=None, **settings):
    seen, output, expected, trained = reference(edit, order)
    records, sharded = {}, parallelism.shard(gated(recomputes=recomputes))
    settings = {"output_ranks": "all"} | settings
    with FlexModel(sharded, records, **parallelism.sizes, **settings) as flex:
        flex.register_trainable_module("probe", probe())
        function = HookFunction("pair", editing_function=edit, unpack_idx=names or order)
        flex.register_forward_hook(function)
        got = flex(parallelism.my_rows(BATCH))
        (got.sum() * parallelism.dp / BATCH.numel()).backward()
        flex.sync_trainable_modules()
        ours = flex.trainable_modules["probe"].weight.grad
    assert_close(got, parallelism.my_rows(output))
    keys = dict(zip(order, names or order))
    assert set(records) == {f"pair[{key}]" for key in keys.values()}
    for index in (0, 1):
        (record,) = records[f"pair[{keys[index]}]"]
        assert_close(record, seen[0][index], rtol=1e-12, atol=1e-14)
    gradients = parallelism.full_gradients(gated(), sharded)
    for name, parameter in expected.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = gradients.get(name, torch.zeros_like(wanted))
        assert_close(found, wanted, msg=partial("{}: {}".format, name))
    if edit is not None and settings.get("edit_on") != "rank0":
        assert_close(ours, trained.weight.grad)


@pytest.mark.parametrize("edit", [None, *EDITS.values()])
def test_one_process(edit):
    check(models.ONE_RANK, edit)
    check(models.ONE_RANK, edit, order=(1, 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_by_name(name):
    for settings in KINDS.values():
        check(models.TWO_RANKS[name], both, names=("left", "right.0"), **settings)
    check(models.TWO_RANKS[name], both, (1, 0), recomputes=True, names=("right.0", "left"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", models.TWO_RANKS)
def test_two_ranks(name):
    parallelism = models.TWO_RANKS[name]
    check(parallelism, None)
    for edit in EDITS.values():
        if (name, edit) == ("ddp", from_nothing):
            continue  # DDP averages nothing where a parameter has no gradient
        for settings in KINDS.values():
            check(parallelism, edit, **settings)
    check(parallelism, both, order=(1, 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "dp"])
def test_recomputed_in_backward(name):
    for settings in KINDS.values():
        check(models.TWO_RANKS[name], both, recomputes=True, **settings)


@pytest.mark.ranks(2)
def test_inputs_and_parts():
    """Keyword arguments, another part of each tensor, and the shapes of both checked."""

    class Product(nn.Module):
        def forward(self, a, *, b):
            return a * b

    class Model(nn.Module):
        columns, rows = ("a", "b"), ()

        def __init__(self):
            super().__init__()
            self.a, self.b, self.product = nn.Linear(6, 8), nn.Linear(6, 8), Product()

        def forward(self, x):
            return self.product(self.a(x), b=self.b(x))

    def swap(module, inputs, save_ctx, modules):
        a, b = inputs
        save_ctx.shapes = [tuple(a.shape), tuple(b.shape)]
        return b.flip(-1), a.flip(-1) * 3

    model = models.seeded(Model).double()
    a, b = model.a(BATCH).clone(), model.b(BATCH).clone()
    a[:, [6, 1]], b[:, 2:4] = b[:, 2:4].flip(-1), a[:, [6, 1]].flip(-1) * 3
    parallelism = models.TWO_RANKS["tp"]
    records = {}
    sharded = parallelism.shard(model)
    with FlexModel(sharded, records, **parallelism.sizes, output_ranks="all") as flex:
        function = HookFunction(
            "product",
            [(None, 8), None],
            swap,
            unpack_idx=[0, 1],
            output_name="seen",
            select=[Select(units=[6, 1]), Select(units=slice(2, 4))],
        )
        handle = flex.register_forward_pre_hook(function)
        flex.update_hook_groups([function], "mine")
        got = flex(BATCH, groups="mine")
        assert flex.save_ctx.shapes == [(5, 2), (5, 2)]
        assert_close(records["seen[1]"], [model.b(BATCH)[:, 2:4]])
        own = slice(4 * torch.distributed.get_rank(), 4 * torch.distributed.get_rank() + 4)
        assert_close(got, (a * b)[:, own])
        handle.remove()
        assert_close(flex(BATCH), (model.a(BATCH) * model.b(BATCH))[:, own])
        flex.register_forward_pre_hook(function)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_costs_are_foretold_and_each_tensor_is_told_of(edit_on):
    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(parallelism.shard(gated()), edit_on=edit_on, **parallelism.sizes) as flex:
        flex.register_trainable_module("probe", probe())
        flex.register_forward_hook(HookFunction("pair", editing_function=both, unpack_idx=(0, 1)))
        dry = flex.dry_run(BATCH)
        flex(BATCH).sum().backward()  # after it, layouts of gradients are known as well
        flex(BATCH)
        spent = flex.explain()
        assert [row.unpack_idx for row in dry] == [0, 1]
        assert [str(row.layout) for row in dry] == [str(row.layout) for row in flex.layouts()]
        assert sum(cost.headers for cost in spent) == dry.forward.headers
        assert sum(cost.collectives for cost in spent) == dry.forward.payloads
        assert flex.verify(gated(), BATCH).is_equal


@pytest.mark.ranks(2)
def test_pipelines():
    """In micro-batches; records and outputs are those of the batch."""
    model = pipelines.make_mlp()
    for place in (0, len(model.layers) - 1):
        model.layers[place] = models.seeded(Gated, seed=place, width=pipelines.WIDTH)
    name, x = f"layers.{place}.pair", models.random(8, pipelines.WIDTH, dtype=torch.float32)

    def units(module, inputs, save_ctx, modules):
        left, right = inputs
        return left + right.flip(-1), left.sum(-1, keepdim=True) * right

    runs = []
    alone = pipelines.alone_group()
    schedule = pipelines.make_schedule(ScheduleGPipe, model, 4)
    for wrapped, settings in [(model, {"process_group": alone}), (schedule, {})]:
        records = {}
        with FlexModel(wrapped, records, **settings, output_ranks="all") as flex, torch.no_grad():
            function = HookFunction(name, editing_function=units, unpack_idx=(0, 1))
            flex.register_forward_hook(function)
            output = flex(x)
        runs.append((records, output))
    (expected, whole), (records, output) = runs
    assert_close(records, expected)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        assert_close(output, whole)


def test_gradients_are_seen_together_and_not_edited_together():
    records, model = {}, gated()
    with FlexModel(model, records) as flex:
        seeing = HookFunction("pair", unpack_idx=(0, 1))
        flex.register_full_backward_pre_hook(seeing)
        flex(BATCH).mean().backward()
        assert {name: len(calls) for name, calls in records.items()} == {"pair[0]": 1, "pair[1]": 1}
        editing = HookFunction("pair", editing_function=both, unpack_idx=(0, 1))
        with pytest.raises(ValueError, match="full_backward hook can't edit several"):
            flex.register_full_backward_hook(editing)
        with pytest.raises(ValueError, match="tensor hook can't edit several"):
            flex.register_hook(HookFunction("out.weight", unpack_idx=(0,)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda left, right: left, "returned a Tensor; expected a tuple of 2 tensors"),
        (lambda left, right: (left,), "returned a tuple of 1; expected a tuple of 2"),
        (lambda left, right: (left, right[:1]), r"tensor 1.*shape \(1, 8\); expected shape \(5, 8"),
    ],
)
def test_what_is_returned_is_checked(returned, message):
    def edit(module, inputs, save_ctx, modules):
        return returned(*inputs)

    with FlexModel(gated()) as flex:
        flex.register_forward_hook(HookFunction("pair", editing_function=edit, unpack_idx=(0, 1)))
        with pytest.raises((HookError, TypeError, ValueError), match=message):
            flex(BATCH)


@pytest.mark.ranks(2)
def test_one_that_is_not_there_is_told_on_every_rank():
    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(parallelism.shard(gated()), **parallelism.sizes) as flex:
        for wrong in [(2, 0), (0, 2)]:
            function = HookFunction("pair", editing_function=both, unpack_idx=wrong)
            with flex.register_forward_hook(function), pytest.raises(HookError, match="holds 2"):
                flex(BATCH)
        function = HookFunction("pair", editing_function=both, unpack_idx=(0, 1))
        flex.register_trainable_module("probe", probe())
        flex.register_forward_hook(function)
        assert_close(flex(BATCH), reference(both)[1])


def test_ready_edits_are_about_one_tensor():
    with pytest.raises(TypeError, match=r"edits one tensor, got unpack_idx=\(0, 1\)"):
        editing.zero().at("pair", unpack_idx=(0, 1))


def test_bad_arguments():
    for wrong, message in [
        ((), "must be an int or a name, or several"),
        ((0, 1.5), "must be an int or a name, or several"),
        ((0, ""), "is an empty name"),
        ((0, -1), "counts from 0"),
        ((1, 1), "twice"),
        (range(9), "8 at most"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            HookFunction("pair", unpack_idx=wrong)
    with pytest.raises(ValueError, match="one entry for each tensor"):
        HookFunction("pair", [(None, 8)], unpack_idx=(0, 1))
    with pytest.raises(ValueError, match="one entry for each tensor"):
        HookFunction("pair", 8, unpack_idx=(0, 1))
