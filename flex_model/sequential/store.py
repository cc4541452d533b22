"""The records that a sequential run writes to a store: each batch once, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import agreed
from flex_model.hooks.core import HookCore
from flex_model.records.store import ActivationStore
from flex_model.records.store.input_hashes import hash_of
from flex_model.records.store.session import config_hash
from flex_model.sequential.engine import Batch

_NOTES = {"input_ids": "token_ids", "attention_mask": "attention_mask"}


class StoredRecords(AbstractContextManager["StoredRecords"]):
    """What one run puts into a store, as a context: what was delivered is on disk at its end,
    however it ends. Collective: made, entered, left, ``take`` and ``flush``.

    Attributes:
        num_stored: The number of batches that the store has already.
    """

    def __init__(self, store: ActivationStore, core: HookCore) -> None:
        self._core, self._store = core, store
        self._is_own = core.runs.session is None  # else it is the FlexModel's, and stays open
        if self._is_own:
            core.runs.open_store(store, config_hash(core.module))
        assert core.runs.session is not None
        self._session = core.runs.session
        self._session.take_whole_batches(True)
        self._hashes: dict[int, str] = {}
        try:
            if not self._is_own:
                self._session.flush()
            self._session.check_hooks(core.digests.described(only_active=True))
        except BaseException as error:
            self.__exit__(type(error))
            raise
        self.num_stored = self._session.num_batches

    def __exit__(self, kind: type[BaseException] | None = None, *exc_info: object) -> None:
        session = self._session
        try:
            if self._is_own:
                session.close(kind)
            elif kind is None:
                session.flush()
            else:
                session.flush_after_error(kind)
        finally:
            session.take_whole_batches(False)
            if self._is_own:
                self._core.runs.close_store()

    def missing(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that are not stored; those that are must be the same ones. Collective
        before the first one.
        """
        source = iter(batches)
        problems = [
            self._difference(index, batch)
            for index, batch in enumerate(itertools.islice(source, self.num_stored))
        ]
        if len(problems) < self.num_stored:
            problems.append(
                f"ActivationStore: {self._store.folder} has {self.num_stored} batches, and "
                f"{len(problems)} are given; give all of them again, or another folder"
            )
        if self.num_stored:
            first = next((text for text in problems if text), None)
            texts = exchange_json(self._core.communicator, first, "the batches that a store has")
            found = next((text for text in texts if text), None)
            if found:
                raise agreed(ValueError(found))
        for index, batch in enumerate(source, self.num_stored):
            self._hashes[index] = hash_of(batch)
            yield batch

    def _difference(self, index: int, batch: Any) -> str | None:
        """Compare a batch with rank 0's inputs, whose hash is in the store."""
        if self._core.communicator.mesh.rank or self._store.inputs_hash(index) == hash_of(batch):
            return None
        return (
            f"ActivationStore: batch {index} in {self._store.folder} was made from other inputs "
            "than those given now; give the same batches in the same order, or another folder"
        )

    def take(self, batch: Batch) -> None:
        """Put a batch's records into the store rather than into ``output_ptr``, with its tokens."""
        assert batch.hooks is not None
        records = dict(batch.hooks.records)
        batch.hooks.records.clear()
        arguments = batch.arguments if isinstance(batch.arguments, Mapping) else {}
        notes = {
            name: arguments[key].detach().cpu().clone()  # the caller may use its memory again
            for key, name in _NOTES.items()
            if isinstance(arguments.get(key), Tensor)
        }
        self._session.append(records, self._hashes.pop(batch.index), notes, batch.hooks.rows)

    def end_window(self) -> None:
        """Write what a window of batches recorded, while the next one runs."""
        self._session.synchronize(ends_group=True)

    def flush(self) -> None:
        """Write everything, and mark the store as complete."""
        self._session.flush(is_complete=True)
