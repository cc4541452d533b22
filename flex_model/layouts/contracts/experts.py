"""The contract of experts: each row of the result depends on the same row of every input.

This holds for ``experts(hidden, indices, weights)`` of Hugging Face, however they are computed and
on whichever ranks each expert is, and for the blocks of Megatron-core and torchtitan, from their
first input. What runs inside is followed beside it: it sorts the rows by expert, so along dp their
places are not known there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from flex_model.distributed.placement import Shard
from flex_model.integrations import transformers_private
from flex_model.layouts import logged
from flex_model.layouts.propagation.operation import REPLICATED

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

# A loop of its own over the experts that any row hits. NLLB-MoE's, too, but which rows its router
# drops depends on the others.
_SWITCHES = (
    "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts"
)
_MEGATRONS = "megatron.core.transformer.moe.moe_layer.MoELayer"
_BLOCKS = (_MEGATRONS, "torchtitan.models.common.moe.MoE", "torchtitan.models.moe.moe.MoE")
# What `flex.experts` makes of experts, or selects: all that it passes on has rows of tokens.
_PARTS = "flex_model.integrations.expert_units.RowByRow"
# With these settings of Megatron's a full expert drops rows, and which ones depends on the others.
_CAPACITIES = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")


def num_inputs(module: nn.Module) -> int:
    """Return how many inputs of a module have the rows of its result; 0: it has no contract."""
    names = _names(module)
    if transformers_private.is_experts(module) or names & {_PARTS, _SWITCHES}:
        return 3
    return 0 if names.isdisjoint(_BLOCKS) else 1


def is_opaque(module: nn.Module) -> bool:
    """Whether nothing is followed inside: it communicates, and completes each row on all ranks."""
    return transformers_private.is_expert_parallel(module) or _PARTS in _names(module)


def returns_own_rows(module: nn.Module) -> bool:
    """Whether, along tp too, each rank gets the whole result of the rows that it gave: Megatron's
    blocks, whichever ranks have which part of which expert. Torchtitan's return partial sums.
    """
    return _MEGATRONS in _names(module)


def _names(module: nn.Module) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}


def refusal(module: nn.Module) -> str:
    """Return the setting by which rows depend on others; empty if there is none."""
    config = getattr(module, "config", None)
    return next((name for name in _CAPACITIES if getattr(config, name, None)), "")


def follow_experts(proofs: AxisProofs, entries: tuple[logged.Experts, ...]) -> None:
    """Note the placement of the result of a call of experts: as it was followed inside, else that
    of all its inputs, if they are replicated, or split along dp by rows. Along tp this holds for
    Megatron's blocks; and for replicated inputs where nothing inside is followed, since expert
    parallelism completes each row on all ranks.
    """
    value, before, inputs, _, why_not, is_opaque, are_own = entries[0]
    are_own = are_own or proofs.axis == "dp"
    proofs.shapes[value] = tuple(entry.shape for entry in entries)
    followed = proofs.placement(before) if all(one.before == before for one in entries) else None
    given = {proofs.placement(one) for one in inputs if all(e.inputs == inputs for e in entries)}
    place = given.pop() if len(given) == 1 else None
    is_kept = (are_own or is_opaque) and place == REPLICATED
    if are_own and isinstance(place, Shard):
        is_kept = place.dim < max(1, len(proofs.shapes[value][0]) - 1)
    text = f"experts with {why_not}, so that rows depend on each other" if why_not else "experts"
    proofs.note_step(value, text, tuple(one for one in inputs if isinstance(one, int)))
    proofs.set_placement(value, place if followed is None and is_kept and not why_not else followed)
    proofs.gradients.note_replaced([entry.before for entry in entries], value)
