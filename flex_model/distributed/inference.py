"""Which layout a tensor has: from DTensor placements, from following the model's operations, from
``expected_shape`` and from the ranks' values; they must agree.

On the tp axis a tensor is replicated only if the ranks' bytes are seen to be equal, and split only
if a source says so. On the dp axis ranks hold rows of the batch along dim 0 where no source says
otherwise. What is neither is an error: a shard is never handed over as the full tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.channel import Channel, agreed
from flex_model.distributed.layout import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.propagation import Cut, Split

ExpectedShape = tuple[int | None, ...] | None

AXES = ("dp", "tp")

# How a tensor is split along dp and tp, as far as a rank knows without asking the others.
Splits = tuple[Split, Split]
UNKNOWN: Splits = (None, None)


@dataclass(frozen=True)
class Told:
    """What all ranks of the grid told of one tensor: fingerprints of its values, and their splits.

    ``fingerprints`` is None where nobody had to ask.
    """

    fingerprints: values.Fingerprints | None
    splits: Sequence[Splits] = (UNKNOWN,)

    def along(self, axis: str) -> Placement | None:
        """The placement along ``axis`` that the ranks' splits say; None where they say nothing."""
        told = {splits[axis == "tp"] for splits in self.splits}
        if len(told) == 1 and not any(isinstance(split, Cut) for split in told):
            split = told.pop()
            assert not isinstance(split, Cut)
            return split
        cuts = {split for split in told if isinstance(split, Cut)}
        if self.fingerprints is None or not told <= {Replicate(), *cuts}:
            return None
        if self.fingerprints.equal_along(axis):
            return Replicate()
        return cuts.pop().shard if len(told) == 1 else None


def check_expected_shape(expected_shape: Any) -> ExpectedShape:
    """``expected_shape`` as a tuple. TypeError or ValueError if it is not one of ints and None."""
    if expected_shape is None:
        return None
    try:
        sizes: tuple[Any, ...] = tuple(expected_shape)
    except TypeError:
        raise TypeError(
            f"expected_shape must be a tuple of ints and None, got {expected_shape!r}; example: "
            "(None, None, 4096)"
        ) from None
    for size in sizes:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise TypeError(
                f"expected_shape must hold ints and None, got {size!r} in {sizes}; example: "
                "(None, None, 4096)"
            )
        if size is not None and size < 0:
            raise ValueError(
                f"expected_shape {sizes} has a negative size; write None for a size that is not "
                "known"
            )
    return sizes


def settle(
    channel: Channel,
    site: str,
    shard: Tensor,
    shapes: Sequence[Shape],
    expected_shape: ExpectedShape,
    known: ShardLayout | None,
    batch_on_dp: bool,
    splits: Splits = UNKNOWN,
    is_gradient: bool = False,
    *,
    is_memory: bool = False,
) -> tuple[ShardLayout, bool]:
    """``resolve`` for this rank's ``shard``; collective where the ranks must ask each other.

    Args:
        is_memory: Whether ``splits`` are those of another tensor at the same site, which this one
            need not follow. The same on every rank.

    Returns:
        The layout, and whether it is proven: constant values show nothing, so it holds for them
        only.
    """
    told = Told(None)
    if known is None and not channel.is_local:
        row = torch.cat([values.fingerprint(shard), torch.tensor(_encode(splits))])
        table = channel.exchange(row).tolist()
        told = Told(
            values.Fingerprints.of(channel.mesh, [row[:2] for row in table]),
            [_decode(row[2:]) for row in table],
        )
    tries = [told, Told(told.fingerprints)] if is_memory else [told]
    for i, told in enumerate(tries):
        try:
            layout = resolve(
                site, shapes, channel.mesh, expected_shape, known, told, batch_on_dp, is_gradient
            )
            break
        except ValueError as error:
            if i + 1 == len(tries):
                raise agreed(error) from None
    is_proven = told.fingerprints is None or told.fingerprints.tell or told.along("tp") is not None
    return layout, is_proven


_KINDS = (None, Replicate, Shard, Partial, Cut)


def _encode(splits: Splits) -> list[int]:
    words = []
    for split in splits:
        kind = _KINDS.index(None if split is None else type(split))
        shard = split.shard if isinstance(split, Cut) else split
        sizes = [0] * 4
        if isinstance(shard, Shard):
            sizes = [shard.dim, shard.parts, shard.pieces or 0, shard.stride]
        words += [kind, *sizes]
    return words


def _decode(words: Sequence[int]) -> Splits:
    found: list[Split] = []
    for start in (0, 5):
        kind, (dim, parts, pieces, stride) = (
            _KINDS[words[start]],
            words[start + 1 : start + 5],
        )
        if kind is None:
            found.append(None)
        elif kind is Shard or kind is Cut:
            shard = Shard(dim, parts, pieces or None, stride)
            found.append(Cut(shard) if kind is Cut else shard)
        else:
            found.append(Replicate() if kind is Replicate else Partial())
    return found[0], found[1]


def resolve(
    site: str,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    known: ShardLayout | None,
    told: Told,
    batch_on_dp: bool = True,
    is_gradient: bool = False,
) -> ShardLayout:
    """The layout of a tensor whose local shapes are ``shapes`` (all ranks of the grid, tp fastest).

    Args:
        site: For messages.
        known: The layout that the tensor itself tells (DTensor), which needs no check.
        told: What the ranks told each other; of a gradient, ``splits`` are the activation's.
        batch_on_dp: Whether dim 0 is the batch, of which dp ranks hold different rows (not so for
            parameters), where nothing says otherwise.

    Raises:
        ValueError: the sources contradict each other, or none of them settles the layout. The same
            on every rank, since it depends on nothing but what all ranks were told.
    """
    if expected_shape is not None and len(expected_shape) != len(shapes[0]):
        raise ValueError(
            f"{site}: expected_shape {expected_shape} has {len(expected_shape)} dims, the tensor "
            f"has {len(shapes[0])}: local shapes {_unique(shapes)}"
        )
    if known is not None:
        layout = known
    elif is_gradient:
        layout = _of_gradient(site, shapes, mesh, expected_shape, told)
    else:
        layout = _of_tensor(site, shapes, mesh, expected_shape, told, batch_on_dp)
    full_shape = _full_shape(site, layout, shapes, mesh)
    if expected_shape is not None and any(
        size is not None and size != full for size, full in zip(expected_shape, full_shape)
    ):
        raise ValueError(
            f"{site}: expected_shape {expected_shape} contradicts {layout.source}: the full "
            f"tensor has shape {full_shape} (layout {layout}, local shapes {_unique(shapes)})"
        )
    if known is None and len(shapes) > 1 and told.fingerprints is not None:
        is_told = told.along("tp") is not None
        if mesh.tp_size > 1:
            _check_values(
                site, layout, shapes, mesh, expected_shape, told.fingerprints, is_told, is_gradient
            )
        if mesh.dp_size > 1:
            _check_values_over_dp(site, layout, shapes, told.fingerprints)
    return layout


_FOLLOWED = "the operations that made it"


def _of_tensor(
    site: str,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    told: Told,
    batch_on_dp: bool,
) -> ShardLayout:
    dp, tp = _batch_unless_told(told, shapes, mesh, batch_on_dp), told.along("tp")
    if expected_shape is None:
        source = "equal values on all ranks" if tp is None else _FOLLOWED
        return ShardLayout(dp, tp or Replicate(), source=source)
    sized = _from_sizes(site, shapes, mesh, expected_shape, dp, tp)
    if tp is None:
        return sized
    if isinstance(tp, Shard):
        agree = sized.tp in (tp, Shard(tp.dim)) or expected_shape[tp.dim] is None
    else:
        agree = sized.tp == Replicate()
        if not agree and told.fingerprints is not None and not told.fingerprints.tell:
            return (
                sized  # inputs of equal values on all ranks are taken for the same, as these were
            )
    if not agree:
        raise ValueError(
            f"{site}: by expected_shape {expected_shape} the tensor is {_in_words(sized.tp)} over "
            f"the tensor-parallel ranks, by {_FOLLOWED} it is {_in_words(tp)} (local shapes "
            f"{_unique(shapes)}, {mesh.describe()}); leave expected_shape out, or give the sizes "
            "of the full tensor"
        )
    return ShardLayout(sized.dp, tp, source=f"{_FOLLOWED} and expected_shape")


def _batch_unless_told(
    told: Told, shapes: Sequence[Shape], mesh: Mesh, batch_on_dp: bool
) -> Placement:
    dp = told.along("dp")
    if dp is not None:
        return dp
    return Shard(0) if batch_on_dp and mesh.dp_size > 1 and shapes[0] else Replicate()


def _of_gradient(
    site: str, shapes: Sequence[Shape], mesh: Mesh, expected_shape: ExpectedShape, told: Told
) -> ShardLayout:
    """A gradient is split as its tensor is. Ranks that share the tensor hold parts of a sum, unless
    the model has summed them up before; of a partial sum every rank has the whole gradient.
    """
    forward = told.along("tp")
    equal = told.fingerprints is None or told.fingerprints.equal_along("tp")
    tp: Placement | None = forward
    if isinstance(forward, Partial):
        tp = Replicate()
    elif isinstance(forward, Replicate):
        tp = Replicate() if equal else Partial()
    dp = _batch_unless_told(told, shapes, mesh, True)
    if dp == Replicate() and mesh.dp_size > 1:
        dp = Partial()
    source = "equal values on all ranks" if tp is None else f"its tensor's: {_FOLLOWED}"
    if expected_shape is None:
        return ShardLayout(dp, tp or Replicate(), source=source)
    sized = _from_sizes(site, shapes, mesh, expected_shape, dp, tp)
    return ShardLayout(sized.dp, sized.tp if tp is None else tp, source=sized.source)


def _in_words(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"split along dim {placement.dim}"
    return "replicated" if isinstance(placement, Replicate) else "a partial sum"


def _from_sizes(
    site: str,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected: tuple[int | None, ...],
    dp: Placement,
    told_tp: Placement | None,
) -> ShardLayout:
    """Read the split off the sizes: where the ranks' sizes add up to the expected one, that dim is
    sharded.

    Args:
        dp: Where the batch is thought to be; the sizes may say otherwise.
        told_tp: How another source splits the tensor along tp.
    """
    tp: Placement = Replicate()
    rows = dp if mesh.dp_size > 1 and isinstance(dp, Shard) else None
    for dim, size in enumerate(expected):
        if size is None:
            continue
        table = [
            [shapes[i * mesh.tp_size + j][dim] for j in range(mesh.tp_size)]
            for i in range(mesh.dp_size)
        ]
        by_dp = {sum(column) for column in zip(*table)} if rows is not None else set()
        by_tp = {sum(row) for row in table} if mesh.tp_size > 1 else set()
        local = {n for row in table for n in row}
        if rows is not None and dim == rows.dim:
            if by_dp == {size}:
                continue
            if {sum(map(sum, table))} == {size} and mesh.tp_size > 1:
                tp = _shard_tp(site, tp, dim, expected)
                continue
            if dp == rows:
                dp = Replicate()
        if local == {size}:
            continue
        if by_tp == {size}:
            tp = _shard_tp(site, tp, dim, expected)
            continue
        if by_dp == {size} and not isinstance(dp, Shard):
            dp = Shard(dim)  # the batch is not where it was thought to be
            continue
        raise ValueError(
            f"{site}: expected_shape {expected} says {size} along dim {dim}, but the ranks hold "
            f"{sorted(local)} there"
            + (f", together {sorted(by_dp)} over data-parallel ranks" if by_dp else "")
            + (f", together {sorted(by_tp)} over tensor-parallel ranks" if by_tp else "")
            + f" (local shapes {_unique(shapes)}, {mesh.describe()}); give the size of the full "
            "tensor there, or None"
        )
    if isinstance(told_tp, Shard) and tp == Shard(told_tp.dim):
        tp = told_tp
    return ShardLayout(dp, tp, source="expected_shape")


def _shard_tp(site: str, tp: Placement, dim: int, expected: tuple[int | None, ...]) -> Placement:
    if isinstance(tp, Shard):
        raise ValueError(
            f"{site}: by expected_shape {expected} both dim {tp.dim} and dim {dim} are sharded "
            "over the tensor-parallel "
            "ranks, but one axis can shard one dim only; write None for dims that are not sharded"
        )
    return Shard(dim)


def _full_shape(site: str, layout: ShardLayout, shapes: Sequence[Shape], mesh: Mesh) -> Shape:
    try:
        return layout.full_shape(shapes, mesh.dp_size, mesh.tp_size)
    except ValueError as error:
        raise ValueError(
            f"{site}: {error}. Give the full sizes in expected_shape where the ranks hold "
            "different sizes"
        ) from None


def _check_values(
    site: str,
    layout: ShardLayout,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    fingerprints: values.Fingerprints,
    is_told: bool,
    is_gradient: bool,
) -> None:
    """Replicated must mean equal bytes, split and partial must not, along tp. Constant values show
    nothing either way, and gradients of different parts may be alike.
    """
    equal = fingerprints.equal_along("tp")
    if layout.tp != Replicate():
        if equal and fingerprints.tell and not is_gradient:
            told = f" {expected_shape}" if layout.source == "expected_shape" else ""
            raise ValueError(
                f"{site}: by {layout.source}{told} the tensor is {_in_words(layout.tp)} over "
                f"{mesh.tp_size} tensor-parallel ranks, but all of them hold the same values of "
                f"shape {_unique(shapes)}: the tensor is replicated; give its own sizes in "
                "expected_shape, or None"
            )
    elif not equal:
        raise ValueError(
            f"{site}: the tensor-parallel ranks hold different values of shape {_unique(shapes)}"
            + (
                f", though by {layout.source} all should hold the same (does each rank draw its "
                "own dropout, or is its input not the same on all?)"
                if is_told
                else ", so each has a shard or a partial sum, and which is not known"
            )
            + f"; it may be {_candidates(shapes, mesh)}: give the full sizes in expected_shape"
            + (f" (it is {expected_shape} now)" if expected_shape is not None else "")
        )
    elif not (fingerprints.tell or is_told or expected_shape is not None) and any(
        _has_many(shape) for shape in shapes
    ):
        raise ValueError(
            f"{site}: all ranks hold one constant value of shape {_unique(shapes)}, which does "
            "not show whether the tensor is sharded; give the full sizes in expected_shape"
        )


def _candidates(shapes: Sequence[Shape], mesh: Mesh) -> str:
    """The layouts along tp that the local shapes allow, with the full shapes of each."""
    found = []
    placements: list[Placement] = [Shard(dim) for dim in range(len(shapes[0]))]
    for tp in (*placements, Partial()):
        rows = shapes[: mesh.tp_size]
        try:
            full = ShardLayout(tp=tp).full_shape(rows, 1, mesh.tp_size)
        except ValueError:
            continue
        found.append(f"{_in_words(tp)}, in full {full}")
    return "; or ".join(found) or "split in a way that is no shard of one tensor"


def _has_many(shape: Shape) -> bool:
    return len(shape) > 0 and 0 not in shape


def _check_values_over_dp(
    site: str, layout: ShardLayout, shapes: Sequence[Shape], fingerprints: values.Fingerprints
) -> None:
    """What data-parallel ranks share must be equal. (Rows of a batch may be: same rows, twice.)"""
    if layout.dp == Replicate() and not fingerprints.equal_along("dp"):
        raise ValueError(
            f"{site}: the data-parallel ranks hold different values of shape {_unique(shapes)} "
            "where they should share one; for gradients: average them over the ranks first"
        )


def _unique(shapes: Sequence[Shape]) -> str:
    unique = list(dict.fromkeys(map(tuple, shapes)))
    return str(unique[0]) if len(unique) == 1 else f"{list(map(tuple, shapes))} by rank"
