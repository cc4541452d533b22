"""Units of experts: records and edits, against experts written by hand, row by row."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close

from flex_model import FlexModel, HookFunction, Select
from mixtures import BLOCK, FAMILIES, NUM_EXPERTS, TOKENS, make, sharded

pytest.importorskip("transformers")

EXPERTS = f"{BLOCK}.experts"


class ByHand:
    """Experts of one process: what they made in the last call, with edits of units and weights."""

    def __init__(self, experts, edit=lambda units, indices: units):
        self.experts, self.edit = experts, edit
        experts.forward = self

    def __call__(self, hidden, indices, weights):
        experts, k = self.experts, indices.shape[1]
        flip = (lambda one: one) if experts.is_transposed else (lambda one: one.transpose(1, 2))
        of_slot = indices.flatten()

        def linear(rows, name):
            made = torch.bmm(rows[:, None], flip(getattr(experts, name))[of_slot])[:, 0]
            return made + getattr(experts, f"{name}_bias")[of_slot] if experts.has_bias else made

        both = linear(hidden.repeat_interleave(k, 0), "gate_up_proj")
        if experts.has_bias:  # gpt-oss
            gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
            units = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            units = F.silu(both.chunk(2, 1)[0]) * both.chunk(2, 1)[1]
        self.indices, self.weights, self.units = indices, weights, units.view(-1, k, units.shape[1])
        self.edited = self.edit(self.units, indices)
        for one in (self.edited, self.weights):
            one.retain_grad()
        self.outputs = linear(self.edited.flatten(0, 1), "down_proj").view(-1, k, hidden.shape[1])
        return (self.outputs * weights[..., None]).sum(1)


def mixed(module, full, *_):
    """An edit that mixes rows of all ranks, and units of all."""
    return full + 0.5 * full.flip(0) - 0.25 * full.flip(-1)


def mixed_of(experts):
    def edit(units, indices):
        chosen = torch.isin(indices, torch.tensor(experts))
        return units.clone().masked_scatter(chosen[..., None], mixed(None, units[chosen]))

    return edit


EDITS = {
    "all": (None, lambda units, indices: mixed(None, units)),
    "two experts": (Select(experts=[5, 2]), mixed_of([2, 5])),
    "one expert": (Select(experts=-1), mixed_of([NUM_EXPERTS - 1])),
}


def gradients(model):
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {
        re.sub(r"^module\.", "", name): one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in grads.items()
    }


def run(model, tokens=TOKENS):
    logits = model(tokens).logits
    logits.square().mean().backward()
    return logits


def is_close(one, other, times=2e-5):
    assert_close(one, other, rtol=0, atol=times * float(other.detach().abs().max()))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_records(family, implementation):
    """The model's own numbers stay, bit for bit."""
    model, records = make(family), {}
    model.set_experts_implementation(implementation)
    reference = copy.deepcopy(model)
    hand = ByHand(reference.get_submodule(EXPERTS))
    run(reference)
    plain = model(TOKENS).logits
    flex = FlexModel(model, records)
    experts = flex.experts(EXPERTS)
    for name in ("units", "outputs", "indices", "weights"):
        flex.register_forward_hook(HookFunction(getattr(experts, name), output_name=name))
    select = Select(experts=[6, 1])
    for name in ("units", "weights", "indices"):
        hook = HookFunction(getattr(experts, name), output_name=f"{name} of two", select=select)
        flex.register_forward_hook(hook)
    assert_close(flex(TOKENS).logits, plain, rtol=0, atol=0)
    for name in ("units", "outputs", "indices", "weights"):
        (found,) = records[name]
        is_close(found, getattr(hand, name).detach())
        if f"{name} of two" in records:
            chosen = (hand.indices == 1) | (hand.indices == 6)
            assert torch.equal(records[f"{name} of two"][0], found[chosen])
    tokens = experts.tokens_of([6, 1], records["indices"][0])
    assert torch.equal(tokens, chosen.nonzero()[:, 0])
    for name in ("units", "weights"):
        hook = HookFunction(getattr(experts, name), output_name=f"{name}.grad")
        flex.register_full_backward_pre_hook(hook)
    is_close(run(flex), plain)
    is_close(records["units.grad"][0], hand.edited.grad)
    is_close(records["weights.grad"][0], hand.weights.grad)
    flex.restore()
    assert_close(model(TOKENS).logits, plain, rtol=0, atol=0)
    assert not hasattr(model.get_submodule(EXPERTS), "slots")


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_edits(family, edit):
    """Outputs and gradients; also where layers are recomputed, by when the edit is removed."""
    select, by_hand = EDITS[edit]
    reference = make(family)
    ByHand(reference.get_submodule(EXPERTS), by_hand)
    expected = run(reference)
    for use_reentrant in (None, False, True):
        model = make(family)
        if use_reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.train()
        flex = FlexModel(model, {})
        units = flex.experts(EXPERTS).units
        handle = flex.register_forward_hook(HookFunction(units, None, mixed, select=select))
        logits = flex(TOKENS).logits
        handle.remove()
        is_close(logits, expected)
        logits.square().mean().backward()
        for name, one in gradients(reference).items():
            is_close(gradients(model)[name], one)


KINDS = ["tp", "ep", "ep all_reduce", "ep of fsdp", "dp", "fsdp"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", ["all", "two experts"])
def test_edits_of_shards(kind, edit, tmp_path):
    model, (select, by_hand) = make("Mixtral"), EDITS[edit]
    reference = copy.deepcopy(model)
    hand = ByHand(reference.get_submodule(EXPERTS), by_hand)
    is_split = kind in ("dp", "fsdp", "ep of fsdp")
    flex = sharded(kind, model, tmp_path)
    experts = flex.experts(EXPERTS)
    flex.register_forward_hook(HookFunction(experts.units, None, mixed, select=select))
    flex.register_full_backward_pre_hook(
        HookFunction(experts.units, output_name="grad", select=Select(experts=3))
    )
    flex.register_forward_hook(HookFunction(experts.indices))
    for tokens in (TOKENS, TOKENS, TOKENS.flip(1), TOKENS):  # other routes: other numbers of rows
        reference.zero_grad()
        flex.zero_grad()
        expected = run(reference, tokens)
        logits = run(flex, tokens.chunk(2)[dist.get_rank()] if is_split else tokens)
        is_close(logits, expected.chunk(2)[dist.get_rank()] if is_split else expected)
        found = gradients(flex.module)
        for name, one in gradients(reference).items():
            is_close(found[name], one, 1e-4)
        if dist.get_rank() == 0:
            units, chosen = hand.units.detach(), slice(None)
            if select is not None:
                chosen = torch.isin(hand.indices, torch.tensor([2, 5]))
            is_close(flex.output_ptr[experts.units][0], units[chosen])
            assert torch.equal(flex.output_ptr[experts.indices][0], hand.indices)
            is_close(flex.output_ptr["grad"][0], hand.edited.grad[hand.indices == 3], 1e-4)
