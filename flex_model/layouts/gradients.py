"""How gradients are placed along one axis, from how the tensors of the forward are.

The gradient of a split tensor is split as it is, and that of a partial sum is the same on all
ranks. That of a replicated tensor is the same on all ranks, or a part of a sum on each: which, the
operations tell that read the tensor. An operation of each rank alone (one of ATen's) whose results
are split, or partial sums, hands back a part of a sum, since each rank has the gradient of its own
results alone; where its results are replicated it hands back what their gradients are, since a
backward is linear. This holds whatever the operation computes: it is the chain rule over the ranks.
The backward of an ``autograd.Function`` may talk to other ranks; its operations are followed as a
forward's are, from the gradients that it got.

Where a tensor is read in both ways its gradient is a sum of both, and is not known.

At the outputs of the model gradients begin: along tp the ranks compute one loss of the same values,
so that they are the same; along dp the loss is the mean over ranks, so that of a tensor which all
data-parallel ranks share each has a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flex_model.distributed.layout import Partial, Placement, Replicate, Shard
from flex_model.layouts.backward_nodes import RECOMPUTES
from flex_model.layouts.log import Entry, Value

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

Kind = Placement | str | None  # of a replicated tensor's gradient; a text: why it is not known

_WHOLE, _PART = Replicate(), Partial()


@dataclass
class _Node:
    """A node of autograd's graph that no rule is about.

    Attributes:
        outputs: The values that it made, by their places.
        handed: By place among its inputs: how the gradient that it handed on is placed; None: it
            handed on none.
    """

    name: str
    outputs: dict[int, Value] = field(default_factory=dict)
    handed: list[Kind] | None = None


class Gradients:
    """Along the axis of ``proofs``."""

    def __init__(self, proofs: AxisProofs) -> None:
        self._proofs = proofs
        self._begin: Placement = _PART if proofs.axis == "dp" else _WHOLE
        self._made: dict[Value, list[Value]] = {}  # by value: what was made of it
        self._nodes_of: dict[Value, list[tuple[_Node, int]]] = {}  # by value: that hand to it
        self._unknown: dict[Value, str] = {}  # by value: what may hand to it
        self._outputs: set[Value] = set()
        self._nodes: dict[Value, _Node] = {}
        # What is computed once more in a backward ends where the gradients begin that it was given.
        self._given: dict[Value, Kind] = {}  # by node that runs
        self._ends: dict[Value, Kind] = {}

    def placement(self, value: Any, partly: bool = False) -> Placement | None:
        """Of the gradient of a value; None where it is not known.

        Args:
            partly: By those nodes that have run, though others may.
        """
        own = self._proofs.placement(value)
        if isinstance(own, Partial):
            return _WHOLE
        if not isinstance(own, Replicate):
            return own
        values = value if isinstance(value, tuple) else (value,)
        kinds = {self._kind(one, partly) for one in values}
        kind = kinds.pop()
        return None if kinds or isinstance(kind, str) else kind or self._begin

    def obstacle(self, value: Any) -> str:
        """Why the gradient of a replicated value is not known."""
        kind = self._kind(value) if isinstance(value, int) else None
        return kind if isinstance(kind, str) else ""

    # Following.

    def note_made(self, inputs: Sequence[Any], outputs: Sequence[Value]) -> None:
        """An operation of each rank alone hands the gradients of its outputs to its inputs."""
        for value in _flat(inputs):
            self._made.setdefault(value, []).extend(outputs)
        if self._given:
            self._ends.update(dict.fromkeys(outputs, list(self._given.values())[-1]))

    def note_named(self, sources: Sequence[Any], value: Value) -> None:
        """The gradient of a tensor is that of ``sources[0]``, where all ranks know whose."""
        if isinstance(sources[0], int) and all(source == sources[0] for source in sources):
            self.note_made(sources[:1], [value])
        else:
            self.lose(sources, "a tensor whose gradient a hook looks at")

    def note_output(self, value: Value) -> None:
        self._outputs.add(value)

    def lose(self, values: Sequence[Any], why: str) -> None:
        """What hands gradients to these values is not known."""
        for value in _flat(values):
            self._unknown.setdefault(value, why)

    def skip(self, entry: Entry) -> None:
        """Not all ranks have this entry."""
        kind = entry[0]
        if kind == "op":
            self.lose(entry[7], f"{entry[1].removeprefix('aten::')}, which not all ranks ran")
        elif kind == "node":
            self.lose(entry[3], f"{entry[2]}, which not all ranks ran")
        elif kind in ("placed", "stated"):
            self.lose([entry[4] if kind == "placed" else entry[2]], "a hook of some ranks")
        elif kind == "named":
            self.lose([entry[3]], "a hook of some ranks")
        elif kind == "backward":
            self._given[entry[1]] = "a backward that not all ranks ran"
        elif kind == "gradients":
            self.note_handed(entry[1], [None] * len(entry[2]))

    def note_node(self, entries: Sequence[Entry]) -> None:
        _, number, name, inputs, place, value = entries[0]
        node = self._nodes.get(number)
        if node is None:
            node = self._nodes[number] = _Node(name)
            for i, source in enumerate(inputs):
                if isinstance(source, int) and all(entry[3][i] == source for entry in entries):
                    self._nodes_of.setdefault(source, []).append((node, i))
                else:
                    self.lose([entry[3][i] for entry in entries], name)
        node.outputs[place] = value

    def note_backward(self, number: Value, given: Sequence[Any]) -> dict[int, Placement | None]:
        """A node runs: how the gradients of these places of it are placed."""
        node = self._nodes.get(number)
        outputs = {} if node is None else node.outputs
        found = {
            place: self.placement(outputs[place]) if place in outputs else None for place in given
        }
        kinds = set(found.values())
        alike = kinds.pop() if len(kinds) == 1 else None
        self._given[number] = alike if isinstance(alike, (Replicate, Partial)) else "a backward"
        return found

    def note_handed(self, number: Value, values: Sequence[Any]) -> None:
        """A node has run, and handed these gradients to its inputs."""
        self._given.pop(number, None)
        node = self._nodes.get(number)
        if node is not None:
            node.handed = [self._handed(node, value) for value in values]

    def _handed(self, node: _Node, value: Any) -> Kind:
        if value == () or node.name == RECOMPUTES:
            return None
        placement = None if value is None else self._proofs.placement(value)
        return placement or node.name

    # Concluding.

    def _kind(self, value: Value, partly: bool = False) -> Kind:
        known: dict[Value, Kind] = {}
        pending = [value]
        while pending:
            one = pending[-1]
            if one not in known:
                ahead = [made for made in self._read_by(one) if made not in known]
                if ahead:
                    pending += ahead
                    continue
                known[one] = self._combined(one, known, partly)
            pending.pop()
        return known[value]

    def _read_by(self, value: Value) -> list[Value]:
        """The replicated values that were made of it."""
        placements = self._proofs.placements
        return [made for made in self._made.get(value, ()) if placements.get(made) == _WHOLE]

    def _combined(self, value: Value, known: dict[Value, Kind], partly: bool) -> Kind:
        if value in self._unknown:
            return self._unknown[value]
        kinds: set[Kind] = {self._begin} if value in self._outputs else set()
        for made in self._made.get(value, ()):
            placement = self._proofs.placements.get(made)
            if placement is None:
                step = self._proofs.steps.get(made)
                return "an operation" if step is None else step.text
            kinds.add(_PART if isinstance(placement, (Shard, Partial)) else known[made])
        for node, place in self._nodes_of.get(value, ()):
            if node.handed is None and partly:
                continue
            if node.handed is None:
                return f"{node.name}, which has not run"
            kinds.add(node.handed[place] if place < len(node.handed) else node.name)
        kinds.discard(None)
        texts = [kind for kind in kinds if isinstance(kind, str)]
        if texts:
            return texts[0]
        if len(kinds) > 1:
            return "it is read both whole and in parts"
        if kinds:
            kind = kinds.pop()
            return kind if isinstance(kind, (Replicate, Partial)) else "a gradient that is split"
        return self._ends.get(value)


def _flat(values: Sequence[Any]) -> list[Value]:
    """Single values of those that may be one of several, or none."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, tuple):
            found += _flat(value)
        elif isinstance(value, int):
            found.append(value)
    return found
