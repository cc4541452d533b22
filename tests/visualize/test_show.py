"""``flex.show()``: the modules, the hooks that sit there, and what they cost."""

import contextlib
import functools
import io
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import models
import pipelines
from flex_model import FlexModel, HookFunction, Select, editing
from flex_model.errors import HookError
from flex_model.visualize.model_map import describe_function


def double(module, x, save_ctx, modules):
    return x * 2


class Shift:
    """As the ready edits: it says itself what it does."""

    def __init__(self, by):
        self.by = by

    def __call__(self, module, x, save_ctx, modules):
        return x + self.by

    def __repr__(self):
        return f"Shift(\n  by={self.by})"


class Broken(Shift):
    def __repr__(self):
        raise ValueError("no picture")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (double, r"double \(test_show\.py:\d+\)"),
        (lambda m, x, c, d: x, r".*<lambda> \(test_show\.py:\d+\)"),
        (Shift(3), r"Shift\( by=3\)"),
        (Broken(3), r"Broken"),
        (Shift("x" * 500), r"Shift\( by=x+\.\.\."),
        (functools.partial(double, None), r"functools\.partial\(<function double>, None\)"),
    ],
)
def test_functions_describe_themselves_in_a_line(function, expected):
    told = describe_function(function)
    assert re.fullmatch(expected, told) and len(told) <= 200


def shown_by(flex, *inputs, **arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        flex.show(*inputs, **arguments)
    return out.getvalue()


def test_before_a_run_there_are_modules_and_hooks():
    with FlexModel(models.mlp(), {}) as flex:
        flex.create_hook_group("probes", "fc", editing_function=Shift(1))
        flex.register_hook(HookFunction("out.weight", output_name="grad"))
        flex.register_forward_pre_hook(HookFunction(""))
        shown = shown_by(flex).splitlines()
    assert shown[0] == "MLP   (1 process)"
    assert shown[1] == "|   * forward-pre; read-only; not run yet"
    edit = "* forward; edits: Shift( by=1); groups: probes; not run yet"
    assert shown[3:5] == ["|-- fc1  Linear", f"|       {edit}"]
    assert shown[-2:] == ["`-- out  Linear", "        * gradient of weight; read-only; not run yet"]


def test_ready_edits_and_selections_show_themselves():
    with FlexModel(models.mlp(), {}) as flex:
        ready = editing.zero(units=[1, 2])
        flex.register_forward_hook(HookFunction("fc1", editing_function=ready))
        flex.register_forward_hook(HookFunction("act", select=Select(units=[3])))
        shown = shown_by(flex)
    assert f"* forward; edits: {ready!r}; not run yet" in shown and "units" in repr(ready)
    assert f"* forward; read-only; {Select(units=[3])!r}; not run yet" in shown


def test_a_rank_that_is_not_there_is_an_error():
    for rank in (1, -1, "0"):
        with pytest.raises(ValueError, match="rank must be one of the model's, 0 to 0, or None"):
            FlexModel(models.mlp()).show(rank=rank)


def test_layers_with_the_same_hooks_are_folded():
    model = nn.Sequential(*(models.block() for _ in range(6)))
    with FlexModel(model, {}) as flex:
        flex.create_hook_group("mlps", re.compile(r"^[0-3]\.mlp$"), editing_function=double)
        folded = shown_by(flex).splitlines()
        unfolded = shown_by(flex, show_all=True).splitlines()
    assert [line for line in folded if "Block" in line] == [
        "|-- 0 to 3  Block",
        "`-- 4 to 5  Block",
    ]
    assert sum("double" in line for line in folded) == 1
    assert sum("Block" in line for line in unfolded) == 6
    assert sum("double" in line for line in unfolded) == 4


def test_wrappers_are_seen_through():
    model = torch.compile(models.mlp(), backend="eager")
    with FlexModel(model, {}) as flex:
        flex.register_forward_hook(HookFunction("fc1"))
        shown = shown_by(flex).splitlines()
    assert shown[3].startswith("|       * forward; read-only") and "fc1" in shown[2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1, None])
def test_costs_are_those_of_explain_and_one_rank_prints(rank):
    me, batch = dist.get_rank(), models.random(4, 6)
    parallelism = models.TWO_RANKS["tp"]
    with FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("act", editing_function=double))
        flex.register_forward_hook(HookFunction("fc1"))
        flex(batch)
        told = flex.explain()
        # Local: it may be called on one rank only.
        shown = shown_by(flex, rank=rank) if me == 0 or rank != 0 else ""
    if rank not in (me, None):
        assert shown == ""
        return
    assert "MLP   (pp 1 x dp 1 x tp 2)" in shown
    act, fc1, shared = told
    assert "float64 4 x 8 [dp R, tp S(1)]; shared_memory, 1 header, 1 collective, 256 B" in shown
    assert (act.headers, act.collectives, act.bytes_moved) == (1, 1, 256)
    assert f"* forward; read-only; float64 4 x 8 [dp R, tp S(1)]; {fc1.transport}, 128 B" in shown
    assert fc1.bytes_moved == 128
    assert f"* all hooks share: {shared.headers} headers, 1 collective, 0 B\n" in shown
    assert (shared.collectives, shared.bytes_moved) == (1, 0)
    assert f"costs are those of rank {me} in the last run" in shown


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["tp", "dtensor", "ddp"])
def test_with_inputs_all_modules_tell_their_tensors(kind):
    parallelism, batch = models.TWO_RANKS[kind], models.random(4, 6)
    rows = parallelism.my_rows(batch)
    with FlexModel(parallelism.shard(models.mlp()), {}, **parallelism.sizes) as flex:
        flex.register_forward_hook(HookFunction("fc2", editing_function=double))
        assert "float64" not in shown_by(flex, rank=None)
        before, told = flex(rows), str(flex.explain())
        shown = shown_by(flex, rows, rank=None)
        assert str(flex.explain()) == told and torch.equal(flex(rows), before)
    split = "dp S(0), tp R" if kind == "ddp" else "dp R, tp S(1)"
    whole = "dp S(0), tp R" if kind == "ddp" else "dp R, tp R"
    assert f"act  Tanh  float64 4 x 8 [{split}]" in shown
    assert f"inp  Linear  float64 4 x 6 [{whole}]" in shown
    assert re.search(rf"fc2  \w+  float64 4 x 8 \[{re.escape(split)}\] -> float64 4 x 6", shown)
    assert "edits: double" in shown


def test_inputs_are_for_models_that_run_on_shapes():
    class Asking(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    with FlexModel(Asking(), {}) as flex:
        with pytest.raises(HookError, match=r"show: the model can't be run on shapes"):
            flex.show(torch.ones(2))
        with flex.active(), pytest.raises(RuntimeError, match="show: a run of this FlexModel"):
            flex.show(torch.ones(2))
    with pytest.raises(RuntimeError, match="was restored"):
        flex.show()


@pytest.mark.ranks(2)
def test_a_pipeline_shows_all_stages():
    me = dist.get_rank()
    schedule = pipelines.make_schedule(Schedule1F1B, pipelines.make_mlp(), loss_fn=nn.MSELoss())
    with FlexModel(schedule, {}) as flex:
        for name in ("layers.1.fc1", "layers.6.fc1"):
            flex.register_forward_hook(HookFunction(name, editing_function=double))
        flex.register_hook(HookFunction("head.weight"))
        flex(models.random(8, 8, dtype=torch.float32), target=torch.zeros(8, 3))
        shown = shown_by(flex, rank=me, show_all=True)
        with pytest.raises(RuntimeError, match="show with inputs is for a model"):
            flex.show(torch.ones(8, 8))
    assert "Schedule1F1B   (pp 2 x dp 1 x tp 1)" in shown
    for name, stage in (("emb", 0), ("0", 0), ("3", 0), ("4", 1), ("7", 1), ("head", 1)):
        assert re.search(rf"-- {name}  \w+  \(stage {stage}\)", shown)
    there = f"; rank {1 - me} has its cost"
    lines = [line for line in shown.splitlines() if "edits: double" in line]
    if me == 0:  # where the records are, of the whole batch
        assert lines[0].endswith("float32 8 x 16; moved nothing")
        assert lines[1].endswith("float32 8 x 16" + there)
    else:
        assert lines[0].endswith(there)
        assert lines[1].endswith("known from its record, on rank 0; moved nothing")
