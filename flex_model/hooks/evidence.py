"""The evidence of how the tensors of hooks are placed, collected during a forward."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from flex_model.distributed.padding import RankRows
from flex_model.hooks.registration import Registration
from flex_model.layouts.cache import ForwardLayouts, Key, Place
from flex_model.layouts.follow import UNKNOWN, Follower, Pair
from flex_model.layouts.obstacle import Obstacle


@dataclass(eq=False, slots=True)
class Evidence:
    """The evidence of how one tensor of a hook is placed.

    Attributes:
        key: The key of its forward; None outside of forwards of the wrapped model.
        pair: Placements along dp and tp; for a followed forward, after the ranks compared it.
        gradient: Placements of its gradient, after the forward; ``gradient_obstacles``: why others
            are not known, by axis.
        rows: The rows of each data-parallel rank; None where no input of its forward has some.
        obstacles: By axis without known placement: the operation where the proof fails.
        follower: The follower of its forward, while that runs.
        words: See `Follower.words`, of the module that is called.
        value: The follower's value for the tensor; ``edited``: that of a hook's replacement.
        is_frozen: Whether it has no gradient in this forward, but may have in a later one.
        is_ambiguous: Whether it is of one of several calls, which are placed differently.
    """

    key: int | None = None
    pair: Pair = UNKNOWN
    gradient: Pair = UNKNOWN
    follower: Follower | None = None
    value: Any = None
    words: tuple[str, ...] = ()
    edited: Any = None
    needs_gradient: bool = False
    is_frozen: bool = False
    is_ambiguous: bool = False
    rows: RankRows | None = None
    obstacles: dict[str, Obstacle] = field(default_factory=dict)
    gradient_obstacles: dict[str, str] = field(default_factory=dict)

    def settle(self) -> None:
        """Keep what the follower has proven, at the end of the forward. Local."""
        assert self.follower is not None
        self.note_obstacles()
        self.pair, self.follower = self.placements, None

    def note_obstacles(self) -> None:
        """Note the operations where proofs fail. Local."""
        assert self.follower is not None
        self.obstacles = self.follower.obstacles(self.value)

    def note_gradient(self, gradient: Pair, obstacles: dict[str, str]) -> None:
        """Note the placements of the gradient, and why others are not known."""
        self.gradient, self.gradient_obstacles = gradient, obstacles

    def note_edit(self, value: Any) -> None:
        """Note the follower's value for the tensor that replaces the hook's."""
        self.edited = value

    def move_to(self, edge: Tensor) -> None:
        """Infer the gradient of this tensor, which replaces the hooked one, from now on. Local."""
        if self.follower is not None:
            self.value = self.follower.recorder.value(edge)

    @property
    def current(self) -> Any:
        """The follower's value for the tensor that the model continues with."""
        return self.value if self.edited is None else self.edited

    @property
    def placements(self) -> Pair:
        return self.pair if self.follower is None else self.follower.placements(self.value)


class Part(NamedTuple):
    """A module of the wrapped one that is called on its own, and its name."""

    name: str
    module: nn.Module


@dataclass(eq=False, slots=True)
class Forward:
    """The running forward of the wrapped model.

    Attributes:
        depth: Depth of the wrapped module's calls inside itself.
        part: What is called, if it is not the wrapped module.
        states: Those of its arguments that are objects which it may change, such as caches.
        numbers: By registration index: how often the hook was called.
        layouts: Of a forward that is not followed: the layouts of the earlier one that was.
        seen: Of a followed forward: the evidence of each hook call, to be cached as layouts.
        parameters: Hooks on gradients of parameters.
        rows: As of `Evidence`.
    """

    depth: int = 0
    part: Part | None = None
    states: list[Any] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    key: Key | None = None
    follower: Follower | None = None
    is_over: bool = True
    has_failed: bool = False
    layouts: ForwardLayouts | None = None
    seen: dict[Place, tuple[Evidence, tuple[int, ...]]] = field(default_factory=dict)
    stack: ExitStack | None = None
    parameters: list[Registration] = field(default_factory=list)
    rows: RankRows | None = None

    def enter(self) -> bool:
        """Enter the wrapped module; return whether it is called inside itself."""
        self.depth += 1
        return self.depth > 1

    def leave(self) -> bool:
        """Leave the wrapped module; return whether the forward is over."""
        self.depth = max(0, self.depth - 1)
        return self.depth == 0

    def number(self, index: int) -> int:
        """Count a call of the hook with this index; return the number of its earlier ones."""
        number = self.numbers.get(index, 0)
        self.numbers[index] = number + 1
        return number

    def begin(self, key: Key, layouts: ForwardLayouts | None) -> None:
        """Set the key of the forward, and the layouts that are known for it."""
        self.key, self.layouts = key, layouts
        self.rows = None if layouts is None else layouts.rows

    def note_rows(self, rows: RankRows | None) -> None:
        """Note the rows of the data-parallel ranks."""
        self.rows = rows

    def follow(self, follower: Follower, stack: ExitStack) -> None:
        """Note that the forward is followed, until ``close``."""
        self.follower, self.is_over, self.stack = follower, False, stack

    def finish(self) -> None:
        """Note that the ranks compare what they have followed: the forward is over."""
        self.is_over = True

    def fail(self) -> None:
        """Note that the model's own code has failed in it."""
        self.has_failed = True

    def close(self) -> None:
        """Stop following operations; do nothing if it has stopped already."""
        stack, self.stack = self.stack, None
        if stack is not None:
            stack.close()
