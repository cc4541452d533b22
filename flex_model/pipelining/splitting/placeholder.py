"""Placeholders for values that a stage does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from flex_model.pipelining.splitting.absent_tensor import Absent, names_in, present

_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


def without_values(tree: Any) -> Any:
    """Return a tree with absent tensors in place of its own, and of its other leaves the plain
    ones.
    """

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Absent(present(leaf).detach().to("meta"), names_in(leaf), leaf.device)
        return leaf if isinstance(leaf, _PLAIN) else None

    return _pytree.tree_map(keep, tree)


class Placeholder:
    """Makes placeholders for a value of the model.

    Their sizes are those of the example. In a stage that receives a hidden state those that the
    hidden state had, too, are those of the one it has received: tokens ``(rows, length)`` for
    ``(rows, length, width)``.

    Args:
        example: The value on the example: `without_values`.
        hidden: The hidden state that the stage received on the example; None: none.
        is_fixed: Whether it has its sizes in any run, as a parameter.
    """

    def __init__(self, example: Any, hidden: Tensor | None, is_fixed: bool = False) -> None:
        self._example, self._hidden, self._is_fixed = example, hidden, is_fixed

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        return self  # torch warns about copies of its specs

    def make(self, hidden: Tensor | None, names: Iterable[str]) -> Any:
        """Return one, in a run of the stage that has received ``hidden``."""

        def absent(example: Tensor) -> Absent:
            sizes, dtype = list(example.shape), example.dtype
            if hidden is not None and self._hidden is not None:
                of_example = list(self._hidden.shape)
                for dim, size in enumerate(() if self._is_fixed else example.shape):
                    if of_example[dim : dim + 1] == [size]:  # its own dim first
                        sizes[dim] = hidden.shape[dim]
                    elif size in of_example:
                        sizes[dim] = hidden.shape[of_example.index(size)]
                dtype = hidden.dtype if dtype == self._hidden.dtype else dtype
            elem = torch.zeros(sizes, dtype=dtype, device="meta")
            return Absent(elem, names, (example if hidden is None else hidden).device)

        return _pytree.tree_map_only(Tensor, absent, self._example)
