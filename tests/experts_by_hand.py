"""Experts of one process written by hand, slot by slot, with modules where hooks can be."""

import torch
import torch.nn.functional as F
from torch import nn


class ByHand:
    """Experts of one process: what they made in the last call, with edits of units and weights.

    Below the experts are modules of the names that ``flex.experts`` gives: ``slots.units`` and so
    on; ``slots.units.of_1_3`` passes on the rows of ``chosen`` experts, here 1 and 3.
    """

    def __init__(self, experts, edit=lambda units, indices: units, chosen=()):
        self.experts, self.edit, self.chosen = experts, edit, chosen
        sites = ("units", "outputs", "weights")
        self.slots = nn.ModuleDict({name: nn.Identity() for name in sites})
        self.rows = nn.Identity()
        if chosen:
            self.slots["units"].add_module("_".join(["of", *map(str, chosen)]), self.rows)

    @classmethod
    def put_in(cls, experts, **settings):
        """Replace the forward of experts; its modules are their children."""
        hand = experts.forward = cls(experts, **settings)
        experts.slots = hand.slots
        return hand

    def __call__(self, hidden, indices, weights):
        experts, k = self.experts, indices.shape[1]
        flip = (lambda one: one) if experts.is_transposed else (lambda one: one.transpose(1, 2))
        of_slot, slots = indices.flatten(), self.slots

        def linear(rows, name):
            made = torch.bmm(rows[:, None], flip(getattr(experts, name))[of_slot])[:, 0]
            return made + getattr(experts, f"{name}_bias")[of_slot] if experts.has_bias else made

        both = linear(hidden.repeat_interleave(k, 0), "gate_up_proj")
        if experts.has_bias:  # gpt-oss
            gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
            units = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            units = F.silu(both.chunk(2, 1)[0]) * both.chunk(2, 1)[1]
        self.indices, self.weights = indices, slots["weights"](weights)
        self.units = slots["units"](units.view(-1, k, units.shape[1]))
        self.edited = self.edit(self.units, indices)
        if self.chosen:
            at = torch.isin(indices, torch.tensor(self.chosen))
            rows = self.rows(self.edited[at])
            self.edited = self.edited.masked_scatter(at[..., None], rows)
        for one in (self.edited, self.weights):
            if one.requires_grad:
                one.retain_grad()
        made = linear(self.edited.flatten(0, 1), "down_proj").view(-1, k, hidden.shape[1])
        self.outputs = slots["outputs"](made)
        return (self.outputs * self.weights[..., None]).sum(1)
