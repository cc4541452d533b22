"""Handles tensors of which only the extent is not known.

``torch.zeros(rows, length)`` and ``mask.expand(rows, -1, -1, -1)`` may have been passed local
sizes. Such a dim is *open*: used with a tensor that is split along a dim of this size, it is a part
of a larger one, since the unsharded program's shapes would not fit else; used with one that is
whole there, it is whole. Along tp what is expanded is the same on all ranks whatever its size, so
it is replicated as well: ``mask.expand(-1, groups, experts // groups)``, where a rank may have as
many heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flex_model.distributed.placement import Partial, Placement, Shard
from flex_model.layouts import factories
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import REPLICATED, Operand, Operation, Shape, differ
from flex_model.layouts.propagation.reshaping import dims_with
from flex_model.layouts.propagation.text_cases import RECURRENT

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

OpenDims = frozenset[int]

_VIEWS = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze"}
_KEEP_ALL = {*_VIEWS, "slice", "select", "repeat", "expand", "flip", "roll", "tril", "triu"}
_JOIN = {*_VIEWS, "cat", "stack", "repeat", "repeat_interleave"}
_BESIDE = {"where", "masked_fill", "copy", "index_copy", "complex"}
_AT_INDICES = {"index_put", "index_copy"}
_AT_FEWER = {"gather", "scatter", "scatter_add", "scatter_reduce"}  # indices than there are rows
_KEEP_SIZES = {"clone", "_to_copy", "transpose", "permute", "native_layer_norm", "linear"}
_MAX_CHOICES = 64
#: By the argument that has the sizes.
EXPANDS = {"expand": "size", "repeat": "repeats", "repeat_interleave": "repeats"}
_FILLS = {"zeros_like", "ones_like", "full_like", "fill", "zero"}


def may_expand(name: str, axis: str) -> bool:
    """Whether an operation may give dims of size 1 a rank's own size; along tp, where a number of
    copies is seldom a share of heads, only one that is passed sizes.
    """
    return name == "expand" or (name in EXPANDS and axis == "dp")


def open_dims(operation: Operation, proofs: AxisProofs, are_numbers: bool) -> OpenDims | None:
    """Return the open dims of the result; None if it has none, or is not known.

    Args:
        are_numbers: Whether the result is made of numbers alone, such as positions, after Python
            has read some of a rank's rows.
    """
    name, result = operation.name, operation.outputs[0]
    known, axis = proofs.open, proofs.axis
    if not _same_numbers(operation):
        return None
    if factories.is_factory(operation) and not factories.makes_blank(name):
        is_open = axis == "dp" or factories.is_fill(name)
        return (is_open and factories.unsettled_dims(operation, proofs)) or None
    if name in _FILLS:
        return known.get(operation.operands[0].value, frozenset(range(result.ndim)))
    of_each: list[OpenDims] = []
    for operand in operation.operands:
        if operand.placement in (None, REPLICATED) and operand.value in known:
            of_each.append(known[operand.value])
        elif operand.placement == REPLICATED:
            of_each.append(frozenset())
        else:
            return None
    if torch.Tag.pointwise in operation.tags:
        whole = [one for one, dims in zip(operation.operands, of_each) if not dims]
        of_each = [
            frozenset(dim for dim in dims if not _is_covered(one, dim, whole))
            for one, dims in zip(operation.operands, of_each)
        ]
    if may_expand(name, axis):
        return _expanded(operation, of_each[0], proofs)
    grown = _grown(operation, proofs) if are_numbers and axis == "dp" else frozenset[int]()
    if axis == "dp" and joins_copies(operation, proofs):
        grown |= {operation["dim"] % result.ndim}
    if not any(of_each):
        return grown or None
    joined = name == "cat"
    found = _joined(operation, of_each) if joined else _parallel(operation, of_each, axis)
    return None if found is None else found | grown


def closed_sizes(
    operation: Operation, shape: Shape, dims: OpenDims, proofs: AxisProofs
) -> dict[int, int]:
    """Return, by dim, the sizes of a result that has these open dims, if it has all of its
    operands' other dims: plain numbers passed to other operations may count rows. One row a rank is
    lost among dims of size 1.
    """
    is_kept = may_expand(operation.name, proofs.axis) or operation.name in _KEEP_SIZES
    is_kept |= torch.Tag.pointwise in operation.tags
    if not is_kept or any(v in proofs.open.keys() - proofs.sizes_passed for v in operation.values):
        return {}
    return {
        d: n
        for d, n in enumerate(shape)
        if d not in dims and (n > 1 or n not in proofs.split_sizes)
    }


def joins_copies(operation: Operation, proofs: AxisProofs) -> bool:
    """Whether it may join copies of one tensor, or of several in turn, for each row:
    ``torch.cat([cls, sep] * len(x))``; where Python has no plain number of rows, along a dim in
    which each has one index. The last dim of several has features, such as the halves of a rotary
    embedding of one frequency.
    """
    if operation.name not in ("cat", "stack"):
        return False
    shape = operation.outputs[0].shapes[0]
    dim = operation["dim"] % len(shape)
    origins = [_origin(value, proofs) for value in operation.values]
    count, kinds = len(origins), len(set(origins))
    copies = count // kinds
    if origins != origins[:kinds] * copies or copies == 1 < count or dim == len(shape) - 1 > 0:
        return False
    if proofs.units:
        return proofs.may_count(copies, False)
    multiples = {size for size in proofs.split_sizes if size > 1 or count == 1}
    return count == shape[dim] and any(copies % size == 0 for size in multiples)


def _origin(value: Any, proofs: AxisProofs, depth: int = 4) -> Any:
    """Return by what operations of what values it was made; numbers differ by what was passed."""
    step = proofs.steps.get(value)
    if step is None or not step.inputs or depth == 0 or value in proofs.numbers:
        return value
    return step.text, *(_origin(one, proofs, depth - 1) for one in step.inputs)


def _grown(operation: Operation, proofs: AxisProofs) -> OpenDims:
    """Return the dims of joined numbers that may count rows, and were not as long before: there may
    be a piece for each of a rank's rows, ``torch.cat([torch.arange(n) for n in lengths])``.
    """
    after = operation.outputs[0].shapes[0]
    before = [operand.shapes[0] for operand in operation.operands]
    return frozenset(
        dim
        for dim, size in enumerate(after)
        if operation.name in _JOIN
        and size > 1
        and proofs.may_count(size, 0 < dim == len(after) - 1)
        and any(len(shape) != len(after) or shape[dim] != size for shape in before)
    )


def _joined(operation: Operation, of_each: Sequence[OpenDims]) -> OpenDims | None:
    """Return the open dims of joined tensors: the dim along which they are joined if it is open in
    one of them, others if they are open in all.
    """
    dim = operation["dim"] % operation.outputs[0].ndim
    along = frozenset({dim} if any(dim in dims for dims in of_each) else ())
    return along | frozenset.intersection(*of_each) - {dim} or None


def _parallel(operation: Operation, of_each: Sequence[OpenDims], axis: str) -> OpenDims | None:
    """Return the result's open dims, if the operation treats each index of an open dim alike and
    independently: it would then turn shards along that dim into shards along a dim of the result.
    Along dp a view may also join it with others, as where a grid of positions is flattened.
    """
    operands, found, covered = operation.operands, set[int](), set[tuple[int, int]]()
    for choice, reading in _readings(operation, operands, of_each):
        split = {(i, one.dim) for i, one in enumerate(choice) if isinstance(one, Shard)}
        (made, *_) = (rules.propagate(reading) if split else None) or [None]
        if isinstance(made, Shard) and made.parts == 1:
            found.add(made.dim)
            covered |= split
    expected = {
        (i, dim)
        for i, dims in enumerate(of_each)
        for dim in dims
        if any(shape[dim] != 1 for shape in operands[i].shapes)
    }
    after = operation.outputs[0].shapes[0]
    if operation.name in _VIEWS and axis == "dp":
        for i, dim in expected - covered:
            found.update(dims_with(operands[i].shapes[0], after, dim))
    elif not expected <= covered:
        every = all(len(dims) == operand.ndim for dims, operand in zip(of_each, operands))
        return frozenset(range(len(after))) if every and operation.name in _KEEP_ALL else None
    return frozenset(found) or None


def _readings(
    operation: Operation, operands: Sequence[Operand], of_each: Sequence[OpenDims]
) -> Iterator[tuple[tuple[Placement, ...], Operation]]:
    """Yield the operation with these operands replicated or split along one of their open dims, in
    all combinations, and their placements; nothing where these are too many.
    """
    choices: list[list[Placement]] = [[REPLICATED, *map(Shard, sorted(dims))] for dims in of_each]
    if math.prod(map(len, choices)) <= _MAX_CHOICES:
        for choice in itertools.product(*choices):
            placed = {id(operand): one for operand, one in zip(operands, choice)}
            yield choice, with_placements(operation, placed)


def _expanded(operation: Operation, dims: OpenDims, proofs: AxisProofs) -> OpenDims | None:
    """Return the open dims of an expanded tensor, with those of size 1 that are expanded to what
    may count rows, or otherwise than in the unsharded program; those of any size that are repeated
    as often, if Python has a plain number of rows.
    """
    operand, result = operation.operands[0], operation.outputs[0]
    passed = operation.by_rank(EXPANDS[operation.name])
    offset = result.ndim - operand.ndim
    found = {dim + offset for dim in dims}
    known = operation.full_sizes.get(EXPANDS[operation.name], [None] * result.ndim)
    if operation.name == "repeat_interleave":  # along one dim
        along = (operation["dim"] or 0) % result.ndim
        is_of_features = along == result.ndim - 1 > 0 and known[0] is None  # frequencies, twice
        if isinstance(passed[0], Operand) or is_of_features:
            return dims or None
        passed = [[n if dim == along else 1 for dim in range(result.ndim)] for n in passed]
        known = [known[0] if dim == along else n for dim, n in enumerate(result.shapes[0])]
    for dim in range(result.ndim):
        sizes = {shape[dim] for shape in result.shapes}
        was = {shape[dim - offset] for shape in operand.shapes} if dim >= offset else {1}
        full = known[dim] if dim < len(known) else None
        if operation.name != "expand" and was != {1}:
            if not proofs.units:
                continue  # a number of copies, not a size
            sizes, was = {numbers[dim] for numbers in passed}, {1}
        is_last = 0 < dim == result.ndim - 1
        may_count = any(proofs.may_count(size, is_last) for size in sizes)
        if sizes == was and (full is not None or not may_count):
            continue
        if full is not None and sizes == {full}:
            continue
        if full is not None or may_count or len(sizes) > 1:
            found.add(dim)
    return frozenset(found) if found else None


def _same_numbers(operation: Operation) -> bool:
    for name in operation.arguments[0]:
        numbers = operation.by_rank(name)
        if isinstance(numbers[0], (int, float)) and differ(numbers):
            return False
    return True


def with_extents(
    operation: Operation, known: Mapping[Any, OpenDims], plain: Container[Any]
) -> Operation:
    """Return the operation, with operands of unknown extent placed as the other operands show."""
    operands = operation.operands
    if operation.name == "expand" and operands[0].value in plain and _shows_rows(operation):
        return with_placements(operation, {id(operands[0]): REPLICATED})
    unknown = [
        (operand, known[operand.value])
        for operand in operands
        if operand.placement is None and operand.value in known
    ]
    others = [operand for operand in operands if operand.placement is not None]
    if not unknown or not others or len(others) + len(unknown) < len(operands):
        return operation
    placed: dict[int, Placement | None]
    is_whole = all(one.placement == REPLICATED for one in others) and operands[0] in others
    if operation.name in RECURRENT and is_whole:
        # `torch.zeros(layers, rows, features)`: states, as large as input and weights show.
        placed = {id(operand): REPLICATED for operand, _ in unknown}
    elif len(unknown) == 1 and _counts_values(operation, unknown[0][0], others):
        placed = {id(unknown[0][0]): REPLICATED}
    elif torch.Tag.pointwise in operation.tags or operation.name in _BESIDE:
        placed = {
            id(operand): _beside(operand, dims, others, operand.value in plain)
            for operand, dims in unknown
        }
    else:
        return _as_rules_allow(operation, unknown, others)
    return operation if None in placed.values() else with_placements(operation, placed)


def _counts_values(operation: Operation, index: Operand, others: Sequence[Operand]) -> bool:
    """Whether an index is as long as the values, all of which are whole, that it says the places
    of: ``w[torch.tensor([1, 5])] = values``.
    """
    if any(one.placement != REPLICATED for one in others) or others[-1] is index:
        return False
    if operation.name in ("index_copy", "index_add"):
        return index is operation["index"]
    if operation.name != "index_put" or index.ndim != 1:
        return False
    indices, values, whole = operation["indices"], others[-1], operation["self"]
    back = whole.ndim - indices.index(index) if len(others) == 2 else 0
    return 0 < back <= values.ndim and values.shapes[0][-back] == index.shapes[0][0] > 1


def _shows_rows(operation: Operation) -> bool:
    """Whether the unsharded program expands to another size: ``x.expand(len(h), -1)``."""
    full, own = operation.full_sizes.get("size", ()), operation.by_rank("size")[0]
    return any(size not in (None, local) for size, local in zip(full, own))


def _as_rules_allow(
    operation: Operation, unknown: Sequence[tuple[Operand, OpenDims]], others: Sequence[Operand]
) -> Operation:
    """Return the operation with placements of these operands with which its rule allows the split
    tensors among the others, if all of these give the same results.
    """
    shards = [operand for operand in others if operand.shard is not None]
    if not shards:
        return operation
    operands, of_each = zip(*unknown)
    if operation.name == "cat":  # as many along its own dim as there are, which shows nothing
        of_each = tuple(dims - {operation["dim"] % operation.outputs[0].ndim} for dims in of_each)
    allowed = [
        (made, results)
        for _, made in _readings(operation, operands, of_each)
        if None not in (results := rules.propagate(made))
    ]
    is_certain = bool(allowed) and all(results == allowed[0][1] for _, results in allowed)
    return allowed[0][0] if is_certain else operation


def with_shares(operation: Operation, known: Mapping[Any, OpenDims]) -> Operation:
    """Return the operation, with replicated operands placed as the others show along dims that may
    be this rank's share: ``scores + bias.expand(-1, heads // tp, -1, -1)``.
    """
    placed: dict[int, Placement | None] = {
        id(operand): None for operand in operation.operands if operand.value in known
    }
    return with_extents(with_placements(operation, placed), known, ()) if placed else operation


def with_single_rows(operation: Operation) -> Operation:
    """Return the operation with replicated operands placed as rows where they have one, as the
    ranks have: the same on all of them, as if it was expanded. It does not broadcast them, so the
    unsharded program passes as many as it has rows.
    """
    operands = operation.operands
    is_alike = torch.Tag.pointwise in operation.tags or operation.name in _BESIDE
    if is_alike or operation.name in _AT_FEWER:
        return operation
    if not any(o.shard is not None and o.shapes[0][o.shard.dim] == 1 for o in operands):
        return operation
    unknown = [
        (operand, frozenset(dim for dim, size in enumerate(operand.shapes[0]) if size == 1))
        for operand in operands
        if operand.placement == REPLICATED and 1 in operand.shapes[0]
    ]
    others = [operand for operand in operands if operand.shard is not None]
    return _as_rules_allow(operation, unknown, others) if unknown else operation


def with_written_blank(operation: Operation, blank: Container[Any]) -> Operation:
    """Return the operation, with a blank tensor that it writes to at some indices placed as its
    rule allows beside the split values: the rest holds anything in the unsharded program, too.
    """
    if operation.name not in _AT_INDICES or operation.values[0] not in blank:
        return operation
    written, *others = operation.operands
    if written.placement is not None:
        return operation
    return _as_rules_allow(operation, [(written, frozenset(range(written.ndim)))], others)


def with_extents_of_whole(operation: Operation, proofs: AxisProofs) -> Operation:
    """Return the operation with operands of unknown extent replicated where the others, which are
    whole, show that they are whole, too.
    """
    unknown = [one for one in operation.operands if one.value in proofs.open]
    whole = [one for one in operation.operands if one.value not in proofs.open]
    are_shown = all(_is_covered(one, d, whole) for one in unknown for d in proofs.open[one.value])
    return with_placements(operation, {id(one): REPLICATED for one in unknown if are_shown})


def with_zeros_as_sums(operation: Operation, proofs: AxisProofs) -> Operation:
    """Return the operation, with replicated operands of zeros placed as partial sums, which they
    are, too: an expert layer adds its partial sums to such a tensor.
    """
    placed = {
        id(operand): Partial()
        for operand in operation.operands
        if operand.placement == REPLICATED and proofs.is_made_by(operand.value, *factories.ZEROS)
    }
    return with_placements(operation, placed) if placed else operation


def with_placements(operation: Operation, placed: Mapping[int, Placement | None]) -> Operation:
    """Return the operation with these placements of operands, by their ``id``."""
    replaced = {  # shared by all ranks
        id(operand): replace(operand, placement=placed[id(operand)])
        for operand in operation.operands
        if id(operand) in placed
    }

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [of(item) for item in value]
        return replaced.get(id(value), value)

    arguments = tuple(
        {name: of(value) for name, value in of_rank.items()} for of_rank in operation.arguments
    )
    return replace(operation, arguments=arguments)


def _beside(
    tensor: Operand, dims: OpenDims, others: Sequence[Operand], is_plain: bool
) -> Placement | None:
    """Return its placement, if the other operands determine the extent of every open dim. Along dp
    a dim that was passed as a plain number is whole where the rows stand in another one.
    """
    shards = [operand for operand in others if operand.shard is not None]
    if any(operand.placement not in (REPLICATED, operand.shard) for operand in others):
        return None
    split = None
    if shards:
        shard = shards[0].shard
        assert shard is not None
        dim = shard.dim - shards[0].ndim + tensor.ndim
        if dim >= 0:
            sizes = [shape[dim] for shape in tensor.shapes]
            if dim in dims and sizes == [shape[shard.dim] for shape in shards[0].shapes]:
                split = dim
            elif set(sizes) != {1}:
                return None
    for dim in () if is_plain and shards else dims:
        if dim != split and not _is_covered(tensor, dim, others):
            return None
    if split is None:
        return REPLICATED
    assert shards[0].shard is not None
    return replace(shards[0].shard, dim=split)


def _is_covered(tensor: Operand, dim: int, others: Sequence[Operand]) -> bool:
    """Whether another operand is whole and larger than 1 there: broadcasting excludes another size.
    A size of 1 is whole beside rows, too, which stand elsewhere.
    """
    is_one = {shape[dim] for shape in tensor.shapes} == {1}
    if is_one and any(one.shard for one in others):
        return True
    back, full = tensor.ndim - dim, len(tensor.shapes) if is_one else 0  # of one row a rank
    return any(
        operand.ndim >= back
        and operand.shapes[0][-back] not in (1, full)
        and not (operand.shard is not None and operand.shard.dim == operand.ndim - back)
        for operand in others
    )
