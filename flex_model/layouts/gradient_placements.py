"""How gradients are placed along one axis, from how the tensors of the forward are.

The gradient of a split tensor is split as it is, and that of a partial sum is the same on all
ranks. That of a replicated tensor is the same on all ranks, or a part of a sum on each: which, the
operations tell that read the tensor. An operation of each rank alone (one of ATen's) whose results
are split, or partial sums, hands back a part of a sum, since each rank has the gradient of its own
results alone; where its results are replicated it hands back what their gradients are, since a
backward is linear. This holds whatever the operation computes: it is the chain rule over the ranks.
No gradient is known where something that was made of the tensor, by whatever number of operations,
is itself not known: ranks that compute other things than the unsharded program do so in the
backward, too.

The backward of an ``autograd.Function`` may talk to other ranks; its operations are followed as a
forward's are, from the gradients that it got.

Where a tensor is read in both ways its gradient is a sum of both, and is not known. A statement of
the user's, or what a hook puts in a tensor's place, takes the place of a tensor that is not known.

At the outputs of the model gradients begin: along tp the ranks compute one loss of the same values,
so that they are the same; along dp the loss is the mean over ranks, so that of a tensor which all
data-parallel ranks share each has a part. A number that the model returns is such a loss. So along
dp a rank has the gradient of its own loss, which is as many times that of the mean as there are
ranks; and what a followed backward does with it must be linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flex_model.distributed.layout import Partial, Placement, Replicate, Shard
from flex_model.layouts import pieces
from flex_model.layouts.backward_nodes import RECOMPUTES
from flex_model.layouts.log import Entry, Value
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.operation import Operand, Operation

if TYPE_CHECKING:
    from flex_model.layouts.proofs import AxisProofs

Kind = Placement | str | None  # of a gradient; a text: why it is not known; None: there is none

_WHOLE, _PART = Replicate(), Partial()


class _Wrong(str):
    """Why a gradient is no part of the unsharded model's, or not yet known to be one, however its
    tensor is placed. Other texts are about replicated tensors, whose gradients the ranks may hold
    in several ways.
    """


class _Mixed(_Wrong):
    """Why a gradient is no part of the unsharded model's: ranks made something of parts alone where
    the unsharded program needs all of them. Not even a DTensor's word says otherwise.
    """


def _worst(texts: Sequence[str]) -> str:
    """The reason that counts of several; the same one on every rank. Empty for none."""
    for kind in (_Mixed, _Wrong):
        found = [text for text in texts if isinstance(text, kind)]
        if found:
            return min(found)
    return min(texts, default="")


@dataclass
class _Node:
    """A node of autograd's graph that no rule is about.

    Attributes:
        outputs: The values that it made, by their places.
        lost_at: Why it is not known how a gradient that it got is placed; empty where it is.
        handed: By place among its inputs: how the gradient that it handed on is placed; None: it
            handed on none.
    """

    name: str
    outputs: dict[int, Value] = field(default_factory=dict)
    lost_at: str = ""
    handed: list[Kind] | None = None
    is_known: bool = False


class Gradients:
    """Along the axis of ``proofs``."""

    def __init__(self, proofs: AxisProofs) -> None:
        self._proofs = proofs
        self._begin: Placement = _PART if proofs.axis == "dp" else _WHOLE
        self._made: dict[Value, list[Value]] = {}  # by value: what was made of it
        self._nodes_of: dict[Value, list[tuple[_Node, int]]] = {}  # by value: that hand to it
        self._unknown: dict[Value, str] = {}  # by value: what may hand to it
        self._outputs: set[Value] = set()
        self._idle: set[Value] = set()  # that carry no gradients
        self._aliases: list[Value] = []  # what tensors have become whose memory others wrote to
        self._unread: set[Value] | None = None  # those of them that nothing read any more
        # By value: what was stated or put for it, or what is made of it once all is written.
        self._in_place_of: dict[Value, Value] = {}
        self._nodes: dict[Value, _Node] = {}
        # What is computed once more in a backward ends where the gradients begin that it was given.
        self._given: dict[Value, Kind] = {}  # by node that runs
        self._ends: dict[Value, Kind] = {}
        # By value: what of it some ranks alone have read. Of a shard each rank has its own gradient
        # all the same, if what was made of it in the end is right, which a statement says.
        self._apart: dict[Value, str] = {}
        # By value and hook, that has not been seen to only look: what may change its gradient.
        self._changed: dict[Value, dict[Value | None, str]] = {}
        self._scaled: set[Value] = set()  # along dp: gradients of a rank's own loss
        self._found: dict[bool, dict[Value, Kind]] = {True: {}, False: {}}  # by ``partly``

    def forget(self) -> None:
        """What was concluded so far: more is known now."""
        self._unread = None
        for found in self._found.values():
            found.clear()

    def placement(self, value: Any, partly: bool = False) -> Placement | None:
        """Of the gradient of a value; None where it is not known.

        Args:
            partly: By those nodes that have run, though others may.
        """
        values = value if isinstance(value, tuple) else (value,)
        kinds = {self._settled(one, partly) for one in values}
        kind = kinds.pop()
        return None if kinds or isinstance(kind, str) else kind

    def _settled(self, value: Any, partly: bool) -> Kind:
        """Also of a value that no gradient comes to: that of one that would."""
        own = self._own(value)
        if own is None:
            return None if self._is_met(value) else self._kind(value, partly)
        kind = self._kind(value, partly)
        return self._expected(own) or self._begin if kind is None else kind

    def obstacle(self, value: Any) -> str:
        """Why the gradient of a value is not known."""
        kind = self._kind(value) if isinstance(value, int) else None
        return kind if isinstance(kind, str) else ""

    def _own(self, value: Any) -> Placement | None:
        """How the value is placed, or what was stated or put in its place."""
        while value not in self._proofs.placements and value in self._in_place_of:
            value = self._in_place_of[value]
        if self._proofs.reduced.get(value) == "mean":
            return _PART  # as far as gradients go, but for a factor that all ranks have
        return self._proofs.placements.get(value)

    @staticmethod
    def _expected(own: Placement) -> Placement | None:
        """Of the gradient of a tensor that is placed so; None: of a replicated one, it depends."""
        if isinstance(own, Replicate):
            return None
        return _WHOLE if isinstance(own, Partial) else own

    # Following.

    def note_made(self, inputs: Sequence[Any], outputs: Sequence[Value]) -> None:
        """An operation of each rank alone hands the gradients of its outputs to its inputs."""
        for value in _flat(inputs):
            self._made.setdefault(value, []).extend(outputs)
        if self._given:
            self._ends.update(dict.fromkeys(outputs, list(self._given.values())[-1]))

    def note_replaced(self, before: Sequence[Any], value: Value) -> None:
        """The user states a tensor anew, or a hook puts another one in its place."""
        self.note_made(before, [value])
        if isinstance(before[0], int) and all(one == before[0] for one in before):
            self._in_place_of[before[0]] = value

    def note_filled(self, before: Value, value: Value) -> None:
        """A part of what was blank is written: it is placed as it is when all of it is."""
        self._in_place_of[before] = value

    def note_alias(self, value: Value) -> None:
        """What a tensor has become by a write through another one that shows its memory."""
        self._aliases.append(value)

    def note_idle(self, values: Sequence[Value]) -> None:
        """An operation has made these for its backward alone: no loss depends on them."""
        self._idle.update(values)

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

    def note_changed(self, values: Sequence[Any], why: str, hook: Value | None = None) -> None:
        """The gradient of these may become another one than rules have it.

        Args:
            hook: The number of the model's hook that may change it; None: it is none.
        """
        self.forget()
        for value in _flat(values):
            self._changed.setdefault(value, {})[hook] = why

    def note_look(self, hook: Value) -> None:
        """A hook has left the gradient as it was."""
        self.forget()
        for of_value in self._changed.values():
            of_value.pop(hook, None)

    def _note_apart(self, values: Sequence[Any], why: str) -> None:
        """Some ranks' operations hand gradients to these."""
        for value in _flat(values):
            self._apart.setdefault(value, why)

    def skip(self, entry: Entry) -> None:
        """Not all ranks have this entry."""
        kind = entry[0]
        if kind == "op":
            self._note_apart(
                entry[7], f"{entry[1].removeprefix('aten::')}, which not all ranks ran"
            )
        elif kind == "node":
            self._note_apart(entry[3], f"{entry[2]}, which not all ranks ran")
        elif kind in ("placed", "stated"):
            self.lose([entry[4] if kind == "placed" else entry[2]], "a hook of some ranks")
        elif kind == "named":
            self.lose([entry[3]], "a hook of some ranks")
        elif kind == "hooked":
            self.lose([entry[1]], entry[2])
        elif kind == "backward":
            self._given[entry[1]] = "a backward that not all ranks ran"
        elif kind == "gradients":
            self.note_handed(entry[1], [(None,)] * len(entry[2]), [None] * len(entry[2]))

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
        self.forget()
        node = self._nodes.get(number)
        outputs = {} if node is None else node.outputs
        found = {
            place: self.placement(outputs[place]) if place in outputs else None for place in given
        }
        if node is not None:
            node.is_known = None not in found.values()
            told = [self._kind(outputs[p]) if p in outputs else node.name for p in found]
            node.lost_at = _worst([kind for kind in told if isinstance(kind, str)])
        kinds = set(found.values())
        alike = kinds.pop() if len(kinds) == 1 else None
        if node is None or node.name == RECOMPUTES:
            lost_at = "a backward" if node is None else node.lost_at or "a backward"
            self._given[number] = alike or lost_at
        return found

    def is_of_mixed(self, number: Value) -> bool:
        """Whether a node that runs got gradients of what ranks made of parts alone."""
        node = self._nodes.get(number)
        return node is not None and isinstance(node.lost_at, _Mixed)

    def note_scaled(self, values: Iterable[Value]) -> None:
        """A node runs with these gradients, or they are linear in such."""
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
        """``found``, without those of results that are not linear in gradients of a rank's loss."""
        scaled = [value in self._scaled for value in values]
        if not any(scaled):
            return list(found)
        kinds = _linearity(operation, scaled)
        self._scaled.update(value for value, kind in zip(outputs, kinds) if kind != _WHOLE)
        return [None if kind is None else placement for placement, kind in zip(found, kinds)]

    def note_handed(
        self,
        number: Value,
        by_place: Sequence[Sequence[Any]],
        stated: Sequence[Placement | None],
    ) -> None:
        """A node has run, and handed these gradients to its inputs, on each rank; ``stated``: how
        those that are DTensors are placed.
        """
        self._given.pop(number, None)
        node = self._nodes.get(number)
        if node is not None:
            node.handed = [
                self._handed(node, of_ranks, told) for of_ranks, told in zip(by_place, stated)
            ]

    def _handed(self, node: _Node, of_ranks: Sequence[Any], stated: Placement | None) -> Kind:
        if node.name == RECOMPUTES or all(value == () for value in of_ranks):
            return None
        if isinstance(node.lost_at, _Mixed):
            return node.lost_at
        if stated is not None:
            return stated
        placement: Placement | None
        if all(value == of_ranks[0] for value in of_ranks):
            placement = None if of_ranks[0] is None else self._proofs.placement(of_ranks[0])
        else:
            placement = pieces.together(of_ranks, self._proofs.makers)
        if not self._is_of_loss(of_ranks, placement):
            return _Wrong(f"{node.name}, of which the gradient is not made of the one that it got")
        return placement or (_Wrong(node.name) if node.is_known else node.lost_at or node.name)

    def _is_of_loss(self, of_ranks: Sequence[Any], placement: Placement | None) -> bool:
        """Whether along dp what a node handed on is that of a rank's own loss, as what it got was:
        so it is taken to be where each rank has a part.
        """
        if self._proofs.axis != "dp" or placement in (None, _WHOLE):
            return True
        of_loss = self._scaled | self._proofs.zeros
        return all(value in of_loss for value in _flat(of_ranks))

    # Concluding.

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
        """What hands gradients to it."""
        if self._unread is None:
            self._unread = self._find_unread()
        found = self._made.get(value, ())
        return [made for made in found if made not in self._idle and made not in self._unread]

    def _find_unread(self) -> set[Value]:
        """Such as what a buffer had received, once it has received something else."""
        unread: set[Value] = set()
        for value in reversed(self._aliases):  # what is made of one comes after it
            is_read = value in self._outputs or value in self._nodes_of
            if not is_read and unread.issuperset(self._made.get(value, ())):
                unread.add(value)
        return unread

    def _combined(self, value: Value, known: dict[Value, Kind], partly: bool) -> Kind:
        if self._changed.get(value):
            return _Wrong(next(iter(self._changed[value].values())))
        own = self._own(value)
        if own is None and not self._is_loss(value) and self._is_met(value):
            text = self._text(value)
            if value in self._proofs.mixed:
                return _Mixed(text)
            return text if value in self._proofs.of_layers else _Wrong(text)
        expected = None if own is None else self._expected(own)
        if expected is None:
            for table in (self._unknown, self._apart):
                if value in table:
                    return table[value]
        kinds: set[Kind] = {expected or self._begin} if value in self._outputs else set()
        for made in self._made_of(value):
            placement = self._own(made)
            is_part = placement is None or isinstance(placement, (Shard, Partial))
            kind = known[made]
            kinds.add(kind if isinstance(kind, str) else expected or (_PART if is_part else kind))
        for node, place in self._nodes_of.get(value, ()):
            if node.handed is None and partly:
                continue
            if node.handed is None:
                return _Wrong(f"{node.name}, which has not run")
            kinds.add(node.handed[place] if place < len(node.handed) else node.name)
        is_free = not self._is_met(value)
        return self._summed(kinds - {None}, expected, is_free) or self._ended(value, expected)

    def _is_met(self, value: Any) -> bool:
        """Whether an operation has read it: else a ``Function`` handed it on to another."""
        return not isinstance(value, int) or value in self._proofs.shapes

    def _is_loss(self, value: Value) -> bool:
        """Whether it is a number that the model returns: along dp the loss is the ranks' mean."""
        shapes = self._proofs.shapes.get(value, ((0,),))
        return self._proofs.axis == "dp" and value in self._outputs and not any(shapes)

    def _text(self, value: Value) -> str:
        """Where the value's own placement was lost."""
        step = self._proofs.steps.get(value)
        return self._proofs.lost_at(value) or ("an operation" if step is None else step.text)

    @staticmethod
    def _summed(kinds: set[Kind], expected: Placement | None, is_free: bool = False) -> Kind:
        """Of a sum of gradients that are placed so; ``is_free``: how the tensor is is not known."""
        texts = [kind for kind in kinds if isinstance(kind, str)]
        if isinstance(_worst(texts), _Wrong) or (texts and expected is None):
            return _worst(texts)
        kinds = kinds - set(texts)
        if len(kinds) > 1:
            return "it is read both whole and in parts"
        kind = next(iter(kinds), None)
        if kind is None or kind == expected:
            return kind
        if expected is not None:
            return "a gradient that is placed otherwise than its tensor"
        return (
            kind
            if is_free or isinstance(kind, (Replicate, Partial))
            else "a gradient that is split"
        )

    def _ended(self, value: Value, expected: Placement | None) -> Kind:
        """Of a value that nothing hands gradients to, but for the end of a recomputed part."""
        end = self._ends.get(value)
        return end if end is None else self._summed({end}, expected)


def _linearity(operation: Operation, is_scaled: Sequence[bool]) -> list[Placement | None]:
    """By result: a partial sum where it is linear in the operands that are, as one rank alone runs
    the operation; replicated where it does not depend on them; None where neither is known.
    """
    placed = {
        id(operand): Operand(operand.shapes[:1] * 2, operand.dtype, _PART if scaled else _WHOLE)
        for operand, scaled in zip(operation.operands, is_scaled)
    }

    def alone(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [alone(item) for item in value]
        return placed[id(value)] if isinstance(value, Operand) else value

    arguments = {name: alone(value) for name, value in operation.arguments[0].items()}
    sizes = {
        name: list(arguments[name]) if isinstance(arguments[name], list) else [arguments[name]]
        for name in operation.full_sizes
        if name in arguments
    }
    outputs = tuple(Operand(made.shapes[:1] * 2, made.dtype) for made in operation.outputs)
    return rules.propagate(
        replace(operation, arguments=(arguments, arguments), outputs=outputs, full_sizes=sizes)
    )


def _flat(values: Sequence[Any]) -> list[Value]:
    """Single values of those that may be one of several, or none."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, tuple):
            found += _flat(value)
        elif isinstance(value, int):
            found.append(value)
    return found
