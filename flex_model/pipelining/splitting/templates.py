"""Sizes of a model's values, as they follow from those of the hidden state.

A later stage runs the model's code without the model's first inputs and without the modules that
turn them into the hidden state. What stands there must have the right sizes, for batches of any
size and length; they are learnt from runs on two or three of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """One size: ``scale * hidden.shape[dim] + offset``, or ``offset`` where dim is None."""

    offset: int
    dim: int | None = None
    scale: Fraction = Fraction(1)

    @staticmethod
    def learn(hiddens: Sequence[Sizes], sizes: Sequence[int], position: int) -> Size:
        """The simplest rule that gave ``sizes``; ``position`` is the dim whose size it is."""
        if len(set(sizes)) == 1:
            return Size(sizes[0])
        ndim = len(hiddens[0])
        dims = sorted(range(ndim), key=lambda dim: dim != position)  # its own dim first
        rules = [Size(0, dim) for dim in dims]
        for dim in dims:
            if hiddens[0][dim]:
                rules.append(Size(0, dim, Fraction(sizes[0], hiddens[0][dim])))
            rules.append(Size(sizes[0] - hiddens[0][dim], dim))
        for rule in rules:
            if all(rule.of(hidden) == size for hidden, size in zip(hiddens, sizes)):
                return rule
        raise NoRuleError

    def of(self, hidden: Sizes) -> int:
        if self.dim is None:
            return self.offset
        numerator, denominator = self.scale.as_integer_ratio()
        size = hidden[self.dim] * numerator  # ints, that follow a size to its tensor
        return -1 if size % denominator else size // denominator + self.offset


class NoRuleError(Exception):
    """Sizes that do not follow from the hidden state's."""


@dataclass(frozen=True)
class TensorTemplate:
    """A tensor without meaning: NaN, or for integers a value that the example had.

    Attributes:
        sizes: As they were in the example.
        rules: One per dim.
        follows: Whether its dtype is that of the hidden state.
    """

    sizes: Sizes
    rules: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    follows: bool
    fill: float | int | bool

    def make(self, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            return torch.full(self.sizes, self.fill, dtype=self.dtype, device=self.device)
        sizes = self.sizes_for(tuple(hidden.shape))
        dtype = hidden.dtype if self.follows else self.dtype
        return torch.full(sizes, self.fill, dtype=dtype, device=hidden.device)

    def sizes_for(self, hidden: Sizes) -> Sizes:
        return tuple(rule.of(hidden) for rule in self.rules)


@dataclass(frozen=True)
class Constant:
    """A leaf that is no tensor."""

    value: Any


@dataclass(frozen=True)
class TreeTemplate:
    """Arguments or an output: its structure, and a template per tensor."""

    spec: Any
    leaves: tuple[TensorTemplate | Constant, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeTemplate:
        return self  # torch warns about copies of its specs

    @staticmethod
    def learn(
        observed: Sequence[Observed], hiddens: Sequence[Sizes], hidden_dtype: torch.dtype
    ) -> TreeTemplate:
        """From the same value in several runs, in which the hidden state had these sizes."""
        first = observed[0]
        leaves: list[TensorTemplate | Constant] = []
        for index, leaf in enumerate(first.leaves):
            if isinstance(leaf, Constant):
                leaves.append(leaf)
                continue
            same = [other.leaves[index] for other in observed if other.has_same_tree(first)]
            if len(same) != len(observed) or not all(isinstance(x, Seen) for x in same):
                raise NoRuleError
            shapes = [x.sizes for x in same if isinstance(x, Seen)]
            if len({len(sizes) for sizes in shapes}) != 1:
                raise NoRuleError
            rules = tuple(
                Size.learn(hiddens, [sizes[dim] for sizes in shapes], dim)
                for dim in range(len(leaf.sizes))
            )
            follows = leaf.dtype == hidden_dtype
            leaves.append(
                TensorTemplate(leaf.sizes, rules, leaf.dtype, leaf.device, follows, leaf.fill)
            )
        return TreeTemplate(first.spec, tuple(leaves))

    def make(
        self,
        hidden: Tensor | None,
        given: Mapping[int, Tensor],
        made: dict[Any, Tensor] | None = None,
    ) -> Any:
        """The tree. Values of the same kind are one tensor, kept in ``made``, if given."""
        leaves = []
        for index, leaf in enumerate(self.leaves):
            if index in given:
                leaves.append(given[index])
            elif isinstance(leaf, Constant):
                leaves.append(leaf.value)
            elif made is None:
                leaves.append(leaf.make(hidden))
            else:
                if leaf not in made:
                    made[leaf] = leaf.make(hidden)
                leaves.append(made[leaf])
        return _pytree.tree_unflatten(leaves, self.spec)

    def tensors_of(self, tree: Any) -> list[Tensor | None]:
        leaves = _pytree.tree_leaves(tree)
        return [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]


@dataclass(frozen=True)
class Seen:
    """A tensor that was seen: what is kept of it."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    fill: float | int | bool

    def nothing(self, hidden: Tensor | None = None) -> Tensor:
        """A tensor without meaning that takes no memory, to read its sizes and dtype."""
        dtype, device = self.dtype, self.device
        if hidden is not None:
            dtype = hidden.dtype if dtype.is_floating_point else dtype
            device = hidden.device
        return torch.full((), self.fill, dtype=dtype, device=device).expand(self.sizes)


@dataclass(frozen=True)
class Observed:
    """A tree of values that was seen in a run."""

    spec: Any
    leaves: tuple[Seen | Constant, ...]

    @staticmethod
    def of(tree: Any) -> Observed:
        leaves, spec = _pytree.tree_flatten(tree)
        return Observed(spec, tuple(_seen(leaf) for leaf in leaves))

    def has_same_tree(self, other: Observed) -> bool:
        return len(self.leaves) == len(other.leaves) and self.spec == other.spec


def _seen(leaf: Any) -> Seen | Constant:
    if not isinstance(leaf, Tensor):
        plain = isinstance(leaf, (bool, int, float, str, type(None), torch.dtype, torch.device))
        return Constant(leaf if plain else None)
    fill: float | int | bool = math.nan
    if leaf.dtype == torch.bool:
        fill = True
    elif not leaf.dtype.is_floating_point and not leaf.dtype.is_complex:
        # A value of the example is a valid index, where it is an index.
        fill = 0 if leaf.is_meta or not leaf.numel() else int(leaf.reshape(-1)[0])
    return Seen(tuple(leaf.shape), leaf.dtype, leaf.device, fill)
