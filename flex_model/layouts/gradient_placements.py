"""Infers the placements of gradients along one axis from those of the forward's tensors.

The gradient of a split tensor is split alike, and that of a partial sum is replicated. That of a
replicated tensor is replicated, or a partial sum: the operations that read the tensor decide which.
An operation that each rank runs alone (one of ATen's) returns a partial sum if its results are
split or partial sums, since each rank has the gradient of its own results only; if its results are
replicated it returns a gradient that is placed as theirs, since a backward is linear. This is the
chain rule over the ranks, so it holds whatever the operation computes. No gradient is known if
anything made of the tensor, by any number of operations, is not known: if ranks compute something
else than the unsharded program, they do so in the backward, too.

The backward of an ``autograd.Function`` may communicate; its operations are followed as a forward's
are, from the gradients that it receives.

If a tensor is read in both ways, its gradient is a sum of both, and not known. A statement of the
user, or a tensor that a hook sets, replaces a tensor that is not known.

Gradients begin at the model's outputs. Along tp the ranks compute one loss of the same values, so
these gradients are replicated. Along dp the loss is the mean over ranks, so each rank has a summand
of the gradient of a tensor that all data-parallel ranks share. A number that the model returns is
such a loss. So along dp a rank has the gradient of its own loss, which is that of the mean times
the number of ranks; and what a followed backward computes of it must be linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flex_model.distributed.placement import Partial, Placement, Shard
from flex_model.layouts import chunks
from flex_model.layouts.backward_nodes import RECOMPUTES
from flex_model.layouts.gradient_kinds import (
    PART,
    WHOLE,
    Kind,
    Mixed,
    Wrong,
    expected_of,
    summed,
    worst,
)
from flex_model.layouts.linearity import linearity
from flex_model.layouts.operation_log import Entry, Value
from flex_model.layouts.propagation.operation import Operation

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs


@dataclass
class _Node:
    """A node of autograd's graph that no rule covers.

    Attributes:
        outputs: Its values by output number.
        lost_at: Why the placement of a gradient that it received is not known; empty if it is.
        returned: The placement of the gradient that it returned for each input; None for no
            gradient.
    """

    name: str
    outputs: dict[int, Value] = field(default_factory=dict)
    lost_at: str = ""
    returned: list[Kind] | None = None
    is_known: bool = False

    def note_received(self, are_known: bool, kinds: Sequence[Kind]) -> None:
        """Note the kinds of the gradients that it receives, and whether all are known."""
        self.is_known = are_known
        self.lost_at = worst([kind for kind in kinds if isinstance(kind, str)])

    def note_returned(self, kinds: list[Kind]) -> None:
        self.returned = kinds


class Gradients:
    """Infers the placements of gradients along the axis of ``proofs``."""

    def __init__(self, proofs: AxisProofs) -> None:
        self._proofs = proofs
        self._begin: Placement = PART if proofs.axis == "dp" else WHOLE
        self._made: dict[Value, list[Value]] = {}  # by value: the values made of it
        self._nodes_of: dict[Value, list[tuple[_Node, int]]] = {}  # that return gradients to it
        self._unknown: dict[Value, str] = {}  # by value: what may pass gradients to it
        self._outputs: set[Value] = set()
        self._detached: set[Value] = set()  # values without gradients
        self._aliases: list[Value] = []  # values after a write through another view
        self._unread: set[Value] | None = None  # aliases that nothing has read
        # By value: the value that a statement or a hook replaced it by, or of the tensor once all
        # of it is written.
        self._in_place_of: dict[Value, Value] = {}
        self._nodes: dict[Value, _Node] = {}
        # A part that a backward recomputes ends where the gradients that the node received begin.
        self._received: dict[Value, Kind] = {}  # by running node
        self._ends: dict[Value, Kind] = {}
        # By value: operations of some ranks alone that read it. Each rank still has its own
        # gradient of a shard, if the final result of these operations is right, as a statement
        # says.
        self._read_by_some: dict[Value, str] = {}
        # By value, and by hook that was not seen to leave the gradient unchanged: what may change
        # it.
        self._changed: dict[Value, dict[Value | None, str]] = {}
        self._scaled: set[Value] = set()  # along dp: gradients of a rank's own loss
        self._found: dict[bool, dict[Value, Kind]] = {True: {}, False: {}}  # by ``partly``

    def forget(self) -> None:
        """Drop what was inferred so far: more is known now."""
        self._unread = None
        for found in self._found.values():
            found.clear()

    def placement(self, value: Any, partly: bool = False) -> Placement | None:
        """Return the placement of a value's gradient; None where it is not known.

        Args:
            partly: Whether to infer from the nodes that have run, though others may run later.
        """
        values = value if isinstance(value, tuple) else (value,)
        kinds = {self._kind_or_expected(one, partly) for one in values}
        kind = kinds.pop()
        return None if kinds or isinstance(kind, str) else kind

    def _kind_or_expected(self, value: Any, partly: bool) -> Kind:
        """Return the kind of a value's gradient; for a value without one, the kind that it would
        have.
        """
        own = self._own(value)
        if own is None:
            return None if self._is_read(value) else self._kind(value, partly)
        kind = self._kind(value, partly)
        return expected_of(own) or self._begin if kind is None else kind

    def obstacle(self, value: Any) -> str:
        """Return why the gradient of a value is not known."""
        kind = self._kind(value) if isinstance(value, int) else None
        return kind if isinstance(kind, str) else ""

    def _own(self, value: Any) -> Placement | None:
        """Return the placement of the value, or of the value that replaced it."""
        while value not in self._proofs.placements and value in self._in_place_of:
            value = self._in_place_of[value]
        if self._proofs.reduced.get(value) == "mean":
            return PART  # for gradients, up to a factor that all ranks share
        return self._proofs.placements.get(value)

    # Inference.

    def note_made(self, inputs: Sequence[Any], outputs: Sequence[Value]) -> None:
        """Note that an operation of each rank alone passes the gradients of its outputs to its
        inputs.
        """
        for value in _flat(inputs):
            self._made.setdefault(value, []).extend(outputs)
        if self._received:
            self._ends.update(dict.fromkeys(outputs, list(self._received.values())[-1]))

    def note_replaced(self, before: Sequence[Any], value: Value) -> None:
        """Note that a statement of the user or a hook replaced a tensor."""
        self.note_made(before, [value])
        if isinstance(before[0], int) and all(one == before[0] for one in before):
            self._in_place_of[before[0]] = value

    def note_filled(self, before: Value, value: Value) -> None:
        """Note that a part of a blank tensor was written: it is placed as it will be once all of it
        is.
        """
        self._in_place_of[before] = value

    def note_alias(self, value: Value) -> None:
        """Note the value of a tensor after a write through another view of its memory."""
        self._aliases.append(value)

    def note_detached(self, values: Sequence[Value]) -> None:
        """Note values that an operation made for its backward alone: no loss depends on them."""
        self._detached.update(values)

    def note_named(self, sources: Sequence[Any], value: Value) -> None:
        """Note that a value has the gradient of ``sources[0]``, if that is the same on all
        ranks.
        """
        if isinstance(sources[0], int) and all(source == sources[0] for source in sources):
            self.note_made(sources[:1], [value])
        else:
            self.invalidate(sources, "a tensor whose gradient a hook receives")

    def note_output(self, value: Value) -> None:
        self._outputs.add(value)

    def invalidate(self, values: Sequence[Any], why: str) -> None:
        """Note that the operations that pass gradients to these values are not known."""
        for value in _flat(values):
            self._unknown.setdefault(value, why)

    def note_changed(self, values: Sequence[Any], why: str, hook: Value | None = None) -> None:
        """Note that the gradient of these values may differ from what rules infer.

        Args:
            hook: The number of the model's hook that may change it; None if it is not a hook.
        """
        self.forget()
        for value in _flat(values):
            self._changed.setdefault(value, {})[hook] = why

    def note_unchanged(self, hook: Value) -> None:
        """Note that a hook ran and left the gradient unchanged."""
        self.forget()
        for of_value in self._changed.values():
            of_value.pop(hook, None)

    def _note_read_by_some(self, values: Sequence[Any], why: str) -> None:
        """Note that only some ranks' operations pass gradients to these values."""
        for value in _flat(values):
            self._read_by_some.setdefault(value, why)

    def skip(self, entry: Entry) -> None:
        """Note an entry that not all ranks have."""
        kind = entry[0]
        if kind == "op":
            self._note_read_by_some(
                entry[7], f"{entry[1].removeprefix('aten::')}, which not all ranks ran"
            )
        elif kind == "node":
            self._note_read_by_some(entry[3], f"{entry[2]}, which not all ranks ran")
        elif kind in ("placed", "stated", "named"):
            value = entry[{"placed": 4, "stated": 2, "named": 3}[kind]]
            self.invalidate([value], "a hook that not all ranks ran")
        elif kind == "hooked":
            self.invalidate([entry[1]], entry[2])
        elif kind == "backward":
            self._received[entry[1]] = "a backward that not all ranks ran"
        elif kind == "gradients":
            self.note_returned(entry[1], [(None,)] * len(entry[2]), [None] * len(entry[2]))

    def note_node(self, entries: Sequence[Entry]) -> None:
        _, number, name, inputs, place, value = entries[0]
        node = self._nodes.get(number)
        if node is None:
            node = self._nodes[number] = _Node(name)
            for i, source in enumerate(inputs):
                if isinstance(source, int) and all(entry[3][i] == source for entry in entries):
                    self._nodes_of.setdefault(source, []).append((node, i))
                else:
                    self.invalidate([entry[3][i] for entry in entries], name)
        node.outputs[place] = value

    def note_backward(self, number: Value, given: Sequence[Any]) -> dict[int, Placement | None]:
        """Note that a node runs; return the placements of the gradients that it receives, by
        output.
        """
        self.forget()
        node = self._nodes.get(number)
        outputs = {} if node is None else node.outputs
        found = {
            place: self.placement(outputs[place]) if place in outputs else None for place in given
        }
        if node is not None:
            output_kinds = [self._kind(outputs[p]) if p in outputs else node.name for p in found]
            node.note_received(None not in found.values(), output_kinds)
        kinds = set(found.values())
        alike = kinds.pop() if len(kinds) == 1 else None
        if node is None or node.name == RECOMPUTES:
            lost_at = "a backward" if node is None else node.lost_at or "a backward"
            self._received[number] = alike or lost_at
        return found

    def is_of_mixed(self, number: Value) -> bool:
        """Whether a running node received gradients of what ranks computed of parts alone."""
        node = self._nodes.get(number)
        return node is not None and isinstance(node.lost_at, Mixed)

    def note_scaled(self, values: Iterable[Value]) -> None:
        """Note gradients that a node received, or values that are linear in such."""
        if self._proofs.axis == "dp":
            self._scaled.update(values)

    def is_scaled(self, value: Any) -> bool:
        return value in self._scaled

    def linear(
        self,
        operation: Operation,
        values: Sequence[Any],
        outputs: Sequence[Value],
        found: Sequence[Placement | None],
    ) -> list[Placement | None]:
        """Return ``found`` without the results that are not linear in gradients of a rank's own
        loss.
        """
        scaled = [value in self._scaled for value in values]
        if not any(scaled):
            return list(found)
        kinds = linearity(operation, scaled)
        self._scaled.update(value for value, kind in zip(outputs, kinds) if kind != WHOLE)
        return [None if kind is None else placement for placement, kind in zip(found, kinds)]

    def note_returned(
        self, number: Value, by_place: Sequence[Sequence[Any]], stated: Sequence[Placement | None]
    ) -> None:
        """Note the gradients that a node returned to its inputs, by rank; ``stated``: the
        placements of those that are DTensors.
        """
        self._received.pop(number, None)
        node = self._nodes.get(number)
        if node is not None:
            pairs = zip(by_place, stated)
            node.note_returned([self._returned(node, of_ranks, own) for of_ranks, own in pairs])

    def _returned(self, node: _Node, of_ranks: Sequence[Any], stated: Placement | None) -> Kind:
        if node.name == RECOMPUTES or all(value == () for value in of_ranks):
            return None
        if isinstance(node.lost_at, Mixed):
            return node.lost_at
        if stated is not None:
            return stated
        placement: Placement | None
        if all(value == of_ranks[0] for value in of_ranks):
            placement = None if of_ranks[0] is None else self._proofs.placement(of_ranks[0])
        else:
            placement = chunks.combine(of_ranks, self._proofs.makers)
        if not self._is_of_loss(of_ranks, placement):
            return Wrong(f"{node.name}, whose gradient is not made of the one that it got")
        return placement or (Wrong(node.name) if node.is_known else node.lost_at or node.name)

    def _is_of_loss(self, of_ranks: Sequence[Any], placement: Placement | None) -> bool:
        """Whether along dp a gradient that a node returned is that of a rank's own loss, as the one
        that it received was. Only then each rank's is a summand.
        """
        if self._proofs.axis != "dp" or placement in (None, WHOLE):
            return True
        of_loss = self._scaled | self._proofs.zeros
        return all(value in of_loss for value in _flat(of_ranks))

    # Evaluation.

    def _kind(self, value: Value, partly: bool = False) -> Kind:
        known = self._found[partly]
        pending = [value]
        while pending:
            one = pending[-1]
            if one not in known:
                ahead = [made for made in self._made_of(one) if made not in known]
                if ahead:
                    pending += ahead
                    continue
                known[one] = self._combined(one, known, partly)
            pending.pop()
        return known[value]

    def _made_of(self, value: Value) -> list[Value]:
        """Return the values that pass gradients to it."""
        if self._unread is None:
            self._unread = self._find_unread()
        found = self._made.get(value, ())
        return [made for made in found if made not in self._detached and made not in self._unread]

    def _find_unread(self) -> set[Value]:
        """Return the aliases that nothing reads, such as the former contents of a buffer."""
        unread: set[Value] = set()
        for value in reversed(self._aliases):  # values made of one come after it
            is_read = value in self._outputs or value in self._nodes_of
            if not is_read and unread.issuperset(self._made.get(value, ())):
                unread.add(value)
        return unread

    def _combined(self, value: Value, known: dict[Value, Kind], partly: bool) -> Kind:
        if self._changed.get(value):
            return Wrong(next(iter(self._changed[value].values())))
        own = self._own(value)
        if own is None and not self._is_loss(value) and self._is_read(value):
            text = self._text(value)
            if value in self._proofs.mixed:
                return Mixed(text)
            return text if value in self._proofs.of_layers else Wrong(text)
        expected = None if own is None else expected_of(own)
        if expected is None:
            for table in (self._unknown, self._read_by_some):
                if value in table:
                    return table[value]
        kinds: set[Kind] = {expected or self._begin} if value in self._outputs else set()
        for made in self._made_of(value):
            placement = self._own(made)
            is_part = placement is None or isinstance(placement, (Shard, Partial))
            kind = known[made]
            kinds.add(kind if isinstance(kind, str) else expected or (PART if is_part else kind))
        for node, place in self._nodes_of.get(value, ()):
            if node.returned is None and partly:
                continue
            if node.returned is None:
                return Wrong(f"{node.name}, which has not run")
            kinds.add(node.returned[place] if place < len(node.returned) else node.name)
        is_free = not self._is_read(value)
        return summed(kinds - {None}, expected, is_free) or self._end_kind(value, expected)

    def _is_read(self, value: Any) -> bool:
        """Whether an operation has read it; else a ``Function`` passed it to another one."""
        return not isinstance(value, int) or value in self._proofs.shapes

    def _is_loss(self, value: Value) -> bool:
        """Whether it is a number that the model returns: along dp the loss is the ranks' mean."""
        shapes = self._proofs.shapes.get(value, ((0,),))
        return self._proofs.axis == "dp" and value in self._outputs and not any(shapes)

    def _text(self, value: Value) -> str:
        """Return where the value's own placement was lost."""
        step = self._proofs.steps.get(value)
        return self._proofs.lost_at(value) or ("an operation" if step is None else step.text)

    def _end_kind(self, value: Value, expected: Placement | None) -> Kind:
        """Return the kind for a value that nothing passes gradients to, except at the end of a
        recomputed part.
        """
        end = self._ends.get(value)
        return end if end is None else summed({end}, expected)


def _flat(values: Sequence[Any]) -> list[Value]:
    """Return the single values among values, tuples of possible values, and None."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, tuple):
            found += _flat(value)
        elif isinstance(value, int):
            found.append(value)
    return found
