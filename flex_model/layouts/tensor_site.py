"""The place of a tensor in the model, for messages, and what is stated about a parameter there."""

from __future__ import annotations

from dataclasses import dataclass

from flex_model.distributed.placement import Shape, Shard
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.layouts.placement_encoding import UNKNOWN, Pair

Share = tuple[Shard, Shape]


@dataclass(frozen=True)
class ParameterSources:
    """The layout that is stated for a parameter, and so for its gradient.

    Attributes:
        placements: Along dp and tp.
        share: The shard along tp that its layer's sizes imply, and these sizes; used if the ranks'
            shares make up the sizes.
        sizes: Of the full parameter, as the user states them.
    """

    placements: Pair = UNKNOWN
    share: Share | None = None
    sizes: ExpectedShape = None


@dataclass(frozen=True)
class Site:
    """The place of a tensor in the model, for messages.

    Attributes:
        name: Such as ``forward hook on 'layers.0'``.
        module: The clean name of the module or parameter, for the call that states its layout.
        kind: The ``kind`` for ``annotate_layout``; empty if that can't be used.
        index: The number of the tensor among the module's, or its name.
        parameter: For a parameter or its gradient: what is stated about it.
        is_gradient: Whether the tensor is the gradient of an activation.
    """

    name: str
    module: str = ""
    kind: str = ""
    index: int | str = 0
    parameter: ParameterSources = ParameterSources()
    is_gradient: bool = False
