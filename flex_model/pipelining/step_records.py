"""Records of a step: those of each micro-batch put together, on the ranks that keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.tensor_dicts import describe, from_rank, gather_to_first
from flex_model.layouts.resolve import ExpectedShape
from flex_model.pipelining import chunks

_BACKWARD = ("full_backward", "full_backward_pre")


@dataclass(eq=False)
class StageRecords:
    """What one stage recorded under one name, of the whole batch, in the order of its calls."""

    name: str
    kind: str
    stage: int
    tensors: list[Tensor]


def joined(
    recorded: dict[Any, list[Tensor]],
    number: int,
    rows: Sequence[Sequence[int]],
    dim_of: Callable[[str], int],
    is_batched: Callable[[str, str], bool | None],
    expected: Mapping[tuple[str, str], ExpectedShape],
) -> list[StageRecords]:
    """What this rank's stages recorded.

    Args:
        recorded: By name, kind and (stage, micro-batch), as ``outputs.Records`` keeps it.
        number: Of micro-batches.
        rows: By data-parallel rank: its rows of each micro-batch.
        dim_of: By name: along which dim they are joined.
        is_batched: By name and kind: whether they have rows along it; None if it is not known.
        expected: By name and kind: their ``expected_shape``, where one was given.

    Raises:
        ValueError: the micro-batches' tensors don't fit together, or not with ``expected``.
    """
    found: dict[tuple[str, str, int], dict[int, list[Tensor]]] = {}
    for (name, kind, (stage, microbatch)), tensors in recorded.items():
        found.setdefault((name, kind, stage), {})[microbatch] = tensors
    result = []
    for (name, kind, stage), by_microbatch in found.items():
        if kind == "tensor":  # of the step
            (tensors,) = by_microbatch.values()
            result.append(StageRecords(name, kind, stage, tensors))
            continue
        lists = [by_microbatch.get(index, []) for index in range(number)]
        if len({len(tensors) for tensors in lists}) > 1:
            raise ValueError(
                f"the {kind} hooks that record {name!r} were called "
                f"{[len(tensors) for tensors in lists]} times in the micro-batches of stage "
                f"{stage}, and what belongs together can't be told; hook a module that is called "
                'equally often in each, or use batch_mode="full"'
            )
        try:
            whole = [
                chunks.join(parts, dim_of(name), rows, is_batched(name, kind))
                for parts in zip(*lists, strict=True)
            ]
            for tensor in whole:
                _check_shape(tensor, expected.get((name, kind)))
        except ValueError as error:
            raise ValueError(f"{kind} hook on {name!r}: {error}") from None
        result.append(StageRecords(name, kind, stage, whole))
    return result


def _check_shape(whole: Tensor, expected: ExpectedShape) -> None:
    if expected is None or len(expected) != whole.dim():
        return  # a hook that was called knows it already
    if any(size not in (None, got) for size, got in zip(expected, whole.shape)):
        raise ValueError(
            f"expected_shape is {expected}, but the tensor of the whole batch has the shape "
            f"{tuple(whole.shape)}; give the sizes of the whole batch, or None"
        )


def told(records: Sequence[StageRecords]) -> list[Any]:
    """What the other ranks must know of them. JSON can hold it."""
    return [
        [record.name, record.kind, record.stage, describe(record.tensors)] for record in records
    ]


def deliver(
    communicator: Communicator,
    mine: Sequence[StageRecords],
    told_by_all: Sequence[Sequence[Any]],
    on_all_ranks: bool,
    output_ptr: dict[str, list[Tensor]],
) -> None:
    """Put the records of all stages into ``output_ptr`` on rank 0, or on all ranks. Collective."""
    tensors = [tensor for record in mine for tensor in record.tensors]
    described = [
        [description for entry in entries for description in entry[3]] for entries in told_by_all
    ]
    if on_all_ranks:
        received = [
            from_rank(
                communicator, rank, tensors if rank == communicator.mesh.group_rank else (), of_rank
            )
            for rank, of_rank in enumerate(described)
        ]
    else:
        gathered = gather_to_first(communicator, tensors, described)
        if gathered is None:
            return
        received = gathered
    found = []
    for entries, of_rank in zip(told_by_all, received, strict=True):
        at = 0
        for name, kind, stage, descriptions in entries:
            found.append(StageRecords(name, kind, stage, of_rank[at : at + len(descriptions)]))
            at += len(descriptions)
    # In the order in which an unsplit model would have come to them.
    found.sort(key=lambda record: -record.stage if record.kind in _BACKWARD else record.stage)
    for record in found:
        output_ptr.setdefault(record.name, []).extend(record.tensors)
