"""The parity table: one cell is {parallelism} x {hook kind} x {site} x {edit}.

In each cell a model runs twice in the same process: unsharded under torch's own hooks (the
oracle), and sharded under FlexModel. What the hook saw, the output, every gradient and the
gradients of the trainable module must be equal.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
import oracle
from flex_model import FlexModel, HookFunction
from oracle import register
from shared_edits import mixing_features, mixing_rows

SITES = {
    "forward": ("inp", "fc1", "act", "fc2"),
    "forward_pre": ("fc1", "act", "fc2"),
    "full_backward": ("fc1", "act", "fc2"),
    "full_backward_pre": ("fc1", "act", "fc2"),
    "parameter": ("inp.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"),
}


# ---- Edits: what a user writes ------------------------------------------------------------------


def elementwise(module, full, save_ctx, modules):
    return (full * 2).tanh()


def in_place(module, full, save_ctx, modules):
    """As in torch's own hooks, what is done to the tensor counts without being returned."""
    full.mul_(1.5)
    full[..., 0] = 0


def in_place_and_return(module, full, save_ctx, modules):
    return full.add_(0.5)


def trainable(module, full, save_ctx, modules):
    return full + modules["probe"](full)


EDITS = {
    "read": None,
    "elementwise": elementwise,
    "mixing features": mixing_features,
    "mixing rows": mixing_rows,
    "in place": in_place,
    "in place and return": in_place_and_return,
    "trainable": trainable,
}


# ---- The two runs of a cell ----------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One hook, and what its editing function does."""

    kind: str
    site: str
    edit: Callable | None = None
    leaf: int = 0
    probe_width: int | None = None

    @property
    def probe(self):
        """A fresh trainable module, the same each time; None for an edit that uses none."""
        width = self.probe_width
        return width and models.seeded(nn.Linear, width, width, seed=5).double()


@dataclass
class Run:
    """All that must be equal."""

    output: torch.Tensor | None = None
    records: list = field(default_factory=list)
    gradients: dict = field(default_factory=dict)
    probe_gradients: dict = field(default_factory=dict)


def mean_loss(output):
    return output.sin().mean()


def unsharded_run(model, batch, cell, loss=mean_loss):
    """The oracle: torch's own hook on the unsharded model."""
    run = Run()
    modules = nn.ModuleDict({"probe": cell.probe} if cell.probe_width else {})
    model.zero_grad()
    with torch_hook(model, cell, modules, run.records):
        run.output = model(batch)
        loss(run.output).backward()
    run.gradients = {name: p.grad for name, p in model.named_parameters()}
    run.probe_gradients = {name: p.grad for name, p in modules.named_parameters()}
    return run


def torch_hook(model, cell, modules, records):
    """The hook of a cell, with its trainable modules, and what it sees."""

    def see(value):
        record, edited = oracle.apply(value, cell.edit, modules)
        records.append(record)
        return edited

    return oracle.torch_hook(model, cell, see)


def sharded_run(parallelism, model, batch, cell, loss=mean_loss, **settings):
    """The same under FlexModel on this rank's shards; gradients come back in full. Collective."""
    run, records = Run(), {}
    sharded = parallelism.shard(model)
    hook_function = HookFunction(cell.site, editing_function=cell.edit, unpack_idx=cell.leaf)
    with FlexModel(sharded, records, **parallelism.sizes, **settings) as flex:
        if cell.probe_width:
            flex.register_trainable_module("probe", cell.probe)
        register(flex, cell.kind, hook_function)
        run.output = flex(parallelism.my_rows(batch))
        loss(run.output).backward()
        run.probe_gradients = {
            name: p.grad for name, p in flex.trainable_modules.named_parameters()
        }
    run.records = records.get(cell.site, [])
    run.gradients = parallelism.full_gradients(model, sharded)
    return run


def table_cell(model, batch, kind, site, edit_name):
    """The cell of the MLP's table."""
    full = unsharded_run(model, batch, Cell(kind, site)).records[0]
    width = full.shape[-1] if edit_name == "trainable" else None
    return Cell(kind, site, EDITS[edit_name], probe_width=width)


def differences(parallelism, model, batch, cell, loss=mean_loss, **settings):
    """Run one cell both ways; return what differs on this rank, as lines of text.

    ``loss`` is what this rank computes on its rows: the mean, or with its weight.
    """
    expected = unsharded_run(model, batch, cell)
    got = sharded_run(parallelism, model, batch, cell, loss, **settings)
    return list(compare(parallelism, expected, got, cell))


def compare(parallelism, expected, got, cell):
    """Yield a line for each thing that is not equal. No collective: ranks may differ here."""
    on_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    pairs = {
        "records": (got.records, expected.records if on_rank_0 else []),
        "output": (got.output, parallelism.my_rows(expected.output)),
        "gradients": (got.gradients, expected.gradients),
        "the trainable module's gradients": (got.probe_gradients, expected.probe_gradients),
    }
    for name, (ours, theirs) in pairs.items():
        try:
            assert_close(ours, theirs)
        except (AssertionError, RuntimeError) as error:  # RuntimeError: a DTensor
            edit = cell.edit and cell.edit.__name__
            text = " ".join(str(error).split())
            yield f"{cell.kind} hook on {cell.site!r}, edit {edit}: {name}: {text}"


def check_cells(parallelism, kind, num_sites=None, edits=EDITS, hidden=8, rows=4, **settings):
    """All cells of the MLP's table of this kind, at its first sites."""
    wrong = []
    for site in SITES[kind][:num_sites]:
        for edit in edits:
            model, batch = models.mlp(hidden=hidden), models.random(rows, 6)
            cell = table_cell(model, batch, kind, site, edit)
            try:
                wrong += differences(parallelism, model, batch, cell, **settings)
            except (NotImplementedError, ValueError) as error:
                # A parameter's averaged gradient, or an error that names it; never a local one.
                if not (kind == "parameter" and parallelism.dp > 1 and site in str(error)):
                    raise
    assert not wrong, "\n".join(wrong)
