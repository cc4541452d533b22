"""Which layout a tensor has: from DTensor placements, from following the model's operations, from
``expected_shape`` and from the ranks' values; they must agree.

On the tp axis a tensor is replicated only if the ranks' bytes are seen to be equal, and split only
if a source says so. On the dp axis ranks hold rows of the batch along dim 0 where no source says
otherwise. What is neither is an error: a shard is never handed over as the full tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.channel import Channel
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
from flex_model.errors import LayoutMismatchError, agreed

ExpectedShape = tuple[int | None, ...] | None

AXES = ("dp", "tp")

# How a tensor is split along dp and tp, as far as a rank knows without asking the others.
Splits = tuple[Split, Split]
UNKNOWN: Splits = (None, None)


# An activation or a parameter; the gradient of an activation; the gradient of a parameter.
Role = Literal["tensor", "gradient", "parameter gradient"]


@dataclass(frozen=True)
class Told:
    """What all ranks of the grid told of one tensor: fingerprints of its values, and their splits.

    Of a gradient, ``splits`` and ``activation`` (fingerprints) are those of the tensor whose
    gradient it is. Fingerprints are None where nobody asked.
    """

    fingerprints: values.Fingerprints | None
    splits: Sequence[Splits] = (UNKNOWN,)
    activation: values.Fingerprints | None = None

    def along(self, axis: str) -> Placement | None:
        """The placement along ``axis`` that the ranks' splits say; None where they say nothing."""
        told = {splits[axis == "tp"] for splits in self.splits}
        cuts = {split for split in told if isinstance(split, Cut)}
        if not cuts:
            split = told.pop() if len(told) == 1 else None
            assert not isinstance(split, Cut)
            return split
        if told - cuts:  # what is some ranks' own part is not that of others: a common slice
            return Replicate() if told == {Replicate(), *cuts} else None
        if self.fingerprints is None or len(cuts) > 1:
            return None
        return Replicate() if self.fingerprints.equal_along(axis) else cuts.pop().shard


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
    role: Role = "tensor",
    *,
    activation: Tensor | None = None,
    is_memory: bool = False,
    before: Splits | None = None,
) -> Settled:
    """``resolve`` for this rank's ``shard``; collective where the ranks must ask each other.

    Args:
        activation: Of a gradient: the fingerprint of the tensor whose gradient it is.
        is_memory: Whether ``splits`` are those of another tensor at the same site, which this one
            need not follow. The same on every rank.
        before: Those of another tensor at the same site, tried where ``splits`` do not settle it.
            The same on every rank.
    """
    told = Told(None)
    if known is None and not channel.is_local:
        has_activation = activation is not None
        if activation is None:
            activation = torch.zeros(2, dtype=torch.int64)
        words = torch.tensor([has_activation, *encode(splits)])
        row = torch.cat([values.fingerprint(shard), activation, words])
        table = channel.exchange(row).tolist()
        told = Told(
            values.Fingerprints.of(channel.mesh, [row[:2] for row in table]),
            [decode(row[5:]) for row in table],
            values.Fingerprints.of(channel.mesh, [row[2:4] for row in table])
            if all(row[4] for row in table)
            else None,
        )
    tries = [told]
    if is_memory:
        tries.append(Told(told.fingerprints, activation=told.activation))
    if before is not None:
        tries.append(Told(told.fingerprints, [before], told.activation))
    for i, told in enumerate(tries):
        try:
            found = resolve(
                site, shapes, channel.mesh, expected_shape, known, told, batch_on_dp, role
            )
            break
        except ValueError as error:
            if i + 1 == len(tries):
                raise agreed(error) from None
    tells = told.fingerprints is None or told.fingerprints.tell or told.along("tp") is not None
    return Settled(found, found if role != "gradient" else _of_activation(found, told), tells)


@dataclass(frozen=True)
class Settled:
    """The layout of a tensor, and of the activation whose gradient it is, or itself.

    ``is_proven``: constant values show nothing, so without it the layout holds for them only.
    """

    layout: ShardLayout
    activation: ShardLayout
    is_proven: bool


_KINDS = (None, Replicate, Shard, Partial, Cut)


def encode(splits: Splits) -> list[int]:
    """Ten ints, for an exchange between ranks."""
    words = []
    for split in splits:
        kind = _KINDS.index(None if split is None else type(split))
        shard = split.shard if isinstance(split, Cut) else split
        sizes = [0] * 4
        if isinstance(shard, Shard):
            sizes = [shard.dim, shard.parts, shard.pieces or 0, shard.stride]
        words += [kind, *sizes]
    return words


def decode(words: Sequence[int]) -> Splits:
    """The inverse of ``encode``."""
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
    role: Role = "tensor",
) -> ShardLayout:
    """The layout of a tensor whose local shapes are ``shapes`` (all ranks of the grid, tp fastest).

    Args:
        site: For messages.
        known: The layout that the tensor itself tells (DTensor), which needs no check.
        told: What the ranks told each other.
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
    elif role == "gradient":
        layout = _of_gradient(site, shapes, mesh, expected_shape, told)
    else:
        layout = _of_tensor(site, shapes, mesh, expected_shape, told, batch_on_dp)
        if role == "parameter gradient":
            layout = _summed_later(layout, told)
            # FSDP2 splits what the layer has split by hand.
            layout = replace(layout, tp_first=layout.splits_one_dim)
    full_shape = _full_shape(site, layout, shapes, mesh)
    if expected_shape is not None and any(
        size is not None and size != full for size, full in zip(expected_shape, full_shape)
    ):
        raise ValueError(
            f"{site}: expected_shape {expected_shape} contradicts {layout.source}: the full "
            f"tensor has shape {full_shape} (layout {layout}, local shapes {_unique(shapes)})"
        )
    if known is None and role != "gradient":
        _check(site, layout, shapes, mesh, expected_shape, told)
    return layout


def _check(
    site: str,
    layout: ShardLayout,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    told: Told,
) -> None:
    """The ranks' values must fit the layout."""
    if len(shapes) == 1 or told.fingerprints is None:
        return
    if mesh.tp_size > 1:
        is_told = told.along("tp") is not None
        _check_values(site, layout, shapes, mesh, expected_shape, told.fingerprints, is_told)
    if mesh.dp_size > 1:
        _check_values_over_dp(site, layout, shapes, told.fingerprints)


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
        if not agree and told.fingerprints is not None:
            alike = told.fingerprints.tell and told.fingerprints.equal_along("tp")
            if not alike and isinstance(tp, Replicate):
                return sized  # the values say that it is not replicated, or nothing: the sizes do
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
    forward = Told(told.activation, told.splits)
    is_known = told.activation is not None or forward.along("tp") is not None
    if mesh.tp_size > 1 and not is_known and expected_shape is None:
        raise ValueError(
            f"{site}: how the tensor is split over the tensor-parallel ranks is not known, and its "
            f"gradient, of shape {_unique(shapes)}, does not tell: it may be "
            f"{_candidates(shapes, mesh)}; give the full sizes in expected_shape"
        )
    tensor = _of_tensor(site, shapes, mesh, expected_shape, forward, True)
    _check(site, tensor, shapes, mesh, expected_shape, forward)
    dp, tp = tensor.dp, tensor.tp
    if isinstance(tp, Partial):
        tp = Replicate()
    elif isinstance(tp, Replicate) and told.fingerprints is not None:
        tp = tp if told.fingerprints.equal_along("tp") else Partial()
    if dp == Replicate() and mesh.dp_size > 1:
        dp = Partial()
    return ShardLayout(dp, tp, source=f"its tensor's: {tensor.source}")


def _of_activation(layout: ShardLayout, told: Told) -> ShardLayout:
    """The layout of the tensor that has a gradient of this layout."""
    dp = Replicate() if isinstance(layout.dp, Partial) else layout.dp
    if isinstance(layout.tp, Shard):
        return ShardLayout(dp, layout.tp)
    was_sum = Told(told.activation, told.splits).along("tp") == Partial()
    return ShardLayout(dp, Partial() if was_sum else Replicate())


def _summed_later(layout: ShardLayout, told: Told) -> ShardLayout:
    """Of a parameter that tensor-parallel ranks share, gradients that differ are parts of a sum
    that the framework will do: else the ranks' copies would part.
    """
    fingerprints = told.fingerprints
    if layout.tp != Replicate() or told.along("tp") != Replicate() or fingerprints is None:
        return layout
    return layout if fingerprints.equal_along("tp") else replace(layout, tp=Partial())


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
    except LayoutMismatchError as error:
        columns = [shapes[place :: mesh.tp_size] for place in range(mesh.tp_size)]
        rows = layout.dp.dim if isinstance(layout.dp, Shard) else None
        candidates = _candidates(shapes, mesh) if mesh.tp_size > 1 else ""
        others = [
            {tuple(n for dim, n in enumerate(shape) if dim != rows) for shape in column}
            for column in columns
        ]
        if any(len(sizes) > 1 for sizes in others):
            advice = "pad the inputs of the data-parallel ranks to one length"
        elif candidates:
            advice = f"it may be {candidates}: give the full sizes in expected_shape"
        else:
            advice = (
                "they are shards of no one tensor: give the tensor-parallel ranks the same inputs, "
                "or hook another module"
            )
        raise LayoutMismatchError(f"{site}: {error}; {advice}") from None


def _check_values(
    site: str,
    layout: ShardLayout,
    shapes: Sequence[Shape],
    mesh: Mesh,
    expected_shape: ExpectedShape,
    fingerprints: values.Fingerprints,
    is_told: bool,
) -> None:
    """Replicated must mean equal bytes, split and partial must not, along tp. Constant values show
    nothing either way.
    """
    equal = fingerprints.equal_along("tp")
    if layout.tp != Replicate():
        if equal and fingerprints.tell:
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
    return "; or ".join(found)


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
