"""How others bring shards together, and how release 0.1.0 did: what we are measured against.

All functions are collective over ``group``; shards are even unless a function says otherwise.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Gather = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


def list_then_cat(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Tensors of its own for each rank's shard, then ``cat``."""
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards, dim)


def flat_then_cat(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """One flat collective; along dim 0 that is all, else Megatron-LM's chunk and ``cat``."""
    flat = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(flat, shard, group=group)
    return flat if dim == 0 else torch.cat(flat.chunk(group.size()), dim)


class FlatThenCatWarm:
    """As ``flat_then_cat``, into memory that is kept from call to call: no page is faulted in, and
    each result is gone with the next.
    """

    def __init__(self, full: Tensor) -> None:
        self.flat, self.full = torch.empty(full.numel(), dtype=full.dtype), torch.empty_like(full)

    def __call__(self, shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        flat = self.flat.view(group.size() * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(flat, shard, group=group)
        return flat if dim == 0 else torch.cat(flat.chunk(group.size()), dim, out=self.full)


def functional(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(shard, dim, group))


def padded_then_cat(shard: Tensor, dim: int, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Uneven shards, ``sizes`` along ``dim``: the collective needs equal ones."""
    width = max(sizes)
    if shard.shape[dim] < width:
        missing = list(shard.shape)
        missing[dim] = width - shard.shape[dim]
        shard = torch.cat([shard, shard.new_empty(missing)], dim)
    padded = [torch.empty_like(shard) for _ in sizes]
    dist.all_gather(padded, shard, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(padded, sizes)], dim)


def by_dtensor(shard: Tensor, dim: int, full: torch.Size, mesh: dist.DeviceMesh) -> Tensor:
    """``Shard(dim)`` to ``Replicate()``; uneven shards too."""
    stride = torch.empty(full, device="meta").stride()
    tensor = DTensor.from_local(
        shard, mesh, [Shard(dim)], run_check=False, shape=full, stride=stride
    )
    whole = tensor.redistribute(placements=[Replicate()]).to_local()
    return whole.wait() if isinstance(whole, funcol.AsyncCollectiveTensor) else whole


def to_first(shard: Tensor, dim: int) -> Tensor | None:
    """``dist.gather`` over the world, then ``cat`` on rank 0."""
    is_first = dist.get_rank() == 0
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if is_first else None
    dist.gather(shard, shards)
    return torch.cat(shards, dim) if is_first else None


def from_first(full: Tensor | None, dim: int, like: Tensor) -> Tensor:
    """``dist.scatter`` over the world of what rank 0 holds."""
    shard = torch.empty_like(like)
    shards = None
    if full is not None:
        shards = [part.contiguous() for part in full.chunk(dist.get_world_size(), dim)]
    dist.scatter(shard, shards)
    return shard


# ---- Release 0.1.0 -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Original:
    """Its gather and scatter along one axis; with data parallelism it is called once per axis."""

    name: str
    gather: Gather
    scatter: Gather  # local


def original(path: str | None) -> Original:
    """The release itself, if ``path`` holds its package; else the same steps."""
    if path is None:
        return Original("0.1.0's steps", _gather_by_its_steps, _scatter_by_its_steps)
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
    sys.path.insert(0, path)
    try:
        mappings = importlib.import_module("flex_model.distributed.mappings")
    finally:
        sys.path.remove(path)
        for name in filter(_is_ours, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(ours)

    def gather(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return mappings.all_gather_tensor_parallel(shard, dim, _State(group))

    def scatter(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        return mappings.scatter_tensor_parallel(full, dim, _State(group))

    return Original("0.1.0", gather, scatter)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "flex_model"


@dataclass(frozen=True)
class _State:
    """What its functions ask: where this rank stands on the tensor-parallel axis."""

    group: dist.ProcessGroup

    def get_tensor_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_tensor_parallel_rank(self) -> int:
        return self.group.rank()

    def get_tensor_parallel_world_size(self) -> int:
        return self.group.size()


def _gather_by_its_steps(shard: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return list_then_cat(shard.clone(), dim, group)


def _scatter_by_its_steps(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return full.chunk(group.size(), dim)[group.rank()].contiguous()
