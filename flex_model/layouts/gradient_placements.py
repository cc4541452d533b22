"""Infers the placements of gradients along one axis from those of the forward's tensors.

The gradient of a split tensor is split alike, and that of a partial sum is replicated.

Along dp the loss is the mean over the ranks, so each has a summand of the gradient of a tensor that
all rows share, however the loss is computed.

Along tp the gradient of a replicated tensor is replicated, or a partial sum: what reads the tensor
decides which. An operation of each rank alone (one of ATen's) returns a partial sum if its results
are split or partial sums, since each rank has the gradient of its own results only; if its results
are replicated, its gradient is placed as theirs, since a backward is linear. This is the chain rule
over the ranks, so it holds whatever the operation computes. Of an ``autograd.Function`` its
contract says it (`contracts.functions`). At the model's outputs gradients are replicated, since the
ranks compute one loss of the same values. If a tensor is read in both ways, its gradient is a sum
of both, and not known; nor is it where anything made of the tensor is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flex_model.distributed.placement import Partial, Placement, Replicate, Shard
from flex_model.integrations.torch_private import CUSTOM_BACKWARD
from flex_model.layouts import chunks, logged
from flex_model.layouts.logged import Entry, Value

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

Kind = Placement | str | None  # a string: why it is not known; None: there is no gradient

WHOLE, PART = Replicate(), Partial()


@dataclass
class _Node:
    """A node of autograd's graph that is not one of ATen's operations.

    Attributes:
        contract: See `contracts.functions`; None where none is stated.
        outputs: Its values by output number.
    """

    name: str
    contract: str | None
    outputs: dict[int, Value] = field(default_factory=dict)


class Gradients:
    """Infers the placements of gradients along the axis of ``proofs``."""

    def __init__(self, proofs: AxisProofs) -> None:
        self._proofs = proofs
        self._made: dict[Value, list[Value]] = {}  # by value: the values made of it
        self._nodes_of: dict[Value, list[_Node]] = {}  # that return gradients to it
        self._unknown: dict[Value, str] = {}  # by value: what may pass gradients to it
        self._outputs: set[Value] = set()
        self._hooked: set[Value] = set()  # with a hook of the model's own
        # By value: the value that a statement or a hook replaced it by, or of the tensor once all
        # of it is written.
        self._in_place_of: dict[Value, Value] = {}
        self._nodes: dict[Value, _Node] = {}
        self._not_followed = ""  # a node inside which anything may be read
        self._found: dict[Value, Kind] = {}

    def forget(self) -> None:
        """Drop what was inferred so far: more is known now."""
        self._found.clear()

    def placement(self, value: Any) -> Placement | None:
        """Return the placement of a value's gradient; None where it is not known. That of a value
        that nothing passes a gradient to is the one that it would have.
        """
        value = self._proofs.resolve_joint(value)
        values = value if isinstance(value, tuple) else (value,)
        kinds = {self._kind_or_expected(one) for one in values}
        kind = kinds.pop()
        return None if kinds or isinstance(kind, str) else kind

    def _kind_or_expected(self, value: Any) -> Kind:
        own = self._own(value)
        if self._proofs.axis == "dp" or own is None:
            return None if own is None else _expected(own) or PART
        kind = self._kind(value)
        return _expected(own) or WHOLE if kind is None else kind

    def obstacle(self, value: Any) -> str:
        """Return why the gradient of a value is not known; empty if it is."""
        value = self._proofs.resolve_joint(value)
        if self._own(value) is None:
            return self._text(value) if isinstance(value, int) else ""
        kind = self._kind(value) if self._proofs.axis == "tp" else None
        return kind if isinstance(kind, str) else ""

    def _own(self, value: Any) -> Placement | None:
        """Return the placement of the value, or of the value that replaced it."""
        while value not in self._proofs.placements and value in self._in_place_of:
            value = self._in_place_of[value]
        return self._proofs.placements.get(value)

    # What is noted.

    def note_made(self, inputs: Sequence[Any], outputs: Sequence[Value]) -> None:
        """Note that an operation of each rank alone passes the gradients of its outputs to its
        inputs.
        """
        for value in _flat(inputs):
            self._made.setdefault(value, []).extend(outputs)

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

    def note_named(self, sources: Sequence[Any], value: Value) -> None:
        """Note that a value has the gradient of ``sources[0]``, if that is the same on all
        ranks.
        """
        if isinstance(sources[0], int) and all(source == sources[0] for source in sources):
            self.note_made(sources[:1], [value])
        else:
            self.invalidate(sources, "a tensor whose gradient a hook receives")

    def note_output(self, value: Value, part: str) -> None:
        """Note a value that the model returns; with ``part``, that this part of it returns, which
        was called on its own: what reads it is not followed.
        """
        if part:
            self._unknown[value] = f"the output of {part!r}, which was called on its own"
        self._outputs.add(value)

    def note_hooked(self, values: Sequence[Any]) -> None:
        """Note that a hook of the model's own gets the gradient of these values."""
        self._hooked.update(_flat(values))

    def invalidate(self, values: Sequence[Any], why: str) -> None:
        """Note that the operations that pass gradients to these values are not known."""
        for value in _flat(values):
            self._unknown.setdefault(value, why)

    def skip(self, entry: Entry) -> None:
        """Note an entry that not all ranks have."""
        if isinstance(entry, logged.Op):
            name = entry.name.removeprefix("aten::")
            advice = "let all run it, or detach what it reads"
            self.invalidate(entry.carriers, f"{name}, which not all ranks ran: {advice}")
        elif isinstance(entry, logged.Node):
            self.invalidate(entry.inputs, f"{entry.name}, which not all ranks ran")
        elif isinstance(entry, (logged.Placed, logged.Stated)):
            self.invalidate([entry.before], "a hook that not all ranks ran")
        elif isinstance(entry, logged.Named):
            self.invalidate([entry.source], "a hook that not all ranks ran")

    def note_node(self, entries: Sequence[logged.Node]) -> None:
        number, name, contract, inputs, place, value = entries[0]
        node = self._nodes.get(number)
        if node is None:
            node = self._nodes[number] = _Node(name, contract)
            self._not_followed = name if contract == "recomputes" else self._not_followed
            for i, source in enumerate(inputs):
                if isinstance(source, int) and all(entry.inputs[i] == source for entry in entries):
                    self._nodes_of.setdefault(source, []).append(node)
                else:
                    self.invalidate([entry.inputs[i] for entry in entries], name)
        node.outputs[place] = value

    # Along tp.

    def _kind(self, value: Value) -> Kind:
        known, entered = self._found, set[Value]()
        pending = [value]
        while pending:
            one = pending[-1]
            if one not in entered and one not in known:
                entered.add(one)
                pending += [made for made in self._read_by(one) if made not in known]
                continue
            if one not in known:
                known[one] = self._combined(one)
            pending.pop()
        return known[value]

    def _read_by(self, value: Value) -> list[Value]:
        """Return the values that pass gradients to it."""
        found = self._made_of(value)
        for node in self._nodes_of.get(value, ()):
            found += node.outputs.values()
        return found

    def _made_of(self, value: Value) -> list[Value]:
        """Return the values that operations made of it; of a tensor that it was joined to, and that
        was only split again, the parts that hold elements of it.
        """
        found: list[Value] = []
        for made in self._made.get(value, ()):
            parts = None
            if not (made in self._outputs or made in self._nodes_of or made in self._hooked):
                readers = self._made.get(made, ()) if made not in self._unknown else ()
                parts = chunks.taken_from(value, made, readers, self._proofs.makers)
            found += [made] if parts is None else parts
        return found

    def _combined(self, value: Value) -> Kind:
        own = self._own(value)
        kinds: set[Kind] = {WHOLE} if value in self._outputs else set()
        if value in self._unknown:
            kinds.add(self._unknown[value])
        if self._not_followed:
            kinds.add(_not_followed(self._not_followed))
        kinds |= {self._local(one) for one in self._made_of(value) if one in self._found}
        for node in self._nodes_of.get(value, ()):
            kinds |= self._of_node(node)
        kinds -= {None}
        if not kinds:
            return None
        if own is None or _expected(own):
            return self._text(value) if own is None else _expected(own)
        texts = [kind for kind in kinds if isinstance(kind, str)]
        if texts:
            return min(texts)
        if len(kinds) > 1:
            return "it is read both whole and in parts"
        (kind,) = kinds
        if kind == PART and value in self._hooked:
            return "a hook of the model's own on gradients"
        return kind

    def _local(self, made: Value) -> Kind:
        """Return the gradient that an operation of each rank alone passes on from its result."""
        kind = self._found[made]
        return PART if isinstance(self._own(made), (Shard, Partial)) and kind is not None else kind

    def _of_node(self, node: _Node) -> set[Kind]:
        """Return the kinds of the gradients that a node returns for a replicated input."""
        if node.contract == "recomputes":
            return {_not_followed(node.name)}
        if node.contract in ("whole", "partial"):
            return {WHOLE if node.contract == "whole" else PART}
        kinds = {self._local(made) for made in node.outputs.values() if made in self._found}
        if node.contract == "local" or kinds <= {WHOLE, None}:
            return kinds
        short = node.name.rpartition(".")[2]
        if node.name.startswith(CUSTOM_BACKWARD):
            return {
                f"{short}, the backward of an operation of another library; if it communicates "
                "nothing, state it with flex_model.layouts.register_rule(..., gradient='local')"
            }
        return {
            f"{node.name}, an autograd.Function without a contract; state whether its backward "
            f"completes gradients with flex_model.layouts.register_function({short}, "
            "gradient='whole'), 'partial' or 'local'"
        }

    def _text(self, value: Value) -> str:
        """Return where the value's own placement was lost."""
        step = self._proofs.steps.get(value)
        return str(self._proofs.obstacle(value) or step or "an operation")


def _not_followed(name: str) -> str:
    return (
        f"{name}, which was not seen to be called, in a part that is recomputed; call it as "
        f"{name.rpartition('.')[2]}.apply there, or use checkpoint(..., use_reentrant=False)"
    )


def _expected(own: Placement) -> Placement | None:
    """Return the placement of the gradient of a tensor with this placement; None for a replicated
    one, which has no single answer.
    """
    if isinstance(own, Replicate):
        return None
    return WHOLE if isinstance(own, Partial) else own


def _flat(values: Sequence[Any]) -> list[Value]:
    """Return the single values among values, tuples of possible values, and None."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, tuple):
            found += _flat(value)
        elif isinstance(value, int):
            found.append(value)
    return found
