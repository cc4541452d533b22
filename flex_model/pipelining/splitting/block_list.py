"""Where a model is split: the list of blocks that the split points are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.pipelining import SplitPoint

from flex_model.errors import nearest

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class BlockList:
    """Blocks that a model runs in order, and where they are split.

    Attributes:
        name: Of the container, "" for the model itself.
        blocks: Names of its modules in order; if it is split behind the last, then of the module
            that is called next, too.
        boundaries: Increasing; ``b`` means in front of block ``b``.
    """

    name: str
    blocks: tuple[str, ...]
    boundaries: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) + 1

    def is_in(self, name: str) -> bool:
        """Whether the list is, or is in, the module of this name: so it is in all stages."""
        return name in ("", self.name) or self.name.startswith(f"{name}.")

    def of_stage(self, stage: int) -> range:
        """The indices of a stage's blocks."""
        edges = (0, *self.boundaries, len(self.blocks))
        return range(edges[stage], edges[stage + 1])


def check_split_spec(module: nn.Module, split_spec: Mapping[str, SplitPoint]) -> None:
    """ValueError for names that the model does not have, and for points that are none."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for name, point in split_spec.items():
        if not isinstance(point, SplitPoint):
            raise ValueError(
                f"split_spec[{name!r}] is {point!r}; give SplitPoint.BEGINNING or SplitPoint.END"
            )
        if name not in names:
            raise ValueError(
                f"split_spec names {name!r}, which is no module of {type(module).__name__}; "
                f"{nearest(name, names)}"
            )


def find_block_list(
    module: nn.Module, split_spec: Mapping[str, SplitPoint], calls: Sequence[str]
) -> BlockList:
    """The list that all split points are in.

    Args:
        calls: Names of the modules that the model called, in order of the calls' beginnings.

    Raises:
        ValueError: if there is none; it says what can be split.
    """
    parents = {name.rpartition(".")[0] for name in split_spec}
    hint = _what_can_be_split(module, calls)
    for name in split_spec:
        parent = name.rpartition(".")[0]
        if not isinstance(module.get_submodule(parent), CONTAINERS):
            raise ValueError(
                f'cannot split {type(module).__name__} at {name!r} with method="modules": it is '
                f"not one of a list of blocks that are run in order. {hint}"
            )
    if len(parents) > 1:
        raise ValueError(
            f"cannot split {type(module).__name__} in several lists at once "
            f'({", ".join(sorted(parents))}) with method="modules". {hint}'
        )
    name = parents.pop()
    blocks = _members(name, module.get_submodule(name))
    if not _is_run_in_order(blocks, calls):
        wrong = next(
            (b for b in blocks if list(calls).count(b) != 1),
            blocks[0],
        )
        raise ValueError(
            f'cannot split {type(module).__name__} in {name!r} with method="modules": its blocks '
            f"are not run once each, in order ({wrong!r} was called "
            f"{list(calls).count(wrong)} times on the example). {hint}"
        )
    boundaries = {
        blocks.index(point) + (where is SplitPoint.END) for point, where in split_spec.items()
    }
    if len(blocks) in boundaries:
        blocks += (_called_behind(module, blocks[-1], calls),)
    return BlockList(name, blocks, tuple(sorted(boundaries)))


def _called_behind(module: nn.Module, last: str, calls: Sequence[str]) -> str:
    for name in calls[calls.index(last) + 1 :]:
        if not name.startswith(f"{last}.") and calls.count(name) == 1:
            return name
    raise ValueError(
        f"cannot split {type(module).__name__} behind {last!r}: no other module is called there. "
        + _what_can_be_split(module, calls)
    )


def _members(name: str, container: nn.Module) -> tuple[str, ...]:
    prefix = f"{name}." if name else ""
    return tuple(f"{prefix}{key}" for key, child in container._modules.items() if child is not None)


def _is_run_in_order(blocks: Iterable[str], calls: Sequence[str]) -> bool:
    blocks = list(blocks)
    members = set(blocks)
    return [name for name in calls if name in members] == blocks


def _what_can_be_split(module: nn.Module, calls: Sequence[str]) -> str:
    found = []
    for name, container in module.named_modules():
        if isinstance(container, CONTAINERS):
            blocks = _members(name, container)
            if len(blocks) > 1 and _is_run_in_order(blocks, calls):
                found.append(f"{blocks[0]!r} to {blocks[-1]!r}")
    if not found:
        return (
            "It has no ModuleList, Sequential or ModuleDict whose modules run once each, in order."
        )
    return f"What can be split: {', '.join(found[:8])}."


def cannot_split(model: nn.Module, why: str) -> str:
    """The message of an error about a model whose blocks are not independent enough."""
    return (
        f'cannot split {type(model).__name__} with method="modules": {why}. What can be split: '
        "lists of blocks that hand on one float tensor, the hidden state, and take from the rest "
        "of the model only what it computes from keyword arguments"
    )
