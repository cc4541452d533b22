"""Describes split dims that consist of several parts, each of them split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flex_model.distributed.placement import Shard
from flex_model.layouts.propagation.operation import Operand

Widths = list[tuple[int, ...]]  # by rank: its width of each part, in their order


def part_widths(operand: Operand) -> Widths | None:
    """Return each rank's width of each part of its split dim. None if the sizes don't fit."""
    shard = operand.shard
    if shard is None:
        return None
    held = [shape[shard.dim] for shape in operand.shapes]
    of_pieces = by_piece(shard, held)
    widths = None if of_pieces is None else shard.part_widths(of_pieces)
    if widths is None:
        return None
    return [tuple(widths[shard.piece(rank)]) for rank in range(len(held))]


def by_piece(shard: Shard, of_ranks: Sequence[Any]) -> list[Any] | None:
    """Return the ranks' items by piece. None if replicas of a piece differ."""
    found: dict[int, Any] = {}
    for rank, own in enumerate(of_ranks):
        if found.setdefault(shard.piece(rank), own) != own:
            return None
    return [found[piece] for piece in sorted(found)]


def shard_of_parts(like: Shard, widths: Widths) -> Shard | None:
    """Return the placement of a dim of such parts, split over the ranks as ``like``. None if there
    is none: parts of unequal sizes must be split evenly.
    """
    count = len(widths[0])
    if count == 0:
        return None
    plain = Shard(like.dim, pieces=like.pieces, stride=like.stride)
    if all(len(set(own)) == 1 for own in widths):
        return replace(plain, parts=count)
    of_pieces = by_piece(like, widths)
    if of_pieces is None:
        return None
    stated = replace(plain, part_sizes=tuple(sum(of_part) for of_part in zip(*of_pieces)))
    found = stated.part_widths([sum(own) for own in of_pieces])
    return stated if found == [list(own) for own in of_pieces] else None
