"""Proves layouts from the operations that the ranks of one mesh axis ran.

A result that no rule and no contract covers is not known, nor is anything made of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils._pytree import tree_iter

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.layouts import chunks, logged, ranges
from flex_model.layouts.contracts.collectives import follow_collective
from flex_model.layouts.contracts.experts import follow_experts
from flex_model.layouts.contracts.logged_calls import follow_call
from flex_model.layouts.gradient_placements import Gradients
from flex_model.layouts.logged import Entry, Value
from flex_model.layouts.obstacle import Cause, Obstacle, Step
from flex_model.layouts.operation_log import Chunk
from flex_model.layouts.operations import follow_operation
from flex_model.layouts.own_rows import OwnRows
from flex_model.layouts.placement_encoding import decode
from flex_model.layouts.propagation.operation import Shape, full_size
from flex_model.layouts.sizes import Expression

_CONTRACTS: dict[type, Any] = {
    logged.Op: follow_operation,
    logged.Collective: follow_collective,
    logged.Call: follow_call,
    logged.Experts: follow_experts,
}


class AxisProofs:
    """Infers placements along one axis. Pure: the same logs give the same proofs on every rank.

    Attributes:
        axis: "dp" or "tp"; ``index``: 0 or 1.
        split_sizes: Local sizes of all split dims so far, but for shards of FSDP, which the model
            reads as a whole: a tensor that is made with such a size may be a part of a larger one.
        weights: The values of parameters and buffers that nothing was written to yet.
        placements, shapes, steps: By value: its placement, its local shapes, the reason.
        open: For values that are the same on all ranks except for the extent of some dims: those
            dims (see `constants`). Along dp they have no placement.
        plain: Those of the open values whose open dims were only passed as plain numbers.
        numbers: Values that are made of sizes and other numbers alone.
        blank: For values of ``torch.empty``, and of ``torch.zeros`` and the like with a size that
            is not known: the placement of all that was written to them so far.
        joint: For values of ``joint`` entries: the value that all ranks have.
        sizes_passed: For values of ``torch.zeros`` and the like: the sizes that were passed; for
            what is expanded: the sizes of dims that are not open.
        ranges: For values that are consecutive integers on each rank: the first one and the count.
        own_rows: For values that belong to some of a rank's own rows: which.
        makers: For values that an operation split off, joined or sorted, or made as zeros or as
            blank as another tensor: that operation.
        received: Values that a collective returned.
        reads_parts: Whether Python has read elements of a tensor that is not the same on all ranks,
            or the size of its split dim: what is made of numbers from then on may be made of those,
            ``torch.tensor(x.tolist())``.
        units: Of what these numbers count: multiples of one may be other ones in the unsharded
            program, ``prompt.repeat(len(x), 1)``.
        difference: The first operation that not all ranks ran.
        conflicts: Values with a statement of the user that contradicts their proof, or, with None
            for it, names a dim that they don't have.
        stated_sizes: Values with the full sizes that the user states.
    """

    def __init__(self, axis: str, num_ranks: int, other_size: int) -> None:
        self.axis, self.num_ranks, self.other_size = axis, num_ranks, other_size
        self.index = ("dp", "tp").index(axis)
        self.split_sizes: set[int] = set()
        self.weights: set[Value] = set()
        self.placements: dict[Value, Placement] = {}
        self.shapes: dict[Value, tuple[Shape, ...]] = {}
        self.steps: dict[Value, Step] = {}
        self.open: dict[Value, frozenset[int]] = {}
        self.plain: set[Value] = set()
        self.numbers: set[Value] = set()
        self.blank: dict[Value, Placement | str | None] = {}
        self.joint: dict[Value, Any] = {}
        self.makers: dict[Value, chunks.Maker] = {}
        self.gathered_elsewhere: set[Value] = set()  # along the other axis
        self.sizes_passed: dict[Value, dict[int, int]] = {}
        self.own_rows: dict[Value, OwnRows] = {}
        self.ranges: dict[Value, ranges.Ranges] = {}
        self.reads_parts = False
        self.units: set[int] = set()
        self.difference = ""
        self._modules: list[str] = []  # those whose forwards run, by name
        self._dead_ends: set[int] = set()  # ids of entries
        self.conflicts: list[tuple[Value, str, Placement, Placement | None]] = []
        self.stated_sizes: list[tuple[Value, str, tuple[int | None, ...]]] = []
        self.received: set[Value] = set()
        self.gradients = Gradients(self)

    def placement(self, value: Any) -> Placement | None:
        """Return the placement of a value; of a tuple of possible values, the one that all have."""
        if isinstance(value, tuple):
            found = [self.placement(one) for one in value]
            return found[0] if all(other == found[0] for other in found) else None
        return self.placements.get(value)

    def placement_of_whole(self, value: Any) -> Placement | None:
        """Return the placement of a value for a site that shows it: None where it may be a rank's
        share (see `constants`).
        """
        value = self.resolve_joint(value)
        values = value if isinstance(value, tuple) else (value,)
        return None if any(one in self.open for one in values) else self.placement(value)

    def value_of_ranks(self, values: Sequence[Any]) -> tuple[Any, Placement | None]:
        """Return the value that all ranks have, None where they have others, and its placement;
        that of the whole, if each has its piece of one.
        """
        value = values[0]
        if all(one == value for one in values):
            return value, None if value is None else self.placement(value)
        return None, chunks.combine(values, self.makers)

    def resolve_joint(self, value: Any) -> Any:
        """Return the value that all ranks have for a joint value; any other value itself."""
        return self.joint.get(value, value)

    def obstacle(self, value: Any) -> Obstacle | None:
        """Return the first operation on the way to a value at which its placement was lost; None
        where it is known, or nothing is known of it.
        """
        value = self.resolve_joint(value)
        value = value[0] if isinstance(value, tuple) and value else value
        pending, seen, parts = [value], set[Value](), 1
        while pending:
            one = pending.pop()
            step = self.steps.get(one)
            if step is None or one in seen or one in self.placements:
                continue
            seen.add(one)
            unknown = [source for source in step.inputs if source not in self.placements]
            parts = max(parts, *(self._parts_in(value, source) for source in step.inputs), 1)
            traced = [source for source in unknown if source in self.steps]
            if not traced:
                return Obstacle(str(step), step.cause, self.difference if unknown else "", parts)
            pending += traced
        return Obstacle(self.difference, difference=self.difference) if self.difference else None

    def _parts_in(self, value: Value, source: Value) -> int:
        """Return of how many parts a value's rows consist if it has those of the source, or several
        of each.
        """
        shard, own, of_source = self.placements.get(source), *map(self.shapes.get, (value, source))
        if self.axis != "dp" or not isinstance(shard, Shard) or not own or not of_source:
            return 1
        size = of_source[0][shard.dim]
        is_alike = len(own[0]) > shard.dim and size and own[0][shard.dim] % size == 0
        return shard.parts if is_alike else 1

    def size(self, value: Any, dim: int) -> int | None:
        """Return a size in the unsharded program; None where it is not known."""
        shapes, placement = self.shapes.get(value), self.placements.get(value)
        if shapes is None or placement is None or dim in self.open.get(value, ()):
            return None
        if isinstance(placement, Shard) and placement.dim == dim:
            return full_size(placement, shapes)
        sizes = {shape[dim] for shape in shapes}
        return sizes.pop() if len(sizes) == 1 else None

    def number(self, leaf: Expression) -> Any:
        """Return a size in the unsharded program; None where it is not known."""
        _, value, dim = leaf
        size = self.size(value, dim)
        return self.sizes_passed.get(value, {}).get(dim) if size is None else size

    # Inference.

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Infer from what the ranks of the axis ran since the last comparison."""
        for value, source in chunks[0].sources.items():
            sources = [chunk.sources[value] for chunk in chunks if value in chunk.sources]
            if len(sources) == len(chunks):
                if source.is_weight:
                    self.weights.add(value)
                placed = [decode(one.placements and one.placements[self.index]) for one in sources]
                self._place(value, placed, [one.shape for one in sources], source.name)
                if source.open_dims and self.axis == "dp":
                    self.open[value] = frozenset(source.open_dims)
                self._check_sizes(value, {one.sizes for one in sources if one.sizes is not None})
        logs = [chunk.entries for chunk in chunks]
        is_one = all(chunk is chunks[0] for chunk in chunks)
        self._dead_ends = set() if is_one else _dead_ends(chunks)
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
        """Note an entry that not all ranks have."""
        if id(entry) not in self._dead_ends:
            self.gradients.skip(entry)
        if isinstance(entry, logged.Read):
            self.note_read(entry)
        elif isinstance(entry, logged.Op):
            self.difference = self.difference or entry.name.removeprefix("aten::")

    def _place(
        self, value: Value, placements: Iterable[Placement | None], shapes: Sequence[Any], text: str
    ) -> None:
        found = set(placements)
        self.shapes[value] = tuple(map(tuple, shapes))
        self.steps[value] = Step(text)
        placement = found.pop() if len(found) == 1 else None
        if placement is not None:
            self.set_placement(value, placement)

    def set_placement(self, value: Value, placement: Placement | None) -> None:
        """Set a value's placement; None where it is not known, or of a dim that it doesn't have."""
        self.open.pop(value, None)
        if placement is None or self._lacks_dim(value, placement):
            self.placements.pop(value, None)
            return
        self.placements[value] = placement
        is_of_fsdp = self.axis == "dp" and value in self.weights
        if isinstance(placement, Shard) and not is_of_fsdp:
            self.split_sizes.update(shape[placement.dim] for shape in self.shapes.get(value, ()))

    def _lacks_dim(self, value: Value, placement: Placement | None) -> bool:
        """Whether it is split, as the user states, along a dim that it doesn't have."""
        shapes = self.shapes.get(value, ())
        return isinstance(placement, Shard) and any(placement.dim >= len(one) for one in shapes)

    def _follow_entry(self, entries: tuple[Any, ...]) -> None:
        first, gradients = entries[0], self.gradients
        follow = _CONTRACTS.get(type(first))
        if follow is not None:
            follow(self, entries)
        elif isinstance(first, logged.Placed):
            found = [decode(one.placements and one.placements[self.index]) for one in entries]
            self._place(first.value, found, [one.shape for one in entries], "set by a hook")
            gradients.note_replaced([one.before for one in entries], first.value)
        elif isinstance(first, logged.Stated):
            self._follow_statement(entries)
        elif isinstance(first, logged.Read):
            self.note_read(*entries)
        elif isinstance(first, logged.Invalidated):
            for entry in entries:
                gradients.invalidate(entry.values, "memory that unrecorded code wrote to")
                for value in entry.values:
                    self.placements.pop(value, None)
                    self.open.pop(value, None)
        elif isinstance(first, logged.Joint):
            self._follow_joint(entries)
        elif isinstance(first, logged.Named):
            self._follow_named(entries)
        elif isinstance(first, logged.Hooked):
            gradients.note_hooked([one.value for one in entries])
        elif isinstance(first, logged.Output):
            gradients.note_output(first.value, first.part)
        elif isinstance(first, logged.Node):
            gradients.note_node(entries)
        elif isinstance(first, logged.Enter):
            self._modules.append(first.path.rpartition("/")[0])
        elif isinstance(first, logged.Exit) and self._modules:
            self._modules.pop()

    def _follow_joint(self, entries: tuple[logged.Joint, ...]) -> None:
        """Set the placement of a joint value: that of the tensor if all ranks have the same one, or
        that of the whole if each has its piece of one.
        """
        value, before = entries[0]
        of_ranks = [entry.before for entry in entries]
        if all(one == before for one in of_ranks):
            self.joint[value] = before
            return
        self._place_pieces(value, of_ranks)

    def _place_pieces(self, value: Value, of_ranks: list[Any]) -> None:
        """Place a value that each rank has another of: its piece of a whole, or unknown."""
        self.steps[value] = Step("a tensor that is not the same one on all ranks")
        combined = chunks.combine(of_ranks, self.makers)
        if combined is not None:
            self.shapes[value] = tuple(self.shapes[one][i] for i, one in enumerate(of_ranks))
            self.steps[value] = Step("each rank's piece", tuple(dict.fromkeys(of_ranks)))
            self.set_placement(value, combined)

    def _follow_named(self, entries: tuple[logged.Named, ...]) -> None:
        """Copy what is known of a value to the new value of a tensor that had it."""
        value, values, _ = entries[0]
        self.gradients.note_named([entry.source for entry in entries], value)
        if any(entry.values != values for entry in entries):
            self._place_pieces(value, [entry.values for entry in entries])
            return
        if isinstance(values, tuple):
            self.shapes[value] = self.shapes.get(values[0], ())
            self.steps[value] = Step("one of several tensors", values)
            self.set_placement(value, self.placement(values))
            return
        tables: tuple[dict[Value, Any], ...] = (
            self.placements, self.shapes, self.steps, self.open, self.own_rows,
        )  # fmt: skip
        for table in tables:
            if values in table:
                table[value] = table[values]

    def _follow_statement(self, entries: tuple[logged.Stated, ...]) -> None:
        """Apply a statement of the user: it completes the proof; a contradiction is noted as a
        conflict.
        """
        value, before, placements, _, text, sizes = entries[0]
        stated = decode(placements and placements[self.index])
        proven = None
        if before is not None and all(entry.before == before for entry in entries):
            proven = self.placement(before)
        self.shapes[value] = tuple(entry.shape for entry in entries)
        inputs = (before,) if isinstance(before, int) else ()
        self.steps[value] = Step(text, inputs)
        self.set_placement(value, stated or proven)
        self.gradients.note_replaced([entry.before for entry in entries], value)
        if isinstance(before, int) and before in self.open and self.placement(value) is None:
            self.open[value] = self.open[before]
        lacks_dim = self._lacks_dim(value, stated)
        if stated is not None and (lacks_dim or proven not in (None, stated)):
            self.conflicts.append((value, text, stated, None if lacks_dim else proven))
        if sizes is not None:
            self.stated_sizes.append((value, text, sizes))

    def shard_of_dim(self, expression: Expression) -> Shard | None:
        """Return how the tensor is split, if the expression is the size of its split dim."""
        if expression[0] != "dim":
            return None
        _, value, dim = expression
        placement = self.placements.get(value)
        return placement if isinstance(placement, Shard) and placement.dim == dim else None

    def is_made_by(self, value: Any, *names: str) -> bool:
        """Whether one of these operations made the value; only of those that `makers` holds."""
        return value in self.makers and self.makers[value][0].name in names

    def note_read(self, *reads: logged.Read) -> None:
        """Note what Python reads on the ranks, if it is a rank's own."""
        for value, dim, unit in reads:
            placement = self.placement(value)
            is_beside = dim is not None and isinstance(placement, Shard) and placement.dim != dim
            if placement != Replicate() and not is_beside:
                self.reads_parts = True
                self.units |= {unit} - {0}

    def may_count(self, number: int, is_last: bool) -> bool:
        """Whether a plain number may count a rank's rows, as a size of a split dim, or as a
        multiple of such a number that Python has. The last dim of several, ``is_last``, has
        features: there, only the former.
        """
        is_multiple = number > 0 and any(number % unit == 0 for unit in self.units)
        return number in self.split_sizes or (is_multiple and not is_last)

    def note_step(
        self, value: Value, text: str, inputs: tuple[Value, ...], cause: Cause | None = None
    ) -> None:
        """Note the operation that made the value, and its inputs."""
        module = self._modules[-1] if self._modules else ""
        self.steps[value] = Step(text, inputs, module, cause)


# ---- Which entries of the ranks' logs are one operation of the model -----------------------------


def align(
    logs: Sequence[Sequence[Entry]], skipped: Callable[[Entry], None] = lambda entry: None
) -> Iterator[tuple[Entry, ...]]:
    """Yield the entries of all ranks, one tuple for each that all of them have.

    Where ranks ran different operations, those are left out, up to the next collective, or begin or
    end of a module, that all of them reach. The results of the operations left out have no entry,
    so they are not known.

    Args:
        skipped: Called with every entry, of any rank, that is left out.
    """
    marks = ({_form(one) for one in log if isinstance(one, logged.MARKERS)} for log in logs)
    common = set.intersection(*marks)
    for segments in itertools.zip_longest(*(_cut(log, common) for log in logs), fillvalue=[]):
        alike = list(itertools.takewhile(_are_alike, zip(*segments)))
        yield from alike
        for segment in segments:
            for entry in segment[len(alike) :]:
                skipped(entry)


def _dead_ends(chunks: Sequence[Chunk]) -> set[int]:
    """Return the ids of operations that not all ranks ran, and whose results only such operations
    have read, and Python: ``if rank == 0: print(h.norm().item())``. As their tensors are gone, no
    gradient comes from there.
    """
    skipped: set[int] = set()
    for _ in align([chunk.entries for chunk in chunks], lambda entry: skipped.add(id(entry))):
        pass
    dead: set[int] = set()
    for chunk in chunks:
        if chunk.live is None:
            continue
        read = set(chunk.live)
        for entry in reversed(chunk.entries):
            is_alone = id(entry) in skipped and isinstance(entry, logged.Op) and not entry.writes
            if is_alone and read.isdisjoint(one.value for one in entry.outputs):
                dead.add(id(entry))
            elif not isinstance(entry, logged.Read):
                read.update(tree_iter(entry))
    return dead


def _cut(log: Sequence[Entry], markers: set[Any]) -> list[list[Entry]]:
    """Return the log in segments, of which all but the first begin with one of these markers."""
    segments: list[list[Entry]] = [[]]
    for entry in log:
        if isinstance(entry, logged.MARKERS) and _form(entry) in markers:
            segments.append([])
        segments[-1].append(entry)
    return segments


def _are_alike(entries: Sequence[Entry]) -> bool:
    first = entries[0]
    return all(entry is first or _form(entry) == _form(first) for entry in entries[1:])


def _form(entry: Entry) -> Any:
    """Return what must be equal on all ranks for two entries to be one operation: all but sizes and
    other numbers, and which tensors are read.
    """
    if not isinstance(entry, (logged.Op, logged.Collective)):
        return type(entry), entry[0]  # a marker's name, the value or values of others
    read = entry.name, _tensors_of(entry.args), _tensors_of(entry.kwargs)
    made = tuple((one.value, len(one.shape), one.dtype) for one in entry.outputs)
    if isinstance(entry, logged.Op):
        return logged.Op, *read, made, len(entry.carriers)
    return logged.Collective, *read, made, entry.reduction, entry.axes


def _tensors_of(arguments: Any) -> Any:
    """Return the positions, numbers of dims and dtypes of the tensors among arguments."""
    if not isinstance(arguments, tuple):
        return None
    if arguments and arguments[0] == "t":
        return "t", len(arguments[2]), arguments[3]
    if arguments and arguments[0] in ("n", "c"):
        return None
    return tuple(found for item in arguments if (found := _tensors_of(item)) is not None)
