"""What is known of the tensors that hooks meet in a forward."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flex_model.hooks.registration import Registration
from flex_model.layouts.cache import ForwardLayouts, Key, Place
from flex_model.layouts.follow import UNKNOWN, Follower, Pair


@dataclass(eq=False)
class Evidence:
    """What is known of how one tensor of a hook is placed.

    Attributes:
        key: Of its forward; None outside of forwards of the wrapped model.
        pair: Placements along dp and tp; of a followed forward once the ranks have compared it.
        gradient: Those of its gradient, where they are known without its backward.
        obstacles: By axis that is not known: the operation at which that began.
        follower: Of its forward, as long as that goes on.
        graph: Of its forward, if that was followed: it follows the backward too.
        value: What stands for the tensor in it; ``edited`` for what a hook put in its place.
        is_passing: Whether a gradient was settled by a part of its backward.
    """

    key: int | None = None
    pair: Pair = UNKNOWN
    gradient: Pair = UNKNOWN
    follower: Follower | None = None
    graph: Follower | None = None
    place: Place | None = None
    value: Any = None
    edited: Any = None
    needs_gradient: bool = False
    is_passing: bool = False
    obstacles: dict[str, str] = field(default_factory=dict)

    def move_to(self, edge: Tensor) -> None:
        """The gradient that counts is that of this tensor, which goes on in its place. Local."""
        if self.graph is not None:
            self.value = self.graph.value(edge)

    @property
    def current(self) -> Any:
        """What stands for the tensor that the model goes on with."""
        return self.value if self.edited is None else self.edited

    @property
    def placements(self) -> Pair:
        return self.pair if self.follower is None else self.follower.placements(self.value)


@dataclass(eq=False)
class Forward:
    """The forward of the wrapped model that goes on.

    Attributes:
        depth: Of the wrapped module's calls inside itself.
        states: Of its arguments those that are objects which it may change, such as caches.
        numbers: By registration index: how often the hook was called.
        layouts: Of a forward that is not followed: those of the one that was.
        seen: Of a followed one: what hooks met, for the layouts to remember.
        parameters: Hooks on gradients of parameters.
    """

    depth: int = 0
    states: list[Any] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    key: Key | None = None
    follower: Follower | None = None
    is_over: bool = True
    layouts: ForwardLayouts | None = None
    seen: dict[Place, tuple[Evidence, tuple[int, ...]]] = field(default_factory=dict)
    stack: ExitStack | None = None
    parameters: list[Registration] = field(default_factory=list)
