"""Infers the placements of one operation's results from its call on all ranks of an axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from flex_model.distributed.placement import Partial, Placement, Shard
from flex_model.layouts import chunks, constants, factories, logged, own_rows, ranges
from flex_model.layouts.argument_reader import ArgumentReader
from flex_model.layouts.contracts import collectives, opaque_calls
from flex_model.layouts.logged import Value
from flex_model.layouts.obstacle import Cause, Reason
from flex_model.layouts.operation_log import dtype_of
from flex_model.layouts.placement_encoding import decode
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import (
    REPLICATED,
    ArgumentsDifferError,
    Operand,
    Operation,
)
from flex_model.layouts.propagation.text_cases import BATCH_NORMS
from flex_model.layouts.writes import follow_writes

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

# Of which later operations read what they made.
_MAKERS = {*factories.ZEROS, "empty_like", "sort", "argsort", "expand"}

_Found = list[Placement | None]


def follow_operation(proofs: AxisProofs, entries: tuple[logged.Op, ...]) -> None:
    """Note the placements of the results of an operation that all ranks ran."""
    name, outputs = entries[0].name, entries[0].outputs
    read, operation = _read(proofs, name, entries)
    values = [one.value for one in read.operands]
    found: _Found = [None] * len(outputs)
    written: Any = entries[0].writes[0].before if entries[0].writes else None
    if name == "aten::copy_" and written in proofs.received and _is_of_gloo(proofs, values[1]):
        # Gloo's own copy into the result of a collective, when it is waited for.
        found = [proofs.placements.get(written)]
        proofs.received.add(outputs[0].value)
    elif operation is not None:
        with suppress(ArgumentsDifferError):
            found = _infer(proofs, entries[0], read, operation)
    cause = _cause(proofs, name, read, written) if None in found else None
    text = f"{name.removeprefix('aten::')}{cause or ''}"
    inputs = tuple(v for v in values if isinstance(v, int)) or tuple(read.sized_by)
    for i, output in enumerate(outputs):
        value, placements = output.value, output.placements
        stated = decode(placements and placements[proofs.index])  # by a DTensor
        proofs.shapes[value] = tuple(entry.outputs[i].local_shape for entry in entries)
        proofs.note_step(value, text, inputs, cause)
        proofs.set_placement(value, found[i] if stated is None else stated)
        if operation is not None:
            _note_facts(proofs, read, operation, value, i)
    rule = "" if operation is None else operation.name
    if name.startswith(("aten::", opaque_calls.PREFIX)) and _passes_gradients(rule):
        made = [output.value for output in outputs if _has_gradient(output.dtype)]
        proofs.gradients.note_made([entry.carriers for entry in entries], made)
    follow_writes(proofs, outputs, [entry.writes for entry in entries])


def _is_of_gloo(proofs: AxisProofs, source: Any) -> bool:
    """Whether nothing in this forward made the tensor, or the one that it was split off from."""
    if source is None:
        return True
    text, cause = proofs.steps[source].text, proofs.steps[source].cause
    return text.startswith("split") and cause is not None and cause.reason is Reason.NOT_MADE


def _cause(proofs: AxisProofs, name: str, read: ArgumentReader, written: Any) -> Cause | None:
    """Return why an operation has no rule for its operands, as far as that is known."""

    def is_whole(value: Any) -> bool:
        return value in proofs.weights and proofs.placement(value) == REPLICATED

    if read.are_others:
        return Cause(Reason.OTHERS)
    if read.unrecorded and name != "aten::lift_fresh":
        return Cause(Reason.NOT_MADE, str(read.unrecorded[0]))
    shards = [(one, one.shard) for one in read.operands if one.shard is not None]
    if proofs.axis == "tp" and shards and is_whole(written):
        return Cause(Reason.INTO_WHOLE, repr(proofs.steps[written].text))
    num_rows = shards[0][0].shapes[0][shards[0][1].dim] if proofs.axis == "dp" and shards else 0
    for one in read.operands if num_rows > 1 else ():
        if is_whole(one.value) and one.ndim > 1 and one.shapes[0][0] == num_rows:
            return Cause(Reason.WITH_WHOLE, repr(proofs.steps[one.value].text))
    return None


# ---- How results are placed ----------------------------------------------------------------------


def _infer(
    proofs: AxisProofs, entry: logged.Op, read: ArgumentReader, operation: Operation
) -> _Found:
    """Infer the placements of an operation's outputs.

    Raises:
        ArgumentsDifferError: an argument that the result depends on is not the same on all ranks.
    """
    if read.differs:
        return [None] * len(operation.outputs)
    found: _Found = []
    for reading in _readings(proofs, operation):
        if not found or reading is not operation:
            found = _propagate(proofs, read, reading)
        if None not in found:
            break
    is_split = bool(operation.operands) and operation.operands[0].shard is not None
    elsewhere = proofs.gathered_elsewhere
    if is_split and collectives.joins_elsewhere(operation, elsewhere, proofs.other_size):
        found = [None]
    if found == [None] and _is_of_copies(proofs, operation):
        found = [REPLICATED]
    if proofs.axis == "dp" and None in found:
        found = _of_own_rows(proofs, entry, operation, found)
    is_known = found != [None]
    of_ranks = ranges.infer(operation, proofs.ranges)
    # All of a dim is no range: `torch.arange(x.shape[1])`.
    if of_ranks is not None and not (is_known and read.sized_by):
        proofs.ranges[entry.outputs[0].value] = of_ranks
        if not is_known and ranges.follow_each_other(of_ranks):
            found = [Shard(0)]
    if entry.writes and factories.is_draw(operation):
        maker, _ = proofs.makers.get(operation.values[0], (operation, 0))
        found = [maker.operands[0].placement] if maker.name == "empty_like" else found
    return [p if rules.fits(p, one) else None for p, one in zip(found, operation.outputs)]


def _readings(proofs: AxisProofs, operation: Operation) -> Iterator[Operation]:
    """Yield the operation, then with placements that tensors among its operands have, too."""
    yield _with_all_written(proofs, operation)
    yield constants.with_written_blank(operation, proofs.blank)
    yield constants.with_zeros_as_sums(operation, proofs)
    if proofs.axis == "tp":
        yield constants.with_shares(operation, proofs.open)
    yield constants.with_single_rows(operation)


def _of_own_rows(
    proofs: AxisProofs, entry: logged.Op, operation: Operation, found: _Found
) -> _Found:
    """Note which of the rank's own rows results belong to; those of all rows are rows of the batch,
    as they are in a norm by the rank's own statistics.
    """
    for i, output in enumerate(entry.outputs):
        if found[i] is None:
            own = own_rows.infer(operation, i, proofs)
            if own is not None and own.place == own_rows.ALL and not own.counts:
                found[i] = own.split
            elif own is not None:
                proofs.own_rows[output.value] = own
    rows = operation.operands[0].shard if operation.name in BATCH_NORMS else None
    return found if rows is None or rows.dim != 0 else [rows, *found[1:]]


def _is_of_copies(proofs: AxisProofs, operation: Operation) -> bool:
    """Whether it takes as many of the equal rows of an expanded tensor on all ranks:
    ``x.expand(rows, -1)[:1]``.
    """
    if operation.name != "slice" or not proofs.is_made_by(operation.values[0], "expand"):
        return False
    (maker, _), rows = proofs.makers[operation.values[0]], operation.operands[0]
    bounds = [(name, operation[name]) for name in ("start", "end")]
    if any(own is None or operation.full_sizes.get(name, [own])[0] != own for name, own in bounds):
        return False  # to the end, or other bounds in the unsharded program
    is_split = rows.shard is not None and rows.shard.dim == operation["dim"] == 0
    (_, start), (_, end) = bounds
    is_inside = 0 <= start <= end <= min(shape[0] for shape in rows.shapes)
    return is_split and is_inside and maker.operands[0].placement == REPLICATED


def _propagate(proofs: AxisProofs, read: ArgumentReader, operation: Operation) -> _Found:
    outputs: _Found = [None] * len(operation.outputs)
    if "::" in operation.name and not rules.has_rule(operation.name):
        return outputs
    if factories.makes_blank(operation.name):
        return outputs  # unknown until all of it is written
    is_literal = operation.name == "lift_fresh" and operation.outputs[0].ndim > 0
    if is_literal and proofs.reads_parts and proofs.axis == "tp":
        return outputs  # equal elements may be those of each rank's own part
    if factories.is_factory(operation):
        return factories.infer(operation, proofs, read.shards_passed)
    if operation.name == factories.SPARSE:
        own = factories.unsettled_dims(operation, proofs)
        return outputs if own is None or own else rules.propagate(operation)
    made, passed = rules.propagate(operation), read.shards_passed
    if read.scales_by_size:
        # The sum of what ranks scale by their own size is not what all is scaled by the full one.
        made = [None if isinstance(one, Partial) else one for one in made]
    if operation.name not in constants.EXPANDS or operation.operands[0].placement != REPLICATED:
        return made
    # All copies are equal, so the ranks have those of the rows whose number was passed.
    return [replace(passed.get(p.dim, p), dim=p.dim) if isinstance(p, Shard) else p for p in made]


def _with_all_written(proofs: AxisProofs, operation: Operation) -> Operation:
    """Return ``blank[permutation] = values`` with anything in the blank tensor: each of its places
    is written.
    """
    if operation.name != "index_put" or operation.values[0] not in proofs.blank:
        return operation
    (blank, *indices), first = operation.operands[:-1], operation.arguments[0]
    maker, output = proofs.makers.get(operation.values[1], (operation, 0))
    is_whole = (
        len(indices) == len(first["indices"]) == 1
        and maker.name in ("sort", "argsort")  # each place once
        and output == len(maker.outputs) - 1
        and blank.ndim == 1
        and indices[0].shapes == blank.shapes
        and not first["accumulate"]
    )
    if not is_whole:
        return operation
    return constants.with_placements(operation, {id(blank): REPLICATED})


# ---- What else is known of results ---------------------------------------------------------------


def _note_facts(
    proofs: AxisProofs, read: ArgumentReader, operation: Operation, value: Value, output: int
) -> None:
    """Note other facts about a result, in addition to its placement or instead of it."""
    values, name = operation.values, operation.name
    if factories.is_factory(operation):
        proofs.sizes_passed[value] = read.sizes_passed
    if name in collectives.SAME_ELEMENTS and not proofs.gathered_elsewhere.isdisjoint(values):
        proofs.gathered_elsewhere.add(value)
    is_of_sums = any(isinstance(one.placement, Partial) for one in operation.operands)
    is_chunk = name in chunks.CHUNKS or name == "cat"
    if chunks.splits_or_joins(operation) or name in _MAKERS or (is_of_sums and not is_chunk):
        proofs.makers[value] = (operation, output)
    if factories.is_factory(operation) or (values and proofs.numbers.issuperset(values)):
        proofs.numbers.add(value)
    if not read.differs:
        _note_open(proofs, read, operation, value)
    is_copy = name in ("_to_copy", "clone", "to") and bool(values)
    if factories.makes_blank(name) or (is_copy and proofs.blank.get(values[0], "") is None):
        proofs.blank[value] = None  # whatever its size, all of it may be written


def _note_open(
    proofs: AxisProofs, read: ArgumentReader, operation: Operation, value: Value
) -> None:
    """Note a result of which only the extent is not known, or was inferred wrongly."""
    values = operation.values
    placement, is_tp = proofs.placements.get(value), proofs.axis == "tp"
    may_be_share = constants.may_expand(operation.name, proofs.axis) or (
        any(v in proofs.open for v in values)
        if is_tp
        else constants.joins_copies(operation, proofs)
    )
    are_numbers = proofs.reads_parts and value in proofs.numbers
    if placement is None or (placement == REPLICATED and (may_be_share or are_numbers)):
        dims = constants.open_dims(operation, proofs, are_numbers)
        if dims is not None:
            is_same = is_tp and all(one.placement == REPLICATED for one in operation.operands)
            proofs.set_placement(value, REPLICATED if is_same and operation.operands else None)
            proofs.open[value] = dims
            shape = proofs.shapes[value][0]
            if sizes := constants.closed_sizes(operation, shape, dims, proofs):
                proofs.sizes_passed[value] = sizes
            others = [one for one in values if one in proofs.open]
            are_plain = proofs.axis == "dp" and read.are_plain
            if are_plain and all(one in proofs.plain for one in others):
                proofs.plain.add(value)


# ---- The operation that was called ---------------------------------------------------------------


def _read(
    proofs: AxisProofs, full_name: str, entries: tuple[logged.Op, ...]
) -> tuple[ArgumentReader, Operation | None]:
    """Read the call from the entries of all ranks: its arguments, and the operation as rules see
    it; neither where torch has no operation of this name.
    """
    overload = overload_of(full_name)
    if full_name.startswith(opaque_calls.PREFIX):
        schema = opaque_calls.schema_of(full_name, entries)
    elif overload is not None:
        schema = overload._schema
    else:
        return ArgumentReader(proofs), None
    reader = ArgumentReader(proofs, schema.name)
    arguments = reader.arguments(schema, entries)
    name = rule_name(schema)
    is_factory = name in factories.BY_SIZES or not reader.operands
    may_be_split = is_factory and (proofs.axis == "dp" or factories.is_fill(name))
    outputs = tuple(
        Operand(tuple(entry.outputs[i].shape for entry in entries), dtype_of(output.dtype))
        for i, output in enumerate(entries[0].outputs)
    )
    start = int(name in ("tril_indices", "triu_indices"))  # of two dims, always
    made = {size for output in outputs for shape in output.shapes for size in shape[start:]}
    may_be_split |= constants.may_expand(name, proofs.axis)
    if name.startswith("repeat") and proofs.units:
        repeats = arguments[0]["repeats"]
        made.update([repeats] if isinstance(repeats, int) else repeats)
    unsettled = {one for one in made if may_be_split and proofs.may_count(one, False)}
    reader.conclude_sizes(unsettled)
    operation = Operation(
        name,
        arguments,
        outputs,
        "" if overload is None else schema.overload_name,
        reader.full_sizes,
        () if overload is None else tuple(overload.tags),
    )
    with suppress(ArgumentsDifferError):
        operation = constants.with_extents(operation, proofs.open, proofs.plain)
    return reader, operation


def _has_gradient(dtype: str) -> bool:
    made = dtype_of(dtype)
    return made.is_floating_point or made.is_complex


def _passes_gradients(rule: str) -> bool:
    """Whether an operation with a floating-point result may pass gradients, which one that reads
    only sizes does not.
    """
    return not (rule.endswith("_like") or rule.startswith("new_") or rule == "detach")


def rule_name(schema: Any) -> str:
    """Return the name under which rules cover the operation."""
    namespace, _, name = schema.name.partition("::")
    if schema.is_mutable and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}::{name}"


@cache
def overload_of(name: str) -> Any:
    """Return the ``OpOverload`` of an entry's name; None if there is none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)
