"""Executes a call of a hook: gathers the full tensor, records it, edits it, scatters the result.

With two or more ranks, the call begins with an exchange of headers, so ranks that disagree raise
before any payload is used. A hook without editing function keeps a copy of its shard until the end
of the run, and no rank waits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flex_model import _C
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import mean_over_dp
from flex_model.distributed.placement import ShardLayout
from flex_model.distributed.plain import is_renamed, plain
from flex_model.hooks import cuda_graphs
from flex_model.hooks.call_check import check_call
from flex_model.hooks.edit_path import EditInput, LocalPath, OnRank0Path, ReplicatedPath
from flex_model.hooks.function import PartHook
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.layout_finder import LayoutFinder
from flex_model.hooks.save_ctx import SentToAll
from flex_model.hooks.tracking import Tracking
from flex_model.hooks.user_function import Observer, UserFunction
from flex_model.integrations import dtensor, profiler
from flex_model.layouts import follow
from flex_model.records.records import Records


class HookExecutor:
    """Runs hooks on this rank's tensors. All methods are collective over the ranks of the stage.

    Args:
        checks_edits: Whether ranks exchange after each edit whether it failed: in a pipeline.
        layouts: Finds the layouts of tensors.

    Attributes:
        sent_to_all: Sends ``save_ctx`` from rank 0 to all ranks, where the user chose that.
        observers: Each is called with ``"hook"`` or ``"edit"`` and the call when a hook, or its
            editing function, begins, and returns the function to call when that ends.
        function: Calls editing functions.
        settles: Whether the dispatcher may call functions that have settled: not on rank 0 alone,
            and not in a pipeline, where ranks exchange whether each edit failed.
    """

    def __init__(
        self,
        communicator: Communicator,
        records: Records,
        save_ctx: Namespace,
        modules: Any,
        edit_on: str,
        full_parameter: Callable[..., Tensor],
        tracking: Tracking,
        checks_edits: bool,
        sent_to_all: SentToAll | None,
        layouts: LayoutFinder,
    ) -> None:
        self._communicator = communicator
        self._tracking = tracking
        self._records = records
        self.layouts = layouts
        self.observers: list[Observer] = []
        self.function = function = UserFunction(communicator, save_ctx, modules, self.observers)
        self.edits_on_all = edit_on == "all"
        # Transfers are waited for at the end of a run or backward. Those of a pipeline at once:
        # where one fails, its schedule goes on without the edit, which no graph may contain then.
        self._defers = not checks_edits
        self.settles = communicator.is_local or (self.edits_on_all and not checks_edits)
        self._path: LocalPath | ReplicatedPath | OnRank0Path
        if communicator.is_local:
            self._path = LocalPath(records, self.layouts, function)
        else:
            path = ReplicatedPath if self.edits_on_all else OnRank0Path
            self._path = path(
                communicator, records, layouts, function, not self.settles, sent_to_all
            )
        self.full_parameter, self.sent_to_all = full_parameter, sent_to_all
        self._num_microbatches = 1

    def average_over(self, num_microbatches: int) -> None:
        """Pass gradients of the mean loss over this many micro-batches, from now on."""
        self._num_microbatches = num_microbatches

    def activation(self, call: HookCall, leaf: Tensor, tree: Any) -> Any:
        """Run a forward or forward-pre hook on one tensor of a tree; return the tree that the model
        continues with.
        """
        ends = profiler.begun(self.observers, profiler.begin_span, "hook", call)
        try:
            call.registration.check_movable(leaf, call.records)
            cuda_graphs.check(call, leaf, self._communicator.is_local)
            if not call.registration.edits:
                self._collect(call, leaf)
                return tree
            self._communicator.defer(self._defers and not call.is_replay)
            inputs = self._gather(call, leaf)
            if not inputs:
                return tree
            edits = self._path.edit(inputs, self._parameters(call, inputs[-1].leaf))
            for one, shard in zip(inputs, edits):
                if shard is not None:
                    number = one.call.registration.number_in(tree)
                    tree = _C.replace_leaf(tree, number, self._placed(one, shard))
            return tree
        finally:
            self._communicator.defer(False)
            for end in ends:
                end()

    def summed(self, grad: Tensor) -> Tensor:
        """Reduce the partial sums of a DTensor's gradient. Every rank continues with the result,
        also one whose function fails: it alone would reduce later, and wait for the others.
        """
        return dtensor.without_partial(grad)

    def gradient(self, call: HookCall, grad: Tensor) -> Tensor:
        """Run a hook on one ``summed`` gradient. An activation's gradient is passed as that of the
        mean loss over data-parallel ranks (see ``Communicator.divisor_at``) and micro-batches. A
        parameter's is summed over dp and divided alike; the backward continues with the average.
        """
        ends = profiler.begun(self.observers, profiler.begin_span, "hook", call)
        try:
            call.registration.check_movable(grad, call.records)
            communicator = self._communicator
            is_of_parameter = call.registration.kind == "tensor"
            moves = is_of_parameter and communicator.mesh.dp_size > 1
            cuda_graphs.check(call, grad, communicator.is_local, moves)
            is_dtensor = self._is_dtensor_along_dp(call, grad)
            if not is_of_parameter:
                divisor = communicator.divisor_at(call.describe(), is_dtensor)
                scale = divisor * self._num_microbatches
            elif is_dtensor:  # FSDP2 has averaged it, or autograd has summed it, as for activations
                scale = 1.0
            else:
                grad = self._mean_over_dp(call, grad)
                scale = communicator.divisor_at(call.describe(), False) / communicator.mesh.dp_size
            unscaled = grad / scale if scale != 1 else grad
            if not call.registration.edits:
                self._collect(call, unscaled)
                return grad
            if self._defers:
                communicator.defer_in_backward()
            one = self._path.gather(call, unscaled)
            (shard,) = self._path.edit([one], self._parameters(call, one.leaf))
            if shard is None:
                return grad
            edited = self._placed(one, shard)
            return edited * scale if scale != 1 else edited
        finally:
            self._communicator.defer(False)
            for end in ends:
                end()

    def _mean_over_dp(self, call: HookCall, grad: Tensor) -> Tensor:
        if self._communicator.mesh.dp_size == 1:
            return grad

        def check(tensor: Tensor) -> None:
            check_call(self._communicator, call, tensor, "tensor")

        mean = mean_over_dp(dtensor.to_local(grad), self._communicator, check)
        return dtensor.like(mean, grad)

    def _is_dtensor_along_dp(self, call: HookCall, grad: Tensor) -> bool:
        mesh = self._communicator.mesh
        return mesh.dp_size > 1 and "dp" in dtensor.axis_names(grad, mesh, call.describe())

    def _collect(self, call: HookCall, leaf: Tensor) -> None:
        """Record a tensor that is not edited, or let a hook read it where it is."""
        hook = call.registration.hook_function
        reader = hook if isinstance(hook, PartHook) else None
        if reader is None and not call.records:
            return
        if self._communicator.is_local:
            if dtensor.is_dtensor(leaf):
                leaf = dtensor.to_local(dtensor.without_partial(leaf))
            elif is_renamed(leaf):
                leaf = plain(leaf)
            if reader is not None:
                return reader.read(call, leaf.detach(), None, not reader.needs_full)
            pick = self.layouts.pick_of_full(call, leaf)
            self._records.keep(call, leaf if pick is None else pick.take(leaf.detach()))
            return
        call, shard, known = self.layouts.shard_of(call, leaf)
        shard = plain(shard)
        if reader is not None:
            return self._read(reader, call, shard.detach(), known)
        pick = None
        if not cuda_graphs.is_captured(shard):  # its indices would be copied to the GPU
            pick = self.layouts.pick_of_shard(call, shard, known)
        self._records.later(call, shard, known, pick)

    def _read(
        self, hook: PartHook, call: HookCall, shard: Tensor, known: ShardLayout | None
    ) -> None:
        """Let a hook read this rank's shard; rank 0's full tensor where shards are not enough."""
        spec = self.layouts.spec_of_shard(call, shard, known, hook.needs_full)
        if spec.is_in_parts and not hook.needs_full:
            return hook.read(call, shard, spec, True)
        shard = shard if spec.padding is None else spec.padding.put(shard)
        hook.read(call, spec.gather_to_first(shard), spec, False)

    def _gather(self, call: HookCall, leaf: Any) -> list[EditInput]:
        """Gather the tensor that a hook edits, and record it. Return all tensors of the edit: none
        until the last one of those that are edited together.
        """
        joint, batch = call.registration.joint, call.run.batch
        if joint is None:
            return [self._path.gather(call, leaf)]
        if call.registration.is_first_of_joint:
            joint.gathered[batch] = []  # drops what a failed call left behind
        inputs = joint.gathered.setdefault(batch, [])
        inputs.append(self._path.gather(call, leaf))
        if not call.registration.calls_function:
            return []
        del joint.gathered[batch]
        # The hook of another of these tensors may have failed, and reported it.
        return inputs if len(inputs) == len(joint.indices) else []

    def _placed(self, one: EditInput, shard: Tensor) -> Tensor:
        """Return the tensor that the model continues with, with the original's placements, and
        register it with the followers that record.
        """
        edited = one.like_original(shard)
        is_followed = one.gather_context is not None and follow.recording()
        if is_followed and one.call.registration.kind in ("forward", "forward_pre"):
            layout, mesh = one.gathered_by.spec.layout, self._communicator.mesh
            placed = layout.placements_of_proofs(mesh.dp_size, mesh.tp_size)
            self._tracking.note(one.call.evidence, edited, one.original, placed)
        return edited

    def _parameters(self, call: HookCall, leaf: Tensor) -> dict[str, Tensor]:
        """Return the current full values of the parameters that the function named."""
        names = call.registration.hook_function.parameter_names
        later = call.run.pending_replicas if self._communicator.defers else None
        return {name: self.full_parameter(name, leaf.device, later) for name in names}
