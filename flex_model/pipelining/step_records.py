"""Joins the records of a step's micro-batches, and sends them to the ranks that keep them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.placement import Placement
from flex_model.distributed.tensor_dicts import describe, from_rank, gather_to_first
from flex_model.layouts.expected_shape import ExpectedShape
from flex_model.pipelining import microbatches
from flex_model.pipelining.row_proofs import BatchRows

_BACKWARD = ("full_backward", "full_backward_pre")


@dataclass(eq=False)
class StageRecords:
    """The records of one stage under one name, of the whole batch, in the order of its calls."""

    name: str
    kind: str
    stage: int
    tensors: list[Tensor]


def join(
    recorded: dict[Any, list[Tensor]],
    number: int,
    rows: Sequence[Sequence[int]],
    stated: Callable[[str], Placement | None],
    rows_of: Callable[[str, str, int], BatchRows],
    expected: Mapping[tuple[str, str], ExpectedShape],
) -> list[StageRecords]:
    """Return the records of this rank's stages.

    Args:
        recorded: By name, kind and (stage, micro-batch), as ``records.Records`` keeps them.
        number: The number of micro-batches.
        rows: By data-parallel rank: its rows of each micro-batch.
        stated: Returns what the user states of their rows, by name.
        rows_of: Returns what is proven of their rows, by name, kind and stage.
        expected: By name and kind: their ``expected_shape``, where it has one.

    Raises:
        ValueError: the micro-batches' tensors don't fit together, or not with ``expected``.
    """
    found: dict[tuple[str, str, int], dict[int, list[Tensor]]] = {}
    for (name, kind, (stage, microbatch)), tensors in recorded.items():
        found.setdefault((name, kind, stage), {})[microbatch] = tensors
    result = []
    for (name, kind, stage), by_microbatch in found.items():
        if kind == "tensor":  # once per step
            (tensors,) = by_microbatch.values()
            result.append(StageRecords(name, kind, stage, tensors))
            continue
        lists = [by_microbatch.get(index, []) for index in range(number)]
        if len({len(tensors) for tensors in lists}) > 1:
            raise ValueError(
                f"the {kind} hooks that record {name!r} were called "
                f"{[len(tensors) for tensors in lists]} times in the micro-batches of stage "
                f"{stage}, so the parts of a call can't be found; hook a module that is called "
                'equally often in each, or use batch_mode="full"'
            )
        try:
            whole = [
                microbatches.join(
                    parts,
                    stated(name),
                    rows,
                    rows_of(name, kind, stage),
                    kind in _BACKWARD,
                )
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
        return  # the hook's own call checks it
    if any(size not in (None, got) for size, got in zip(expected, whole.shape)):
        raise ValueError(
            f"expected_shape is {expected}, but the tensor of the whole batch has the shape "
            f"{tuple(whole.shape)}; give the sizes of the whole batch, or None"
        )


def describe_records(records: Sequence[StageRecords]) -> list[Any]:
    """Describe them for the other ranks, as JSON."""
    return [
        [record.name, record.kind, record.stage, describe(record.tensors)] for record in records
    ]


def deliver(
    communicator: Communicator,
    records: Sequence[StageRecords],
    described: Sequence[Sequence[Any]],
    on_all_ranks: bool,
    output_ptr: dict[str, list[Tensor]],
) -> None:
    """Append the records of all stages to ``output_ptr`` on rank 0, or on all ranks. Collective.

    Args:
        described: By rank: the result of ``describe_records`` there.
    """
    tensors = [tensor for record in records for tensor in record.tensors]
    tensors_of = [[one for entry in entries for one in entry[3]] for entries in described]
    if on_all_ranks:
        received = [
            from_rank(
                communicator, rank, tensors if rank == communicator.mesh.group_rank else (), of_rank
            )
            for rank, of_rank in enumerate(tensors_of)
        ]
    else:
        gathered = gather_to_first(communicator, tensors, tensors_of)
        if gathered is None:
            return
        received = gathered
    found = []
    for entries, of_rank in zip(described, received, strict=True):
        tensors_left = iter(of_rank)
        for name, kind, stage, descriptions in entries:
            own = list(itertools.islice(tensors_left, len(descriptions)))
            found.append(StageRecords(name, kind, stage, own))
    # In the order in which the unsplit model calls its modules.
    found.sort(key=lambda record: -record.stage if record.kind in _BACKWARD else record.stage)
    for record in found:
        output_ptr.setdefault(record.name, []).extend(record.tensors)
