"""Exchanges values whose number and shape differ by rank: JSON of every rank, and tensors of one
rank. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import DTYPES, Header, site_hash
from flex_model.distributed.mesh import GRID
from flex_model.distributed.transports.transport import Gathered, as_bytes, end_to_end

#: Dtypes by the names that `describe` uses.
DTYPE_OF_NAME = {str(dtype): dtype for dtype in DTYPES}

#: The name of a tensor's dtype, and its shape.
Description = tuple[str, Sequence[int]]


def describe(tensors: Sequence[Tensor]) -> list[Description]:
    """Return the JSON by which other ranks can receive these tensors."""
    return [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]


def exchange_json(communicator: Communicator, value: Any, where: str) -> list[Any]:
    """Gather the values of all ranks. Collective.

    Args:
        where: Their purpose, in messages.
    """
    if communicator.is_local:
        return [value]
    data = json.dumps(value).encode()
    header = Header("described values", site=site_hash(where), shape=(len(data),))
    lengths = [other.shape[0] for other in communicator.check_consistency(header, where)]
    return list(map(json.loads, communicator.exchange_padded(data, max(lengths))))


def gather_tensors(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    described: Sequence[Sequence[Description]],
    on_all_ranks: bool = False,
) -> list[list[Tensor]] | None:
    """Gather the tensors of all ranks on rank 0, or on all, on the CPU (its own unchanged); None
    elsewhere. Collective.

    Args:
        described: By rank, the result of ``describe`` there.
    """
    if communicator.is_local:
        return [list(tensors)]
    if on_all_ranks:
        return [from_rank(communicator, r, tensors, of_rank) for r, of_rank in enumerate(described)]
    moved = [
        (rank, i)
        for rank, descriptions in enumerate(described)
        for i, description in enumerate(descriptions)
        if rank > 0 and _num_bytes(description)
    ]
    place, size = communicator.mesh.group_rank, len(described)
    gathered = [
        Gathered(
            end_to_end([_num_bytes(described[rank][i]) * (r == rank) for r in range(size)]),
            list(range(size)),
            _own_bytes(tensors, i, rank == place),
        )
        for rank, i in moved
    ]
    received = communicator.gather_to_first(GRID, gathered) if gathered else []
    if place > 0:
        return None
    found = dict(zip(moved, received or [], strict=True))
    others = [
        [_typed(found.get((rank, i)), description) for i, description in enumerate(descriptions)]
        for rank, descriptions in enumerate(described)
        if rank > 0
    ]
    return [list(tensors), *others]


def from_rank(
    communicator: Communicator,
    rank: int,
    tensors: Sequence[Tensor],
    described: Sequence[Description],
) -> list[Tensor]:
    """Send the CPU tensors of one rank to every rank. Collective."""
    if communicator.is_local:
        return list(tensors)
    found = []
    for i, description in enumerate(described):
        num_bytes = _num_bytes(description)
        plan = end_to_end(
            [num_bytes * (r == rank) for r in range(len(communicator.mesh.stage_ranks))]
        )
        is_mine = communicator.mesh.group_rank == rank
        shard = _own_bytes(tensors, i, is_mine)
        full = communicator.all_gather(GRID, shard, plan)[0] if num_bytes else None
        found.append(tensors[i] if is_mine else _typed(full, description))
    return found


def _num_bytes(description: Description) -> int:
    return DTYPE_OF_NAME[description[0]].itemsize * math.prod(description[1])


def _own_bytes(tensors: Sequence[Tensor], i: int, is_mine: bool) -> Tensor:
    """Return the bytes that this rank has of the tensor of a number: all of its own, else none."""
    return as_bytes(tensors[i]) if is_mine else torch.empty(0, dtype=torch.uint8, device="cpu")


def _typed(data: Tensor | None, description: Description) -> Tensor:
    """Return the tensor that has these bytes; None: it has no bytes."""
    dtype, shape = DTYPE_OF_NAME[description[0]], list(description[1])
    if data is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()  # unaligned: one of several in a buffer
    return data.view(dtype).reshape(shape)
