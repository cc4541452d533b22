"""One batch of a store before it is written, and the index of a group of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flex_model.records.store.manifest import Index, annotation_key, record_key
from flex_model.records.store.record_layout import RecordLayout, RecordShard


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


def index_of(group: Sequence[Batch], first: int, session: str) -> Index:
    """Return the index of consecutive batches, from number ``first`` on."""
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
    return Index(first, last, session, batches, list(layouts), records, annotations)
