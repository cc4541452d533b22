"""Tensors that annotate a batch: the ranks' tensors form one full tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flex_model.distributed import memory, values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.placement import Replicate, Shard, ShardLayout
from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME
from flex_model.records.store.record_layout import RecordLayout, RecordShard


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
