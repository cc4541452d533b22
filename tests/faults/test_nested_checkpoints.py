"""Checkpointed blocks inside checkpointed blocks: an edit is replayed as often as its site is
computed, recorded once, and no bit of a gradient differs from the run without checkpointing.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import models
from flex_model import FlexModel, HookError, HookFunction

BATCH = models.random(4, 6)
# How the outer and the inner block are recomputed; None: they are not.
NESTED = [(outer, inner) for outer in (True, False) for inner in (None, True, False)]


def block(module, x, use_reentrant):
    if use_reentrant is None:
        return module(x)
    with warnings.catch_warnings():  # inside another reentrant one no input needs a gradient
        warnings.simplefilter("ignore")
        return checkpoint(module, x, use_reentrant=use_reentrant)


class Inner(nn.Module):
    columns, rows = ("fc1",), ("fc2",)

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Outer(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(6, 6), Inner(), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.after(block(self.inner, self.before(x), self.use_reentrant).sin())


class Nested(nn.Module):
    columns, rows = ("outer.inner.fc1",), ("outer.inner.fc2",)

    def __init__(self, outer=None, inner=None):
        super().__init__()
        self.first, self.outer, self.last = nn.Linear(6, 6), Outer(inner), nn.Linear(6, 6)
        self.use_reentrant = outer

    def forward(self, x):
        return self.last(block(self.outer, self.first(x), self.use_reentrant))


def run(parallelism, *nested, **settings):
    """Records, output, gradients, and how often an edit was called."""
    records, calls = {}, []

    def edit(module, full, save_ctx, modules):
        calls.append(1)
        return full.sin() * torch.randn_like(full)

    model = models.seeded(Nested, *nested).double()
    flex = FlexModel(parallelism.shard(model), records, **parallelism.sizes, **settings, timeout=30)
    split = (None, 8) if parallelism.by_hand else None
    flex.register_forward_hook(HookFunction("outer.before", editing_function=edit))
    flex.register_forward_hook(HookFunction("outer.inner.fc1", split, edit))
    flex.register_forward_hook(HookFunction("outer.inner.act", split))
    flex.register_forward_hook(HookFunction("outer.after", editing_function=edit))
    backward = HookFunction("outer.inner.fc2", split, output_name="grad")
    flex.register_full_backward_hook(backward)
    torch.manual_seed(3)
    outputs = []
    for step in range(2):
        output = flex(parallelism.my_rows(BATCH + step))
        output.square().sum().backward()
        outputs.append((output.detach(), {name: list(kept) for name, kept in records.items()}))
    gradients = {name: parameter.grad for name, parameter in flex.named_parameters()}
    flex.restore()
    return outputs, gradients, len(calls)


def check(parallelism, nested, **settings):
    outputs, gradients, calls = run(parallelism, *nested, **settings)
    expected_outputs, expected_gradients, expected_calls = run(parallelism, **settings)
    assert_close(outputs, expected_outputs, rtol=0, atol=0)
    assert_close(gradients, expected_gradients, rtol=0, atol=0)
    for _, records in outputs:
        assert all(len(kept) == 1 for kept in records.values())
    runs_edits = settings.get("edit_on") != "rank0" or dist.get_rank() == 0
    assert calls > expected_calls or not runs_edits, "nothing was recomputed"


@pytest.mark.parametrize("nested", NESTED, ids=str)
def test_nested_checkpoints(nested):
    check(models.ONE_RANK, nested)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "transport, edit_on", [("shared_memory", "all"), ("gloo", "all"), ("shared_memory", "rank0")]
)
@pytest.mark.parametrize("nested", NESTED, ids=str)
def test_nested_checkpoints_on_two_ranks(nested, transport, edit_on, monkeypatch):
    """What autograd saves of an edit on rank 0 is there alone: it must not begin a recomputation,
    nor count for its end.
    """
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    check(models.TWO_RANKS["tp"], nested, edit_on=edit_on)


def sums_aside(module, full, save_ctx, modules):
    save_ctx.total = full.exp().sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("site", ["outer", "outer.after", "outer.inner.fc2"])
def test_what_rank_0_computes_beside_the_model_is_not_computed_once_more_for_it(site):
    model = models.seeded(Nested, False).double()
    parallelism = models.TWO_RANKS["tp"]
    flex = FlexModel(parallelism.shard(model), edit_on="rank0", timeout=20, **parallelism.sizes)
    flex.register_forward_hook(HookFunction(site, editing_function=sums_aside))
    flex(BATCH).square().sum().backward()
    model.outer.use_reentrant = model.use_reentrant = None
    model(BATCH).square().sum().backward()
    gradients = parallelism.full_gradients(model, flex.module)
    assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})


def changes_what_is_saved(module, full, save_ctx, modules):
    edited = full.exp()
    return edited.mul_(2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit_on", ["all", "rank0"])
def test_a_change_in_place_of_what_is_saved_for_backward_is_an_error(edit_on):
    flex = models.replicas(
        FlexModel(models.mlp(), tensor_parallel_size=2, edit_on=edit_on, timeout=20)
    )
    flex.register_forward_hook(HookFunction("fc1", editing_function=changes_what_is_saved))
    output = flex(BATCH)
    with pytest.raises((RuntimeError, HookError), match=r"modified by an inplace|own backward"):
        output.sum().backward()
