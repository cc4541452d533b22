"""Layouts of earlier forwards, under a key of what was known when each began.

The key holds shapes and dtypes of the inputs, the other arguments, torch's modes, training flags,
adapters and the active hooks, of all ranks. A forward with a new key is followed; one whose key is
remembered runs as the remembered one did, unless its control flow depends on values.

In decoding, lengths grow by one from call to call. After two followed calls that differ in such
lengths alone, and whose layouts are the same, the next ones are predicted: each tensor's sizes must
be those that grow as they did between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from flex_model import _C
from flex_model.distributed.header import site_hash
from flex_model.distributed.layout import Shape
from flex_model.errors import HookError
from flex_model.layouts.arguments import describe
from flex_model.layouts.attributes import Attributes
from flex_model.layouts.follow import Follower, Pair
from flex_model.layouts.sizes import COMPARISONS

_MOST = 256
_MOST_ASKED = 4


class Place(NamedTuple):
    """One call of a hook: its site, and how often it was called before in its forward."""

    site: int
    number: int


@dataclass
class ForwardLayouts:
    """What a followed forward showed of each hook's tensor.

    Attributes:
        shapes: Local shapes on this rank.
        state: Of tensors that the forward left in its arguments' objects or returned.
        buffers: By name, of the model's buffers that the forward wrote to or made.
        attributes: Of tensors that the forward left in plain attributes of modules.
        gradients: Placements of the gradients of the tensors that have one.
        graph: Follows the backward of the forward that was followed; ``values`` stand for the
            tensors in it. Kept as long as a gradient is not known.
        comparisons: Of sizes that the forward compared: by what, and the numbers on this rank.
        growth: By how much the shapes grow from call to call, where the forward is a predicted one;
            ``comparison_growth``: likewise, the numbers that are compared.
        num_asked: How often it was followed once more to see its backward.
        mixed: Where ranks mixed parts of what a DTensor was then made of; empty if nowhere.
    """

    pairs: dict[Place, Pair] = field(default_factory=dict)
    gradients: dict[Place, Pair] = field(default_factory=dict)
    graph: Follower | None = None
    values: dict[Place, Any] = field(default_factory=dict)
    shapes: dict[Place, Shape] = field(default_factory=dict)
    state: list[Pair] = field(default_factory=list)
    buffers: dict[str, Pair] = field(default_factory=dict)
    attributes: dict[tuple[int, int], Pair] = field(default_factory=dict)
    comparisons: list[tuple[str, Any, Any]] = field(default_factory=list)
    growth: dict[Place, Shape] | None = None
    comparison_growth: list[tuple[Any, Any]] = field(default_factory=list)
    num_asked: int = 0
    mixed: str = ""

    def asks_for_gradients(self) -> bool:
        """Whether the forward is to be followed once more, since only its backward can tell how
        gradients are placed, and none has come so far.
        """
        if self.num_asked >= _MOST_ASKED or not any(None in g for g in self.gradients.values()):
            return False
        self.num_asked += 1
        return True

    def decides_otherwise(self) -> bool:
        """Whether a comparison of sizes has another answer in the next predicted forward."""
        return any(
            COMPARISONS[by](left + more, right + by_right) != COMPARISONS[by](left, right)
            for (by, left, right), (more, by_right) in zip(self.comparisons, self.comparison_growth)
        )

    def check(self, place: Place, shape: Shape, describe: Callable[[], str]) -> Pair:
        """The placements of the tensor at this place, in a forward that is not followed.

        Args:
            describe: Returns what the hook is called in messages.

        Raises:
            HookError: no tensor of this shape was there in the forward that was.
        """
        expected = self.shapes.get(place)
        if expected == shape:
            return self.pairs[place]
        seen = "was not called" if expected is None else f"had a tensor of shape {expected}"
        raise HookError(
            f"{describe()}: in the forward that was followed for inputs like these, call "
            f"{place.number} of this hook {seen}, now it has one of shape {shape}: the model's "
            "control flow depends on more than its inputs' shapes; use "
            'FlexModel(..., follow="always")'
        )


@dataclass
class _Growing:
    """Calls whose inputs' lengths grow by one from each to the next.

    Attributes:
        step: Stands for which sizes grow, on all ranks; 0 for none.
        layouts: Of the last call.
        is_proven: Whether two followed calls have shown the same layouts.
    """

    step: int = 0
    layouts: ForwardLayouts | None = None
    is_proven: bool = False


class LayoutMemory:
    """Layouts by key, of one FlexModel. All ranks change it alike, or forget what they have: keys
    tell how often each rank has.
    """

    def __init__(self) -> None:
        self._num_cleared = 0
        self._forwards: dict[int, ForwardLayouts] = {}
        self._growing: dict[int, _Growing] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}  # on this rank, of the last call of a form
        self._form_keys: dict[int, int] = {}  # by form on this rank: that of all ranks
        self._form = 0  # of the forward that begins

    def clear(self) -> None:
        """Nothing is remembered. Local."""
        self._num_cleared += 1
        for table in (self._forwards, self._growing, self._sizes, self._form_keys):
            table.clear()

    def words(self, form: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """What this rank contributes to the key of a forward: six numbers of 31 bits.

        Args:
            form: Stands for all but the sizes.
        """
        form = site_hash(form, self._num_cleared)
        self._form = form
        before = self._sizes.get(form, ())
        _make_room(self._sizes)
        self._sizes[form] = sizes
        by = tuple(new - old for new, old in zip(sizes, before))
        grows = len(sizes) == len(before) and set(by) == {0, 1}
        growing = self._growing.get(self._form_keys.get(form, 0))
        if growing is not None and growing.is_proven and growing.layouts is not None:
            grows = grows and not growing.layouts.decides_otherwise()
        step = site_hash(by) if grows else 0
        words = (form, site_hash(form, sizes), step)
        return tuple(half for word in words for half in (word & 0x7FFFFFFF, word >> 32))

    def begin(self, table: Sequence[tuple[int, ...]]) -> tuple[Key, ForwardLayouts | None]:
        """The key that a forward has on all ranks, and its layouts, if they are known.

        Args:
            table: ``words`` of all ranks.
        """
        forms, sizes, steps = zip(*((words[:2], words[2:4], words[4:]) for words in table))
        key = Key(site_hash(*sizes), site_hash(*forms))
        step = site_hash(*steps) if all(map(any, steps)) else 0
        known = self._forwards.get(key.forward)
        _make_room(self._form_keys)
        self._form_keys[self._form] = key.form
        if key.form not in self._growing:
            _make_room(self._growing)
        growing = self._growing.setdefault(key.form, _Growing())
        if known is not None:
            self._growing[key.form] = _Growing(step, known)
        elif step and step == growing.step and growing.is_proven:
            assert growing.layouts is not None
            known = growing.layouts = _grown(growing.layouts)
        elif step != growing.step:
            growing.step, growing.is_proven = step, False
        return key, known

    def pairs(self, key: int | None, site: int) -> list[Pair]:
        """The placements of all calls of a hook in the forwards of a key."""
        layouts = None if key is None else self._forwards.get(key)
        if layouts is None:
            return []
        return [pair for place, pair in layouts.pairs.items() if place.site == site]

    def mixed(self, key: int | None) -> str:
        """See `ForwardLayouts`; empty for a forward that is not remembered."""
        layouts = None if key is None else self._forwards.get(key)
        return "" if layouts is None else layouts.mixed

    def note_gradient(self, key: int | None, place: Place, gradient: Pair) -> None:
        """What the backward of a followed forward has shown."""
        layouts = None if key is None else self._forwards.get(key)
        if layouts is not None and place in layouts.gradients:
            layouts.gradients[place] = gradient
            if not any(None in known for known in layouts.gradients.values()):
                layouts.graph = None

    def remember(self, key: Key, layouts: ForwardLayouts) -> None:
        """A followed forward is over."""
        _make_room(self._forwards)
        before = self._forwards.get(key.forward)
        if before is not None:
            layouts.num_asked = before.num_asked
        self._forwards[key.forward] = layouts
        growing = self._growing[key.form]
        last, growing.layouts = growing.layouts, layouts
        growth = None if last is None or not growing.step else _growth(last, layouts)
        compared = list(zip(() if last is None else last.comparisons, layouts.comparisons))
        growing.is_proven = growth is not None
        if growth is not None:
            by = [(new[1] - old[1], new[2] - old[2]) for old, new in compared]
            growing.layouts = replace(layouts, growth=growth, comparison_growth=by)


@dataclass(frozen=True)
class Key:
    """Stands for what was known on all ranks when a forward began; ``form`` for all but sizes."""

    forward: int
    form: int


def _make_room(table: dict[int, Any]) -> None:
    while len(table) >= _MOST:
        del table[next(iter(table))]


def _growth(before: ForwardLayouts, after: ForwardLayouts) -> dict[Place, Shape] | None:
    """By how much each shape has grown; None where layouts or numbers of dims differ."""
    if before.pairs != after.pairs or before.gradients != after.gradients:
        return None
    if before.buffers != after.buffers or before.attributes != after.attributes:
        return None
    if [by for by, *_ in before.comparisons] != [by for by, *_ in after.comparisons]:
        return None
    growth = {}
    for place, shape in after.shapes.items():
        old = before.shapes[place]
        if len(old) != len(shape):
            return None
        growth[place] = tuple(new - was for new, was in zip(shape, old))
    return growth


def _grown(layouts: ForwardLayouts) -> ForwardLayouts:
    assert layouts.growth is not None
    shapes = {
        place: tuple(size + by for size, by in zip(shape, layouts.growth[place]))
        for place, shape in layouts.shapes.items()
    }
    grown = zip(layouts.comparisons, layouts.comparison_growth)
    comparisons = [(by, left + more, right + mr) for (by, left, right), (more, mr) in grown]
    return replace(layouts, shapes=shapes, comparisons=comparisons)


class Conditions:
    """All but the inputs that the key of a forward holds."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._objects: list[Any] = []  # what the model is made of
        self._generation = 0  # how often that has changed
        self._training = 0  # stands for the training flags
        self._adapted: list[nn.Module] = []

    def _look(self) -> None:
        """Notice what was changed about the modules since the forward before."""
        objects, self._training = _C.walk_modules(self._root, self._objects)
        if objects is not self._objects:
            self._generation += 1
            self._objects = objects
            self._adapted = [m for m in self._root.modules() if hasattr(m, "active_adapters")]

    def form(
        self, args: Any, kwargs: Mapping[str, Any], active: int, attributes: Attributes
    ) -> tuple[int, tuple[int, ...]]:
        """What stands for the arguments and the tensors in attributes but for the sizes of their
        tensors, and those sizes.
        """
        self._look()
        sizes: list[int] = []
        parts: list[Any] = [active, self._generation]
        describe((args, dict(kwargs)), parts, sizes)
        kept, sizes_of_kept = attributes.describe()
        sizes += sizes_of_kept
        parts += [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            self._training,
            [_adapters(module) for module in self._adapted],
            kept,
        ]
        return site_hash(*parts), tuple(sizes)


def _adapters(module: nn.Module) -> str:
    names: Any = module.active_adapters
    return f"{None if callable(names) else names} {getattr(module, 'merged', '')}"
