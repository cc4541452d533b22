"""The state of one call of one hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from flex_model.hooks.evidence import Evidence
from flex_model.integrations.past_positions import Positions
from flex_model.layouts.follow import UNKNOWN, Pair

if TYPE_CHECKING:
    from flex_model.hooks.registration import Registration
    from flex_model.runs.run import Run

NOTHING = Evidence()


@dataclass(eq=False, slots=True)
class HookCall:
    """One call of one hook.

    Attributes:
        module: None for a parameter's gradient.
        is_replay: Whether it is a recomputation during backward (checkpointing).
        number: Counts the calls of this hook in one forward of the wrapped model; None in a replay,
            whose calls may come in another order.
        evidence: The evidence of the tensor's placements (of a backward hook: the activation's).
        stated: Placements that a DTensor states, along the axes that its mesh has.
        positions: Those of the forward in its sequence, if the hook counts them.
    """

    registration: Registration
    module: nn.Module | None
    run: Run
    is_replay: bool = False
    number: int | None = 0
    evidence: Evidence = NOTHING
    stated: Pair = UNKNOWN
    positions: Positions | None = None

    @property
    def records(self) -> bool:
        """Whether the tensor is recorded."""
        return self.registration.hook_function.record and not self.is_replay

    @property
    def of_forward(self) -> tuple[int | None, int | None]:
        """Its number, and that of the forward's positions, if the hook counts them: a tensor of
        other ones has other positions, of the same shape. A replay has neither.
        """
        return self.number, self.positions and self.positions.length

    @property
    def num_past(self) -> int:
        """The number of positions before the forward, if the hook counts them; else 0."""
        return 0 if self.positions is None else self.positions.past

    def describe(self) -> str:
        return self.registration.description
