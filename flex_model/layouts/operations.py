"""Infers the placements of one operation's results from its call on all ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from flex_model.distributed.placement import Partial, Placement, Shard
from flex_model.layouts import chunks, collectives, constants, factories, positions
from flex_model.layouts.argument_reader import ArgumentReader
from flex_model.layouts.operation_log import Entry, Value, dtype_of
from flex_model.layouts.placement_encoding import decode
from flex_model.layouts.propagation import reductions, rules
from flex_model.layouts.propagation.operation import (
    REPLICATED,
    ArgumentsDifferError,
    Operand,
    Operation,
)
from flex_model.layouts.propagation.views import TO_SIZES
from flex_model.layouts.writes import follow_writes

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

# Operations by which layers mask the looked-up rows that belong to other ranks.
_MASKS = {
    "masked_fill", "index_put", "_index_put_impl", "mul", "where", "clone", "_to_copy", "transpose",
    "split", "chunk", "cat", "view", "alias", "detach",
}  # fmt: skip
_VIEWS = {f"aten::{name}" for name in (*TO_SIZES, "_reshape_alias", "unflatten")}

_Found = list[Placement | None]


@dataclass
class _Call:
    """One call of an operation, read from the entries of all ranks.

    Attributes:
        read: Its arguments; none where torch has no operation of this name.
        operation: As rules see it; None where torch has no operation of this name.
        has_known_numbers: Whether the unsharded program passes the same numbers.
    """

    name: str
    entries: tuple[Entry, ...]
    read: ArgumentReader
    operation: Operation | None = None
    has_known_numbers: bool = False

    @property
    def written(self) -> Any:
        """The value of its first output before an in-place operation."""
        writes = self.entries[0][6]
        return writes[0][0] if writes else None


def follow_operation(proofs: AxisProofs, entries: tuple[Entry, ...]) -> None:
    """Note the placements of the results of an operation that all ranks ran."""
    _, name, _, _, outputs, _, _, carriers = entries[0]
    call = _read(proofs, name, entries)
    operation, values = call.operation, call.read.values
    found: _Found = [None] * len(outputs)
    parts: list[collectives.Gathered | None] = [None] * len(outputs)
    is_ruled = False  # whether a rule covers the ranks' parts
    if name == "aten::copy_" and call.written in proofs.received and values[1] is None:
        # Gloo's own copy into the result of a collective, when it is waited for.
        found = [proofs.placements.get(call.written)]
        if proofs.gradients.is_scaled(call.written):
            proofs.gradients.note_scaled([outputs[0][0]])
        proofs.received.add(outputs[0][0])
        proofs.note_gathered(outputs[0][0], proofs.gathered.get(call.written))
    elif operation is not None:
        with suppress(ArgumentsDifferError):
            found, parts = _infer(proofs, call, operation)
            are_known = call.has_known_numbers and not call.read.ambiguous
            is_ruled = are_known and _has_parts(name, operation)
    if operation is not None and None in found and _has_local_count(operation):
        proofs.note_converted({len(entry[4]) for entry in entries})
    if operation is None or not _are_whole(operation):
        for entry in entries:
            proofs.numbers.note_read(entry[5])
    text = name.removeprefix("aten::")
    for i, output in enumerate(outputs):
        value = output[0]
        proofs.shapes[value] = tuple(tuple(entry[4][i][4]) for entry in entries)
        _note_placement(proofs, call, value, found[i], output[3], text, is_ruled)
        if operation is not None:
            proofs.note_gathered(value, parts[i])
            _note_facts(proofs, call, operation, value, i)
    rule = "" if operation is None else operation.name
    if carriers and name.startswith("aten::") and _passes_gradients(rule):
        made = [value for value, _, dtype, *_ in outputs if _has_gradient(dtype)]
        proofs.gradients.note_made([entry[7] for entry in entries], made)
    if operation is not None and _scales_by_own_counts(operation):
        why = "embedding with scale_grad_by_freq, which counts each rank's indices alone"
        proofs.gradients.note_changed(values[:1], why)
    follow_writes(proofs, outputs, [entry[6] for entry in entries], text)


def _note_placement(
    proofs: AxisProofs,
    call: _Call,
    value: Value,
    found: Placement | None,
    encoded: Any,
    text: str,
    is_ruled: bool,
) -> None:
    """Note the placement of a result, or where its placement was lost.

    Args:
        found: The inferred placement.
        encoded: The placements that a DTensor states for it.
        is_ruled: Whether a rule covers the ranks' parts.
    """
    inputs = tuple(v for v in call.read.values if isinstance(v, int))
    proofs.note_step(value, text, inputs or tuple(call.read.sized_by))
    if proofs.is_layer(proofs.module):
        proofs.of_layers.add(value)
    stated = decode(encoded and encoded[proofs.index])
    of_mixed = [one for one in inputs if one in proofs.mixed]
    is_of_mixed = bool(of_mixed) or any(one in proofs.reduced for one in inputs)
    if of_mixed and stated is not None:
        proofs.note_mixed_in_dtensor(of_mixed[0])
        stated = None
    proofs.set_placement(value, found if stated is None else stated)
    is_lost = value not in proofs.placements and value not in proofs.reduced
    if is_lost and (is_of_mixed or (is_ruled and not proofs.may_have_diverged)):
        proofs.mixed.add(value)
    if value not in proofs.placements and _is_lost_by_numbers(call):
        number = f"{text} of {call.read.ambiguous[0]}, which may be a rank's own number"
        proofs.note_step(value, number, inputs)


def _is_lost_by_numbers(call: _Call) -> bool:
    """Whether the only unknown of an operation is a number that the unsharded program passes."""
    operation = call.operation
    if operation is None or not call.read.ambiguous:
        return False
    is_constant = operation.name == "lift_fresh"
    return is_constant or all(one.placement is not None for one in operation.operands)


def _note_facts(
    proofs: AxisProofs, call: _Call, operation: Operation, value: Value, output: int
) -> None:
    """Note other facts about a result, in addition to its placement or instead of it."""
    values, name = call.read.values, operation.name
    if factories.is_fill(name):
        proofs.sizes_passed[value] = call.read.sizes_passed
    if _is_looked_up(proofs, operation, values):
        proofs.looked_up.add(value)
    if (
        name in ("sort", "argsort")
        and operation["self"].ndim == 1
        and output == len(operation.outputs) - 1
    ):
        proofs.permutations.add(value)
    if factories.makes_zeros(operation):
        proofs.zeros.add(value)
    elif values and values[0] in proofs.zeros:
        dim = chunks.own_slice(operation)
        if dim is not None:
            proofs.zero_slices[value] = (values[0], dim)
    if name in ("all", "any") and operation["self"].shard is not None:
        proofs.shard_conditions.add(value)
    if name in collectives.SAME_ELEMENTS and not proofs.gathered_elsewhere.isdisjoint(values):
        proofs.gathered_elsewhere.add(value)
    if chunks.splits_or_joins(operation):
        proofs.makers[value] = (operation, output, tuple(values))
    if call.has_known_numbers:
        _note_open(proofs, value, operation, values)
        if value not in proofs.placements:
            split = positions.infer(operation, values, proofs.positions)
            if split is not None:
                proofs.positions[value] = split
    if name == "empty_like":
        proofs.templates[value] = operation.operands[0].placement
    if _is_blank(proofs, operation, values, value):
        proofs.blank[value] = None  # whatever its size, all of it may be written


# ---- How results are placed ----------------------------------------------------------------------


def _infer(
    proofs: AxisProofs, call: _Call, operation: Operation
) -> tuple[_Found, list[collectives.Gathered | None]]:
    """Infer the placements of an operation's outputs, and which are parts of an all-gather.

    Raises:
        ArgumentsDifferError: an argument that the result depends on is not the same on all ranks.
    """
    values, num_ranks = call.read.values, proofs.num_ranks
    made = [output[0] for output in call.entries[0][4]]
    found = _propagate(proofs, call, _with_all_written(proofs, operation, values))
    if None in found:
        as_sums = constants.with_zeros_as_sums(operation, values, proofs.zeros)
        if as_sums is not operation:
            found = _propagate(proofs, call, as_sums)
    if collectives.joins_all(operation, values, proofs.gathered, num_ranks):
        found = [REPLICATED]
    is_split = bool(operation.operands) and operation.operands[0].shard is not None
    elsewhere = proofs.gathered_elsewhere
    if is_split and collectives.joins_elsewhere(operation, values, elsewhere, proofs.other_size):
        found = [None]
    if len(made) == 1:
        found = _follow_reduced(proofs, made[0], operation, values, found)
    if call.has_known_numbers and found == [None]:
        found = [positions.infer_selected(operation, values, proofs.positions)]
    if found == [None]:
        found = _follow_range(proofs, made[0], operation, values)
    if call.has_known_numbers and call.written in proofs.templates and factories.is_draw(operation):
        found = [proofs.templates[call.written]]
    found = proofs.gradients.linear(operation, values, made, found)
    found = [p if rules.fits(p, one) else None for p, one in zip(found, operation.outputs)]
    return found, collectives.propagate_gathered(operation, values, proofs.gathered, num_ranks)


def _propagate(proofs: AxisProofs, call: _Call, operation: Operation) -> _Found:
    outputs: _Found = [None] * len(operation.outputs)
    numbers = proofs.numbers
    if not call.has_known_numbers or proofs.may_have_diverged:
        return outputs
    if not call.name.startswith("aten::") and not rules.has_rule(operation.name):
        return outputs
    if factories.makes_blank(operation.name):
        return outputs  # unknown until all of it is written
    if operation.name in ("stack", "cat") and numbers.may_be_counted(len(operation.operands)):
        return outputs
    if factories.is_factory(operation):
        sizes = [size for sizes in operation.full_sizes.values() for size in sizes]
        if numbers.tainted_module is not None and (not sizes or None in sizes):
            return outputs
        return factories.infer(operation, numbers.split_sizes, call.read.shards_passed)
    return rules.propagate(operation)


def _with_all_written(proofs: AxisProofs, operation: Operation, values: Sequence[Any]) -> Operation:
    """Return ``blank[permutation] = values`` with anything in the blank tensor: each of its places
    is written.
    """
    if operation.name != "index_put" or values[0] not in proofs.blank:
        return operation
    (blank, *indices), first = operation.operands[:-1], operation.arguments[0]
    is_whole = (
        len(indices) == len(first["indices"]) == 1
        and values[1] in proofs.permutations
        and indices[0].shapes == blank.shapes
        and not first["accumulate"]
    )
    if not is_whole:
        return operation
    written = rules.replace_placement(blank, REPLICATED)
    return replace(
        operation, arguments=tuple({**one, "self": written} for one in operation.arguments)
    )


def _follow_reduced(
    proofs: AxisProofs, value: Value, operation: Operation, values: Sequence[Any], found: _Found
) -> _Found:
    """Return ``found``, updated for reductions that ranks computed of their shards."""
    kind = reductions.of_shards(operation)
    before = proofs.reduced.get(values[0]) if len(values) == 1 else None
    if kind or (before and operation.name in collectives.SAME_ELEMENTS):
        proofs.reduced[value] = kind or str(before)
    elif before == "mean" and reductions.divides(operation, proofs.num_ranks):
        return [Partial()]
    return found


def _follow_range(
    proofs: AxisProofs, value: Value, operation: Operation, values: Sequence[Any]
) -> _Found:
    """Return the placement of integers that are consecutive on each rank, if nothing else is
    known.
    """
    ranges = positions.infer_ranges(operation, values, proofs.ranges)
    if ranges is not None and positions.follow_each_other(ranges):
        return [Shard(0)]
    if ranges is not None:
        proofs.ranges[value] = ranges
    return [None]


# ---- What else is known of results ---------------------------------------------------------------


def _is_looked_up(proofs: AxisProofs, operation: Operation, values: Sequence[Any]) -> bool:
    """Whether a layer has looked up rows in its shard of a table, or has set those to 0 that other
    ranks have.
    """
    if operation.name == "embedding":
        return proofs.is_layer(proofs.module) and operation["weight"].placement == Shard(0)
    return operation.name in _MASKS and bool(values) and values[0] in proofs.looked_up


def _is_blank(
    proofs: AxisProofs, operation: Operation, values: Sequence[Any], value: Value
) -> bool:
    """Whether its layout depends on later writes to it: it is uninitialized, or is filled with one
    number and has a size that is not known, or is a copy of such a tensor.
    """
    if factories.makes_blank(operation.name):
        return True
    if factories.is_fill(operation.name):
        return value not in proofs.placements
    is_copy = operation.name in ("_to_copy", "clone", "to")
    return is_copy and bool(values) and proofs.blank.get(values[0], "") is None


def _note_open(
    proofs: AxisProofs, value: Value, operation: Operation, values: Sequence[Any]
) -> None:
    """Note a result of which only the extent is not known, or was inferred wrongly."""
    placement = proofs.placements.get(value)
    if placement is None or (placement == REPLICATED and operation.name == "expand"):
        split_sizes = proofs.numbers.split_sizes
        dims = constants.open_dims(operation, values, proofs.open, split_sizes)
        if dims is not None:
            proofs.set_placement(value, None)
            proofs.open[value] = dims


# ---- The operation that was called ---------------------------------------------------------------


def _read(proofs: AxisProofs, name: str, entries: tuple[Entry, ...]) -> _Call:
    """Read the call from the entries of all ranks."""
    overload = overload_of(name)
    if overload is None:
        return _Call(name, entries, ArgumentReader(proofs, len(entries)))
    schema = overload._schema
    reader = ArgumentReader(proofs, len(entries), schema.name in _VIEWS)
    arguments = reader.arguments(schema, entries)
    reader.conclude_sizes(schema.name, arguments[0])
    outputs = tuple(
        Operand(tuple(tuple(entry[4][i][1]) for entry in entries), dtype_of(entries[0][4][i][2]))
        for i in range(len(entries[0][4]))
    )
    operation = Operation(
        rule_name(schema),
        arguments,
        outputs,
        schema.overload_name,
        reader.full_sizes,
        tuple(overload.tags),
    )
    with suppress(ArgumentsDifferError):
        operation = constants.with_extents(operation, reader.values, proofs.open)
    is_local, ambiguous, numbers = reader.is_local, reader.ambiguous, proofs.numbers
    if operation.name == "lift_fresh":
        ambiguous += [n for n in outputs[0].shapes[0] if n in numbers.split_sizes]
        is_shown = all("numbers" in dict(entry[3]) for entry in entries)
        is_bool = bool(outputs) and outputs[0].dtype == torch.bool
        is_local |= numbers.has_read or (is_bool and numbers.has_condition)
        is_local |= numbers.has_converted and not is_shown
    return _Call(name, entries, reader, operation, not is_local)


def _has_gradient(dtype: str) -> bool:
    made = dtype_of(dtype)
    return made.is_floating_point or made.is_complex


def _passes_gradients(rule: str) -> bool:
    """Whether an operation with a floating-point result may pass gradients, which one that reads
    only sizes does not.
    """
    return not (rule.endswith("_like") or rule.startswith("new_") or rule == "detach")


def _has_parts(name: str, operation: Operation) -> bool:
    """Whether it has a rule, and reads tensors of known placement of which ranks have parts."""
    placements = [operand.placement for operand in operation.operands]
    has_rule = name.startswith("aten::") and rules.has_rule(operation.name)
    return has_rule and None not in placements and any(one != REPLICATED for one in placements)


def _are_whole(operation: Operation) -> bool:
    return all(operand.placement == REPLICATED for operand in operation.operands)


def _scales_by_own_counts(operation: Operation) -> bool:
    """Whether its backward divides by the count of each index, which each rank counts in its own
    rows.
    """
    return (
        operation.name == "embedding"
        and any(operation.by_rank("scale_grad_by_freq"))
        and operation.arguments[0]["indices"].placement != REPLICATED
    )


def _has_local_count(operation: Operation) -> bool:
    """Whether the number of its results depends on the length of a dim that is or may be split."""
    is_by_width = operation.name in ("split", "unsafe_split")
    if not (is_by_width or operation.name == "unbind") or not operation.operands:
        return False
    operand, dims = operation.operands[0], operation.by_rank("dim")
    shard = operand.shard
    is_split = shard is not None and shard.dim in {dim % operand.ndim for dim in dims}
    return is_split or (operand.placement is None and not is_by_width)


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
