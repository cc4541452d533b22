"""Operands of one operation: how each is split along a mesh axis, and which argument it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flex_model.distributed.layout import Placement, Replicate, Shard


@dataclass(frozen=True)
class Cut:
    """A slice of a replicated tensor that is this rank's own part of it, if every rank took its own
    (``shard``), or a replicated tensor, if all took the same one. The values will tell.
    """

    shard: Shard

    def __str__(self) -> str:
        return f"{self.shard} or R"


Split = Placement | Cut | None
PlaceOf = Callable[[Tensor], Split]

REPLICATED = Replicate()


@dataclass(frozen=True)
class AxisPlace:
    """Where this rank stands on the axis."""

    index: int
    size: int


def shard_of(place: Split) -> Shard | None:
    if isinstance(place, Cut):
        return place.shard
    return place if isinstance(place, Shard) else None


def moved(place: Split, dim: int | None) -> Split:
    """The same split at another dim; not known where ``dim`` is None."""
    shard = shard_of(place)
    assert shard is not None
    if dim is None:
        return None
    shard = replace(shard, dim=dim)
    return Cut(shard) if isinstance(place, Cut) else shard


def replace_parts(place: Split, parts: int) -> Split:
    """The same split, of so many interleaved parts."""
    if isinstance(place, Cut):
        return Cut(replace(place.shard, parts=parts))
    assert isinstance(place, Shard)
    return replace(place, parts=parts)


def parts_of(place: Split) -> int:
    shard = shard_of(place)
    return 0 if shard is None else shard.parts


def agreeing(places: Sequence[Split]) -> Split:
    return places[0] if all(place == places[0] for place in places) else None


def argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if i < len(args):
                return args[i]
            return kwargs.get(name, argument.default_value)
    raise KeyError(name)
