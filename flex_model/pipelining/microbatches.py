"""Splits the inputs of a batch into micro-batches along the schedule's own specs, joins the records
of micro-batches, and sends them to the ranks that keep them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _Replicate,
    split_args_kwargs_into_chunks,
)
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.distributed.tensor_dicts import Description, describe, gather_tensors
from flex_model.distributed.transports.buffer_layout import same_bits
from flex_model.hooks.registration import Registration
from flex_model.pipelining.row_proofs import BatchRows
from flex_model.records.records import list_of


def batch_dim(schedule: Any) -> int:
    """Return the dim along which the schedule splits its first tensor input."""
    specs, _ = pytree.tree_flatten(schedule._args_chunk_spec)
    return next((spec.split_dim for spec in specs if isinstance(spec, TensorChunkSpec)), 0)


def num_rows(
    schedule: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int
) -> int | None:
    """Return the number of rows of the first input that is split; None without such an input.

    Raises:
        ValueError: an input can't be split into ``number`` micro-batches of one size.
    """
    rows = None
    arg_specs, kwarg_specs = schedule._args_chunk_spec, schedule._kwargs_chunk_spec
    of_args = None if arg_specs is None else dict(enumerate(arg_specs))
    for name, tensor, dim in _split_tensors(dict(enumerate(args)), of_args):
        size = tensor.shape[dim]
        check_divides(size, number, f"positional argument {name}" if rows else "the batch")
        rows = rows or size
    for name, tensor, dim in _split_tensors(kwargs, kwarg_specs):
        size = tensor.shape[dim]
        if kwarg_specs is None and rows not in (None, size):
            _check_is_shared(name, size, rows, number)
            continue
        check_divides(size, number, f"keyword argument {name!r}" if rows else "the batch")
        rows = rows or size
    return rows


def _split_tensors(
    values: dict[Any, Any], specs: dict[Any, Any] | None
) -> Iterator[tuple[Any, Tensor, int]]:
    """Yield the tensors that the specs split: the argument's name, the tensor, the dim. Without
    specs all tensors are split, along their first.
    """
    if values and specs is not None and set(specs) != set(values):
        raise ValueError(
            f"the schedule's chunk spec is for the arguments {list(specs)}, and {list(values)} "
            "were passed; give what the spec is for, or make the schedule with another"
        )
    for name, value in values.items():
        leaves, tree = pytree.tree_flatten(value, is_leaf=_is_mask)
        whole = [TensorChunkSpec(0)] * len(leaves)
        leaf_specs = whole if specs is None else tree.flatten_up_to(specs[name])
        for leaf, spec in zip(leaves, leaf_specs, strict=True):
            if isinstance(leaf, Tensor) and leaf.dim() and isinstance(spec, TensorChunkSpec):
                yield name, leaf, spec.split_dim


def check_divides(rows: int, number: int, what: str) -> None:
    """ValueError for a batch that can't be split into this many micro-batches of one size."""
    if number > 1 and (rows < number or rows % number):
        raise ValueError(
            f"{what} has {rows} rows, and the schedule splits it into {number} micro-batches of "
            f"one size; give a multiple of {number} rows, or use batch_mode='full'"
        )


def _check_is_shared(name: str, size: int, rows: int | None, number: int) -> None:
    """ValueError for a tensor that seems to be one micro-batch's, and would be passed to all."""
    if number > 1 and size > 1 and size * number == rows:
        raise ValueError(
            f"keyword argument {name!r} has {size} rows, as many as a micro-batch, and the batch "
            f"has {rows}; give it for the whole batch, or make the schedule with "
            "kwargs_chunk_spec= if all micro-batches share it"
        )


def split(
    schedule: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, rows: int | None
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and the keyword inputs of each micro-batch. Without specs, positional
    tensors are split, and keyword ones that have a row for each of the batch's ``rows``; all else
    is passed to every micro-batch.
    """
    if number == 1 or not (args or kwargs):
        return [args] * number, [kwargs] * number
    arg_specs, kwarg_specs = schedule._args_chunk_spec, schedule._kwargs_chunk_spec
    if arg_specs is None or not args:
        arg_specs = tuple(_default_specs(arg, None) for arg in args)
    if kwarg_specs is None or not kwargs:
        kwarg_specs = {name: _default_specs(value, rows) for name, value in kwargs.items()}
    return split_args_kwargs_into_chunks(args, kwargs, number, arg_specs, kwarg_specs)


def find_unsplit(
    schedule: Any, kwargs: dict[str, Any], chunk: dict[str, Any], number: int
) -> dict[str, int]:
    """Return the tensors that every micro-batch gets whole without a spec that states it, and that
    could be split: their rows by name.

    Args:
        chunk: The keyword inputs of one micro-batch.
    """
    if number == 1 or schedule._kwargs_chunk_spec is not None:
        return {}
    return {
        name: value.shape[0]
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and value.dim() and value.shape[0] % number == 0
        if chunk[name].shape == value.shape
    }


def _default_specs(value: Any, rows: int | None) -> Any:
    def spec_of(leaf: Any) -> Any:
        is_mask, is_tensor = _is_mask(leaf), isinstance(leaf, Tensor) and leaf.dim() > 0
        has_rows = (is_mask or is_tensor) and rows in (None, leaf.shape[0])
        has_rows |= is_mask and leaf.shape[0] == 1  # one for all rows
        return TensorChunkSpec(0) if has_rows else _Replicate()

    return pytree.tree_map(spec_of, value, is_leaf=_is_mask)


def _is_mask(value: Any) -> bool:
    """Whether it is a mask of flex_attention, which torch splits as one."""
    return isinstance(value, BlockMask)


def shapes_of(values: Any) -> list[Description]:
    """Return the dtypes and shapes of all tensors in it, as JSON."""
    return describe([leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)])


def join(
    parts: Sequence[Tensor],
    stated: Placement | None,
    rows: Sequence[Sequence[int]],
    of: BatchRows,
    is_gradient: bool = False,
) -> Tensor:
    """Return the tensor that the hook of an unsplit run sees, from those of the micro-batches.

    Args:
        parts: By micro-batch.
        stated: What the user states of their rows; None: nothing.
        rows: By data-parallel rank: its rows of each micro-batch.
        of: What is proven of their rows.
        is_gradient: Whether these are gradients of the tensors that ``stated`` and ``of`` are
            about.

    Raises:
        ValueError: it is not known what rows they have, or the user states it wrongly.
    """
    if len(parts) == 1:
        return parts[0]
    first, placement = parts[0], of.placement
    if isinstance(stated, Shard) and stated.dim < 0:
        stated = Shard(first.dim() + stated.dim) if first.dim() >= -stated.dim else None
    if placement is None:
        placement = stated
    elif isinstance(placement, Shard) and stated not in (None, placement):
        raise ValueError(_refusal(parts, placement, "", stated))
    are_alike = len({part.shape for part in parts}) == 1
    if isinstance(placement, Replicate) and are_alike:
        if is_gradient:  # each micro-batch adds to it
            return torch.stack(list(parts)).sum(0)
        if all(same_bits(part, first) for part in parts[1:]):
            return first
    dim = placement.dim if isinstance(placement, Shard) else -1
    if placement != Shard(dim):  # in parts, or in pieces
        dim = -1
    sizes = _rows_of_ranks(parts, dim, rows) if 0 <= dim < first.dim() and are_alike else None
    if sizes is None:
        raise ValueError(_refusal(parts, placement, of.lost_at, None))
    # Each part has the rows of all data-parallel ranks, one rank after the other, as the whole
    # must have.
    pieces = [part.split(of_part, dim) for part, of_part in zip(parts, sizes)]
    return torch.cat([piece[rank] for rank in range(len(rows)) for piece in pieces], dim)


def _rows_of_ranks(
    parts: Sequence[Tensor], dim: int, rows: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """Return, by micro-batch, each data-parallel rank's size along ``dim``; None where the parts
    have not equally many indices there for each row of the batch.
    """
    of_all = [[of_rank[i] for of_rank in rows] for i in range(len(parts))]
    found = {divmod(part.shape[dim], sum(of_part)) for part, of_part in zip(parts, of_all)}
    times, rest = found.pop()
    if found or rest:
        return None
    return [[times * size for size in of_part] for of_part in of_all]


def _refusal(
    parts: Sequence[Tensor], placement: Placement | None, lost_at: str, stated: Placement | None
) -> str:
    what = f"the tensors of the micro-batches, of shapes {[tuple(p.shape) for p in parts]}"
    if stated is not None and isinstance(placement, Shard):
        other = f"along dim {stated.dim}" if isinstance(stated, Shard) else "nowhere"
        return (
            f"{what}, have the rows of the batch along dim {placement.dim} by the operations that "
            f"made them, and microbatch_dim states that they have them {other}; leave it out"
        )
    if placement is not None:
        return (
            f"{what}, are neither the same for any rows nor rows of the batch one after the other; "
            'use batch_mode="full"'
        )
    after = f" (lost at {lost_at})" if lost_at else ""
    return (
        f"which rows of the batch {what}, have is not known{after}; state the dim of the rows with "
        "microbatch_dim={name of the module: dim}, or None for a tensor that has none, or use "
        'batch_mode="full"'
    )


def part_of_shape(
    shape: tuple[int | None, ...] | None, dim: int | None, rows: Sequence[Sequence[int]]
) -> tuple[int | None, ...] | None:
    """Return the shape of a micro-batch's tensor, where that of the whole batch has ``shape``.

    Args:
        rows: As of ``join``.
    """
    if shape is None or dim is None or not -len(shape) <= dim < len(shape):
        return shape
    if shape[dim] != sum(sum(of_rank) for of_rank in rows):
        return shape  # no rows of the batch
    part = list(shape)
    part[dim] = sum(of_rank[0] for of_rank in rows)
    return tuple(part)


_BACKWARD = ("full_backward", "full_backward_pre")


class StageRecords(NamedTuple):
    """The records of one stage under one name, of the whole batch, in the order of its calls."""

    name: str
    kind: str
    stage: int
    tensors: list[Tensor]


def join_records(
    recorded: dict[Any, list[Tensor]],
    number: int,
    rows: Sequence[Sequence[int]],
    stated: Mapping[str, Placement],
    proven: Mapping[tuple[str, str, int], BatchRows],
    hooks: Mapping[tuple[str, str], Sequence[Registration]],
) -> list[StageRecords]:
    """Return the records of this rank's stages.

    Args:
        recorded: By name, kind and (stage, micro-batch), as ``records.Records`` keeps them.
        number: The number of micro-batches.
        rows: By data-parallel rank: its rows of each micro-batch.
        stated: By name: what the user states of their rows.
        proven: By name, kind and stage: what is proven of their rows.
        hooks: By name and kind: those that make them.

    Raises:
        ValueError: the micro-batches' tensors don't fit together, or not with an
            ``expected_shape``.
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
        of = proven.get((name, kind, stage), BatchRows())
        try:
            whole = [
                join(parts, stated.get(name), rows, of, kind in _BACKWARD)
                for parts in zip(*lists, strict=True)
            ]
            for tensor in whole:
                _check_shape(tensor, hooks[name, kind])
        except ValueError as error:
            raise ValueError(f"{hooks[name, kind][-1].describe()}: {error}") from None
        result.append(StageRecords(name, kind, stage, whole))
    return result


def _check_shape(whole: Tensor, hooks: Sequence[Registration]) -> None:
    function = hooks[0].hook_function
    expected = function.expected_shape
    if len(hooks) > 1 or function.select is not None:
        return
    if expected is None or len(expected) != whole.dim():
        return  # the hook's own call checks it
    if any(size not in (None, got) for size, got in zip(expected, whole.shape)):
        raise ValueError(
            f"expected_shape is {expected}, but the tensor of the whole batch has the shape "
            f"{tuple(whole.shape)}; give the sizes of the whole batch, or None"
        )


def describe_records(records: Sequence[StageRecords]) -> list[Any]:
    """Describe them for the other ranks, as JSON."""
    return [[*record[:3], describe(record.tensors)] for record in records]


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
    received = gather_tensors(communicator, tensors, tensors_of, on_all_ranks)
    if received is None:
        return
    found = []
    for entries, of_rank in zip(described, received, strict=True):
        tensors_left = iter(of_rank)
        for name, kind, stage, descriptions in entries:
            own = list(itertools.islice(tensors_left, len(descriptions)))
            found.append(StageRecords(name, kind, stage, own))
    # In the order in which the unsplit model calls its modules.
    found.sort(key=lambda record: -record.stage if record.kind in _BACKWARD else record.stage)
    for record in found:
        list_of(output_ptr, record.name).extend(record.tensors)
