"""Proves which rows of the batch the tensors of a step's micro-batches have: their operations are
recorded while the step runs, and tensors are placed over micro-batches as over data-parallel ranks
whose batches differ in length.

Sizes and values prove nothing: a tensor may be as long as a micro-batch and have no rows, have the
rows in another order, or be the same in micro-batches that are alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.hooks.site import ModuleSite
from flex_model.integrations import compiled
from flex_model.layouts import follow
from flex_model.layouts.alignment import align
from flex_model.layouts.expressions import Expression, leaves
from flex_model.layouts.follow import Follower
from flex_model.layouts.module_buffers import Buffers
from flex_model.layouts.operation_log import Chunk, Entry, Value
from flex_model.layouts.placement_encoding import encode
from flex_model.layouts.proofs import AxisProofs
from flex_model.selection import Select

_AXIS = "dp"  # micro-batches stand for its ranks
_OF_INPUTS = ("forward_pre", "full_backward")


@dataclass(frozen=True)
class BatchRows:
    """Where the rows of the batch are in a hook's tensor.

    Attributes:
        placement: That of the tensor over the micro-batches; None: not known.
        lost_at: The operation at which it was lost, as far as that is known.
        selected: The dim of the rows, if the hook selects along it.
    """

    placement: Placement | None = None
    lost_at: str = ""
    selected: int | None = None


@dataclass(frozen=True)
class InputDims:
    """The dims along which inputs are split into micro-batches; None: each gets all of it.

    Attributes:
        args: By tensor in the positional arguments, in the order of pytrees.
        kwargs: By keyword argument, the same.
    """

    args: list[int | None]
    kwargs: dict[str, list[int | None]]


@dataclass(eq=False)
class _Microbatch:
    """What was recorded of one micro-batch.

    Attributes:
        received, sent: The values of what the stage got from the one before, and of its outputs.
        of_hooks: By a hook's index, the values of its tensors.
    """

    received: list[Value | None] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    of_hooks: dict[int, list[Any]] = field(default_factory=dict)
    chunk: Chunk = field(default_factory=lambda: Chunk([], {}))


class StageRecording:
    """Records a stage's micro-batches in one step. Local.

    Args:
        buffers: What the rank's buffers contain as the step begins.
        registrations: The hooks at modules of this rank: those that record, and those that edit.
        dims: How the step's inputs are split into micro-batches.
        is_first: Whether the stage gets the step's positional inputs, not another stage's outputs.
        is_always: Whether every step is recorded, since the model's path depends on values: one
            that the rows of a micro-batch select is none that the whole batch would take.
    """

    def __init__(
        self,
        root: nn.Module,
        core: HookCore,
        buffers: Buffers,
        registrations: Sequence[Registration],
        dims: InputDims,
        is_first: bool,
        number: int,
        is_always: bool = False,
    ) -> None:
        self._core = core
        modules = set(root.modules())
        self._has_fsdp = any(isinstance(module, FSDPModule) for module in modules)
        self._sites = {  # of this stage, by hook
            registration: [site for site in registration.places if site.module in modules]
            for registration in registrations
        }
        self._dims, self._is_first, self._number = dims, is_first, number
        self._buffers, self._trusts_conditions = buffers, not is_always
        self._microbatches: dict[int, _Microbatch] = {}

    def run(
        self,
        microbatch: int,
        forward: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a micro-batch's forward, and record it."""
        found = _Microbatch()
        with follow.paused():  # the core may be following this forward, too
            self._buffers.observe()
            follower = self._core.tracking.follower_of_microbatch(self._buffers)
            self._note_inputs(follower, found, args, kwargs)
        try:
            with compiled.nothing_compiled(), follower, self._noting(follower, found):
                output = forward()
                found.sent = [follower.joint_value(one) for one in _tensors(output)]
                return output
        finally:  # a forward that ``run_until`` ends, too
            follower.recorder.flush()
            found.chunk = follower.log.take()
            self._microbatches[microbatch] = found

    def _note_inputs(
        self, follower: Follower, found: _Microbatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for name, value in kwargs.items():
            dims = self._dims.kwargs.get(name, [])
            for i, (tensor, dim) in enumerate(zip(_tensors(value), dims)):
                follower.note_input(tensor, f"input {name!r}, tensor {i}", (_placed(dim), None))
        tensors = _tensors(args)
        if self._is_first:
            for i, (tensor, dim) in enumerate(zip(tensors, self._dims.args)):
                follower.note_input(tensor, f"input {i}", (_placed(dim), None))
            return
        for i, tensor in enumerate(tensors):
            follower.note_input(tensor, f"what the stage before sends, tensor {i}", (None, None))
            found.received.append(follower.value(tensor))

    @contextlib.contextmanager
    def _noting(self, follower: Follower, found: _Microbatch) -> Iterator[None]:
        """A context in which the values of hooks' tensors are noted, and the results of edits get
        those of the tensors that they replace: an editing function gets, and returns, a
        micro-batch's rows.
        """
        handles: list[Any] = []
        for registration, sites in self._sites.items():
            of_hook = found.of_hooks.setdefault(registration.index, [])
            for site in sites:
                handles += _note_at(site, registration, follower, of_hook)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def infer(self, received: Sequence[Any]) -> tuple[dict[int, BatchRows], list[Any]]:
        """Return the rows in the tensor of each hook, by its index, and the placements of what the
        stage sends, encoded.

        Args:
            received: Those of what the stage before sends.
        """
        recorded = [self._microbatches.get(index) for index in range(self._number)]
        done = [one for one in recorded if one is not None]
        if len(done) < self._number:  # it failed, or the step ended before this stage
            return {}, []
        if any(_answers(one.chunk) != _answers(done[0].chunk) for one in done):
            branched = BatchRows(None, "a branch on values, which not all micro-batches take")
            return dict.fromkeys((one.index for one in self._sites), branched), []
        proofs = self._prove(done, received)
        found = {
            registration.index: _rows_in_calls(
                proofs, [one.of_hooks[registration.index] for one in done], registration.select
            )
            for registration, sites in self._sites.items()
            if sites
        }
        sent = [_rows(proofs, values).placement for values in zip(*(one.sent for one in done))]
        return found, list(map(encode, sent))

    def _prove(
        self, microbatches: Sequence[_Microbatch], received: Sequence[Any]
    ) -> list[AxisProofs]:
        """Infer placements, by micro-batch: from what all of them ran, so that a number, a path or
        a tensor that is one micro-batch's own proves nothing.

        There are two exceptions: a micro-batch whose rows have no padding may have no masks, and
        FSDP gathers parameters in some micro-batches only. Then it is as if all micro-batches ran
        what this one ran, of its sizes.
        """
        chunks = [_with_received(one, received) for one in microbatches]
        masks = [_answers_of_masks(one) for one in chunks]
        may_differ = self._has_fsdp or any(one != masks[0] for one in masks)
        if may_differ and not any(map(_reads_elements, chunks)):
            own = _without_own_numbers(chunks)
            return [self._follow([one] * self._number) for one in own]
        return [self._follow(chunks)] * self._number

    def _follow(self, chunks: Sequence[Chunk]) -> AxisProofs:
        tp_size = self._core.mesh.tp_size
        proofs = AxisProofs(_AXIS, self._number, tp_size, self._trusts_conditions)
        proofs.ignore_collectives()
        proofs.follow(chunks)
        return proofs


def _with_received(microbatch: _Microbatch, received: Sequence[Any]) -> Chunk:
    """Return what was recorded of it, with the placements of what the stage before sent."""
    chunk = microbatch.chunk
    for value, placement in zip(microbatch.received, received):
        if value in chunk.sources:
            name, _, *rest = chunk.sources[value]
            chunk.sources[value] = (name, (placement, None), *rest)
    return chunk


def _without_own_numbers(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks, where nothing is known of the results of operations to which micro-batches
    passed the same tensors and different numbers.
    """
    found: list[list[Any]] = [[] for _ in chunks]
    places = [{id(entry): i for i, entry in enumerate(one.entries)} for one in chunks]
    ends = [0] * len(chunks)
    for entries in align([one.entries for one in chunks]):
        passed = [_passed(entry) for entry in entries if entry[0] == "op"]
        differ = len(set(passed)) > 1 and len({_values(one) for one in passed}) == 1
        for i, entry in enumerate(entries if differ else ()):
            end = places[i][id(entry)] + 1
            lost = ("invalidated", tuple(output[0] for output in entry[4]))
            found[i] += [*chunks[i].entries[ends[i] : end], lost]
            ends[i] = end
    return [
        Chunk([*kept, *one.entries[end:]], one.sources)
        for kept, one, end in zip(found, chunks, ends)
    ]


def _passed(operation: Entry) -> Any:
    """Return the arguments of an operation, without the sizes of tensors."""
    return _plain(operation[2]), _plain(operation[3])


def _plain(arguments: Any) -> Any:
    if not isinstance(arguments, tuple):
        return arguments
    if arguments and arguments[0] == "t":
        return "t", arguments[1]
    return tuple(map(_plain, arguments))


def _values(arguments: Any) -> tuple[Value, ...]:
    """Return the values of the tensors in what ``_passed`` returns."""
    if not isinstance(arguments, tuple):
        return ()
    if arguments and arguments[0] == "t":
        return (arguments[1],)
    return tuple(value for one in arguments for value in _values(one))


def _answers_of_masks(chunk: Chunk) -> list[Any]:
    """Return the answers to conditions on values on which the making of masks branches."""
    return [entry[2] for entry in chunk.entries if entry[0] == "condition" and entry[3]]


def _reads_elements(chunk: Chunk) -> bool:
    """Return whether elements became plain numbers, on which the model may branch unseen."""
    return any(
        entry[0] == "read"
        or (entry[0] == "number" and any(leaf[0] == "read" for leaf in leaves(entry[2])))
        for entry in chunk.entries
    )


def _answers(chunk: Chunk) -> list[Any]:
    """Return the answers to conditions on values, on which the model may branch."""
    found = []
    for kind, *entry in chunk.entries:
        if kind == "condition" and not entry[2]:
            found.append(entry[1])
        elif kind == "compared" and any(leaf[0] == "read" for leaf in _leaves_of(entry)):
            found.append(entry[3])
    return found


def _leaves_of(comparison: Sequence[Any]) -> set[Expression]:
    _, own, other, *_ = comparison
    return {*leaves(own), *leaves(other)}


def _note_at(
    site: ModuleSite, registration: Registration, follower: Follower, of_hook: list[Any]
) -> list[Any]:
    """Register hooks of torch's around a hook of ours, so that no other lies between; return their
    handles.
    """
    before: list[Tensor] = []

    def leaf_of(tree: Any) -> Tensor | None:
        with contextlib.suppress(Exception), follow.paused():  # the hook's own call raises it
            return registration.leaf(tree)
        return None

    def note(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        leaf = leaf_of(output[0] if output else (args, kwargs))
        before.clear()
        if leaf is not None:
            before.append(leaf)
            of_hook.append(follower.joint_value(leaf))

    def keep(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        leaf = leaf_of(output[0] if output else (args, kwargs))
        if leaf is not None and before and leaf is not before[0]:
            follower.note_substitute(leaf, before[0])

    return site.surround(registration.kind in _OF_INPUTS, note, keep)


def _rows_in_calls(
    proofs: Sequence[AxisProofs], of_hook: Sequence[list[Any]], select: Select | None
) -> BatchRows:
    """Return the rows in a hook's tensors, if those of all its calls have the same.

    Args:
        proofs: By micro-batch.
        of_hook: By micro-batch, the values of the tensors.
    """
    found = {_rows(proofs, of_call, select) for of_call in zip(*of_hook)}
    return found.pop() if len(found) == 1 else BatchRows()


def _rows(
    proofs: Sequence[AxisProofs], values: Sequence[Any], select: Select | None = None
) -> BatchRows:
    """Return the rows in a tensor, if that is proven for all micro-batches alike."""
    resolved = [one.resolve_joint(value) for one, value in zip(proofs, values)]
    found = {one.placement(value) for one, value in zip(proofs, resolved)}
    if len(found) == 1 and None not in found:
        placement = found.pop()
        selected = None
        if select is not None and isinstance(placement, Shard):
            shape = proofs[0].shapes[resolved[0]][0]
            selected = placement.dim if placement.dim in select.indices(shape) else None
        return BatchRows(placement, selected=selected)
    texts = (one.lost_at(value) for one, value in zip(proofs, resolved))
    return BatchRows(None, next(filter(None, texts), ""))


def _placed(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
