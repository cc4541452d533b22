"""Placeholders for values that a stage does not have.

A later stage runs the model's code without the model's first inputs and without the modules that
turn them into the hidden state. Their placeholders must have the right sizes, for batches of any
size and length: they are inferred from those in runs of the model on two or three sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

Sizes = tuple[int, ...]
Rule = tuple[int, int, int, int, int]  # dim, x, y, dx, dy: y + (hidden.shape[dim] - x) * dy / dx


@dataclass(frozen=True)
class Crossing:
    """How the hidden state passes one boundary.

    Attributes:
        argument: Index of the leaf in the arguments of the block behind the boundary.
        shapes: Its sizes in each run.
        dtype: Its dtype.
    """

    argument: int
    shapes: tuple[Sizes, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Seen:
    """The sizes, dtype and device of a tensor of a run, and a number to fill a placeholder with."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    fill: float | int | bool

    @staticmethod
    def of(tensor: Tensor) -> Seen:
        fill: float | int | bool = math.nan
        if tensor.dtype == torch.bool:
            fill = True
        elif not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            # A value of the example is a valid index, where it is an index.
            fill = 0 if tensor.is_meta or not tensor.numel() else int(tensor.reshape(-1)[0])
        return Seen(tuple(tensor.shape), tensor.dtype, tensor.device, fill)


@dataclass(frozen=True)
class Observed:
    """The structure of a value of a run, and its leaves: a tensor is a `Seen`."""

    spec: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(tree: Any) -> Observed:
        leaves, spec = _pytree.tree_flatten(tree)
        return Observed(spec, tuple(map(_keep, leaves)))


def _keep(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Seen.of(leaf)
    plain = isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
    return leaf if plain else None


class UnknownSizesError(RuntimeError):
    """The sizes of a placeholder do not follow from those of the hidden state.

    Attributes:
        name: What it stands for.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Template:
    """Makes placeholders for a value of the model, of its structure, sizes and dtypes: NaN, or for
    integers a value of the example.

    Args:
        name: What it is, for errors.
        runs: The value in each run.
        crossing: The hidden state in these runs. None in the first stage, which receives none: it
            has the sizes of the first run.
    """

    def __init__(self, name: str, runs: Sequence[Observed], crossing: Crossing | None) -> None:
        self._name, self._runs, self._crossing = name, runs, crossing

    def __deepcopy__(self, memo: dict[int, Any]) -> Template:
        return self  # torch warns about copies of its specs

    def make(self, hidden: Tensor | None) -> Any:
        first = self._runs[0]
        leaves = list(first.leaves)
        for index, seen in enumerate(leaves):
            if not isinstance(seen, Seen):
                continue
            sizes, dtype, device = list(seen.sizes), seen.dtype, seen.device
            if hidden is not None and self._crossing is not None:
                sizes = [self._size(rule, hidden) for rule in self._rules[index]]
                dtype = hidden.dtype if dtype == self._crossing.dtype else dtype
                device = hidden.device
            leaves[index] = torch.full(sizes, seen.fill, dtype=dtype, device=device)
        return _pytree.tree_unflatten(leaves, first.spec)

    def _size(self, rule: Rule, hidden: Tensor) -> int:
        dim, x, y, dx, dy = rule
        steps, rest = divmod((hidden.shape[dim] - x) * dy, dx)
        if rest:
            raise self._unknown_sizes()
        return y + steps

    @cached_property
    def _rules(self) -> list[list[Rule]]:
        """Per leaf, of the dims of a tensor."""
        trees = [[getattr(leaf, "sizes", ()) for leaf in run.leaves] for run in self._runs]
        if any([*map(len, tree)] != [*map(len, trees[0])] for tree in trees):
            raise self._unknown_sizes()
        return [
            [self._infer(dim, sizes) for dim, sizes in enumerate(zip(*of_leaf))]
            for of_leaf in zip(*trees)
        ]

    def _infer(self, position: int, sizes: Sizes) -> Rule:
        """How the size of a dim follows: constant, or linear in one size of the hidden state."""
        if len(set(sizes)) == 1:
            return 0, 0, sizes[0], 1, 0
        assert self._crossing is not None
        by_dim = list(zip(*self._crossing.shapes))
        for dim in sorted(range(len(by_dim)), key=lambda dim: dim != position):  # its own dim first
            points = list(zip(by_dim[dim], sizes))
            x, y = points[0]
            dx, dy = next(((px - x, py - y) for px, py in points if px != x), (0, 0))
            if dx and all((py - y) * dx == (px - x) * dy for px, py in points):
                return dim, x, y, dx, dy
        raise self._unknown_sizes()

    def _unknown_sizes(self) -> UnknownSizesError:
        sizes = [
            [leaf.sizes for leaf in run.leaves if isinstance(leaf, Seen)] for run in self._runs
        ]
        hidden = [] if self._crossing is None else list(self._crossing.shapes)
        return UnknownSizesError(
            self._name,
            f"the sizes of {self._name!r} ({sizes}) do not follow from those of the hidden state "
            f"({hidden})",
        )
