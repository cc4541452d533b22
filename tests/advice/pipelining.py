"""Advice about pipelines: splitting a model, and running a schedule. Two ranks for the latter."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

import models
from flex_model import FlexModel, HookFunction, editing, sequential
from flex_model.pipelining import SplitPoint, current_microbatch, pipeline
from flex_model.selection import Select
from pipelines import MLP, Scaled, Summary, Transposed, alone_group, make_mlp, make_schedule, part

X, Y = models.random(8, 8, dtype=torch.float32), models.random(8, 3, seed=3, dtype=torch.float32)
MSE, SCALE, ROWS_OF_BATCH = nn.MSELoss(), torch.ones(8, 1), TensorChunkSpec(0)
SPLIT = {"layers.4": SplitPoint.BEGINNING}

# ---- Splitting -----------------------------------------------------------------------------------


def split(args=(X[:2],), kwargs=None, model=None, split_spec=SPLIT, method="modules", **settings):
    model = make_mlp() if model is None else model
    pipe = pipeline(model, args, kwargs, split_spec=split_spec, method=method, **settings)
    found = pipe(X[:2], **(kwargs or {}))
    found = found[0] if isinstance(found, tuple) else found  # as torch's tracer returns it
    torch.testing.assert_close(found, model(X[:2], **(kwargs or {})))


def with_hook(name, method, is_removed=False):
    model = make_mlp()
    handle = model.get_submodule(name).register_forward_hook(lambda *_: None)
    if is_removed:
        handle.remove()
    split(model=model, method=method)


def with_flex(is_restored):
    model = make_mlp()
    flex = FlexModel(model)
    split(model=flex.restore() if is_restored else flex)


def policy(method="auto", **settings):
    def halves(graph):
        return graph

    pipeline(make_mlp(), (X[:2],), method=method, **{"split_policy": halves, **settings})


class Skips(MLP):
    """Its input is added behind the blocks."""

    def forward(self, x, again=None):
        again = x if again is None else again
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + again)


ROWS = {
    "give SplitPoint.BEGINNING or": (
        lambda: split(split_spec={"layers.4": "beginning"}),
        lambda: [split(split_spec={"layers.4": point}) for point in SplitPoint],
    ),
    "; write (x,)": (lambda: split(X[:2]), lambda: split((X[:2],))),
    "; choose from": (
        lambda: split(method="fx"),
        lambda: [split(method=method) for method in ("auto", "trace", "modules")],
    ),
    "two ways to say where to split; give one of them": (
        lambda: policy(split_spec=SPLIT),
        lambda: (split(), policy()),
    ),
    "remove them before pipeline(), and hook the stages": (
        lambda: with_hook("layers.1", "modules"),
        lambda: (with_hook("layers.1", "trace", is_removed=True), split()),
    ),
    "call restore() on it, split, and wrap the schedule": (
        lambda: with_flex(is_restored=False),
        lambda: with_flex(is_restored=True),
    ),
    "give it by keyword, so that every stage has it": (
        lambda: split(model=Skips()),
        lambda: split(model=Skips(), kwargs={"again": X[:2]}),
    ),
}

# ---- Schedules -----------------------------------------------------------------------------------


def wrapped(*functions, cut=part, num_microbatches=4, schedule=None, model=None, **settings):
    """A schedule with a loss over two ranks."""
    of_flex = {name: settings.pop(name) for name in FLEX if name in settings}
    settings = {"loss_fn": MSE, **settings}
    model = make_mlp() if model is None else model
    schedule = schedule or make_schedule(
        ScheduleGPipe, model, num_microbatches, cut=cut, **settings
    )
    flex = FlexModel(schedule, {}, **of_flex)
    for function in functions:
        flex.register_forward_hook(function)
    return flex


FLEX = ("batch_mode", "microbatch_dim", "save_ctx_on", "data_parallel_size")


def step(*functions, x=X, target=Y, grad=True, call=None, **settings):
    with wrapped(*functions, **settings) as flex, torch.set_grad_enabled(grad):
        call = flex if call is None else functools.partial(call, flex)
        call(x, **({} if target is None else {"target": target}))
        return flex.output_ptr


class Patches(Scaled):
    """A stage with two rows of an input for each row of the batch, as images have patches."""

    def forward(self, x, scale=None):
        return super().forward(x, scale.reshape(len(x), 2, 1).mean(1))


def scaled(scale, spec=None, module=Scaled):
    settings = {} if spec is None else {"kwargs_chunk_spec": {"scale": spec}}

    def call(flex, x, **kwargs):
        return flex(x, **({} if scale is None else {"scale": scale}), **kwargs)

    step(cut=lambda *args: module(part(*args)), call=call, **settings)


def turned(**settings):
    model = make_mlp()
    model.layers[2].act = Transposed()
    step(HookFunction("layers.2.act.inner"), model=model, **settings)


SUMMARY = "layers.2.act.1.inner"


def shared_rows(kind, function=None, **settings):
    model = make_mlp()
    model.layers[2].act = nn.Sequential(nn.Linear(16, 8), Summary(kind), nn.Linear(8, 16))
    step(function or HookFunction(SUMMARY), model=model, **settings)


def edited_unit(**settings):
    def double(module, x, save_ctx, modules):
        return x * 2

    function = HookFunction(SUMMARY, editing_function=double, select=Select(units=0), record=False)
    shared_rows("rows in reverse order", function, **settings)


def edited_rows(batch_mode="micro", **where):
    """Two rows of the batch, which are along dim 1 there."""
    edit = editing.zero(rows=[0, 5], **where)
    hook = HookFunction("layers.2.act.inner", editing_function=edit, record=False)
    model = make_mlp()
    model.layers[2].act = Transposed()
    step(hook, model=model, batch_mode=batch_mode)


class Sometimes(nn.Module):
    """It calls a module in some micro-batches."""

    def __init__(self):
        super().__init__()
        self.rare, self.often = nn.Identity(), nn.Identity()

    def forward(self, x):
        if current_microbatch() in (None, 1):
            x = self.rare(x)
        return self.often(x)


def sometimes(name, **settings):
    model = make_mlp()
    model.layers[2].act = Sometimes()
    step(HookFunction(f"layers.2.act.{name}"), model=model, **settings)


def writes(name):
    def edit(module, full, save_ctx, modules):
        setattr(save_ctx, name, full.shape)

    return edit


def reads(module, full, save_ctx, modules):
    save_ctx.seen = save_ctx.first


def written_twice(first, second):
    flex = wrapped(
        HookFunction("layers.1", editing_function=writes(first)),
        HookFunction("layers.6", editing_function=writes(second)),
    )
    with flex:
        flex(X, target=Y)
        if dist.get_rank() == 0:
            assert [*vars(flex.save_ctx)] == [first, second]


def read_on_another_stage(*groups):
    with wrapped(save_ctx_on="all") as flex:
        flex.create_hook_group("write", "layers.1", editing_function=writes("first"))
        flex.create_hook_group("read", "layers.6", editing_function=reads)
        for names in groups:
            flex(X, target=Y, groups=names)
        assert flex.save_ctx.seen == (2, 8)


class Shares(nn.Module):
    """A stage beside whose own there is a module that every stage has."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.time = inner, models.seeded(nn.Linear, 1, 1)

    def forward(self, x):
        return self.inner(x) * self.time(x.mean(-1, keepdim=True))


def shared(hooks):
    """Its gradient, which is that of the unsplit model."""
    model = make_mlp()
    parts = [Shares(part(model, index, 2)) for index in range(2)]
    parts[1].time = parts[0].time
    MSE(parts[1](parts[0](X)), Y).backward()
    with wrapped(cut=lambda *args: Shares(part(*args)), model=model) as flex:
        if hooks:
            flex.register_hook(HookFunction("time.weight"))
        flex(X, target=Y)
        with pytest.raises(ValueError, match=r"get_module_gradient: .*\(stages \[0, 1\]\)"):
            flex.get_module_gradient("time.weight")
        total = flex.schedule._stage.submod.time.weight.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, parts[0].time.weight.grad)


def verify(how):
    model = make_mlp()
    if how == "schedule":
        wrapped().verify(model, X)
    elif how == "unsplit":
        FlexModel(make_mlp(), process_group=alone_group()).verify(model, X)
    else:
        records = step(HookFunction("layers.6"))
        with FlexModel(model, expected := {}, process_group=alone_group()) as flex:
            flex.register_forward_hook(HookFunction("layers.6"))
            flex(X)
        for kept in records.get("layers.6", []):
            torch.testing.assert_close(kept, expected["layers.6"][0])


class Masks(nn.Module):
    """A stage that hands a mask on, or is given it."""

    def __init__(self, inner, index, is_handed_on):
        super().__init__()
        self.inner, self.hands_on = inner, is_handed_on and index == 0

    def forward(self, x, handed=None, mask=None):
        mask = handed if mask is None else mask
        mask = (x[:, :1] > 0).long() if mask is None else mask
        x = self.inner(x) * mask
        return (x, mask) if self.hands_on else x


def masked(is_handed_on, **settings):
    def cut(model, index, number):
        return Masks(part(model, index, number), index, is_handed_on)

    def call(flex, x, **kwargs):
        return flex(x, **({} if is_handed_on else {"mask": (x[:, :1] > 0).long()}), **kwargs)

    step(cut=cut, call=call, **settings)


def both_have_it(number=1, group=None, **settings):
    """Both ranks have the first stage."""
    device, group = torch.device("cpu"), alone_group() if number == 1 else None
    stage = PipelineStage(part(make_mlp(), 0, number), 0, number, device, group=group)
    with FlexModel(ScheduleGPipe(stage, 2, loss_fn=MSE), **settings) as flex:
        flex(X, target=Y)


def wrapped_twice(is_restored):
    flex = wrapped()
    schedule = flex.schedule
    try:
        if is_restored:
            flex.restore()
        FlexModel(schedule).restore()
    finally:
        flex.restore()


def frozen(requires_grad):
    with wrapped() as flex:
        flex.register_hook(HookFunction("layers.1.fc1.weight"))
        if dist.get_rank() == 0:
            flex.schedule._stage.submod.layers[1].fc1.weight.requires_grad_(requires_grad)
        flex(X, target=Y)


def attribution(metric=None, **settings):
    tokens, target = X[:, None].expand(8, 5, 8), Y[:, None].expand(8, 5, 3)
    with wrapped(**settings) as flex:
        given = {"metric": metric} if metric else {"target": target}
        editing.attribution_patching(flex, tokens, -tokens, ["layers.2"], **given)


def sequential_run(is_split):
    model = make_mlp()
    flex = wrapped() if is_split else FlexModel(model, process_group=alone_group())
    with flex:
        sequential.run(flex, [X], "layers.0")


def of_a_module(**settings):
    FlexModel(make_mlp(), process_group=alone_group(), **settings).restore()


TWO_RANKS = {
    "FlexModel(schedule, ...), or leave it out": (
        lambda: of_a_module(batch_mode="full"),
        lambda: (of_a_module(), step(batch_mode="full")),
    ),
    "which has no stages; wrap the schedule of a pipeline": (
        lambda: FlexModel(make_mlp(), process_group=alone_group()).stages_of("layers.0"),
        lambda: step(call=lambda flex, *_, **__: flex.stages_of("layers.0")),
    ),
    "but the schedule has no loss_fn; make it with one": (lambda: step(loss_fn=None), step),
    "give target=, or run it under torch.no_grad()": (
        lambda: step(target=None),
        lambda: (step(), step(target=None, grad=False)),
    ),
    "target is one number; give a row for each of": (
        lambda: step(target=torch.tensor(1.0)),
        lambda: step(target=torch.ones(8, 1).expand(8, 3)),
    ),
    "with a row for each of the batch's or several": (
        lambda: step(target=Y[:4], loss_fn=torch.nn.functional.l1_loss),
        lambda: (step(), step(target=torch.ones(16), loss_fn=lambda o, t: o.sum() * t.sum())),
    ),
    "give the inputs of the whole batch": (lambda: step(x=torch.tensor(1.0)), step),
    "give what the spec is for, or make the schedule with another": (
        lambda: step(args_chunk_spec=(ROWS_OF_BATCH, ROWS_OF_BATCH)),
        lambda: (step(args_chunk_spec=(ROWS_OF_BATCH,)), scaled(SCALE, spec=ROWS_OF_BATCH)),
    ),
    "rows, or use batch_mode='full'": (
        lambda: step(x=X[:6], target=Y[:6]),
        lambda: (step(x=X[:4], target=Y[:4]), step(x=X[:6], target=Y[:6], batch_mode="full")),
    ),
    "give it for the whole batch, or make the schedule with": (
        lambda: scaled(SCALE[:2]),
        lambda: (scaled(SCALE), scaled(SCALE[:2], spec=_Replicate)),
    ),
    "TensorChunkSpec(0) for each keyword argument that is split, if it is to": (
        lambda: scaled(torch.ones(16, 1), module=Patches),
        lambda: scaled(torch.ones(16, 1), ROWS_OF_BATCH, Patches),
    ),
    "and microbatch_dim states that they have them": (
        lambda: turned(microbatch_dim={"layers.2.act.inner": 0}),
        lambda: (turned(), turned(microbatch_dim={"layers.2.act.inner": 1})),
    ),
    "state the dim of the rows with microbatch_dim=": (
        lambda: shared_rows("two shared rows"),
        lambda: (
            shared_rows("two shared rows", microbatch_dim={SUMMARY: None}),
            shared_rows("rows in reverse order", microbatch_dim={SUMMARY: 0}),
            shared_rows("a sum over rows", batch_mode="full"),
        ),
    ),
    "may select rows of the micro-batches: their dim is not known": (
        edited_unit,
        lambda: (edited_unit(microbatch_dim={SUMMARY: 0}), edited_unit(batch_mode="full")),
    ),
    "are neither the same for any rows nor rows of the batch one after the other": (
        lambda: shared_rows("all rows twice"),
        lambda: shared_rows("all rows twice", batch_mode="full"),
    ),
    "give the dim of the rows with dims={'rows': ...}, or use": (
        edited_rows,
        lambda: (edited_rows(dims={"rows": 1, "units": 0}), edited_rows("full")),
    ),
    "hook a module that is called equally often in each, or use": (
        lambda: sometimes("rare"),
        lambda: (sometimes("often"), sometimes("rare", batch_mode="full")),
    ),
    "give each hook an attribute of its own, and combine them": (
        lambda: written_twice("found", "found"),
        lambda: written_twice("first", "second"),
    ),
    "write it in one step and read it in the next, with": (
        lambda: read_on_another_stage(["write", "read"]),
        lambda: read_on_another_stage(["write"], ["read"]),
    ),
    "has a part of its gradient only": (lambda: shared(hooks=True), lambda: shared(hooks=False)),
    "call {} on the unsplit model": (
        lambda: verify("schedule"),
        lambda: (verify("unsplit"), verify("records")),
    ),
    "give the sizes of the whole batch, or None": (
        lambda: step(HookFunction("layers.6.fc1", (2, 16))),
        lambda: [step(HookFunction("layers.6.fc1", shape)) for shape in ((8, 16), (None, 16))],
    ),
    "give it to the stages as a keyword argument (a mask": (
        lambda: masked(True),
        lambda: (masked(False), masked(True, target=None, grad=False), step()),
    ),
    "stages are run by their schedule; call the FlexModel": (
        lambda: step(call=lambda flex, x, target: flex.module(x)),
        step,
    ),
    "hook a module that one stage has": (
        lambda: step(HookFunction("layers")),
        lambda: step(HookFunction("layers.0")),
    ),
    "give each stage to one rank of a pipeline": (
        lambda: both_have_it(2),
        lambda: (step(), both_have_it(data_parallel_size=2)),
    ),
    "that of a FlexModel already; restore() it first": (
        lambda: wrapped_twice(is_restored=False),
        lambda: wrapped_twice(is_restored=True),
    ),
    "call requires_grad_(True) before the step": (
        lambda: frozen(requires_grad=False),
        lambda: frozen(requires_grad=True),
    ),
    "make the schedule with loss_fn=, leave out metric=": (
        lambda: attribution(metric=torch.sum),
        attribution,
    ),
    "which alone runs its stages; give the unsplit model": (
        lambda: sequential_run(is_split=True),
        lambda: sequential_run(is_split=False),
    ),
}
