"""What a stage has in place of values that it does not have.

A later stage runs the model's code without the model's first inputs and without the modules that
turn them into the hidden state. What is there instead must have the right sizes, for batches of any
size and length: they are inferred from those in runs of the model on two or three sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

Sizes = tuple[int, ...]


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
    """A tensor of a run: what is kept of it."""

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
    """A tree of values of a run."""

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


class Template:
    """Makes trees of the structure, sizes and dtypes of a value of the model, and without meaning:
    NaN, or for integers a value that the example had.

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
        if any(run.spec != first.spec for run in self._runs):
            raise self._unknown_sizes()
        leaves = [
            self._tensor(index, leaf, hidden) if isinstance(leaf, Seen) else leaf
            for index, leaf in enumerate(first.leaves)
        ]
        return _pytree.tree_unflatten(leaves, first.spec)

    def _tensor(self, index: int, seen: Seen, hidden: Tensor | None) -> Tensor:
        if hidden is None or self._crossing is None:
            return torch.full(seen.sizes, seen.fill, dtype=seen.dtype, device=seen.device)
        shapes = self._shapes(index)
        if len(set(map(len, shapes))) != 1:
            raise self._unknown_sizes()
        sizes = [self._infer(dim, of_dim, hidden) for dim, of_dim in enumerate(zip(*shapes))]
        dtype = hidden.dtype if seen.dtype == self._crossing.dtype else seen.dtype
        return torch.full(sizes, seen.fill, dtype=dtype, device=hidden.device)

    def _infer(self, position: int, sizes: Sizes, hidden: Tensor) -> int:
        """The size of a dim: constant, or linear in the size of one dim of the hidden state."""
        if len(set(sizes)) == 1:
            return sizes[0]
        assert self._crossing is not None
        dims = sorted(range(hidden.dim()), key=lambda dim: dim != position)  # its own dim first
        for dim in dims:
            points = [(shape[dim], size) for shape, size in zip(self._crossing.shapes, sizes)]
            x, y = points[0]
            dx, dy = next(((px - x, py - y) for px, py in points if px != x), (0, 0))
            if dx and all((py - y) * dx == (px - x) * dy for px, py in points):
                steps, rest = divmod((hidden.shape[dim] - x) * dy, dx)
                if not rest:
                    return y + steps
        raise self._unknown_sizes()

    def _shapes(self, index: int) -> list[Sizes]:
        return [
            run.leaves[index].sizes for run in self._runs if isinstance(run.leaves[index], Seen)
        ]

    def _unknown_sizes(self) -> RuntimeError:
        sizes = [
            [leaf.sizes for leaf in run.leaves if isinstance(leaf, Seen)] for run in self._runs
        ]
        hidden = [] if self._crossing is None else list(self._crossing.shapes)
        return RuntimeError(
            f"the sizes of {self._name!r} ({sizes}) do not follow from those of the hidden state "
            f"({hidden})"
        )
