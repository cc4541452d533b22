"""How ranks hold the tensors that a batch of a store is annotated with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flex_model.distributed import memory, values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.padding import RankRows, paddings
from flex_model.distributed.placement import Shape, Shard, ShardLayout
from flex_model.distributed.tensor_dicts import DTYPE_OF_NAME
from flex_model.layouts.sources import BatchDim, batch_dim_of
from flex_model.records.store.manifest import RecordLayout, RecordShard


def described(name: str, tensor: Tensor) -> list[Any]:
    """Return what ranks exchange of a tensor, as JSON: name, dtype, shape and fingerprint."""
    return [name, str(tensor.dtype), list(tensor.shape), values.fingerprint(tensor)]


def parts_of(
    communicator: Communicator,
    notes: Mapping[str, Tensor],
    per_rank: Sequence[Sequence[Any]],
    batch_dim: BatchDim,
    rows: Sequence[RankRows],
) -> dict[str, RecordShard]:
    """Return this rank's shard of each tensor. Rows of batches of different lengths are padded with
    0: a mask leaves the padding out.

    Args:
        per_rank: By rank, the results of ``described`` there, with the same names and dtypes.
        batch_dim: The FlexModel's; ``rows``: of the inputs of the run's forwards.

    Raises:
        ValueError: the ranks' tensors do not fit together; the same on all ranks.
    """
    mesh, found = communicator.mesh, {}
    for tensor, of_ranks in zip(notes.values(), zip(*per_rank)):
        name, dtype = of_ranks[0][:2]
        shapes = [tuple(shape) for _, _, shape, _ in of_ranks]
        try:
            if len({len(shape) for shape in shapes}) > 1:
                raise ValueError("ranks give different numbers of dims")
            prints = values.Fingerprints(mesh, tuple(one[3] for one in of_ranks))
            if not prints.equal_along("tp"):
                raise ValueError("tensor-parallel ranks give different values")
            is_same = len(set(shapes)) == 1 and prints.equal_along("dp")
            layout, of_inputs = ShardLayout(), None
            if mesh.dp_size > 1:
                dim = batch_dim_of(batch_dim, name)
                layout, of_inputs = _layout_along_dp(shapes, dim, rows, is_same)
            if of_inputs is not None and of_inputs.is_ragged:
                padded = paddings(layout, shapes, of_inputs.counts, mesh, 0)
                shapes = [one.padded for one in padded]
                tensor = padded[mesh.group_rank].put(tensor)
            spec = TensorSpec.of(communicator, layout, shapes, DTYPE_OF_NAME[dtype])
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"annotate({name}=...): {error}; give rows of the batch as this rank gives them to "
                "the model, the same on the ranks of one data-parallel row, or a tensor that "
                f"is the same on all ranks, with FlexModel(batch_dim={{{name!r}: None}}) if its "
                "size may be one of rows"
            ) from None
        kept = memory.copy(tensor) if spec.rank_0_gathers else None
        found[name] = RecordShard(RecordLayout.of(spec, tensor.dtype), kept)
    return found


def _layout_along_dp(
    shapes: Sequence[Shape], batch_dim: int | None, rows: Sequence[RankRows], is_same: bool
) -> tuple[ShardLayout, RankRows | None]:
    """Return how data-parallel ranks hold a tensor, and the inputs whose rows it has: by its
    shapes, as equal values may be of different rows.

    Args:
        batch_dim: The dim of rows in the model's inputs; None: the tensor has no rows.
        rows: Of the inputs of the run's forwards; empty: not known.

    Raises:
        ValueError: neither rows of the batch, nor the same on all ranks.
    """
    for dim in () if batch_dim is None else dict.fromkeys((batch_dim, 0)):
        if any(len(shape) <= dim for shape in shapes):
            continue
        if not rows:
            raise ValueError(
                "no input of the run's forwards has rows, so those of data-parallel "
                "ranks are not known"
            )
        sizes = [shape[dim] for shape in shapes[:: len(shapes) // len(rows[0].counts)]]
        for one in rows:
            if all(size == count or not count for size, count in zip(sizes, one.counts)):
                return ShardLayout(dp=Shard(dim)), one
        # generate(num_return_sequences=2) repeats rows, and several forwards may share them out.
        totals = map(sum, zip(*(one.counts for one in rows)))
        is_same &= sizes != list(totals) and not any(
            all(not count or (size and count % size == 0) for size, count in zip(sizes, one.counts))
            for one in rows
        )
    if is_same:
        return ShardLayout(), None
    raise ValueError(
        f"the data-parallel ranks give tensors of shapes {list(dict.fromkeys(shapes))}, that have "
        f"not as many rows as their inputs, {[one.counts for one in rows]}, and differ, or may be "
        "parts of those rows"
    )


def parts_of_first(notes: Mapping[str, Tensor], dp_size: int) -> dict[str, RecordShard]:
    """Return rank 0's tensors, in a pipeline. ValueError where it lacks rows of the batch."""
    if dp_size != 1:
        raise ValueError(
            "annotate: in a pipeline with data-parallel ranks, rank 0 does not have the whole "
            "batch; annotate with what JSON can hold (tokens.tolist())"
        )
    return {name: RecordShard.whole(memory.copy(tensor)) for name, tensor in notes.items()}
