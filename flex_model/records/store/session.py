"""Writes one FlexModel's records into a store: batches, in groups that are stored in whole.

All ranks form the same groups. Each writes its own file of a group, in a thread; at the next
exchange (the end of a run, or a flush) it reports how many of its files are on the disk. When all
ranks have written a group, rank 0 adds it to the manifest: only then its batches exist. An error of
any rank's disk is reported in that exchange, too, and raised on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.padding import RankRows
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookError, agreed, see
from flex_model.layouts.sources import BatchDim
from flex_model.names import wrapped_chain
from flex_model.records.store.activation_store import ActivationStore
from flex_model.records.store.annotations import described, parts_of, parts_of_first
from flex_model.records.store.files import FolderLock, Writer, safetensors_of, write_whole
from flex_model.records.store.input_hashes import hash_of
from flex_model.records.store.manifest import (
    MANIFEST_ASIDE,
    Index,
    Manifest,
    RecordLayout,
    RecordShard,
    annotation_key,
    digest_of,
    index_name,
    is_of_batches,
    record_key,
    shard_name,
)
from flex_model.records.store.statistics import moments_of, statistics_key, width_of

_GRACE_S = 10.0  # that a rank whose run failed waits for the others, to flush complete batches


class Session:
    """Writes a FlexModel's records into a store. Collective over the ranks of ``communicator``: the
    constructor, ``flush``, ``close``, ``end_run`` and ``synchronize``. All else is local.

    Args:
        config: The hash of the model's configuration; None if it has none.
        take: Returns this rank's records of the open batch, and forgets them.
        batch_dim: The FlexModel's.
        dp_size: For a pipeline, whose rank 0 has all records in full; else None.

    Attributes:
        number: The number of the run whose batch is open: other runs can't add records.
        in_run: Whether a run is in progress.
        layouts: By name, those of the last batch.
        is_sequential: Whether a sequential run passes whole batches (``append``).
        num_batches: Their number, those that are not written yet included.

    Raises:
        ValueError: the folder is not seen by all ranks, is being written by others, or holds
            records of another model; or data-parallel ranks have runs of their own.
    """

    def __init__(
        self,
        store: ActivationStore,
        communicator: Communicator,
        config: str | None,
        take: Callable[[], dict[str, list[Any]]],
        batch_dim: BatchDim = 0,
        dp_size: int | None = None,
    ) -> None:
        if communicator.mesh.left_out:
            raise ValueError(
                "an ActivationStore keeps records of the whole batch, and with "
                "FlexModel(dp_batch='local') each data-parallel rank has records of its own; keep "
                "them in a dict, or use dp_batch='global'"
            )
        store.check_unused()
        self.store, self.number = store, 0
        self.in_run = self.is_sequential = False
        self._communicator, self._take, self._dp_size = communicator, take, dp_size
        self._batch_dim, self._rank = batch_dim, communicator.mesh.rank
        self._numbers = itertools.count(1)
        self._writer = Writer(store.max_bytes)
        self._failure = ""
        self._is_closed = False
        self._open: Batch | None = None  # of a run that has ended; gradients may follow
        self._num_backwards = 0  # backward passes in progress that belong to it
        self.layouts: dict[str, list[RecordLayout]] = {}
        self._group: list[Batch] = []
        self._group_bytes, self._group_began = 0, 0.0  # of full tensors
        self._held_bytes = 0  # of this rank's shards of the group
        self._num_groups = 0  # submitted to the writer
        self._num_written = 0  # of those, on this rank's disk
        self._unlisted: deque[tuple[int, Index]] = deque()  # rank 0: number of the group, index
        self._lock, self._on_disk, self._name = opened(store, communicator, config)
        self.num_batches = self._on_disk.num_batches
        self._hooks = self._on_disk.hooks if self.num_batches else None
        store.set_session(self)

    def check_hooks(self, hooks: list[Any]) -> None:
        """Check that existing records, and those of the run in progress, are of these hooks.

        Raises:
            ValueError: they are not; on every rank, since ranks have agreed on their hooks.
        """
        hooks = json.loads(json.dumps(hooks))
        if self._hooks is not None and self._hooks != hooks:
            raise ValueError(
                f"ActivationStore: {self.store.folder} holds records of other hooks "
                f"({self._hooks}), not of {hooks}; give another folder, or delete it; within a "
                "program register all hooks before its first run, and choose by groups="
            )
        self._hooks = hooks

    def take_whole_batches(self, is_sequential: bool) -> None:
        """Begin, or end, a sequential run, which passes whole batches."""
        self.is_sequential = is_sequential

    def begin_run(self) -> int:
        """Begin an outermost run, and end the previous one's batch; return the run's number."""
        self._check_usable()
        if self.is_sequential:
            return next(self._numbers)
        self._end_batch()
        if not self.num_batches:
            self._hooks = None  # of a run that failed
        self.in_run = True
        self.number = next(self._numbers)
        return self.number

    def check_open(self, number: int, current: int | None) -> None:
        """HookError for gradients of a run whose batch has ended.

        Args:
            current: The number of the run in progress, if any.
        """
        if number != (self.number if current is None else current):
            raise HookError(
                "the backward of a run came after its batch in the store was ended, by the next "
                "run or by flush(); call backward before that, or run both inside one "
                f"flex.active() ({see('a-batch-of-a-store-was-ended')})"
            )

    def begin_backward(self, number: int) -> None:
        """Count a backward of this run. A batch is dropped if a backward of it was aborted."""
        self._num_backwards += number == self.number

    def end_backward(self, number: int) -> None:
        self._num_backwards -= number == self.number

    def end_run(self, is_whole: bool, rows: Sequence[RankRows] = ()) -> None:
        """Open the batch of a run with delivered records.

        Args:
            is_whole: Whether no gradients follow.
            rows: Those of the inputs of its forwards.
        """
        self.in_run = False
        annotations = self.store.take_annotations()
        notes = {name: v for name, v in annotations.items() if not isinstance(v, Tensor)}
        batch = self._open = Batch({}, notes=notes)
        if is_whole:
            self._end_batch()
        tensors = {name: v for name, v in annotations.items() if name not in notes}
        self.synchronize(batch, tensors, rows)

    def leave_run(self) -> None:
        """Note that the run has ended without a batch of its own."""
        self.in_run = False

    def fail_run(self) -> None:
        """Drop the records of a run, its gradients included."""
        self.in_run = False
        if not self.is_sequential:
            self._take()
            self.store.take_annotations()
            self._open, self._num_backwards = None, 0
            self.number = next(self._numbers)

    def append(
        self,
        records: Mapping[str, Sequence[Any]],
        inputs: str,
        notes: Mapping[str, Tensor],
        rows: Sequence[RankRows] = (),
    ) -> None:
        """Add the next batch, whole. Collective.

        Args:
            inputs: The hash of its inputs.
            notes, rows: Its annotations, and the rows of its forwards' inputs.
        """
        batch = Batch(as_parts(records), inputs)
        self._add(batch)
        self.synchronize(batch, notes, rows)

    def _end_batch(self) -> None:
        batch, self._open = self._open, None
        if batch is None:
            return
        is_broken, self._num_backwards = self._num_backwards > 0, 0
        self.number = next(self._numbers)
        records = self._take()
        if not is_broken:  # else some of its gradients are missing
            batch.records.update(as_parts(records))
            self._add(batch)

    def _add(self, batch: Batch) -> None:
        parts = [part for _, part in batch.parts(0)]
        self.layouts = {name: [p.layout for p in calls] for name, calls in batch.records.items()}
        if not self._group:
            self._group_began = time.monotonic()
        self._hold(parts)
        self._group.append(batch)
        self._group_bytes += sum(part.layout.num_bytes for part in parts)
        self.num_batches += 1

    def _hold(self, parts: Iterable[RecordShard]) -> None:
        """Wait until the writer has room for these shards."""
        held = sum(part.tensor.nbytes for part in parts if part.tensor is not None)
        self._writer.reserve(held)
        self._held_bytes += held

    def synchronize(
        self,
        batch: Batch | None = None,
        notes: Mapping[str, Tensor] | None = None,
        rows: Sequence[RankRows] = (),
        ends_group: bool = False,
    ) -> None:
        """Exchange what is written, and errors; end the group of batches if rank 0 finds it large
        or old, or if all ranks request it. Collective.

        Args:
            batch, notes, rows: A batch, the annotations to add to it, and the rows of the inputs of
                its forwards.

        Raises:
            HookError: a rank could not write.
            HookMismatchError: ranks have other batches or annotations.
        """
        notes = notes or {}
        if self._dp_size is not None and self._rank:
            notes = {}
        age = time.monotonic() - self._group_began
        error = self._writer.error
        own = {
            "error": error and f"{type(error).__name__}: {error}",
            "at": [self.num_batches, len(self._group), self._open is not None],
            "written": self._num_written,
            "ends": ends_group
            or (self._group_bytes >= self.store.shard_bytes or age >= self.store.seconds),
            "notes": [described(name, tensor) for name, tensor in notes.items()],
        }
        gathered = exchange_json(self._communicator, own, f"the store {self.store.folder}")
        errors = [f"rank {i}: {one['error']}" for i, one in enumerate(gathered) if one["error"]]
        if errors:
            self._failure = f"ActivationStore: {self.store.folder}: {'; '.join(errors)}"
            text = f"{self._failure} ({see('a-store-cant-be-written')})"
            raise agreed(HookError(text)) from error
        of_all = self._dp_size is None
        keys = [[one["at"], [n[:2] for n in one["notes"]] if of_all else []] for one in gathered]
        if len(set(map(json.dumps, keys))) > 1:
            self._failure = f"{self.store.folder}: ranks have different batches"
            raise self._communicator.mismatch(
                f"{own['at']}, {own['notes']}", "have different batches"
            )
        if batch is not None and gathered[0]["notes"]:
            try:
                if self._dp_size is not None:
                    parts = parts_of_first(notes, self._dp_size)
                else:
                    of_ranks = [one["notes"] for one in gathered]
                    parts = parts_of(self._communicator, notes, of_ranks, self._batch_dim, rows)
            except ValueError as problem:
                self._failure = str(problem)
                raise agreed(problem) from None
            batch.annotations.update(parts)
            self._hold(parts.values())
        if gathered[0]["ends"]:
            self._end_group()
        self._list(min(one["written"] for one in gathered))

    def _end_group(self) -> None:
        """Submit the group to the writer."""
        group, self._group = self._group, []
        held, self._held_bytes, self._group_bytes = self._held_bytes, 0, 0
        if not group:
            return
        first, last = self.num_batches - len(group), self.num_batches - 1
        tensors = {
            key: part.tensor
            for number, batch in enumerate(group, first)
            for key, part in batch.parts(number)
            if part.tensor is not None
        }
        path = self.store.folder / shard_name(first, last, self._name, self._rank)
        measured = {
            name: parts
            for name, parts in (shards_of(group) if self.store.keeps_statistics else {}).items()
            if width_of(part.layout for part in parts) is not None
        }
        if self._rank == 0:
            index = index_of(group, first, self._name, tuple(measured))
            self._unlisted.append((self._num_groups, index))
        self._num_groups += 1

        def write() -> None:
            if tensors:
                for name, parts in measured.items():
                    tensors[statistics_key(name)] = moments_of(parts, self._rank)
                write_whole(path, safetensors_of(tensors))
            self._num_written += 1

        self._writer.submit(write, held)
        if self._communicator.is_local:  # queued behind the group's file
            self._list(self._num_groups)

    def _list(self, num_written: int) -> None:
        """On rank 0: add the groups that all ranks have written to the manifest."""
        while self._unlisted and self._unlisted[0][0] < num_written:
            index = self._unlisted.popleft()[1]
            self._writer.submit(functools.partial(self._write_index, index, self._hooks))

    def _write_index(self, index: Index, hooks: Any) -> None:
        """Write an index and list it; in the writer's thread, like all changes of ``_on_disk``."""
        text = index.to_json()
        write_whole(self.store.folder / index_name(index.first, index.last), [text])
        group = (index.first, index.last, digest_of(text))
        self._write_manifest(hooks=hooks, is_complete=False, groups=(*self._on_disk.groups, group))

    def _write_manifest(self, **changes: Any) -> None:
        manifest = replace(self._on_disk, **changes)
        if manifest != self._on_disk:
            manifest.write(self.store.folder)
            self._on_disk = manifest

    def flush(self, is_complete: bool = False) -> None:
        """Flush; collective. See ``ActivationStore.flush``."""
        try:
            self._flush(is_complete)
        except (KeyboardInterrupt, SystemExit) as error:
            self._communicator.abort_on(error)  # so that no rank waits for this one
            raise

    def _flush(self, is_complete: bool) -> None:
        self._check_usable()
        if self.in_run:
            raise RuntimeError(
                "ActivationStore: flush() inside a run, whose batch is not whole; call it after"
            )
        self._end_batch()
        self.synchronize(ends_group=True)
        self._writer.wait()
        self.synchronize()
        if is_complete and self._rank == 0:
            changes = functools.partial(self._write_manifest, hooks=self._hooks, is_complete=True)
            self._writer.submit(changes)
        self._writer.wait()
        self.synchronize()
        _reload(self.store, lambda: self.store.num_batches >= self.num_batches)

    def close(self, after: type[BaseException] | None = None) -> None:
        """Close; collective. After an exception of a kind, flush complete batches if all ranks take
        part.
        """
        if self._is_over:
            return
        if after is not None:
            try:
                self.flush_after_error(after)
            finally:
                self.abandon()
            return
        try:
            if self._communicator.broken is not None:
                warnings.warn(
                    f"{self.store.folder} lacks the batches since its last flush: "
                    f"{self._communicator.broken}",
                    stacklevel=3,
                )
            elif not self._failure:
                self.flush(is_complete=True)
        finally:
            self._end()

    def flush_after_error(self, kind: type[BaseException]) -> None:
        """Flush after an exception of this kind; do nothing if some rank does not take part."""
        self.in_run = False
        if self._open is not None:  # gradients of it may be missing
            self.fail_run()
        flushes = issubclass(kind, Exception) or self._communicator.is_local
        if flushes and not self._failure:
            timeout_s = min(self._communicator.timeout_s, _GRACE_S)
            with self._communicator.deadline(timeout_s), contextlib.suppress(HookError, ValueError):
                self.flush()

    def abandon(self) -> None:
        """End without the other ranks, losing unlisted batches; with one rank, flush. Local."""
        if self._is_over:
            return
        try:
            if self._communicator.is_local and not self._failure:
                self.in_run = False
                self.flush()
            elif self._group or self._unlisted or self._open:
                warnings.warn(
                    f"{self.store.folder}: batches that were not flushed are lost; call flush(), "
                    "or restore() on every rank",
                    RuntimeWarning,
                    stacklevel=2,
                )
        finally:
            self._end()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._writer.is_child

    def _end(self) -> None:
        self._is_closed = True
        self._writer.close()
        if self._lock is not None:
            self._lock.release()
        self.store.set_session(None)

    def _check_usable(self) -> None:
        if self._writer.is_child:
            raise HookError(
                f"the store {self.store.folder} was opened before this process was forked, and is "
                f"written by its parent ({see('a-forked-process')})"
            )
        if self._failure:
            raise HookError(
                f"{self._failure} (before); restore() and wrap again: what is in the manifest is "
                "kept"
            )
        if self._is_closed:
            raise HookError(
                f"the store {self.store.folder} was closed; wrap the model again to go on"
            )


SEEN_S = 5.0  # for other hosts of a shared file system to see what rank 0 wrote

# Fields of a configuration that name the model's source, not its properties.
_IGNORED = ("_name_or_path", "transformers_version")


def config_hash(module: nn.Module) -> str | None:
    """Return a hash of the values of ``module.config``, of a wrapper (DDP) or of what is inside;
    None if there is none.
    """
    configs = (getattr(one, "config", None) for one in wrapped_chain(module))
    config = next((one for one in configs if one is not None), None)
    to_dict = getattr(config, "to_dict", None)
    fields = to_dict() if callable(to_dict) else getattr(config, "__dict__", config)
    if not isinstance(fields, Mapping):
        return None
    fields = {str(name): value for name, value in fields.items() if name not in _IGNORED}
    text = json.dumps(fields, sort_keys=True, default=hash_of)
    return digest_of(text.encode())


def opened(
    store: ActivationStore, communicator: Communicator, config: str | None
) -> tuple[FolderLock | None, Manifest, str]:
    """Return rank 0's lock, the manifest as all ranks see it, and the session's name. Collective.

    Raises:
        ValueError, OSError: see ``Session``; on every rank.
    """
    lock: FolderLock | None = None
    where = f"the store {store.folder}"

    def prepare() -> None:
        nonlocal lock
        if communicator.mesh.rank == 0:
            lock = _prepared(store, config)

    try:
        gather_checked(communicator, where, prepare)
        gathered = gather_checked(
            communicator, where, lambda: (_id_seen(store), uuid.uuid4().hex[:8])
        )
        if len({number for number, _ in gathered}) > 1:
            raise agreed(
                ValueError(
                    f"ActivationStore: the ranks do not see the same {store.folder}; give a folder "
                    "on a file system that they share"
                )
            )
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock, store._manifest, gathered[0][1]


def _prepared(store: ActivationStore, config: str | None) -> FolderLock:
    """Lock the folder, and remove the leftovers of a killed process."""
    store.folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(store.folder)
    try:
        store.reload()
        manifest = store._manifest
        store.check_key(manifest)
        if not manifest.id:
            manifest = replace(manifest, id=uuid.uuid4().hex)
        if manifest.num_batches and manifest.config != config:
            raise ValueError(
                f"ActivationStore: {store.folder} holds records of a model with another "
                "configuration; give another folder, or delete that one"
            )
        _delete_leftovers(store, manifest)
        replace(manifest, config=config, is_complete=False).write(store.folder)
        store.reload()
    except BaseException:
        lock.release()
        raise
    return lock


def _delete_leftovers(store: ActivationStore, manifest: Manifest) -> None:
    listed = set()
    for first, last, digest in manifest.groups:
        index = Index.read(store.folder, first, last, digest)
        listed |= {index_name(first, last), *index.files}
    for path in store.folder.iterdir():
        is_ours = is_of_batches(path.name) or path.name == MANIFEST_ASIDE
        if is_ours and path.name not in listed and not path.is_dir():
            path.unlink()


def _id_seen(store: ActivationStore) -> str | None:
    """Return the id of the store that this rank sees in the folder, after rank 0 has written it."""
    _reload(store, lambda: bool(store._manifest.id))
    return store._manifest.id or None


def _reload(store: ActivationStore, is_seen: Callable[[], bool]) -> None:
    """Reload the manifest until this rank sees what rank 0 wrote, or the time for it is over."""
    deadline = time.monotonic() + SEEN_S
    store.reload()
    while not is_seen() and time.monotonic() < deadline:
        time.sleep(0.01)
        store.reload()


# ---- One batch before it is written, and the index of a group ------------------------------------


@dataclass(eq=False)
class Batch:
    """One rank's part of a batch.

    Attributes:
        inputs: In a sequential run: the hash of its inputs.
        notes, annotations: The values that it was annotated with: JSON values, and tensors.
    """

    records: dict[str, list[RecordShard]]
    inputs: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, RecordShard] = field(default_factory=dict)

    def parts(self, number: int) -> Iterator[tuple[str, RecordShard]]:
        """Yield all shards, with their keys in the files."""
        for name, calls in self.records.items():
            for call, part in enumerate(calls):
                yield record_key(number, name, call), part
        for name, part in self.annotations.items():
            yield annotation_key(number, name), part


def as_parts(records: Mapping[str, Sequence[Any]]) -> dict[str, list[RecordShard]]:
    """Return records by name as shards; a plain tensor is one that rank 0 has in full."""
    return {
        name: [
            one if isinstance(one, RecordShard) else RecordShard.whole(one.contiguous())
            for one in calls
        ]
        for name, calls in records.items()
    }


def shards_of(group: Sequence[Batch]) -> dict[str, list[RecordShard]]:
    """Return the shards of consecutive batches by the names of their records."""
    found: dict[str, list[RecordShard]] = {}
    for batch in group:
        for name, calls in batch.records.items():
            found.setdefault(name, []).extend(calls)
    return found


def index_of(
    group: Sequence[Batch], first: int, session: str, statistics: Sequence[str] = ()
) -> Index:
    """Return the index of consecutive batches, from number ``first`` on.

    Args:
        statistics: The names of records whose moments are in the files.
    """
    layouts: dict[RecordLayout, int] = {}

    def number_of(part: RecordShard) -> int:
        return layouts.setdefault(part.layout, len(layouts))

    batches, records, annotations = [], [], []
    for number, batch in enumerate(group, first):
        batches.append({"inputs": batch.inputs, "notes": batch.notes})
        for name, calls in batch.records.items():
            records += [(number, name, call, number_of(p)) for call, p in enumerate(calls)]
        annotations += [(number, name, number_of(p)) for name, p in batch.annotations.items()]
    last = first + len(group) - 1
    return Index(
        first, last, session, batches, list(layouts), records, annotations, tuple(statistics)
    )
