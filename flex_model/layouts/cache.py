"""Caches the layouts of earlier forwards, by a key that is known when a forward begins.

The key holds shapes and dtypes of the inputs, the other arguments, torch's modes, training flags
and other attributes of modules, which parameters require gradients, adapters and the active hooks,
of all ranks. A forward with a new key is followed; one with a cached key runs as the cached one
did, unless its control flow depends on values.

In decoding, lengths grow by one from call to call. After two followed calls that differ in such
lengths alone and have the same layouts, the next ones are predicted: each tensor's sizes must grow
as they did between the two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flex_model import _C
from flex_model.distributed.header import site_hash, sites_hash
from flex_model.distributed.padding import RankRows
from flex_model.distributed.placement import Shape
from flex_model.errors import HookError
from flex_model.layouts.arguments import describe
from flex_model.layouts.kept import Attributes
from flex_model.layouts.placement_encoding import Pair
from flex_model.layouts.sizes import COMPARISONS

_MAX_ENTRIES = 256


class Place(NamedTuple):
    """One call of a hook: its site, and the number of its earlier calls in the forward."""

    site: int
    number: int


@dataclass
class ForwardLayouts:
    """The layouts of the hooks' tensors in a followed forward.

    Attributes:
        shapes: Local shapes on this rank.
        state: Placements of tensors that the forward left in objects among its arguments, or
            returned.
        buffers: By name, placements of the model's buffers that the forward wrote to or made.
        attributes: Placements of tensors that the forward left in plain attributes of modules.
        gradients: Placements of the gradients of tensors that have one; ``obstacles``: by axis, why
            such a placement is not known.
        comparisons: The comparisons of sizes in the forward: operator and numbers on this rank.
        rows: The rows of each data-parallel rank; None where no input has some.
        settled: By a registration's index and a call number: what later forwards of this key, or
            that it predicts, gather the hook's tensor by.
    """

    pairs: dict[Place, Pair] = field(default_factory=dict)
    gradients: dict[Place, Pair] = field(default_factory=dict)
    obstacles: dict[Place, dict[str, str]] = field(default_factory=dict)
    shapes: dict[Place, Shape] = field(default_factory=dict)
    state: list[Pair] = field(default_factory=list)
    buffers: dict[str, Pair] = field(default_factory=dict)
    attributes: dict[tuple[int, int], Pair] = field(default_factory=dict)
    comparisons: list[tuple[str, Any, Any]] = field(default_factory=list)
    rows: RankRows | None = None
    settled: dict[tuple[int, int | None], Any] = field(default_factory=dict)

    def branches(self) -> list[bool]:
        """Return the results of the comparisons of sizes."""
        return [COMPARISONS[by](left, right) for by, left, right in self.comparisons]

    def check(self, place: Place, shape: Shape, describe: Callable[[], str]) -> Pair:
        """Return the placements of the tensor at this place, in a forward that is not followed.

        Args:
            describe: Returns the hook's description for messages.

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


@dataclass(frozen=True)
class _Growing:
    """Calls whose input lengths grow by one from each to the next.

    Attributes:
        step: A hash of the sizes that grow, on all ranks; 0 for none.
        last: The layouts of the last call.
        next: Those predicted for the next call, once two followed calls have had the same layouts.
    """

    step: int = 0
    last: ForwardLayouts | None = None
    next: ForwardLayouts | None = None


class LayoutCache:
    """Caches one FlexModel's layouts, by key. All ranks change it alike, or clear it: keys contain
    how often each rank has.
    """

    def __init__(self) -> None:
        self._num_cleared = 0
        self._forwards: dict[int, ForwardLayouts] = {}
        self._growing: dict[int, _Growing] = {}
        self._sizes: dict[int, tuple[int, ...]] = {}  # on this rank, in the last call of a form
        self._form_keys: dict[int, int] = {}  # by this rank's form: the form of all ranks
        self._form_numbers: dict[int, int] = {}  # in the order in which this rank met them
        self._num_forms = 0
        self._form = 0  # of the beginning forward

    def clear(self) -> None:
        """Remove all cached layouts. Local."""
        self._num_cleared += 1
        for table in (self._forwards, self._growing, self._sizes, self._form_keys):
            table.clear()

    def key_numbers(self, form: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return this rank's part of the key of a forward: six numbers of 31 bits.

        Args:
            form: A hash of all but the sizes.
        """
        number = self._form_numbers.get(form)
        if number is None:  # the hash is that of this process; ranks count alike
            number = self._num_forms = self._num_forms + 1
            _put(self._form_numbers, form, number)
        form = sites_hash(number, self._num_cleared)
        self._form, step = form, 0
        before = self._sizes.get(form)
        if sizes != before:
            _put(self._sizes, form, sizes)
            step = 0 if before is None else self._step(before, sizes)
        key = sites_hash(form, sizes)
        halves = form & 0x7FFFFFFF, form >> 32, key & 0x7FFFFFFF, key >> 32
        return *halves, step & 0x7FFFFFFF, step >> 32

    def _step(self, before: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        """Return a hash of the sizes that have grown by one; 0 if others have changed, or if the
        next predicted forward takes another branch.
        """
        by = tuple(new - old for new, old in zip(sizes, before))
        if len(sizes) != len(before) or set(by) != {0, 1}:
            return 0
        growing = self._growing.get(self._form_keys.get(self._form, 0), _Growing())
        last, predicted = growing.last, growing.next
        if last and predicted and last.branches() != predicted.branches():
            return 0
        return site_hash(by)

    def begin(self, table: tuple[tuple[int, ...], ...]) -> tuple[Key, ForwardLayouts | None]:
        """Return the key of a forward on all ranks, and its layouts, if they are known.

        Args:
            table: The ``key_numbers`` of all ranks.
        """
        key, step = _joint_key(table)
        known = self._forwards.get(key.forward)
        if self._form_keys.get(self._form) != key.form:
            _put(self._form_keys, self._form, key.form)
        growing = self._growing.get(key.form, _Growing())
        if known is not None:
            growing = _Growing(step, known)
        elif step != growing.step:
            growing = _Growing(step, growing.last)
        elif step and growing.next is not None:
            known = growing.next
            growing = _Growing(step, known, _grown(growing.last, known))
        _put(self._growing, key.form, growing)
        return key, known

    def of(self, key: int | None) -> ForwardLayouts:
        """Return the layouts of a forward; none for one that is not cached."""
        found = None if key is None else self._forwards.get(key)
        return found or ForwardLayouts()

    def remember(self, key: Key, layouts: ForwardLayouts) -> None:
        """Cache the layouts of a followed forward, unless the cache was cleared since it began."""
        growing = self._growing.get(key.form)
        if growing is None:
            return
        _put(self._forwards, key.forward, layouts)
        predicted = _grown(growing.last, layouts) if growing.step else None
        self._growing[key.form] = _Growing(growing.step, layouts, predicted)


@dataclass(frozen=True)
class Key:
    """A hash of what was known on all ranks when a forward began; ``form``: of all but the
    sizes.
    """

    forward: int
    form: int


@lru_cache(maxsize=256)
def _joint_key(table: tuple[tuple[int, ...], ...]) -> tuple[Key, int]:
    """Return the key of a forward on all ranks, and a hash of the sizes that grow on all of them; 0
    if there are none.
    """
    forms, sizes, steps = zip(*((words[:2], words[2:4], words[4:]) for words in table))
    step = site_hash(*steps) if all(map(any, steps)) else 0
    return Key(site_hash(*sizes), site_hash(*forms)), step


def _put(table: dict[int, Any], key: int, value: Any) -> None:
    """Set an entry, in the place of the oldest where the table is full."""
    while key not in table and len(table) >= _MAX_ENTRIES:
        del table[next(iter(table))]
    table[key] = value


def _grown(before: ForwardLayouts | None, after: ForwardLayouts) -> ForwardLayouts | None:
    """Return the layouts of the call after these two, where all sizes grow as between them; None
    where layouts or numbers of dims differ.
    """
    if before is None or before.pairs != after.pairs or before.gradients != after.gradients:
        return None
    if before.buffers != after.buffers or before.attributes != after.attributes:
        return None
    if [by for by, *_ in before.comparisons] != [by for by, *_ in after.comparisons]:
        return None
    shapes = {place: (before.shapes[place], shape) for place, shape in after.shapes.items()}
    if any(len(old) != len(new) for old, new in shapes.values()):
        return None
    grown = {place: tuple(2 * n - o for o, n in zip(*both)) for place, both in shapes.items()}
    compared = zip(before.comparisons, after.comparisons)
    comparisons = [(by, 2 * n - o, 2 * m - p) for (_, o, p), (by, n, m) in compared]
    rows = after.rows
    if before.rows and rows:
        counts = tuple(2 * n - o for o, n in zip(before.rows.counts, rows.counts))
        rows = replace(rows, counts=counts)
    return replace(after, shapes=grown, comparisons=comparisons, rows=rows)


class Conditions:
    """Describes all that a forward's key contains, other than its inputs."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._objects: list[Any] = []  # the modules, their forwards and their hooks
        self._generation = 0  # how often they have changed
        self._flags = 0  # a hash of training flags and of which parameters require gradients
        self._state = 0  # a hash of the modules' plain attributes
        self._adapted: list[nn.Module] = []

    def _refresh(self) -> None:
        """Detect changes of the modules since the forward before."""
        objects, self._flags, self._state = _C.walk_modules(
            self._root, self._objects, Tensor, nn.Module
        )
        if objects is self._objects:
            return
        before, now = map(_without_skips, (self._objects, objects))
        self._objects = objects
        if len(before) != len(now) or not all(map(operator.is_, before, now)):
            self._generation += 1
            self._adapted = [m for m in self._root.modules() if hasattr(m, "active_adapters")]

    def form(
        self, args: Any, kwargs: Mapping[str, Any], active: int, attributes: Attributes
    ) -> tuple[int, tuple[int, ...]]:
        """Return a hash of the arguments and of the tensors in attributes, except for the sizes of
        their tensors, and those sizes.
        """
        self._refresh()
        sizes: list[int] = []
        parts: list[Any] = [active, self._generation]
        describe((args, kwargs), parts, sizes)
        attributes.describe(parts, sizes)
        parts += [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            self._flags,
            self._state,
            *map(_adapters, self._adapted),
        ]
        return sites_hash(*parts), tuple(sizes)


def _without_skips(objects: list[Any]) -> list[Any]:
    """Leave out what skips modules in ``run_from``, an argument of whose forwards tells which."""
    return [
        None if type(one) is FunctionType and hasattr(one, "skips_for_run_from") else one
        for one in objects
    ]


def _adapters(module: nn.Module) -> str:
    names: Any = module.active_adapters
    return f"{None if callable(names) else names} {getattr(module, 'merged', '')}"
