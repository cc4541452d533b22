"""The three paths of an edit: on one process, on every rank of a stage, on rank 0 only.

Each gathers the editing function's inputs, runs it, and scatters its results, with gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import gather, values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.failure import OK
from flex_model.distributed.gather import GatherContext, TensorSpec
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.picked import Pick
from flex_model.distributed.placement import Placement
from flex_model.distributed.plain import is_renamed, plain
from flex_model.errors import is_agreed
from flex_model.hooks.call_check import check_call, replicated_axes
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.layout_finder import LayoutFinder
from flex_model.hooks.save_ctx import SentToAll
from flex_model.hooks.settled_gather import SettledGather
from flex_model.hooks.user_function import Edits, Parameters, UserFunction
from flex_model.integrations import dtensor
from flex_model.integrations.torch_private import FakeTensor
from flex_model.layouts import replicas
from flex_model.records.records import Records

_CHANGED, _REQUIRES_GRAD = 1, 2  # flags by which rank 0 describes an edit, in Header.microbatch


@dataclass(eq=False)
class EditInput:
    """One tensor that is passed to an editing function.

    Attributes:
        original: The model's own tensor.
        leaf: This rank's plain local tensor of it, in the graph, padded; ``own``: without that.
        part: The hook's selection of ``leaf``.
        full: The tensor passed to the function; an empty one on ranks that don't run it.
        gather_context: With several ranks: how it is gathered and scattered.
    """

    call: HookCall
    original: Any
    leaf: Tensor
    part: Tensor
    full: Tensor
    pick: Pick | None
    gather_context: GatherContext | None = None
    own: Tensor | None = None

    @property
    def gathered_by(self) -> GatherContext:
        """How the tensor was gathered, with several ranks."""
        assert self.gather_context is not None
        return self.gather_context

    def put_back(self, shard: Tensor) -> Tensor:
        """Return the leaf with the edited selection in its place."""
        return shard if self.pick is None else self.pick.put(self.leaf, shard)

    def like_original(self, shard: Tensor) -> Tensor:
        """Return the tensor that the model continues with. It is contiguous if the model's own is:
        views of it work, and a DTensor states that of its local part.
        """
        padding = None if self.gather_context is None else self.gathered_by.spec.padding
        if padding is not None and self.own is not None:
            shard = padding.cut(shard, self.own)
        if self.original.is_contiguous() or dtensor.is_dtensor(self.original):
            shard = shard.contiguous()
        if dtensor.is_dtensor(self.original):
            return dtensor.like(shard, self.original)
        return shard.as_subclass(type(self.original)) if is_renamed(self.original) else shard


class LocalPath:
    """The path on one process: the tensor is full already, and no data moves."""

    def __init__(self, records: Records, layouts: LayoutFinder, function: UserFunction) -> None:
        self._records, self._layouts, self._function = records, layouts, function

    def gather(self, call: HookCall, original: Any) -> EditInput:
        """Copy the tensor for the function, and record it."""
        call, leaf, _ = self._layouts.shard_of(call, original)
        leaf = plain(leaf) if is_renamed(leaf) else leaf
        pick = self._layouts.pick_of_full(call, leaf)
        part = leaf if pick is None else pick.take(leaf)
        if call.records:
            self._records.keep(call, part)
        return EditInput(call, original, leaf, part, _copied(part), pick)

    def edit(self, inputs: Sequence[EditInput], parameters: Parameters) -> Edits:
        """Run the function on this process."""
        call, leaf = inputs[-1].call, inputs[-1].leaf
        edits = self._function.run(call, [one.full for one in inputs], leaf, parameters)
        return [
            None if edited is None else one.put_back(copy_for_model(edited, one.leaf))
            for one, edited in zip(inputs, edits)
        ]


class _ShardedPath(ABC):
    """Gathers this rank's shard with those of the others, for the paths on several ranks.

    Args:
        checks_edits: Whether ranks exchange after each edit whether it failed: on rank 0 alone
            always, and in a pipeline, where they run backward passes after it, whose graphs must be
            the same.
        sent_to_all: Sends ``save_ctx`` from rank 0 to all ranks, where the user chose that.

    Attributes:
        gather_in_graph: Gathers with autograd inside.
    """

    gather_in_graph: Callable[[Tensor, GatherContext], Tensor]

    def __init__(
        self,
        communicator: Communicator,
        records: Records,
        layouts: LayoutFinder,
        function: UserFunction,
        checks_edits: bool,
        sent_to_all: SentToAll | None,
    ) -> None:
        self._communicator, self._records = communicator, records
        self._layouts, self._function = layouts, function
        self._checks_edits, self._sent_to_all = checks_edits, sent_to_all
        # Whether the dispatcher calls functions that have settled.
        self._settles = not checks_edits and communicator.gathers_at_once

    def gather(self, call: HookCall, original: Any) -> EditInput:
        """Check the call on all ranks, look up its layout, gather, and record."""
        communicator, layouts, records = self._communicator, self._layouts, self._records
        call, leaf, known = layouts.shard_of(call, original)
        leaf = plain(leaf)
        axes = replicated_axes(communicator.mesh, call, leaf, known)
        shapes, differing = check_call(communicator, call, leaf, call.registration.kind, axes)
        if differing:
            leaf = replicas.reconciled(communicator, call.registration.layout_site, leaf, differing)
        spec, leaf = layouts.lookup(call, shapes, leaf.dtype, known, leaf)
        may_settle = self._settles and not torch.is_grad_enabled()  # it serves no gradients
        if may_settle and type(original) is Tensor and len(set(shapes)) == 1:
            self._settle(call, leaf, spec, bool(axes))

        own = leaf
        if spec.padding is not None:
            leaf = spec.padding.put(leaf)
        if not records.keeps_parts:
            records.note_lengths(call, spec)

        def check_gradient(grad: Tensor) -> None:
            check_call(communicator, call, grad, "gradient of an edit")

        def of_replicas(grad: Tensor | None) -> Placement:
            return layouts.of_edit_gradient(call, grad, spec.layout)

        num_records = int(call.records and self._keeps_record(leaf))
        # As in earlier calls; not known of the first one.
        is_read = call.registration.writes is False
        context = GatherContext(
            spec,
            check_gradient,
            of_replicas,
            num_records,
            is_read,
            hook=call.describe(),
            why_once=self._why_once,
            is_dtensor=call.stated[0] is not None,
        )
        part = leaf if spec.pick is None else spec.pick.take(leaf)
        if records.keeps_parts and call.records:
            records.later(call, own, known, spec.pick if own is leaf else None)
        full = _gathered(self.gather_in_graph, part, context)
        if call.records and not records.keeps_parts:
            self._record(call, part, full, context)
        return EditInput(call, original, leaf, part, full, spec.pick, context, own)

    def _why_once(self) -> str:
        """Return why gradients of gradients would be wrong; empty if they are right. Local."""
        return self._layouts.why_once()

    def _settle(self, call: HookCall, leaf: Tensor, spec: TensorSpec, is_compared: bool) -> None:
        """Leave later calls like this one to a ``SettledGather``, if it serves them."""
        settled = self._layouts.settled_of(call)
        if settled is not None and SettledGather.serves(call, leaf, spec):
            settled[call.registration.index, call.number] = SettledGather(
                self._communicator, self._records, call, leaf, spec, is_compared
            )

    @abstractmethod
    def _keeps_record(self, leaf: Tensor) -> bool:
        """Whether the gather makes the record, besides the tensor for the function."""

    @abstractmethod
    def _record(self, call: HookCall, part: Tensor, full: Tensor, context: GatherContext) -> None:
        """Record the full tensor where this rank keeps it."""


class ReplicatedPath(_ShardedPath):
    """The path on which every rank has the full tensor, runs the function and keeps its shard."""

    gather_in_graph = staticmethod(gather.gather)

    def _keeps_record(self, leaf: Tensor) -> bool:
        return self._records.keeps_full and leaf.is_cpu

    def _record(self, call: HookCall, part: Tensor, full: Tensor, context: GatherContext) -> None:
        self._records.put(call, context.cast_record, full)

    def edit(self, inputs: Sequence[EditInput], parameters: Parameters) -> Edits:
        """Run the function on every rank. The results of the first call that edits are compared: a
        value of a rank's own, as an unseeded vector, is in that already, and later calls need no
        exchange.
        """
        call, leaf = inputs[-1].call, inputs[-1].leaf
        registration, communicator = call.registration, self._communicator
        edits: Edits = [None] * len(inputs)
        compares = not (call.is_replay or registration.is_compared or _are_without_values(inputs))
        checks, digest = self._checks_edits or compares, None
        try:
            made = self._function.run(call, [one.full for one in inputs], leaf, parameters)
            digest = _digest(made) if compares else None
            edits = made
        except Exception as error:
            if not checks or is_agreed(error):
                raise
            communicator.fail(registration.failure(error), error)
        is_edited = any(edited is not None for edited in edits)
        communicator.note_edit(call.describe() if is_edited else "")
        if checks:
            with nullcontext() if self._checks_edits else communicator.uncounted():
                self._check_results(inputs, edits, digest)
        return [
            None
            if edited is None
            else one.put_back(gather.scatter(edited.to(one.part.dtype), one.gathered_by))
            for one, edited in zip(inputs, edits)
        ]

    def _check_results(self, inputs: Sequence[EditInput], edits: Edits, digest: int | None) -> None:
        """Exchange whether the function failed; with a digest of what it returned, compare that.
        Collective.

        Raises:
            HookError: it failed, on some rank. On every rank.
            ReplicasDifferError: the ranks' results differ. On every rank.
        """
        call, communicator = inputs[-1].call, self._communicator
        header = Header("result of an edit", site=call.registration.site, hash=digest)
        headers = communicator.check_consistency(
            header, f"the result of the edit of {call.describe()}"
        )
        if digest is None or any(other.state != OK for other in headers):
            return
        if any(other.hash != digest for other in headers):
            # What the function was given may be the cause, as a weight on a GPU.
            replicas.compare(communicator, call.run.pending_replicas)
            for one, edited in zip(inputs, edits):
                result = one.full if edited is None else edited
                replicas.check_edit(communicator, call.describe(), one.full, result)
        if any(edited is not None for edited in edits):  # on all ranks alike: headers say so
            call.registration.note_compared()


def _are_without_values(inputs: Sequence[EditInput]) -> bool:
    return any(isinstance(one.full, FakeTensor) or one.full.is_meta for one in inputs)


def _digest(edits: Edits) -> int:
    """Return a hash of what a function made of its tensors."""
    hashes = [None if one is None else int(values.hashed(one, one.is_cuda)) for one in edits]
    return site_hash(*hashes)


class OnRank0Path(_ShardedPath):
    """The path on which rank 0 alone has the full tensor and runs the function; others get
    shards.
    """

    gather_in_graph = staticmethod(gather.gather_to_first)

    def _why_once(self) -> str:
        return "the function runs on rank 0 only; use FlexModel(edit_on='all')"

    def _keeps_record(self, leaf: Tensor) -> bool:
        return not self._records.on_all_ranks and not self._records.keeps_parts and leaf.is_cpu

    def _record(self, call: HookCall, part: Tensor, full: Tensor, context: GatherContext) -> None:
        record = context.cast_record
        if self._records.on_all_ranks:
            full = context.spec.cast(context.spec.copies(part, 1, num_read=1)[0])
        if self._records.on_all_ranks or self._communicator.mesh.group_rank == 0:
            self._records.put(call, record, full)

    def edit(self, inputs: Sequence[EditInput], parameters: Parameters) -> Edits:
        """Run the function on rank 0, and scatter from there."""
        communicator, call, leaf = self._communicator, inputs[-1].call, inputs[-1].leaf
        edits: Edits = [None] * len(inputs)
        if communicator.mesh.group_rank == 0:
            if self._sent_to_all is not None and not call.is_replay:
                self._sent_to_all.note(self._function.context_of(call.run))
            try:
                # Checkpointing would recompute what is saved here, and on this rank only.
                with torch.autograd.graph.saved_tensors_hooks(_saved, _unsaved):
                    fulls = [one.full for one in inputs]
                    edits = self._function.run(call, fulls, leaf, parameters)
            except Exception as error:
                if call.is_replay:
                    raise
                communicator.fail(call.registration.failure(error), error)
        headers = communicator.check_consistency(
            Header(
                "result of an edit on rank 0",
                site=call.registration.site,
                microbatch=_flags_of(edits),
            ),
            f"the result of the edit of {call.describe()}",
        )
        return [
            self._scatter(inputs, one, edited, headers[0].microbatch >> 2 * i)
            for i, (one, edited) in enumerate(zip(inputs, edits))
        ]

    def _scatter(
        self, inputs: Sequence[EditInput], one: EditInput, edited: Tensor | None, flags: int
    ) -> Tensor | None:
        """Scatter one edit; ``flags``: rank 0's, shifted so that this tensor's are the lowest."""
        if not flags & _CHANGED:
            return None
        in_graph = bool(flags & _REQUIRES_GRAD) and torch.is_grad_enabled()
        if edited is not None:
            edited = edited.to(one.part.dtype)
        gathered = [(other.full, other.gathered_by) for other in inputs]
        shard = gather.scatter_from_first(edited, gathered, one.gathered_by, one.part, in_graph)
        return one.put_back(shard)


def _flags_of(edits: Edits) -> int:
    """Encode which edits changed a tensor, and which require grad: two bits for each tensor."""
    flags = 0
    for i, edited in enumerate(edits):
        if edited is not None:
            in_graph = edited.requires_grad and torch.is_grad_enabled()
            flags |= (_CHANGED | (_REQUIRES_GRAD if in_graph else 0)) << 2 * i
    return flags


def _saved(tensor: Tensor) -> tuple[Tensor, int]:
    """Save a tensor as autograd does where no saved-tensor hooks are set."""
    return tensor, tensor._version


def _unsaved(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation in an editing function: a {tuple(tensor.shape)} tensor is at version "
            f"{tensor._version}, expected {version}"
        )
    return tensor


def copy_for_model(edited: Tensor, leaf: Tensor) -> Tensor:
    """Return a copy of a function's result, as shards are: the model may change it in place, and
    the user may keep it. Contiguous if the model's own tensor ``leaf`` is: views of it work.
    """
    is_contiguous = leaf.is_contiguous()
    return edited.clone(
        memory_format=torch.contiguous_format if is_contiguous else torch.preserve_format
    )


def _copied(leaf: Tensor) -> Tensor:
    """Return a copy, in the graph, for the function to edit in place; never an inference tensor,
    so that its version counter works.
    """
    if leaf.is_inference() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return leaf.clone()
    return leaf.clone()


def _gathered(
    gather_in_graph: Callable[..., Tensor], part: Tensor, gather_context: GatherContext
) -> Tensor:
    """Return the full tensor from ``gather_in_graph``, in the dtype of the hook; never an inference
    tensor, as in ``_copied``.
    """
    spec = gather_context.spec
    if spec.is_whole and gather_in_graph is gather.gather and not part.requires_grad:
        return _copied(part)
    if not torch.is_inference_mode_enabled():
        return spec.cast(gather_in_graph(part, gather_context))
    with torch.inference_mode(False), torch.no_grad():
        return spec.cast(gather_in_graph(part, gather_context))
