"""Advice about dry runs, `inspect`, rules and plots."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flex_model
import models
from advice.triggers import BATCH, in_a_folder, wrapped
from flex_model import FlexModel, HookFunction
from flex_model.inspection import offline
from flex_model.inspection.offline import run_on_shapes
from flex_model.layouts import register_rule
from flex_model.layouts.propagation import rules
from flex_model.visualize import plot_patching


def findings(edit, **settings):
    """A dry run, whose findings are raised; then the run itself."""
    hook = HookFunction("fc1", editing_function=lambda *args: edit(hook, *args), **settings)
    flex = wrapped(hook)
    if found := flex.dry_run(BATCH).findings:
        raise RuntimeError("; ".join(finding.message for finding in found))
    flex(BATCH).sum().backward()
    return flex


def overwrites(copies):
    def edit(hook, module, full, save_ctx, modules):
        found = full.exp()
        found = found.clone() if copies else found
        found += 1
        return found

    return edit


class Hidden:
    """A place from which a dry run can't take a tensor again."""

    __slots__ = ("tensor",)


def keeps(kept, empties):
    """Run the model after a dry run whose tensor a function of the user's kept."""

    def edit(module, full, save_ctx, modules):
        kept.append(full * 2)
        return kept[0]

    flex = wrapped(HookFunction("fc1", editing_function=edit))
    flex.dry_run(BATCH)
    if empties:
        kept.clear()
    flex(BATCH)


# ---- inspect -------------------------------------------------------------------------------------


class AsksForValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def asks_for_values():
    return AsksForValues().double()


def inspected(name="models:mlp", shape=(4, 6), dp=1):
    inputs = None if shape is None else [(shape, "float64")]
    return run_on_shapes(name, tp=1, dp=dp, inputs=inputs).tree()


def costs(hooks="fc1 edit"):
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write(hooks)
        file.flush()
        lines = offline.read(file.name)
    run = run_on_shapes("models:mlp", 1, 2, [((4, 6), "float64")])
    return offline.predict(run, lines, "all")


def of_one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inspected()
    finally:
        dist.destroy_process_group()


def run_for_real():
    flex = FlexModel(asks_for_values(), {})
    flex.register_forward_hook(HookFunction("fc"))
    flex(BATCH)
    assert "4 x 6" in str(flex.layouts())


# ---- Rules and plots -----------------------------------------------------------------------------


def rule(op="flex_model_advice::scale", number=1, **settings):
    try:
        for _ in range(number):
            register_rule(op, lambda operation: operation["x"].placement, **settings)
    finally:
        rules.RULES.pop("flex_model_advice::scale", None)


def plot(values):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    plot_patching(values)
    pyplot.close("all")


HOLES = torch.tensor([[1.0, torch.nan]])


def in_a_run(edit):
    """A run whose editing function records one of the same FlexModel."""
    flex = FlexModel(models.mlp())
    flex.register_forward_hook(HookFunction("fc1", editing_function=lambda *_: edit(flex)))
    flex(BATCH)


@in_a_folder
def recorded(folder, others=False, inside=False, finishes=True):
    if others:
        (folder / "mine.txt").write_text("")
    flex = wrapped()
    if inside:
        in_a_run(lambda flex: flex.fingerprint(folder / "a", BATCH))
    if finishes:
        flex.fingerprint(folder, BATCH)
    flex_model.compare(folder, folder)


@in_a_folder
def compared(folder, own=False, live=False, inputs=(), box=None):
    flex = FlexModel(Boxed())
    flex.fingerprint(folder, box or BATCH, tensors=True)
    if inputs:
        flex.verify(folder, *inputs)
    else:
        flex_model.compare(folder, flex if live else folder, own=own)


@in_a_folder
def renamed(folder, names=None):
    for name, model in (("a", models.mlp()), ("b", nn.Sequential(models.mlp()))):
        FlexModel(model).fingerprint(folder / name, BATCH)
    assert flex_model.compare(folder / "a", folder / "b", names).is_equal


class Boxed(nn.Module):
    def forward(self, box):
        return getattr(box, "rows", box) * 2


class Box:
    rows = BATCH


ROWS = {
    "has other files; give a folder of its own": (
        lambda: recorded(others=True),
        lambda: recorded(),
    ),
    "interrupted; run flex.fingerprint({}, ...) again": (
        lambda: recorded(finishes=False),
        lambda: recorded(),
    ),
    "fingerprint: a run of this FlexModel is under way; call it afterwards": (
        lambda: recorded(inside=True),
        lambda: recorded(),
    ),
    "no site of A but the input is in B; give names=": (
        lambda: renamed({"": "other"}),
        lambda: renamed({"": "0"}),
    ),
    "own=True feeds A's inputs to B's modules; give B as a FlexModel": (
        lambda: compared(own=True),
        lambda: compared(own=True, live=True),
    ),
    "give them: flex.verify(folder, *inputs)": (
        lambda: compared(live=True, box=Box()),
        lambda: compared(inputs=[Box()], box=Box()),
    ),
    "its backward raises: {}; write to a clone(), not in place": (
        lambda: findings(overwrites(copies=False)),
        lambda: findings(overwrites(copies=True)),
    ),
    "delete what it keeps after a dry run, or keep it": (
        lambda: keeps([], empties=False),
        lambda: keeps([], empties=True),
    ),
    "call it in a single process": (of_one_rank, inspected),
    "give --input, as 4,128": (lambda: inspected(shape=None), inspected),
    "give multiples of": (lambda: inspected(dp=3), lambda: inspected(dp=3, shape=(6, 6))),
    "run without values ({}: {}){}; give --input for each tensor that it needs": (
        lambda: inspected("advice.inspection:asks_for_values"),
        run_for_real,
    ),
    "write a line as 'model.layers.*.mlp edit'": (lambda: costs("# none"), costs),
    "give a module's name, read or edit, and one of": (
        lambda: costs("act read\nfc1 look"),
        lambda: costs("act read\nfc1 read forward_pre"),
    ),
    "correct the name (inspect without --hooks shows all)": (
        lambda: costs("fc7 edit"),
        lambda: costs("fc? edit"),
    ),
    "pass replace=True to use this one": (
        lambda: rule(number=2),
        lambda: rule(number=2, replace=True),
    ),
    'example: register_rule("mylib::scale", rule)': (lambda: rule(op=3), rule),
    "give finite numbers, or fill missing values with 0": (
        lambda: plot(HOLES),
        lambda: plot(HOLES.nan_to_num()),
    ),
}
