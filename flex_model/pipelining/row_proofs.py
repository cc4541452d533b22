"""Proves which rows of the batch the tensors of a step's micro-batches have: their operations are
recorded while the step runs, and each micro-batch is followed alone, as a data-parallel rank is.

Sizes and values prove nothing: a tensor may be as long as a micro-batch and have no rows, have the
rows in another order, or be the same in micro-batches that are alike::

    mask = x.new_ones(4, 4).tril()         # as long as a micro-batch of 4, no rows: Replicate()
    hidden = x.transpose(0, 1) + bias      # rows along dim 1: Shard(1)
    order = hidden[:, x.argsort(0)[:, 0]]  # rows in an order that values give: not known
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.hooks.site import ModuleSite
from flex_model.integrations import compiled
from flex_model.layouts import follow
from flex_model.layouts.follow import Follower
from flex_model.layouts.logged import Value
from flex_model.layouts.module_buffers import Buffers
from flex_model.layouts.operation_log import Chunk
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
        inputs: The arguments of the step, of the whole batch.
        is_first: Whether the stage gets the step's positional inputs, not another stage's outputs.
    """

    def __init__(
        self,
        root: nn.Module,
        core: HookCore,
        buffers: Buffers,
        registrations: Sequence[Registration],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        is_first: bool,
        number: int,
    ) -> None:
        self._core = core
        modules = set(root.modules())
        self._sites = {  # of this stage, by hook
            registration: [site for site in registration.places if site.module in modules]
            for registration in registrations
        }
        self._inputs, self._is_first, self._number = inputs, is_first, number
        self._buffers = buffers
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
            found.chunk = follower.log.take()
            self._microbatches[microbatch] = found

    def _note_inputs(
        self, follower: Follower, found: _Microbatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        of_args, of_kwargs = self._inputs
        given = {f"input {name!r}, tensor": (kwargs[name], of_kwargs[name]) for name in kwargs}
        if self._is_first:
            given["input"] = args, of_args
        for what, (part, whole) in given.items():
            for i, (tensor, of_batch) in enumerate(zip(_tensors(part), _tensors(whole))):
                follower.note_input(tensor, f"{what} {i}", (_split(of_batch, tensor), None))
        for i, tensor in enumerate([] if self._is_first else _tensors(args)):
            follower.note_input(tensor, f"what the stage before sends, tensor {i}", (None, None))
            found.received.append(follower.recorder.value(tensor))

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
        proofs = [self._follow(_with_received(one, received)) for one in done]
        found = {
            registration.index: _rows_in_calls(
                proofs, [one.of_hooks[registration.index] for one in done], registration.select
            )
            for registration, sites in self._sites.items()
            if sites
        }
        sent = [_rows(proofs, values).placement for values in zip(*(one.sent for one in done))]
        return found, list(map(encode, sent))

    def _follow(self, chunk: Chunk) -> AxisProofs:
        proofs = AxisProofs(_AXIS, self._number, self._core.mesh.tp_size)
        proofs.follow([chunk] * self._number)
        return proofs


def _with_received(microbatch: _Microbatch, received: Sequence[Any]) -> Chunk:
    """Return what was recorded of it, with the placements of what the stage before sent."""
    chunk = microbatch.chunk
    for value, placement in zip(microbatch.received, received):
        if value in chunk.sources:
            source = chunk.sources[value]
            chunk.sources[value] = source._replace(placements=(placement, None))
    return chunk


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
    obstacles = (one.obstacle(value) for one, value in zip(proofs, resolved))
    return BatchRows(None, str(next(filter(None, obstacles), "")))


def _split(whole: Tensor, part: Tensor) -> Placement:
    """Return how an input of the whole batch is split into parts, of which this is one of several;
    each gets all of it where none of its sizes is smaller.
    """
    dims = (dim for dim, size in enumerate(part.shape) if size != whole.shape[dim])
    return next(map(Shard, dims), Replicate())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
