"""Layouts proven from what the ranks of one mesh axis ran.

A proof is about all ranks of the axis at once: it sees every rank's shapes and arguments. What no
rule covers is not known, and all that is made of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from flex_model.distributed.layout import Partial, Placement, Replicate, Shard
from flex_model.layouts import collectives, constants, factories, pieces, positions
from flex_model.layouts.alignment import aligned
from flex_model.layouts.encoding import decode
from flex_model.layouts.gradient_placements import Gradients
from flex_model.layouts.log import Chunk, Entry, Value, dtype_of
from flex_model.layouts.propagation import reductions, rules
from flex_model.layouts.propagation.operation import (
    REPLICATED,
    ArgumentsDifferError,
    Operand,
    Operation,
    Shape,
)
from flex_model.layouts.sizes import (
    COMPARISONS,
    CONVERSIONS,
    Expression,
    divides_by,
    evaluate,
    factors,
    is_of_no_value,
    leaves,
    meaning,
    plain_numbers,
)

_DIFFERS = ": the ranks' control flow differs, not all ran {}"


@dataclass(frozen=True)
class Step:
    """Why a value is placed as it is.

    Attributes:
        text: The operation, or where the value is from.
        inputs: The values that it was made of.
    """

    text: str
    inputs: tuple[Value, ...] = ()


class AxisProofs:
    """What is proven along one axis. Pure: the same logs give the same proofs on every rank.

    Attributes:
        axis: "dp" or "tp".
        split_sizes: Local sizes of all dims that were seen split: a plain number equal to one of
            these may be the local size of a dim that is larger in the unsharded program.
        open: Of values whose placement is not known, but that are the same on all ranks: the dims
            whose extent is all that isn't (see `constants`).
        blank: Of values of ``torch.empty``, and of ``torch.zeros`` and the like whose size is not
            known: how what was written to them so far is placed.
        met: Of what hooks met: its value, where that is the same on all ranks.
        positions: Of values that are positions along a split dim: how they are split.
        gathered: Of values that a gather gave: whose parts they are.
        sizes_passed: Of values of ``torch.zeros`` and the like: the sizes that they were given.
        reduced: Of values that each rank made of its shard, over the split dim: "max", "min" or
            "mean".
        of_layers: Values that a layer with a shard of a weight made: by its contract right.
        looked_up: Values of rows that a layer looked up in its shard of a table.
        ranges: Of values that count on by one on each rank: from where, and how far.
        zeros: Values of which all elements are 0.
        places: Of each rank's own part of such a value: of which, and along which dim.
        templates: Of values of ``torch.empty_like``: how what they are like is placed.
        difference: The first operation that not all ranks ran.
        is_astray: Whether the unsharded program may have taken another path, by a size or by an
            element that is another one there.
        conflicts: Values with a statement of the user's that says otherwise than their proof.
        stated_sizes: Values with the full sizes that the user states.
    """

    def __init__(
        self, axis: str, num_ranks: int, other_size: int, trusts_answers: bool = True
    ) -> None:
        self._trusts_answers = trusts_answers
        self.axis, self.num_ranks, self.other_size = axis, num_ranks, other_size
        self._index = ("dp", "tp").index(axis)
        self.placements: dict[Value, Placement] = {}
        self.shapes: dict[Value, tuple[Shape, ...]] = {}
        self.steps: dict[Value, Step] = {}
        self.split_sizes: set[int] = set()
        self.open: dict[Value, frozenset[int]] = {}
        self.blank: dict[Value, Placement | str | None] = {}
        self.positions: dict[Value, Shard] = {}
        self.met: dict[Value, Any] = {}
        self.templates: dict[Value, Placement | None] = {}
        self.makers: dict[Value, pieces.Maker] = {}
        self.gathered: dict[Value, collectives.Gathered] = {}
        self.sizes_passed: dict[Value, dict[int, int]] = {}
        self._sizes_passed: dict[int, int] = {}  # of the operation, by place
        self._ambiguous: list[Any] = []  # plain numbers of the operation
        self._sized_by: tuple[Value, ...] = ()  # values whose sizes it was passed
        self._shards_passed: dict[int, Shard] = {}  # of which it was passed the sizes, by place
        self.reduced: dict[Value, str] = {}
        self.of_layers: set[Value] = set()
        self.looked_up: set[Value] = set()
        self.zeros: set[Value] = set()
        self.ranges: dict[Value, positions.Ranges] = {}
        self.places: dict[Value, tuple[Value, int]] = {}
        self.difference = ""
        self.is_astray = False
        self.conflicts: list[tuple[Value, str, Placement, Placement]] = []
        self.stated_sizes: list[tuple[Value, str, tuple[int | None, ...]]] = []
        self._numbers: set[Any] = set()  # read from tensors that are not the same on all ranks
        self._has_read = False  # elements of tensors that are not the same on all ranks
        self._local_values: set[Any] = set()  # sizes of this rank's, made plain numbers
        self._has_converted = False  # whether there were any, whatever their values
        # What ranks made of their parts alone where the unsharded program needs all of them, such
        # as a softmax along a split dim, and what was made of it. No DTensor's word mends that.
        self.mixed: set[Value] = set()
        self.mixed_in_dtensor = ""  # where the first began of which a DTensor was made
        self._has_asked = False  # whether something is so of such a tensor
        self._sharded: set[str] = set()  # modules with a weight of which ranks have shards
        self._left = ""  # the module that has just ended
        self._modules: list[str] = []  # that run
        self._suspect: str | None = None  # the outermost of them that has made such numbers
        self._asks_of_parts: set[Value] = set()  # whether all, or any, elements of shards are so
        self._received: set[Value] = set()
        self.gradients = Gradients(self)

    def placement(self, value: Any) -> Placement | None:
        """The placement of a value; of several values that may be meant, what all agree on."""
        if isinstance(value, tuple):
            found = [self.placement(one) for one in value]
            return found[0] if all(other == found[0] for other in found) else None
        return self.placements.get(value)

    def meant(self, value: Any) -> Any:
        """The value of what a hook met; any other value itself."""
        return self.met.get(value, value)

    def lost_at(self, value: Any) -> str:
        """The first operation on the way to a value at which its placement was lost; empty where
        it is known, or nothing is known of it.
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
        """A size in the unsharded program; None where it is not known."""
        shapes, placement = self.shapes.get(value), self.placements.get(value)
        if shapes is None or placement is None:
            return None
        if isinstance(placement, Shard) and placement.dim == dim:
            return _full_size(placement, shapes)
        sizes = {shape[dim] for shape in shapes}
        return sizes.pop() if len(sizes) == 1 else None

    def number(self, leaf: Expression) -> Any:
        """A size, or a number that was read from a tensor, in the unsharded program; None where it
        is not known.
        """
        kind, value, which = leaf
        if kind == "dim":
            size = self.size(value, which)
            return self._passed(value, which) if size is None else size
        return which if self.placement(value) == REPLICATED else None

    def _passed(self, value: Value, dim: int) -> int | None:
        """The size that a factory was passed, of whose result not all sizes are known."""
        size = self.sizes_passed.get(value, {}).get(dim)
        return None if self.may_be_made_of_size(size) else size

    # Following.

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """What the ranks of the axis ran since the last time."""
        for value, (name, *_) in chunks[0].sources.items():
            sources = [chunk.sources[value] for chunk in chunks if value in chunk.sources]
            if len(sources) == len(chunks):
                placements = [decode(source[1] and source[1][self._index]) for source in sources]
                self._place(value, placements, [source[2] for source in sources], name)
                if isinstance(self.placement(value), Shard):
                    self._sharded.add(name.rpartition(".")[0])
                self._check_sizes(value, {source[3] for source in sources} - {None})
        logs = [chunk.entries for chunk in chunks]
        is_one = all(chunk is chunks[0] for chunk in chunks)
        for entries in zip(*logs) if is_one else aligned(logs, self._skip):
            self._follow_entry(entries)
        if any(logs):
            self.gradients.forget()

    def _check_sizes(self, value: Value, stated: set[tuple[int | None, ...]]) -> None:
        """The shards of a weight must make up the sizes that its layer or the user states."""
        shard = self.placements.get(value)
        if not isinstance(shard, Shard):
            return
        full = _full_size(shard, self.shapes[value])
        of_dim = {sizes[shard.dim] for sizes in stated if shard.dim < len(sizes)}
        if of_dim - {None, full}:
            self._know(value, None)

    def _skip(self, entry: Entry) -> None:
        """Not all ranks ran it: numbers that it read from a tensor may be of one rank alone."""
        self.gradients.skip(entry)
        if entry[0] == "op":
            self._numbers.update(entry[5])
            self._has_read |= bool(entry[5])
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
            self._know(value, placement)

    def _know(self, value: Value, placement: Placement | None) -> None:
        self.open.pop(value, None)
        if placement is None:
            self.placements.pop(value, None)
            return
        self.mixed.discard(value)
        self.placements[value] = placement
        if isinstance(placement, Shard):
            self.split_sizes.update(
                shape[placement.dim] for shape in self.shapes.get(value, ()) if shape
            )

    def _follow_entry(self, entries: tuple[Entry, ...]) -> None:
        kind = entries[0][0]
        if kind == "op":
            self._follow_operation(entries)
        elif kind == "collective":
            self._follow_collective(entries)
        elif kind == "placed":
            found = [decode(entry[2] and entry[2][self._index]) for entry in entries]
            shapes = [entry[3] for entry in entries]
            self._place(entries[0][1], found, shapes, "set by a hook")
            self.gradients.note_replaced([entry[4] for entry in entries], entries[0][1])
        elif kind == "stated":
            self._follow_statement(entries)
        elif kind == "lost":
            for entry in entries:
                self.gradients.lose(entry[1], "memory that was written to unseen")
                for value in entry[1]:
                    self.placements.pop(value, None)
                    self.open.pop(value, None)
        elif kind == "enter":
            self._modules.append(entries[0][1])
            self._left = ""
        elif kind == "exit":
            self._follow_exit(entries[0][1])
        elif kind == "read":
            if any(self.placement(entry[1]) != REPLICATED for entry in entries):
                self._note_local(())
        elif kind == "asked":
            self._follow_question(entries)
        elif kind == "compared":
            self._follow_comparison(entries)
        elif kind == "number":
            self._follow_number(entries)
        elif kind == "met":
            self._follow_met(entries)
        elif kind == "named":
            self._follow_named(entries)
        elif kind == "idle":
            self.gradients.note_idle(entries[0][1])
        elif kind == "hooked":
            _, _, why, number = entries[0]
            self.gradients.note_changed([entry[1] for entry in entries], why, number)
        elif kind == "looked":
            self.gradients.note_look(entries[0][1])
        elif kind == "output":
            self.gradients.note_output(entries[0][1])
        elif kind == "node":
            self.gradients.note_node(entries)
        elif kind == "backward":
            self._follow_backward(entries)
        elif kind == "gradients":
            _, number, _, placements = entries[0]
            stated = [decode(each and each[self._index]) for each in placements]
            by_place = list(zip(*(entry[2] for entry in entries)))
            self.gradients.note_handed(number, by_place, stated)

    def _follow_exit(self, path: str) -> None:
        while path in self._modules:
            left = self._left = self._modules.pop()
            self._suspect = None if left == self._suspect else self._suspect

    @property
    def _module(self) -> str:
        """The innermost that runs."""
        return self._modules[-1] if self._modules else ""

    def _follow_question(self, entries: tuple[Entry, ...]) -> None:
        """What the model does by the answer it may do otherwise where another one is given: in the
        unsharded program, of all of a tensor of which ranks have parts. (Ranks that got different
        answers run different operations.)
        """
        values = {entry[1] for entry in entries} - {0}  # of tensors that the model has not made
        answers = {entry[2] for entry in entries}
        if all(self.placement(value) == REPLICATED for value in values):
            return
        if len(answers) == 1 and values <= self._asks_of_parts:
            return  # all parts say so, and so does the whole
        self._has_asked = True
        self.is_astray |= len(answers) == 1 and not self._trusts_answers

    def _follow_comparison(self, entries: tuple[Entry, ...]) -> None:
        """Likewise of a comparison of sizes, or of numbers that were read from tensors."""
        _, by, own, other, _, is_check = entries[0]
        unknown = [leaf for leaf in {*leaves(own), *leaves(other)} if self.number(leaf) is None]
        if any(kind == "read" for kind, *_ in unknown):
            self._has_asked = True
            self.is_astray |= not self._trusts_answers
            return
        if any(value not in self.shapes for _, value, _ in unknown) or (unknown and is_check):
            return  # nothing was seen of it, or torch checks what is not known itself
        for sizes in itertools.product(*map(self._possible_sizes, unknown)):
            known = dict(zip(unknown, sizes))

            def number(leaf: Expression, known: Mapping[Expression, int] = known) -> Any:
                return known.get(leaf, self.number(leaf))

            left, right = evaluate(own, number), evaluate(other, number)
            answer = None if None in (left, right) else COMPARISONS[by](left, right)
            if any(entry[4] != answer for entry in entries):
                self._note_local(())
                self.is_astray = True
                return

    def _possible_sizes(self, leaf: Expression) -> set[int]:
        """Of a tensor that is not known: as on each rank, or of all ranks together."""
        _, value, dim = leaf
        sizes = [shape[dim] for shape in self.shapes[value]]
        return {*sizes, sum(sizes)}

    def _follow_number(self, entries: tuple[Entry, ...]) -> None:
        """A size was made a plain number: it is not known where that goes."""
        _, _, expression, conversion = entries[0]
        numbers = {entry[1] for entry in entries}
        full = evaluate(expression, self.number)
        if full is None or numbers != {CONVERSIONS[conversion](full)}:
            self._note_local(numbers)

    def _note_local(self, numbers: Collection[Any]) -> None:
        """Numbers that don't show it are a rank's own, and so may be all that the module makes."""
        self._has_converted = True
        if self._suspect is None:
            self._suspect = self._module
        self._local_values.update(numbers)

    def _follow_met(self, entries: tuple[Entry, ...]) -> None:
        """A hook meets a tensor: nothing is proven of it where ranks hand on different ones, but
        for each its piece of a whole one.
        """
        _, value, before = entries[0]
        of_ranks = [entry[2] for entry in entries]
        if self.is_astray:
            self.steps[value] = Step("a path that the unsharded program may not take")
            return
        if all(one == before for one in of_ranks):
            self.met[value] = before
            return
        self.steps[value] = Step("a tensor that is another one on other ranks")
        together = pieces.together(of_ranks, self.makers)
        if together is not None:
            self.shapes[value] = tuple(self.shapes[one][i] for i, one in enumerate(of_ranks))
            self.steps[value] = Step("each rank's piece", tuple(dict.fromkeys(of_ranks)))
            self._know(value, together)

    def _follow_named(self, entries: tuple[Entry, ...]) -> None:
        """A tensor that had one of some values has one of its own."""
        value, values = entries[0][1:3]
        self.gradients.note_named([entry[3] for entry in entries], value)
        if isinstance(values, int) and self.gradients.is_scaled(values):
            self.gradients.note_scaled([value])
        if any(entry[2] != values for entry in entries):
            return
        if isinstance(values, tuple):
            self.shapes[value] = self.shapes.get(values[0], ())
            self.steps[value] = Step("one of several tensors", values)
            self._know(value, self.placement(values))
            return
        tables: tuple[dict[Value, Any], ...] = (
            self.placements, self.shapes, self.steps, self.open, self.positions,
        )  # fmt: skip
        for table in tables:
            if values in table:
                table[value] = table[values]

    def _follow_backward(self, entries: tuple[Entry, ...]) -> None:
        """A node of the backward runs, with these gradients."""
        _, number, given = entries[0]
        found = self.gradients.note_backward(number, [place for place, *_ in given])
        self.gradients.note_scaled(value for _, value, *_ in given)
        is_mixed = self.gradients.is_of_mixed(number)
        for i, (place, value, _, stated) in enumerate(given):
            self.shapes[value] = tuple(tuple(entry[2][i][2]) for entry in entries)
            self.steps[value] = Step("a gradient of the backward")
            told = None if is_mixed else decode(stated and stated[self._index])
            self._know(value, found[place] if told is None else told)
            if is_mixed:
                self.mixed.add(value)

    def _follow_statement(self, entries: tuple[Entry, ...]) -> None:
        """It completes what is proven; against that it is noted as a conflict."""
        _, value, before, placements, _, text, sizes = entries[0]
        stated = decode(placements and placements[self._index])
        proven = None
        if before is not None and all(entry[2] == before for entry in entries):
            proven = self.placement(before)
        self.is_astray &= stated is None  # whoever states it knows of the path so far
        self.shapes[value] = tuple(tuple(entry[4]) for entry in entries)
        inputs = (before,) if isinstance(before, int) else ()
        self.steps[value] = Step(text, inputs)
        self._know(value, stated or proven)
        self.gradients.note_replaced([entry[2] for entry in entries], value)
        if isinstance(before, int) and before in self.open and self.placement(value) is None:
            self.open[value] = self.open[before]
        if stated is not None and proven is not None and stated != proven:
            self.conflicts.append((value, text, stated, proven))
        if sizes is not None:
            self.stated_sizes.append((value, text, sizes))

    def _follow_operation(self, entries: tuple[Entry, ...]) -> None:
        _, name, _, _, outputs, _, _, carriers = entries[0]
        operation, values, is_taken = self._operation(name, entries)
        rule = "" if operation is None else operation.name
        found: list[Placement | None] = [None] * len(outputs)
        parts: list[collectives.Gathered | None] = [None] * len(outputs)
        before = entries[0][6][0][0] if entries[0][6] else None
        is_ruled = False  # whether a rule says what becomes of ranks' parts
        if name == "aten::copy_" and before in self._received and values[1] is None:
            # Gloo's own copy into the result of a collective, when that is waited for.
            found = [self.placements.get(before)]
            if self.gradients.is_scaled(before):
                self.gradients.note_scaled([outputs[0][0]])
            self._received.add(outputs[0][0])
            self._note_gathered(outputs[0][0], self.gathered.get(before))
        elif operation is not None:
            with suppress(ArgumentsDifferError):
                found, parts = self._conclude(name, entries, operation, values, is_taken)
                is_ruled = is_taken and not self._ambiguous and _has_parts(name, operation)
        if operation is not None and None in found and _counts(operation):
            self._note_local({len(entry[4]) for entry in entries})
        has_read = any(entry[5] for entry in entries)
        if has_read and not (operation is not None and _are_whole(operation)):
            self._has_read = True
            for entry in entries:
                self._numbers.update(entry[5])
        text = name.removeprefix("aten::")
        inputs = tuple(v for v in values if isinstance(v, int))
        for i, output in enumerate(outputs):
            value, stated = output[0], output[3]
            self.shapes[value] = tuple(tuple(entry[4][i][4]) for entry in entries)
            self.steps[value] = Step(text, inputs or self._sized_by)
            if self._is_layer(self._module):
                self.of_layers.add(value)
            told = decode(stated and stated[self._index])
            of_mixed = [one for one in inputs if one in self.mixed]
            is_of_mixed = bool(of_mixed) or any(one in self.reduced for one in inputs)
            if of_mixed and told is not None:
                self.mixed_in_dtensor = self.mixed_in_dtensor or self.lost_at(of_mixed[0])
                told = None
            self._know(value, found[i] if told is None else told)
            is_lost = value not in self.placements and value not in self.reduced
            if is_lost and (is_of_mixed or (is_ruled and not self.is_astray)):
                self.mixed.add(value)
            if self._is_lost_by_numbers(operation, value):
                number = f"{text} of {self._ambiguous[0]}, which may be a rank's own number"
                self.steps[value] = Step(number, inputs)
            if operation is not None:
                self._note_gathered(value, parts[i])
                if factories.is_fill(operation.name):
                    self.sizes_passed[value] = self._sizes_passed
                if self._is_looked_up(operation, values):
                    self.looked_up.add(value)
                if factories.makes_zeros(operation):
                    self.zeros.add(value)
                elif values and values[0] in self.zeros:
                    dim = pieces.own_slice(operation)
                    if dim is not None:
                        self.places[value] = (values[0], dim)
                if operation.name in ("all", "any") and operation["self"].shard is not None:
                    self._asks_of_parts.add(value)
                if pieces.takes_apart_or_joins(operation):
                    self.makers[value] = (operation, i, tuple(values))
                if is_taken:
                    self._note_open(value, operation, values)
                if is_taken and value not in self.placements:
                    self._note_positions(value, operation, values)
                if operation.name == "empty_like":
                    self.templates[value] = operation.operands[0].placement
                if self._is_blank(operation, values, value):
                    self.blank[value] = None  # however large it is, all of it may be written
        if carriers and name.startswith("aten::") and _hands_gradients(rule):
            made = [value for value, _, dtype, *_ in outputs if _has_gradient(dtype)]
            self.gradients.note_made([entry[7] for entry in entries], made)
        if operation is not None and _counts_own_words(operation):
            why = "embedding with scale_grad_by_freq, which counts a rank's own words"
            self.gradients.note_changed(values[:1], why)
        self._follow_writes(entries[0][4], [entry[6] for entry in entries], text)

    def _is_lost_by_numbers(self, operation: Operation | None, value: Value) -> bool:
        """Whether all is known of an operation but what the unsharded program passes for one of its
        numbers.
        """
        if operation is None or value in self.placements or not self._ambiguous:
            return False
        is_constant = operation.name == "lift_fresh"
        return is_constant or all(one.placement is not None for one in operation.operands)

    def _conclude(
        self,
        name: str,
        entries: tuple[Entry, ...],
        operation: Operation,
        values: Sequence[Any],
        is_taken: bool,
    ) -> tuple[list[Placement | None], list[collectives.Gathered | None]]:
        """How an operation's outputs are placed, and which are parts that were gathered.

        Raises:
            ArgumentsDifferError: an argument that tells is not the same on all ranks.
        """
        made = [output[0] for output in entries[0][4]]
        before = entries[0][6][0][0] if entries[0][6] else None
        found = self._propagate(name, operation, is_taken)
        if None in found:
            as_sums = constants.with_zeros_as_sums(operation, values, self.zeros)
            if as_sums is not operation:
                found = self._propagate(name, as_sums, is_taken)
        if collectives.joins_all(operation, values, self.gathered, self.num_ranks):
            found = [REPLICATED]
        if len(made) == 1:
            found = self._follow_reduced(made[0], operation, values, found)
        if is_taken and found == [None]:
            found = [positions.selected(operation, values, self.positions)]
        if found == [None]:
            found = self._follow_range(made[0], operation, values)
        if is_taken and before in self.templates and factories.is_draw(operation):
            found = [self.templates[before]]
        found = self.gradients.linear(operation, values, made, found)
        found = [p if rules.fits(p, one) else None for p, one in zip(found, operation.outputs)]
        return found, collectives.handed_on(operation, values, self.gathered, self.num_ranks)

    def _propagate(self, name: str, operation: Operation, is_taken: bool) -> list[Placement | None]:
        outputs: list[Placement | None] = [None] * len(operation.outputs)
        if not is_taken or self.is_astray:
            return outputs
        if not name.startswith("aten::") and not rules.has_rule(operation.name):
            return outputs
        if factories.makes_blank(operation.name):
            return outputs  # until all of it is written
        if operation.name in ("stack", "cat") and self._may_be_counted(len(operation.operands)):
            return outputs
        if factories.is_factory(operation):
            sizes = [size for sizes in operation.full_sizes.values() for size in sizes]
            if self._suspect is not None and (not sizes or None in sizes):
                return outputs
            return factories.placements(operation, self.split_sizes, self._shards_passed)
        return rules.propagate(operation)

    def _operation(
        self, name: str, entries: tuple[Entry, ...]
    ) -> tuple[Operation | None, list[Any], bool]:
        """The operation as rules see it, the values it reads, and whether its numbers are those
        that the unsharded program passes.
        """
        overload = overload_of(name)
        if overload is None:
            return None, [], False
        schema = overload._schema
        reader = _Reader(self, len(entries), schema.name in _VIEWS)
        arguments = reader.arguments(schema, entries)
        reader.conclude_sizes(schema.name, arguments[0])
        self._sizes_passed, self._shards_passed = reader.sizes_passed, reader.shards_passed
        self._ambiguous, self._sized_by = reader.ambiguous, tuple(reader.sized_by)
        outputs = tuple(
            Operand(
                tuple(tuple(entry[4][i][1]) for entry in entries), dtype_of(entries[0][4][i][2])
            )
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
            operation = constants.with_extents(operation, reader.values, self.open)
        is_local = reader.is_local
        if operation.name == "lift_fresh":
            self._ambiguous += [n for n in outputs[0].shapes[0] if n in self.split_sizes]
            is_shown = all("numbers" in dict(entry[3]) for entry in entries)
            is_bool = bool(outputs) and outputs[0].dtype == torch.bool
            is_local |= self._has_read or (is_bool and self._has_asked)
            is_local |= self._has_converted and not is_shown
        return operation, reader.values, not is_local

    def _follow_range(
        self, value: Value, operation: Operation, values: Sequence[Any]
    ) -> list[Placement | None]:
        """Of numbers that count on by one on each rank, and of which nothing else is known."""
        ranges = positions.ranges(operation, values, self.ranges)
        if ranges is not None and positions.follow_each_other(ranges):
            return [Shard(0)]
        if ranges is not None:
            self.ranges[value] = ranges
        return [None]

    def _is_looked_up(self, operation: Operation, values: Sequence[Any]) -> bool:
        """Whether a layer has looked rows up in its shard of a table, or has set some of them to 0,
        which other ranks have.
        """
        if operation.name == "embedding":
            return self._is_layer(self._module) and operation["weight"].placement == Shard(0)
        return operation.name in _MASKS and bool(values) and values[0] in self.looked_up

    def _is_blank(self, operation: Operation, values: Sequence[Any], value: Value) -> bool:
        """Whether its layout is that of what will be written to it: it has no elements yet, or one
        number in all of them and a size that is not known, or is a copy of such a tensor.
        """
        if factories.makes_blank(operation.name):
            return True
        if factories.is_fill(operation.name):
            return value not in self.placements
        is_copy = operation.name in ("_to_copy", "clone", "to")
        return is_copy and bool(values) and self.blank.get(values[0], "") is None

    def _note_open(self, value: Value, operation: Operation, values: Sequence[Any]) -> None:
        """A result whose extent is all that isn't known, or was wrongly taken for known."""
        placement = self.placements.get(value)
        if placement is None or (placement == REPLICATED and operation.name == "expand"):
            dims = constants.open_dims(operation, values, self.open, self.split_sizes)
            if dims is not None:
                self._know(value, None)
                self.open[value] = dims

    def _note_positions(self, value: Value, operation: Operation, values: Sequence[Any]) -> None:
        split = positions.made(operation, values, self.positions)
        if split is not None:
            self.positions[value] = split

    @property
    def suspicious_sizes(self) -> set[int]:
        """Numbers that may be the local size of a split dim. (1 is too often just 1: what of a
        dim's size is left where one is meant is found by its expression.)
        """
        return self.split_sizes - {0, 1}

    def may_count_rows(self, number: int) -> bool:
        """Whether the number may be the local size of a split dim, or a product with one that was
        made a plain number.
        """
        sizes = self.split_sizes - {0}
        is_product = (self._has_read or self._has_converted) and any(
            number % size == 0 for size in sizes
        )
        return number in sizes or is_product or self._suspect is not None

    def _may_be_counted(self, length: int) -> bool:
        """Whether a list may have this length by a number that is a rank's own."""
        counts = {n for n in self._local_values if isinstance(n, int) and n > 0}
        return self._suspect is not None and any(length % n == 0 for n in counts)

    def shard_of_dim(self, expression: Expression) -> Shard | None:
        """How the tensor is split, if the expression is the size of its split dim."""
        if expression[0] != "dim":
            return None
        _, value, dim = expression
        placement = self.placements.get(value)
        return placement if isinstance(placement, Shard) and placement.dim == dim else None

    def is_local_number(self, number: Any) -> bool:
        """Whether the number may have been read from a tensor that is not the same on all ranks.
        (That 0 or 1 was read somewhere says nothing of the next 0 or 1.)
        """
        return number not in (-1, 0, 1) and number in self._numbers

    def may_be_made_of_size(self, number: Any) -> bool:
        """Whether a plain number may be one of this rank's sizes, or made of one by functions that
        don't say so.
        """
        if isinstance(number, bool):
            return self._has_asked
        return self._suspect is not None or number in self._local_values

    # Writes.

    def _follow_writes(self, outputs: Sequence[Any], writes: Sequence[Any], text: str) -> None:
        """What is written to memory that other values show too."""
        for i, output in enumerate(outputs):
            if i >= len(writes[0]):
                return
            self._follow_write(output[0], [of_rank[i] for of_rank in writes], text)

    def _follow_write(self, written: Value, writes: Sequence[Any], text: str) -> None:
        before = writes[0][0]
        same = before is not None and all(write[0] == before for write in writes)
        new = self.placements.get(written)
        was = self.placements.get(before) if same else None
        if same and before in self.blank:
            self._fill(before, written, new, None, all(write[2] for write in writes))
        for old, value, dims in {other for write in writes for other in write[1]}:
            self.shapes[value] = self.shapes.get(old, ())
            self.steps[value] = Step(f"{text} (written through a view)", (old, written))
            self.gradients.note_made([old, written], [value])
            self.gradients.note_alias(value)
            if old in self.mixed or written in self.mixed:
                self.mixed.add(value)
            place = self.places.get(before)
            if same and place is not None and place[0] == old and new == Shard(place[1]):
                self._know(value, Partial())  # a shard in its place, and zeros beside it
            elif same and new is not None and new == was:
                is_own = isinstance(new, Shard) and self.placements.get(old) == REPLICATED
                if not is_own:  # else each rank has written to another part of the whole
                    self._copy(old, value)
            elif same and old in self.blank:
                dims = self._dims_of_piece(before, old) or dims
                self.gradients.note_filled(before, written)
                self._fill(old, value, new, dims, all(write[2] for write in writes))
            elif same and old in self.open and isinstance(new, Shard):
                moved = _moved(new, dims)
                if moved is not None and moved.dim in self.open[old]:
                    self._know(value, moved)
            if self.gradients.is_scaled(old) or self.gradients.is_scaled(written):
                if self.gradients.is_scaled(old) != self.gradients.is_scaled(written):
                    self._know(value, None)  # numbers beside gradients
                self.gradients.note_scaled([value])

    def _dims_of_piece(self, piece: Value, whole: Value) -> tuple[int | None, ...] | None:
        """By dim of a slice: the same dim of what it was cut out of, if it has all of that; which
        memory alone does not tell of dims of size 1. None if it is no slice of it.
        """
        shapes = self.shapes.get(piece, ()), self.shapes.get(whole, ())
        while piece != whole:
            maker = self.makers.get(piece)
            if maker is None or maker[0].name not in pieces.CUTS or maker[2][0] is None:
                return None
            piece = maker[2][0]
        sizes = zip(*(zip(*of_ranks) for of_ranks in shapes))
        return tuple(dim if own == full else None for dim, (own, full) in enumerate(sizes))

    def _copy(self, old: Value, value: Value) -> None:
        placement = self.placements.get(old)
        if placement is not None:
            self._know(value, placement)

    def _fill(
        self,
        old: Value,
        value: Value,
        new: Placement | None,
        dims: Sequence[int | None] | None,
        is_complete: bool,
    ) -> None:
        """A part of what was blank is written: all parts must be placed alike."""
        self.gradients.note_filled(old, value)
        so_far = self.blank[old]
        moved = new if dims is None or not isinstance(new, Shard) else _moved(new, dims)
        if moved is None or isinstance(moved, Partial) or so_far not in (None, moved):
            self.blank[value] = "differs"
        else:
            self.blank[value] = moved
        if dims is None:
            return  # the written tensor itself: its own rule says what it is
        if is_complete and isinstance(self.blank[value], (Shard, Replicate)):
            self._know(value, self.blank.pop(value))  # type: ignore[arg-type]

    # Collectives.

    def _follow_collective(self, entries: tuple[Entry, ...]) -> None:
        _, name, reduction, axes, args, _, outputs, _, by_plan = entries[0]
        reader = _Reader(self, len(entries))
        for i in range(len(args)):
            reader.read([entry[4][i] for entry in entries], "")
        inputs = tuple(v for v in reader.values if isinstance(v, int))
        base = name.partition("::")[2]
        for i, output in enumerate(outputs):
            value = output[0]
            self.shapes[value] = tuple(tuple(entry[6][i][4]) for entry in entries)
            of = f"{name}, {reduction}," if reduction else name
            self.steps[value] = Step(f"{of} along {axes}", inputs)
            place = collectives.source(base, len(reader.operands), i)
            found = None
            if axes is not None and place < len(reader.operands):
                operand, read = reader.operands[place], reader.values[place]
                is_sum = reduction == "sum" and axes == (self.axis,)
                is_of_layer = self._is_layer(self._module) or self._is_layer(self._left)
                if is_sum and (read in self.looked_up or (by_plan and is_of_layer)):
                    # By the layer's contract, which rules don't see: each row is looked up on one
                    # rank, and is 0 on the others; a plan says that experts' sums are parts of one.
                    operand = replace(operand, placement=Partial())
                found = collectives.placement(self, base, reduction, axes, operand, read)
                if collectives.ends(self.reduced.get(read, ""), base, reduction, axes, self.axis):
                    found = REPLICATED
                part = collectives.gathered(base, self.axis, axes, operand, outputs[0][0], i)
                self._note_gathered(value, part)
            if not rules.fits(found, Operand(self.shapes[value], torch.float32)):
                found = None
            if any(map(self.gradients.is_scaled, inputs)):
                found = found if reduction in ("", "sum", "avg") else None
                self.gradients.note_scaled([value])
            self._know(value, found)
            if found is None and any(one in self.mixed for one in inputs):
                self.mixed.add(value)
            self._received.add(value)
        self._follow_writes(outputs, [entry[7] for entry in entries], name)

    def _is_layer(self, path: str) -> bool:
        """Whether tensor-parallel ranks have shards of a weight of the module."""
        return self.axis == "tp" and path.rpartition("/")[0] in self._sharded

    def _follow_reduced(
        self,
        value: Value,
        operation: Operation,
        values: Sequence[Any],
        found: list[Placement | None],
    ) -> list[Placement | None]:
        """``found``, of what ranks make of such reductions of their shards."""
        kind = reductions.of_shards(operation)
        before = self.reduced.get(values[0]) if len(values) == 1 else None
        if kind or (before and operation.name in collectives.SAME_ELEMENTS):
            self.reduced[value] = kind or str(before)
        elif before == "mean" and reductions.divides(operation, self.num_ranks):
            return [Partial()]
        return found

    def _note_gathered(self, value: Value, part: collectives.Gathered | None) -> None:
        if part is not None:
            self.gathered[value] = part


_SPLITS = {
    "aten::split",
    "aten::split_with_sizes",
    "aten::chunk",
    "aten::tensor_split",
    "aten::unsafe_split",
    "aten::unsafe_chunk",
    "aten::select",
    "aten::unbind",
}
# What layers do to the rows that they looked up, but that are other ranks'.
_MASKS = {
    "masked_fill", "index_put", "_index_put_impl", "mul", "where", "clone", "_to_copy", "transpose",
    "split", "chunk", "cat", "view", "alias", "detach",
}  # fmt: skip
_VIEWS = {
    "aten::view",
    "aten::reshape",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::unflatten",
}


class _Reader:
    """Arguments of one operation, from the entries of all ranks.

    Attributes:
        values: The values of its tensors, in order.
        full_sizes: See `Operation`.
        shards_passed: By place in the argument "size": how the tensor is split of which the size of
            a split dim was passed.
        is_local: Whether a number among them is one of this rank's own that the unsharded program
            has otherwise, and that no rule takes into account.
        ambiguous: Plain numbers of which nothing tells whether the unsharded program has them, too.
        sized_by: The values whose sizes are among its numbers.
    """

    def __init__(self, proofs: AxisProofs, num_ranks: int, is_view: bool = False) -> None:
        self._proofs, self._num_ranks, self._is_view = proofs, num_ranks, is_view
        self.values: list[Any] = []
        self.operands: list[Operand] = []
        self.full_sizes: dict[str, list[int | None]] = {}
        self.is_local = False
        self.shards_passed: dict[int, Shard] = {}
        self.ambiguous: list[Any] = []
        self.sized_by: list[Value] = []
        self._plain: list[tuple[str, int, Any]] = []  # sizes without an expression
        self._with_expression: set[str] = set()  # arguments of which some have one

    def arguments(self, schema: Any, entries: tuple[Entry, ...]) -> tuple[dict[str, Any], ...]:
        by_rank: list[dict[str, Any]] = [{} for _ in entries]
        # Calls leave out what is the default, which may be so on some ranks only.
        names = [argument.name for argument in schema.arguments]
        given = [{**dict(zip(names, entry[2])), **dict(entry[3])} for entry in entries]
        for argument in schema.arguments:
            name, default = argument.name, argument.default_value
            if any(name in passed for passed in given):
                default = ("l", *default) if isinstance(default, (list, tuple)) else default
                items = [passed.get(name, default) for passed in given]
                values = self.read(items, name, meaning(argument))
            else:
                values = [default] * len(entries)
            for arguments, value in zip(by_rank, values):
                arguments[name] = value
        self.is_local |= len({passed.get("content") for passed in given}) > 1
        numbers = [passed["numbers"] for passed in given if "numbers" in passed]
        if numbers:  # that a tensor was made of
            self.is_local |= len(numbers) < len(given)
            self.read(numbers, "numbers", "value")
        return tuple(by_rank)

    def read(self, items: Sequence[Any], name: str, meant: str = "") -> list[Any]:
        """One argument, by rank."""
        kinds = {_kind(item) for item in items}
        if len(kinds) > 1:
            self.is_local = True
            return [_number_of(item) for item in items]
        (kind,) = kinds
        if kind == "t":
            return [self._operand(items)] * len(items)
        if kind == "s":
            return [item[1] for item in items]
        if kind == "c":
            parts = (part for item in items for part in item[1:])
            self.is_local |= any(map(self._proofs.may_be_made_of_size, parts))
            return [complex(*item[1:]) for item in items]
        if kind == "n":
            numbers = [_number_of(item) for item in items]
            expressions = [item[2] if isinstance(item, tuple) else None for item in items]
            self._number(numbers, name, meant, expressions)
            return numbers
        if kind != "l":
            is_flag = meant == "value" and kind == "bool"
            self.is_local |= is_flag and any(map(self._proofs.may_be_made_of_size, items))
            return list(items)
        first = items[0]
        if len({len(item) for item in items}) > 1:  # lists of other lengths, of numbers only
            self.full_sizes[name] = [None] * (len(first) - 1)
            return [[_number_of(one) for one in item[1:]] for item in items]
        lists: list[list[Any]] = [[] for _ in items]
        for i in range(1, len(first)):
            for of_rank, value in zip(lists, self.read([it[i] for it in items], name, meant)):
                of_rank.append(value)
        return lists

    def _operand(self, items: Sequence[Any]) -> Operand:
        value = items[0][1]
        if any(item[1] != value for item in items):
            value = None
            placement = pieces.together([item[1] for item in items], self._proofs.makers)
        else:
            placement = None if value is None else self._proofs.placement(value)
        shapes = tuple(tuple(item[2]) for item in items)
        self.values.append(value)
        operand = Operand(shapes, dtype_of(items[0][3]), placement)
        self.operands.append(operand)
        return operand

    def _number(
        self, numbers: Sequence[Any], name: str, meant: str, expressions: Sequence[Any]
    ) -> None:
        known, is_size = None, meant == "size"
        sources = {leaf[1] for e in expressions if e is not None for leaf in leaves(e)}
        self.sized_by += sorted(sources - {0})
        if any(
            expression is not None and expression[:2] == ("read", 0) for expression in expressions
        ):
            self.is_local = True  # of code that is not seen
        if (
            is_size
            and self.operands
            and any(e is not None and is_of_no_value(e) for e in expressions)
        ):
            expressions = [None] * len(expressions)  # as plain ones
        if expressions[0] is not None and all(e == expressions[0] for e in expressions):
            known = evaluate(expressions[0], self._proofs.number)
        if is_size and expressions[0] is not None and self._has_own_factor(expressions[0]):
            known = None  # ``x.shape[0] * heads``, where the heads may be a rank's own
        is_share = self._is_view and known == numbers[0]
        if expressions[0] is not None and (is_share or not self.operands):
            # What of an unsplit dim's size is divided by the ranks' number may be a rank's share.
            # (Slices and the like are of a dim that is split or is not, as their operand shows.)
            known = None if divides_by(expressions[0], self._proofs.num_ranks) else known
        if is_size:
            sizes = self.full_sizes.setdefault(name, [])
            sizes.append(known)
            if expressions[0] is not None:
                self._with_expression.add(name)
                shard = self._proofs.shard_of_dim(expressions[0]) if name == "size" else None
                if shard is not None:
                    self.shards_passed[len(sizes) - 1] = shard
            elif len(set(numbers)) == 1:
                self._plain.append((name, len(sizes) - 1, numbers[0]))
        for number, expression in zip(numbers, expressions) if meant else ():  # no dims
            plain = {number} if expression is None else plain_numbers(expression)
            self.is_local |= any(map(self._proofs.is_local_number, plain))
        if is_size:
            return
        if expressions[0] is not None:
            self.is_local |= known is None or any(known != number for number in numbers)
        elif meant == "value" and any(map(self._proofs.may_be_made_of_size, numbers)):
            self.is_local = True
            self.ambiguous.append(numbers[0])

    def _has_own_factor(self, expression: Any) -> bool:
        """Whether a plain number among the factors may be this rank's share of a larger one. Ranks
        share out heads and features along tp; along dp only what is as long as a split dim.
        """
        found = factors(expression)
        is_split = any(operand.shard is not None for operand in self.operands)
        return (
            bool(found)
            if is_split and self._proofs.axis == "tp"
            else bool(found & self._proofs.suspicious_sizes)
        )

    def conclude_sizes(self, operation: str, arguments: Mapping[str, Any]) -> None:
        """Plain numbers that all ranks pass are those that the unsharded program passes, unless
        they may be the local size of a split dim.

        Of a tensor that is split they are sizes of other dims, for a tensor is split along one, or
        of that one; the operation's own rule sees which. And pieces of a whole one are the same.
        """
        shards = [operand for operand in self.operands if operand.shard is not None]
        trusts = bool(shards) or self._is_view or operation in _SPLITS
        # Along dp ranks share out rows, which have been seen; along tp heads and features, too.
        is_of_rows = self._is_view and bool(shards) and self._proofs.axis == "dp"
        told = set(self._with_expression)
        for name, place, number in self._plain:
            is_literal = not trusts or (not shards and name in self._with_expression)
            is_literal &= number not in self._proofs.suspicious_sizes
            is_literal &= number in (-1, 0, 1) or not self._proofs.may_be_made_of_size(number)
            if is_literal or (self._is_view and number == -1):
                self.full_sizes[name][place] = number
            elif operation == "aten::slice" and name == "end" and self._takes_all(arguments):
                self.full_sizes[name][place] = number  # and so does a larger one
            elif operation == "aten::expand" and shards:
                self.full_sizes[name][place] = self._expanded(shards[0], name, place, number)
            elif is_of_rows and not self._proofs.may_count_rows(number):
                self.full_sizes[name][place] = number
                told.add(name)
            else:
                self.ambiguous.append(number)
        if trusts:
            self.full_sizes = {
                name: sizes for name, sizes in self.full_sizes.items() if name in told
            }

    @property
    def sizes_passed(self) -> dict[int, int]:
        """The sizes of a factory in the unsharded program, by place: those that are known, and
        those that are plain numbers, the same on all ranks.
        """
        plain = {place: number for name, place, number in self._plain if name == "size"}
        known = enumerate(self.full_sizes.get("size", []))
        return plain | {place: size for place, size in known if size is not None}

    def _takes_all(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a slice goes to the end of a dim that is whole."""
        operand, end = self.operands[0], arguments["end"]
        dim = arguments["dim"] % operand.ndim
        is_whole = operand.placement == REPLICATED and end is not None
        return is_whole and all(end >= shape[dim] for shape in operand.shapes)

    def _expanded(self, operand: Operand, name: str, place: int, number: int) -> int:
        """A plain size of an expanded tensor: where it keeps the split dim, the size of that."""
        dim = place - len(self.full_sizes[name]) + operand.ndim
        shard = operand.shard
        if shard is not None and shard.dim == dim and number == operand.shapes[0][dim]:
            return _full_size(shard, operand.shapes) or number
        return number


def _has_gradient(dtype: str) -> bool:
    made = dtype_of(dtype)
    return made.is_floating_point or made.is_complex


def _hands_gradients(rule: str) -> bool:
    """Whether an operation with a floating result may hand gradients on: not one that reads sizes
    alone.
    """
    return not (rule.endswith("_like") or rule.startswith("new_") or rule == "detach")


def _has_parts(name: str, operation: Operation) -> bool:
    """Whether it has a rule, and reads ranks' parts of tensors, of which all are known."""
    placements = [operand.placement for operand in operation.operands]
    has_rule = name.startswith("aten::") and rules.has_rule(operation.name)
    return has_rule and None not in placements and any(one != REPLICATED for one in placements)


def _are_whole(operation: Operation) -> bool:
    return all(operand.placement == REPLICATED for operand in operation.operands)


def _counts_own_words(operation: Operation) -> bool:
    """Whether its backward divides by how often each word is met, which is another number in the
    rows of all ranks.
    """
    return (
        operation.name == "embedding"
        and any(operation.by_rank("scale_grad_by_freq"))
        and operation.arguments[0]["indices"].placement != REPLICATED
    )


def _counts(operation: Operation) -> bool:
    """Whether the number of its results is made of the length of a dim that is split, or may be."""
    is_by_width = operation.name in ("split", "unsafe_split")
    if not (is_by_width or operation.name == "unbind") or not operation.operands:
        return False
    operand, dims = operation.operands[0], operation.by_rank("dim")
    shard = operand.shard
    is_split = shard is not None and shard.dim in {dim % operand.ndim for dim in dims}
    return is_split or (operand.placement is None and not is_by_width)


def _kind(item: Any) -> str:
    """Of an encoded argument: its mark, "n" for numbers."""
    if isinstance(item, tuple):
        return str(item[0])
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
    return "n" if is_number else type(item).__name__


def _number_of(item: Any) -> Any:
    return item[1] if isinstance(item, tuple) else item


def _moved(shard: Shard, dims: Sequence[int | None]) -> Shard | None:
    """The same split of another tensor, whose dims are ``dims``."""
    dim = dims[shard.dim] if shard.dim < len(dims) else None
    if dim is None:
        return None
    return Shard(dim, *list(vars(shard).values())[1:])


def _full_size(placement: Shard, shapes: tuple[Shape, ...]) -> int | None:
    try:
        return Operand(shapes, torch.float32, placement).full_shape[placement.dim]
    except ValueError:
        return None


def rule_name(schema: Any) -> str:
    """The operation's name as rules have it."""
    namespace, _, name = schema.name.partition("::")
    if schema.is_mutable and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}::{name}"


@cache
def overload_of(name: str) -> Any:
    """The ``OpOverload`` of an entry's name; None if there is none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)
