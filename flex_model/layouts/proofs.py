"""Proves layouts from the operations that the ranks of one mesh axis ran.

A proof is about all ranks of the axis at once: it uses every rank's shapes and arguments. A result
that no rule covers is not known, nor is anything made of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flex_model.distributed.placement import Placement, Shard
from flex_model.layouts import chunks, collectives, positions
from flex_model.layouts.alignment import align
from flex_model.layouts.collectives import follow_collective
from flex_model.layouts.expressions import Expression, evaluate, leaves
from flex_model.layouts.gradient_placements import Gradients
from flex_model.layouts.local_numbers import LocalNumbers
from flex_model.layouts.operation_log import Chunk, Entry, Value
from flex_model.layouts.operations import follow_operation
from flex_model.layouts.placement_encoding import decode
from flex_model.layouts.propagation.operation import REPLICATED, Shape, full_size
from flex_model.layouts.sizes import COMPARISONS, CONVERSIONS

_DIFFERS = ": the ranks' control flow differs, not all ran {}"


@dataclass(frozen=True)
class Step:
    """The reason why a value is placed as it is.

    Attributes:
        text: The operation, or the source of the value.
        inputs: The values that the operation read.
    """

    text: str
    inputs: tuple[Value, ...] = ()


class AxisProofs:
    """Infers placements along one axis. Pure: the same logs give the same proofs on every rank.

    Attributes:
        axis: "dp" or "tp"; ``index``: 0 or 1.
        numbers: The record of plain numbers that may differ from the unsharded program's.
        placements, shapes, steps: By value: its placement, its local shapes, the reason.
        open: For values that have no placement, but are the same on all ranks except for the extent
            of some dims: those dims (see `constants`).
        blank: For values of ``torch.empty``, and of ``torch.zeros`` and the like with a size that
            is not known: the placement of all that was written to them so far.
        joint: For values of ``joint`` entries: the value that all ranks have.
        positions: For values that are positions along a split dim: how they are split.
        gathered: For results of an all-gather: which rank's part of which gather they are.
        sizes_passed: For values of ``torch.zeros`` and the like: the sizes that were passed.
        reduced: For values that each rank computed of its shard, over the split dim: "max", "min"
            or "mean".
        of_layers: Values made in a layer with a sharded weight, which are right by the layer's
            contract.
        looked_up: Values of rows that a layer looked up in its shard of a table.
        ranges: For values that are consecutive integers on each rank: the first one and the count.
        permutations: Values that are the indices of a sort: each place once.
        zeros: Values of which all elements are 0.
        zero_slices: For each rank's own slice of a value of zeros: that value, and the sliced dim.
        templates: For values of ``torch.empty_like``: the placement of the tensor that they are
            like.
        makers: For values that an operation split off or joined: that operation.
        mixed: Values that ranks computed of their parts alone where the unsharded program needs all
            of them, such as a softmax along a split dim, and all that was computed of those; a
            placement that a DTensor states does not make them right. ``mixed_in_dtensor``: where
            the first of these began of which a DTensor was made.
        shard_conditions: Values of ``all`` or ``any`` over the elements of a shard.
        received: Values that a collective returned.
        exited: The module whose forward ended last, if none has begun since.
        ignores_collectives: Whether nothing is inferred from collectives along this axis: in
            batches of different sizes, the mean of the ranks' means is not the mean, for one.
        difference: The first operation that not all ranks ran.
        may_have_diverged: Whether the unsharded program may have taken another path, by a size or
            an element that differs there.
        conflicts: Values with a statement of the user that contradicts their proof.
        stated_sizes: Values with the full sizes that the user states.
    """

    def __init__(
        self, axis: str, num_ranks: int, other_size: int, trusts_conditions: bool = True
    ) -> None:
        self._trusts_conditions = trusts_conditions
        self.axis, self.num_ranks, self.other_size = axis, num_ranks, other_size
        self.index = ("dp", "tp").index(axis)
        self.numbers = LocalNumbers()
        self.placements: dict[Value, Placement] = {}
        self.shapes: dict[Value, tuple[Shape, ...]] = {}
        self.steps: dict[Value, Step] = {}
        self.open: dict[Value, frozenset[int]] = {}
        self.blank: dict[Value, Placement | str | None] = {}
        self.positions: dict[Value, Shard] = {}
        self.joint: dict[Value, Any] = {}
        self.templates: dict[Value, Placement | None] = {}
        self.makers: dict[Value, chunks.Maker] = {}
        self.gathered: dict[Value, collectives.Gathered] = {}
        self.gathered_elsewhere: set[Value] = set()  # along the other axis
        self.sizes_passed: dict[Value, dict[int, int]] = {}
        self.reduced: dict[Value, str] = {}
        self.of_layers: set[Value] = set()
        self.looked_up: set[Value] = set()
        self.permutations: set[Value] = set()
        self.zeros: set[Value] = set()
        self.ranges: dict[Value, positions.Ranges] = {}
        self.zero_slices: dict[Value, tuple[Value, int]] = {}
        self.difference = ""
        self.may_have_diverged = False
        self.conflicts: list[tuple[Value, str, Placement, Placement]] = []
        self.stated_sizes: list[tuple[Value, str, tuple[int | None, ...]]] = []
        self.mixed: set[Value] = set()
        self.mixed_in_dtensor = ""
        self.shard_conditions: set[Value] = set()
        self.received: set[Value] = set()
        self.exited = ""
        self.ignores_collectives = False
        self._sharded: set[str] = set()  # modules with a sharded weight
        self._modules: list[str] = []  # running
        self.gradients = Gradients(self)

    def placement(self, value: Any) -> Placement | None:
        """Return the placement of a value; of a tuple of possible values, the one that all have."""
        if isinstance(value, tuple):
            found = [self.placement(one) for one in value]
            return found[0] if all(other == found[0] for other in found) else None
        return self.placements.get(value)

    def resolve_joint(self, value: Any) -> Any:
        """Return the value that all ranks have for a joint value; any other value itself."""
        return self.joint.get(value, value)

    def lost_at(self, value: Any) -> str:
        """Return the first operation on the way to a value at which its placement was lost; empty
        where it is known, or nothing is known of it.
        """
        pending = [value[0] if isinstance(value, tuple) and value else value]
        seen: set[Value] = set()
        while pending:
            one = pending.pop()
            step = self.steps.get(one)
            if step is None or one in seen or one in self.placements:
                continue
            seen.add(one)
            unknown = [source for source in step.inputs if source not in self.placements]
            traced = [source for source in unknown if source in self.steps]
            if not traced:
                differs = bool(unknown) and bool(self.difference)
                return f"{step.text}{_DIFFERS.format(self.difference)}" if differs else step.text
            pending += traced
        return f"{self.difference}{_DIFFERS.format(self.difference)}" if self.difference else ""

    def size(self, value: Any, dim: int) -> int | None:
        """Return a size in the unsharded program; None where it is not known."""
        shapes, placement = self.shapes.get(value), self.placements.get(value)
        if shapes is None or placement is None:
            return None
        if isinstance(placement, Shard) and placement.dim == dim:
            return full_size(placement, shapes)
        sizes = {shape[dim] for shape in shapes}
        return sizes.pop() if len(sizes) == 1 else None

    def number(self, leaf: Expression) -> Any:
        """Return a size, or a number that was read from a tensor, in the unsharded program; None
        where it is not known.
        """
        kind, value, which = leaf
        if kind == "dim":
            size = self.size(value, which)
            return self._passed(value, which) if size is None else size
        return which if self.placement(value) == REPLICATED else None

    def _passed(self, value: Value, dim: int) -> int | None:
        """Return the size that was passed to a factory whose result has sizes that are not
        known.
        """
        size = self.sizes_passed.get(value, {}).get(dim)
        return None if self.numbers.may_be_made_of_size(size) else size

    # Inference.

    def ignore_collectives(self) -> None:
        """Infer nothing from collectives along this axis, from now on."""
        self.ignores_collectives = True

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Infer from what the ranks of the axis ran since the last comparison."""
        for value, (name, *_) in chunks[0].sources.items():
            sources = [chunk.sources[value] for chunk in chunks if value in chunk.sources]
            if len(sources) == len(chunks):
                placements = [decode(source[1] and source[1][self.index]) for source in sources]
                self._place(value, placements, [source[2] for source in sources], name)
                if isinstance(self.placement(value), Shard):
                    self._sharded.add(name.rpartition(".")[0])
                self._check_sizes(value, {source[3] for source in sources} - {None})
        logs = [chunk.entries for chunk in chunks]
        is_one = all(chunk is chunks[0] for chunk in chunks)
        for entries in zip(*logs) if is_one else align(logs, self._skip):
            self._follow_entry(entries)
        if any(logs):
            self.gradients.forget()

    def _check_sizes(self, value: Value, stated: set[tuple[int | None, ...]]) -> None:
        """Drop a weight's placement if its shards don't make up the sizes that its layer or the
        user states.
        """
        shard = self.placements.get(value)
        if not isinstance(shard, Shard):
            return
        full = full_size(shard, self.shapes[value])
        of_dim = {sizes[shard.dim] for sizes in stated if shard.dim < len(sizes)}
        if of_dim - {None, full}:
            self.set_placement(value, None)

    def _skip(self, entry: Entry) -> None:
        """Note an entry that not all ranks have: numbers that it read from a tensor may be of one
        rank alone.
        """
        self.gradients.skip(entry)
        if entry[0] == "op":
            self.numbers.note_read(entry[5])
            self.difference = self.difference or entry[1].removeprefix("aten::")

    def _place(
        self,
        value: Value,
        placements: Iterable[Placement | None],
        shapes: Sequence[Any],
        text: str,
    ) -> None:
        found = set(placements)
        self.shapes[value] = tuple(map(tuple, shapes))
        self.steps[value] = Step(text)
        placement = found.pop() if len(found) == 1 else None
        if placement is not None:
            self.set_placement(value, placement)

    def set_placement(self, value: Value, placement: Placement | None) -> None:
        self.open.pop(value, None)
        if placement is None:
            self.placements.pop(value, None)
            return
        self.mixed.discard(value)
        self.placements[value] = placement
        if isinstance(placement, Shard):
            self.numbers.split_sizes.update(
                shape[placement.dim] for shape in self.shapes.get(value, ()) if shape
            )

    def _follow_entry(self, entries: tuple[Entry, ...]) -> None:
        kind = entries[0][0]
        if kind == "op":
            follow_operation(self, entries)
        elif kind == "collective":
            follow_collective(self, entries)
        elif kind == "placed":
            found = [decode(entry[2] and entry[2][self.index]) for entry in entries]
            shapes = [entry[3] for entry in entries]
            self._place(entries[0][1], found, shapes, "set by a hook")
            self.gradients.note_replaced([entry[4] for entry in entries], entries[0][1])
        elif kind == "stated":
            self._follow_statement(entries)
        elif kind == "invalidated":
            for entry in entries:
                self.gradients.invalidate(entry[1], "memory that unrecorded code wrote to")
                for value in entry[1]:
                    self.placements.pop(value, None)
                    self.open.pop(value, None)
        elif kind == "enter":
            self._modules.append(entries[0][1])
            self.exited = ""
        elif kind == "exit":
            self._follow_exit(entries[0][1])
        elif kind == "read":
            if any(self.placement(entry[1]) != REPLICATED for entry in entries):
                self.note_converted(())
        elif kind == "condition":
            self._follow_condition(entries)
        elif kind == "compared":
            self._follow_comparison(entries)
        elif kind == "number":
            self._follow_number(entries)
        elif kind == "joint":
            self._follow_joint(entries)
        elif kind == "named":
            self._follow_named(entries)
        elif kind == "detached":
            self.gradients.note_detached(entries[0][1])
        elif kind == "hooked":
            _, _, why, number = entries[0]
            self.gradients.note_changed([entry[1] for entry in entries], why, number)
        elif kind == "unchanged":
            self.gradients.note_unchanged(entries[0][1])
        elif kind == "output":
            self.gradients.note_output(entries[0][1])
        elif kind == "node":
            self.gradients.note_node(entries)
        elif kind == "backward":
            self._follow_backward(entries)
        elif kind == "gradients":
            _, number, _, placements = entries[0]
            stated = [decode(each and each[self.index]) for each in placements]
            by_place = list(zip(*(entry[2] for entry in entries)))
            self.gradients.note_returned(number, by_place, stated)

    def _follow_exit(self, path: str) -> None:
        while path in self._modules:
            self.exited = self._modules.pop()
            self.numbers.leave(self.exited)

    @property
    def module(self) -> str:
        """The innermost running module."""
        return self._modules[-1] if self._modules else ""

    def _follow_condition(self, entries: tuple[Entry, ...]) -> None:
        """Note a condition on elements of tensors. The model may branch on it, and the unsharded
        program evaluates it on all of a tensor of which ranks have parts. (Ranks with different
        answers run different operations.)
        """
        values = {entry[1] for entry in entries} - {0}  # 0: tensors that the model did not make
        answers = {entry[2] for entry in entries}
        if all(self.placement(value) == REPLICATED for value in values):
            return
        if len(answers) == 1 and values <= self.shard_conditions:
            return  # it holds for all parts, so for the whole
        self.numbers.note_condition()
        self.may_have_diverged |= len(answers) == 1 and not self._trusts_conditions

    def _follow_comparison(self, entries: tuple[Entry, ...]) -> None:
        """Note a comparison of sizes, or of numbers that were read from tensors, on which the model
        may branch.
        """
        _, by, own, other, _, is_check = entries[0]
        unknown = [leaf for leaf in {*leaves(own), *leaves(other)} if self.number(leaf) is None]
        if any(kind == "read" for kind, *_ in unknown):
            self.numbers.note_condition()
            self.may_have_diverged |= not self._trusts_conditions
            return
        if any(value not in self.shapes for _, value, _ in unknown) or (unknown and is_check):
            return  # nothing is known of it, or torch checks its own arguments
        for sizes in itertools.product(*map(self._possible_sizes, unknown)):
            known = dict(zip(unknown, sizes))

            def number(leaf: Expression, known: Mapping[Expression, int] = known) -> Any:
                return known.get(leaf, self.number(leaf))

            left, right = evaluate(own, number), evaluate(other, number)
            answer = None if None in (left, right) else COMPARISONS[by](left, right)
            if any(entry[4] != answer for entry in entries):
                self.note_converted(())
                self.may_have_diverged = True
                return

    def _possible_sizes(self, leaf: Expression) -> set[int]:
        """Return the possible sizes of a tensor that is not known: those of each rank, and their
        sum.
        """
        _, value, dim = leaf
        sizes = [shape[dim] for shape in self.shapes[value]]
        return {*sizes, sum(sizes)}

    def _follow_number(self, entries: tuple[Entry, ...]) -> None:
        """Note the conversion of a size to a plain number, whose uses are not known."""
        _, _, expression, conversion = entries[0]
        numbers = {entry[1] for entry in entries}
        full = evaluate(expression, self.number)
        if full is None or numbers != {CONVERSIONS[conversion](full)}:
            self.note_converted(numbers)

    def _follow_joint(self, entries: tuple[Entry, ...]) -> None:
        """Set the placement of a joint value: that of the tensor if all ranks have the same one, or
        that of the whole if each has its piece of one.
        """
        _, value, before = entries[0]
        of_ranks = [entry[2] for entry in entries]
        if self.may_have_diverged:
            self.steps[value] = Step("a path that the unsharded program may not take")
            return
        if all(one == before for one in of_ranks):
            self.joint[value] = before
            return
        self.steps[value] = Step("a tensor that is not the same one on all ranks")
        combined = chunks.combine(of_ranks, self.makers)
        if combined is not None:
            self.shapes[value] = tuple(self.shapes[one][i] for i, one in enumerate(of_ranks))
            self.steps[value] = Step("each rank's piece", tuple(dict.fromkeys(of_ranks)))
            self.set_placement(value, combined)

    def _follow_named(self, entries: tuple[Entry, ...]) -> None:
        """Copy what is known of a value to the new value of a tensor that had it."""
        value, values = entries[0][1:3]
        self.gradients.note_named([entry[3] for entry in entries], value)
        if isinstance(values, int) and self.gradients.is_scaled(values):
            self.gradients.note_scaled([value])
        if any(entry[2] != values for entry in entries):
            return
        if isinstance(values, tuple):
            self.shapes[value] = self.shapes.get(values[0], ())
            self.steps[value] = Step("one of several tensors", values)
            self.set_placement(value, self.placement(values))
            return
        tables: tuple[dict[Value, Any], ...] = (
            self.placements, self.shapes, self.steps, self.open, self.positions,
        )  # fmt: skip
        for table in tables:
            if values in table:
                table[value] = table[values]

    def _follow_backward(self, entries: tuple[Entry, ...]) -> None:
        """Set the placements of the gradients that a node of the backward receives."""
        _, number, given = entries[0]
        found = self.gradients.note_backward(number, [place for place, *_ in given])
        self.gradients.note_scaled(value for _, value, *_ in given)
        is_mixed = self.gradients.is_of_mixed(number)
        for i, (place, value, _, stated) in enumerate(given):
            self.shapes[value] = tuple(tuple(entry[2][i][2]) for entry in entries)
            self.steps[value] = Step("a gradient of the backward")
            from_dtensor = None if is_mixed else decode(stated and stated[self.index])
            self.set_placement(value, found[place] if from_dtensor is None else from_dtensor)
            if is_mixed:
                self.mixed.add(value)

    def _follow_statement(self, entries: tuple[Entry, ...]) -> None:
        """Apply a statement of the user: it completes the proof; a contradiction is noted as a
        conflict.
        """
        _, value, before, placements, _, text, sizes = entries[0]
        stated = decode(placements and placements[self.index])
        proven = None
        if before is not None and all(entry[2] == before for entry in entries):
            proven = self.placement(before)
        self.may_have_diverged &= stated is None  # the user states it for the path so far
        self.shapes[value] = tuple(tuple(entry[4]) for entry in entries)
        inputs = (before,) if isinstance(before, int) else ()
        self.steps[value] = Step(text, inputs)
        self.set_placement(value, stated or proven)
        self.gradients.note_replaced([entry[2] for entry in entries], value)
        if isinstance(before, int) and before in self.open and self.placement(value) is None:
            self.open[value] = self.open[before]
        if stated is not None and proven is not None and stated != proven:
            self.conflicts.append((value, text, stated, proven))
        if sizes is not None:
            self.stated_sizes.append((value, text, sizes))

    def shard_of_dim(self, expression: Expression) -> Shard | None:
        """Return how the tensor is split, if the expression is the size of its split dim."""
        if expression[0] != "dim":
            return None
        _, value, dim = expression
        placement = self.placements.get(value)
        return placement if isinstance(placement, Shard) and placement.dim == dim else None

    def note_converted(self, numbers: Collection[Any]) -> None:
        """Note that sizes of this rank became plain numbers in the running module."""
        self.numbers.note_converted(numbers, self.module)

    def note_step(self, value: Value, text: str, inputs: tuple[Value, ...]) -> None:
        """Note the operation that made the value, and its inputs."""
        self.steps[value] = Step(text, inputs)

    def note_mixed_in_dtensor(self, value: Value) -> None:
        """Note that a DTensor was made of a mixed value."""
        self.mixed_in_dtensor = self.mixed_in_dtensor or self.lost_at(value)

    def is_layer(self, path: str) -> bool:
        """Whether tensor-parallel ranks have shards of one of the module's weights."""
        return self.axis == "tp" and path.rpartition("/")[0] in self._sharded

    def note_gathered(self, value: Value, part: collectives.Gathered | None) -> None:
        """Note that the value is a part of a collective's result; no effect for None."""
        if part is not None:
            self.gathered[value] = part
