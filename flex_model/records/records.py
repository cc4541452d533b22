"""Collected activations: owned CPU copies in the user's ``output_ptr``, on rank 0 or on all ranks.

A hook that edits has gathered the full tensor, and its record is made at once; on a GPU it keeps a
snapshot, which is copied to the CPU when the run ends. A read-only hook keeps a snapshot of this
rank's shard, and all such shards of a run are gathered together when the run ends. For a store
nothing is gathered: each rank keeps its shard, also for hooks that edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.distributed import memory, values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import DTYPES, Header, sites_hash
from flex_model.distributed.mesh import GRID
from flex_model.distributed.picked import Pick
from flex_model.distributed.placement import Shape, ShardLayout
from flex_model.distributed.transports import host_copies
from flex_model.distributed.transports.transport import Gathered
from flex_model.hooks import cuda_graphs
from flex_model.integrations import torch_private
from flex_model.layouts import replicas, resolve
from flex_model.records.snapshots import Snapshot, Snapshots
from flex_model.records.store.manifest import RecordLayout, RecordShard

if TYPE_CHECKING:
    from flex_model.hooks.hook_call import HookCall
    from flex_model.hooks.registration import Registration
    from flex_model.runs.step import MicrobatchState

_MAX_DIMS = 64  # torch's own limit
_REMEMBERED_RUNS = 64  # generation may bring new shapes with every step


@dataclass(eq=False)
class PendingRecord:
    """A shard, or a full tensor, that waits for the end of its run."""

    call: HookCall
    snapshot: Snapshot
    known: ShardLayout | None  # the layout that the tensor itself states
    slot: tuple[list[Any], int] | None  # the record's list and index; None on ranks that keep none
    shard: tuple[torch.dtype, Shape] | None = None  # of which the snapshot is what a hook selects


def owned_copy(tensor: Tensor) -> Tensor:
    """Return a CPU copy that nothing else can change: no alias, no inference tensor."""
    with torch.inference_mode(False):
        return memory.copy(tensor)


# The user's dict may be of a subclass, whose __setitem__ and __delitem__ are bypassed by
# `setdefault`, `update` and `pop`.


def list_of(records: dict[Any, list[Any]], name: Any) -> list[Any]:
    """Return the list of a name, made where there is none."""
    if name not in records:
        records[name] = []
    return records[name]


def drop(records: dict[Any, list[Any]], name: Any) -> None:
    """Remove the list of a name, if there is one."""
    if name in records:
        del records[name]  # noqa: RUF051


Resolve = Callable[..., tuple[TensorSpec, Tensor]]  # see `Records.join`
Deliveries = list[tuple[PendingRecord, TensorSpec]]  # records, and how each is gathered
OnFailure = Callable[["Registration", Exception], None]


class Records:
    """The user's ``output_ptr``, and the only code that appends to it.

    For a store it is a dict of the current batch's records, on every rank: with several ranks a
    record is a ``RecordShard``. In a pipeline it is the stages' own, on rank 0 of each stage; its
    keys name the stage and micro-batch of a list, and ``flex_model.pipelining`` merges the lists
    into the user's.

    Args:
        on_failure: Called with the hook of a record whose layout is not known, and the error,
            instead of raising that; such a record is not delivered.

    Attributes:
        keeps_parts: Whether records are for a store, each rank's own shard.
        lengths: By record name: see ``FlexModel.lengths``.
        on_all_ranks: Whether every rank keeps full tensors; ``keeps_full``: whether this rank does.
    """

    def __init__(
        self,
        output_ptr: dict[Any, list[Tensor]],
        communicator: Communicator,
        output_ranks: str,
        step: MicrobatchState | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.output_ptr = output_ptr
        self._on_failure = on_failure
        self._ranks = output_ranks
        self._communicator = communicator
        self.keep_parts(False)
        self._step = step
        self._snapshots = Snapshots()
        self.lengths: dict[Any, list[dict[int, Shape]]] = {}
        # Dtypes and shapes on all ranks at the end of runs, by the hashes that ranks exchanged.
        self._tensors: dict[tuple[int, ...], list[list[tuple[torch.dtype, Shape]]]] = {}

    def take(self) -> dict[Any, list[Any]]:
        """Return all records, and forget them."""
        records = dict(self.output_ptr)
        self.output_ptr.clear()
        return records

    def keep_parts(self, keeps: bool) -> None:
        """Keep shards for a store from now on, or full tensors."""
        self.keeps_parts = keeps
        self.on_all_ranks = self._ranks == "all" and not keeps
        is_first = self._communicator.mesh.group_rank == 0
        self.keeps_full = self.on_all_ranks or (is_first and not keeps)

    def clear(self, names: Set[str]) -> None:
        """Drop the records of these names."""
        tables: tuple[dict[Any, Any], ...] = (self.output_ptr, self.lengths)
        for table in filter(None, tables):
            for name in names:
                if name in table:  # as `drop`, without a call for each of many hooks in each run
                    del table[name]

    def note_lengths(self, call: HookCall, spec: TensorSpec) -> None:
        """Note the lengths of the rows in a tensor that is recorded. On every rank."""
        registration = call.registration
        if call.records and registration.pads:
            padding = {} if spec.padding is None else dict(spec.padding.lengths)
            name = registration.hook_function.record_name
            self.lengths.setdefault(name, []).append(padding)

    def exchange(
        self, names: Iterable[str], records: dict[str, list[Tensor]]
    ) -> dict[str, list[Tensor]]:
        """Replace the lists of these names by a batch's; return those that were there."""
        found = {name: self.output_ptr[name] for name in names if name in self.output_ptr}
        for name in found:
            del self.output_ptr[name]
        for name, tensors in records.items():
            self.output_ptr[name] = tensors
        return found

    def extend(self, records: Mapping[str, list[Any]]) -> None:
        """Append the records of a batch."""
        for name, tensors in records.items():
            list_of(self.output_ptr, name).extend(tensors)

    def put(self, call: HookCall, record: Tensor | None, full: Tensor) -> None:
        """Record ``record``, which has no other owner; if there is none, a copy of ``full``."""
        if not self.keeps_full:
            return
        if record is None or record is full or host_copies.is_on_gpu(full):
            self.keep(call, full)
        else:
            self.add(call.registration, record)

    def add(self, registration: Registration, record: Tensor) -> None:
        """Record a tensor on the CPU that has no other owner."""
        self._list(registration).append(record)

    def keep(self, call: HookCall, full: Tensor) -> None:
        """Record a copy; that of a GPU's tensor goes to the CPU when the run ends."""
        if torch_private.is_functorch_tensor(full) or torch_private.is_batched(full):
            with torch_private.outside_transforms():
                return self.keep(call, torch_private.unwrapped(full))
        if host_copies.is_on_gpu(full):
            snapshot, slot = self._snapshots.take(full), self._reserve(call)
            call.run.pending_fulls.append(PendingRecord(call, snapshot, None, slot))
        else:
            self._list(call.registration).append(owned_copy(full))

    def later(
        self, call: HookCall, shard: Tensor, known: ShardLayout | None, pick: Pick | None = None
    ) -> None:
        """Keep this rank's shard, or what is picked of it, until the run ends. Its place in the
        list is reserved now: records are in call order.
        """
        slot = self._reserve(call) if self.keeps_full or self.keeps_parts else None
        part = shard if pick is None else pick.take(shard.detach())
        of = None if pick is None else (shard.dtype, tuple(shard.shape))
        call.run.pending.append(PendingRecord(call, self._snapshots.take(part), known, slot, of))

    def _reserve(self, call: HookCall) -> tuple[list[Any], int]:
        records = self._list(call.registration)
        records.append(None)
        return records, len(records) - 1

    def _list(self, registration: Registration) -> list[Any]:
        key: Any = registration.hook_function.record_name
        if self._step is not None:
            key = (key, registration.kind, self._step.section)
        return list_of(self.output_ptr, key)

    def forget(self, context) -> None:
        """Drop the pending records and their places: the run failed."""
        pending = [*context.pending, *context.pending_fulls]
        slots = [record.slot for record in pending if record.slot is not None]
        for records, index in sorted(slots, key=lambda slot: slot[1], reverse=True):
            if index < len(records) and records[index] is None:
                del records[index]
        self._release(context)

    def _release(self, context) -> None:
        for records in (context.pending, context.pending_fulls):
            self._snapshots.drop([record.snapshot for record in records])
            records.clear()
        context.pending_replicas.clear()

    def finish(self, context) -> None:
        """Deliver the full tensors of GPUs on one process, whose other records are there. Local."""
        try:
            with torch.inference_mode(False), torch.no_grad():  # records are plain tensors
                self._fill_whole(context.pending_fulls)
        except BaseException:
            self.forget(context)
            raise
        self._release(context)

    def join(self, context, kind: str, resolve: Resolve) -> bool:
        """Compare the pending replicas, and deliver the pending records. Collective over the grid,
        after one status exchange; True if a rank drew random numbers.

        Args:
            kind: ``"end of the run"`` or ``"end of the backward"``.
            resolve: ``(call, shapes, dtype, known, shard) -> spec``: collective where the layout is
                new.
        """
        pending, compared = context.pending, context.pending_replicas
        listed = "; ".join(record.call.describe() for record in pending[:8])
        listed += f"; and {len(pending) - 8} more" if len(pending) > 8 else ""
        tensors = [record.snapshot.tensor for record in pending]
        if any(map(cuda_graphs.is_captured, tensors)):
            error = cuda_graphs.refusal(listed, "the run ends, and their records go to the host")
            self._communicator.fail(str(error), error)
        local = [
            record.shard or (tensor.dtype, tuple(tensor.shape))
            for record, tensor in zip(pending, tensors)
        ]
        digest = sites_hash(*local)
        header = Header(
            kind,
            site=sites_hash(
                *(record.call.registration.site for record in pending),
                *(replica.site for replica in compared),
            ),
            # Not sizes but a hash: whether the tensors equal those of an earlier run.
            shape=(digest & 0x7FFFFFFF, digest >> 32),
            flags=Header.CONSUMED if context.has_drawn else 0,
        )
        try:
            what = f"{kind}, with {len(pending)} records to deliver ({listed or 'none'})"
            headers = self._communicator.check_consistency(header, what)
            replicas.compare(self._communicator, compared)
            if pending:
                key = (header.site, *(size for other in headers for size in other.shape))
                found = self._check_specs(pending, self._tensors_of_all(key, local), resolve)
                self._communicator.meter.turn_to(header.site)
                deliver = self._deliver_to_all if self.on_all_ranks else self._deliver_to_first
                if self.keeps_parts:
                    deliver = self._keep_parts
                with torch.inference_mode(False), torch.no_grad():  # records are plain tensors
                    deliver(found)
            self._fill_whole(context.pending_fulls)
        except BaseException:
            self.forget(context)
            raise
        self._release(context)
        return any(other.flags & Header.CONSUMED for other in headers)

    def _tensors_of_all(
        self, key: tuple[int, ...], local: list[tuple[torch.dtype, Shape]]
    ) -> list[list[tuple[torch.dtype, Shape]]]:
        """Return dtype and shape of each record's tensor, by rank. Exchanged where ``key`` is new,
        which it is on all ranks or on none.
        """
        if key in self._tensors:
            return self._tensors[key]
        rows = torch.zeros(len(local), 2 + _MAX_DIMS, dtype=torch.int64, device="cpu")
        for row, (dtype, shape) in zip(rows, local):
            row[0], row[1] = DTYPES.index(dtype), len(shape)
            row[2 : 2 + len(shape)] = torch.tensor(shape, dtype=torch.int64, device="cpu")
        table = self._communicator.exchange(rows).tolist()
        while len(self._tensors) >= _REMEMBERED_RUNS:
            del self._tensors[next(iter(self._tensors))]
        found = [[(DTYPES[row[0]], tuple(row[2 : 2 + row[1]])) for row in rows] for rows in table]
        self._tensors[key] = found
        return found

    def _check_specs(
        self, pending: list[PendingRecord], per_rank: list[list[tuple[torch.dtype, Shape]]], resolve
    ) -> Deliveries:
        """Return the records to deliver, and how each is gathered."""
        found = []
        for record, *tensors in zip(pending, *per_rank):
            if len({(dtype, len(shape)) for dtype, shape in tensors}) > 1:
                own = tensors[self._communicator.mesh.group_rank]
                raise self._communicator.mismatch(
                    f"{record.call.registration.describe()} with {own[0]} of shape {own[1]}",
                    "have different tensors",
                )
            shapes: list[Shape] = [shape for _, shape in tensors]
            snapshot = record.snapshot
            snapshot.wait()
            shard = snapshot.tensor
            try:
                dtype = shard.dtype if record.shard is None else record.shard[0]
                spec, _ = resolve(record.call, shapes, dtype, record.known, shard)
            except ValueError as error:
                if self._on_failure is None:
                    raise
                self._on_failure(record.call.registration, error)
                continue
            self._communicator.meter.turn_to(record.call.registration.site)
            self.note_lengths(record.call, spec)
            if spec.padding is not None:
                snapshot.change(spec.padding.put)
            if spec.pick is not None and record.shard is None:
                snapshot.change(spec.pick.take)
            if spec.layout.partial_axes:  # reducing needs the same device type on all ranks
                self._snapshots.to_cpu([snapshot])
                snapshot.change(spec.summed)
                if not spec.axes or self.keeps_parts:  # else what is gathered is cast
                    snapshot.change(spec.cast)
            found.append((record, spec))
        self._compare_replicas(found)
        return found

    def _compare_replicas(self, found: Deliveries) -> None:
        """Check that ranks hold equal values where the layout is Replicate, by proof, statement or
        DTensor; gradients, too. Where they differ only by the order of sums, all keep the first
        rank's. Collective where there is such a record.
        """
        compared = [
            (record, spec.layout)
            for record, spec in found
            if resolve.axes_of_replicas(spec.layout, self._communicator.mesh)
            # A data-parallel rank may have no rows of it.
            and replicas.are_compared(spec.full_shape)
        ]
        if not compared:
            return
        hashes = values.on_host([record.snapshot.hash() for record, _ in compared])
        table = self._communicator.exchange(hashes).tolist()
        for i, (record, layout) in enumerate(compared):
            prints = values.Fingerprints(self._communicator.mesh, tuple(row[i] for row in table))
            axes = resolve.differing_axes(layout, prints)
            if axes:
                site = record.call.registration.layout_site
                self._snapshots.to_cpu([record.snapshot])  # not all ranks may have moved theirs
                own = record.snapshot.tensor
                first = replicas.reconciled(self._communicator, site, own, axes)
                record.snapshot.replace_by(owned_copy(first))

    def _deliver_to_all(self, found: Deliveries) -> None:
        self._snapshots.to_cpu([record.snapshot for record, _ in found])
        for record, spec in found:
            self._communicator.meter.turn_to(record.call.registration.site)
            full = record.snapshot.tensor  # partial sums are reduced already
            if spec.axes:
                full = self._communicator.all_gather(spec.axes, full, spec.plan, 1, 1)[0]
            self._fill(record, spec.cast(full))

    def _deliver_to_first(self, found: Deliveries) -> None:
        """Gather all records in one transfer; only ranks whose shards rank 0 needs send."""
        split = [(record, spec) for record, spec in found if spec.axes]
        if self._communicator.host_gather is None:
            self._snapshots.to_cpu([record.snapshot for record, _ in split])
        if split:
            tensors = [
                Gathered(
                    spec.plan,
                    spec.ranks_of_first,
                    record.snapshot.tensor,
                    site=record.call.registration.site,
                    ready=record.snapshot.ready,
                )
                for record, spec in split
            ]
            fulls = self._communicator.gather_to_first(GRID, tensors)
            for (record, spec), full in zip(split, fulls or []):
                self._fill(record, spec.cast(full))
        self._fill_whole([record for record, spec in found if not spec.axes and record.slot])

    def _fill_whole(self, records: list[PendingRecord]) -> None:
        """Deliver full tensors that this rank holds."""
        self._snapshots.to_cpu([record.snapshot for record in records])
        for record in records:
            self._fill(record, record.snapshot.tensor)

    def _keep_parts(self, found: Deliveries) -> None:
        """Keep the shards where they are; of several replicas, the first rank keeps its own."""
        self._snapshots.to_cpu([r.snapshot for r, spec in found if spec.rank_0_gathers])
        for record, spec in found:
            tensor = record.snapshot.tensor
            layout = RecordLayout.of(spec, tensor.dtype)
            self._fill(record, RecordShard(layout, tensor if spec.rank_0_gathers else None))

    @staticmethod
    def _fill(record: PendingRecord, full: Tensor | RecordShard) -> None:
        if record.slot is not None:
            records, index = record.slot
            records[index] = full
