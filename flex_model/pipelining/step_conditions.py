"""Describes what the path of a step's micro-batches depends on, other than values of tensors: the
inputs, and the stages.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from flex_model.distributed.header import site_hash
from flex_model.layouts.arguments import describe
from flex_model.layouts.attributes import Attributes
from flex_model.layouts.cache import Conditions
from flex_model.layouts.kept import KeptTensors
from flex_model.layouts.sources import Constants


class StepConditions:
    """Describes it for one rank's stages. Local: ranks describe it differently."""

    def __init__(self, root: nn.Module) -> None:
        self._conditions = Conditions(root)
        self._attributes = Attributes(root, Constants(root), KeptTensors())

    def digest(self) -> int:
        """Return a hash of the modules, their hooks and attributes, and of torch's modes."""
        form, sizes = self._conditions.form((), {}, 0, self._attributes)
        return site_hash(form, *sizes)

    def note_attributes(self) -> None:
        """Find the attributes in which the modules have kept tensors, after a step."""
        self._attributes.scan()


def digest_of_inputs(args: Any, kwargs: dict[str, Any]) -> int:
    """Return a hash of the inputs, except for the values of tensors."""
    parts: list[Any] = []
    sizes: list[int] = []
    describe((args, kwargs), parts, sizes)
    return site_hash(*parts, *sizes)
