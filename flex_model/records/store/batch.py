"""One batch of a store before it is written, its annotations, and the index of a group of
batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flex_model.distributed import memory, values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.placement import Replicate, Shard, ShardLayout
from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME
from flex_model.records.store.manifest import (
    Index,
    RecordLayout,
    RecordShard,
    annotation_key,
    record_key,
)


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


def described(name: str, tensor: Tensor) -> list[Any]:
    """Return what ranks exchange of a tensor, as JSON: name, dtype, shape and fingerprint."""
    print_ = values.fingerprint(tensor).tolist()
    return [name, str(tensor.dtype), list(tensor.shape), print_]


def parts_of(
    communicator: Communicator, notes: Mapping[str, Tensor], per_rank: Sequence[Sequence[Any]]
) -> dict[str, RecordShard]:
    """Return this rank's shard of each tensor. Data-parallel ranks have rows of one batch, as for a
    model's inputs, unless all have equal tensors.

    Args:
        per_rank: By rank, the results of ``described`` there, with the same names and dtypes.

    Raises:
        ValueError: the ranks' tensors do not fit together; the same on all ranks.
    """
    mesh, found = communicator.mesh, {}
    for tensor, rows in zip(notes.values(), zip(*per_rank)):
        name, dtype = rows[0][:2]
        shapes = [tuple(shape) for _, _, shape, _ in rows]
        try:
            if len({len(shape) for shape in shapes}) > 1:
                raise ValueError("ranks give different numbers of dims")
            prints = values.Fingerprints.of(mesh, [row[3] for row in rows])
            if not prints.equal_along("tp"):
                raise ValueError("tensor-parallel ranks give different values")
            is_same = len(set(shapes)) == 1 and prints.equal_along("dp")
            layout = ShardLayout(dp=Replicate() if is_same else Shard(0))
            spec = TensorSpec.of(communicator, layout, shapes, DTYPE_OF_NAME[dtype])
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"annotate({name}=...): {error}; give what this rank gives to the model, the same "
                "on the ranks of one data-parallel row"
            ) from None
        kept = memory.copy(tensor) if spec.rank_0_gathers else None
        found[name] = RecordShard(RecordLayout.of(spec, tensor.dtype), kept)
    return found


def parts_of_first(notes: Mapping[str, Tensor], dp_size: int) -> dict[str, RecordShard]:
    """Return rank 0's tensors, in a pipeline. ValueError where it lacks rows of the batch."""
    if dp_size != 1:
        raise ValueError(
            "annotate: in a pipeline with data-parallel ranks, rank 0 does not have the whole "
            "batch; annotate with what JSON can hold (tokens.tolist())"
        )
    return {name: RecordShard.whole(memory.copy(tensor)) for name, tensor in notes.items()}
