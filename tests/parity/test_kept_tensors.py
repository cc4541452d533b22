"""What an editing function keeps is in the graph, as with torch's own hooks: its gradient is that
of what the model continues with, whether the function returns it or nothing.
"""

from argparse import Namespace

import pytest
import torch
from torch.testing import assert_close

import models
from flex_model import FlexModel, HookFunction
from tiers import ways

SITE = "act"
RETURNS = {"itself": lambda full: full, "nothing": lambda full: None}


def kept_and_retained(module, full, save_ctx, modules):
    full.retain_grad()
    save_ctx.kept = full
    return save_ctx.returned(full)


def hooked(module, full, save_ctx, modules):
    full.register_hook(lambda grad: save_ctx.gradients.append(grad.clone()) or grad * 2)
    return save_ctx.returned(full)


def gradients_of_twin(model, batch, edit, returned):
    found = Namespace(gradients=[], returned=returned)
    handle = model.get_submodule(SITE).register_forward_hook(
        lambda module, args, output: edit(module, output, found, {})
    )
    model(batch).sin().mean().backward()
    handle.remove()
    if edit is kept_and_retained:
        found.gradients.append(found.kept.grad)
    return found.gradients, {name: p.grad for name, p in model.named_parameters()}


EDITS = {"kept and retained": kept_and_retained, "hooked": hooked}


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("parallelism", ways("one", *models.TWO_RANKS))
def test_gradients_of_what_an_edit_keeps(parallelism, edit, returned):
    edit, returned = EDITS[edit], RETURNS[returned]
    model, batch = models.mlp(), models.random(4, 6)
    expected, of_weights = gradients_of_twin(model, batch, edit, returned)
    model.zero_grad()
    sharded = parallelism.shard(model)
    with FlexModel(sharded, {}, **parallelism.sizes) as flex:
        flex.save_ctx.gradients, flex.save_ctx.returned = [], returned
        flex.register_forward_hook(HookFunction(SITE, editing_function=edit))
        flex(parallelism.my_rows(batch)).sin().mean().backward()
        if edit is kept_and_retained:
            flex.save_ctx.gradients.append(flex.save_ctx.kept.grad)
        assert_close(flex.save_ctx.gradients, expected)
    assert_close(parallelism.full_gradients(model, sharded), of_weights)


@pytest.mark.parametrize("returned", RETURNS.values(), ids=RETURNS)
def test_gradients_by_tensors_of_two_modules(returned):
    """As captum takes them: ``autograd.grad`` by what several layers gave."""
    model, batch, names = models.mlp(), models.random(4, 6), ("inp", "fc2")

    def keep(module, full, save_ctx, modules):
        save_ctx.kept.append(full)
        return returned(full)

    twin, handles = Namespace(kept=[]), []
    for name in names:
        hook = lambda module, args, output: keep(module, output, twin, {})  # noqa: E731
        handles.append(model.get_submodule(name).register_forward_hook(hook))
    expected = torch.autograd.grad(model(batch).sin().mean(), twin.kept)
    for handle in handles:
        handle.remove()
    with FlexModel(model, {}) as flex:
        flex.save_ctx.kept = []
        for name in names:
            flex.register_forward_hook(HookFunction(name, None, keep))
        found = torch.autograd.grad(flex(batch).sin().mean(), flex.save_ctx.kept)
    assert_close(found, expected)
