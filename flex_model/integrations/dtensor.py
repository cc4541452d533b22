"""DTensor and AsyncCollectiveTensor: how they are split, and their way to plain tensors and
back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from flex_model.distributed.layout import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    ShardLayout,
)
from flex_model.distributed.mesh import Mesh


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor. Does not import ``torch.distributed.tensor`` (over a second) where
    nobody did.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def wait(tensor: Tensor) -> Tensor:
    """A plain tensor in place of an AsyncCollectiveTensor, in the graph; anything else as it is.

    Its own ``wait()`` would cut the graph, so a differentiable copy is taken.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is not None and isinstance(tensor, module.AsyncCollectiveTensor):
        return tensor.clone()
    return tensor


def axes_of(device_mesh: dist.DeviceMesh, mesh: Mesh, site: str) -> list[str | None]:
    """Our axis for each dim of a DTensor's mesh; None for dims of one rank.

    Raises:
        ValueError: a dim runs over ranks that are no axis of this wrap.
    """
    axes: list[str | None] = []
    ours = {axis: {mesh.grid[place] for place in mesh.members((axis,))} for axis in ("dp", "tp")}
    for dim in range(device_mesh.ndim):
        if device_mesh.size(dim) == 1:
            axes.append(None)
            continue
        ranks = set(dist.get_process_group_ranks(device_mesh.get_group(dim)))
        matching = [axis for axis in ("dp", "tp") if ours[axis] == ranks]
        if not matching:
            raise ValueError(
                f"{site}: its DTensor lives on ranks {sorted(ranks)}, which are no axis of this "
                "wrap "
                f"({mesh.describe()} over ranks {list(mesh.ranks)}); give the sizes or the "
                "device_mesh of the model"
            )
        axes.append(matching[0])
    return axes


def layout(tensor: Any, mesh: Mesh, site: str, *, batch_on_dp: bool) -> ShardLayout:
    """The layout of a DTensor; along dp, where its mesh does not reach, rows of the batch if
    ``batch_on_dp``. Local.

    Raises:
        ValueError: a placement that is not plain Shard, Replicate or a partial sum, or a mesh that
            is not this wrap's.
    """
    placements: dict[str, Placement] = {}
    tp_first = False
    axes = axes_of(tensor.device_mesh, mesh, site)
    for axis, placement in zip(axes, tensor.placements):
        if axis is None:
            continue
        strided = type(placement).__name__ == "_StridedShard"
        if placement.is_replicate():
            placements[axis] = Replicate()
        elif type(placement).__name__ == "Shard":
            placements[axis] = Shard(placement.dim % tensor.ndim)
        elif strided and axis == "dp" and placement.split_factor == mesh.tp_size and "tp" in axes:
            placements[axis] = Shard(
                placement.dim % tensor.ndim
            )  # FSDP2 splits what tensor parallelism has split
            tp_first = True
        elif placement.is_partial() and getattr(placement, "reduce_op", "sum") == "sum":
            placements[axis] = Partial()
        else:
            raise ValueError(
                f"{site}: DTensor placement {placement} can't be gathered; redistribute it to "
                "Shard or Replicate"
            )
    if "dp" not in placements and batch_on_dp and mesh.dp_size > 1 and tensor.ndim:
        placements["dp"] = Shard(0)
    dp, tp = placements.get("dp", Replicate()), placements.get("tp", Replicate())
    return ShardLayout(dp, tp, tp_first and dp == tp, "its DTensor placements")


def reaches(tensor: Any, mesh: Mesh, site: str, axis: str) -> bool:
    """Whether the DTensor's mesh runs along this axis."""
    return axis in axes_of(tensor.device_mesh, mesh, site)


def layout_beside_weight(
    module: nn.Module | None, kind: str, shapes: Sequence[Shape], mesh: Mesh, site: str
) -> ShardLayout | None:
    """What a linear layer's DTensor weight tells of its plain input or output; None for nothing.

    A weight split over its outputs leaves a part of the output's last dim on each rank, one split
    over its inputs takes a part of the input's (Megatron's column- and row-parallel layers, in
    Hugging Face's and torch's own tensor parallelism). Only where the ranks' widths add up to the
    weight's: a layer that gathers or reduces its output itself does not fit. Local.
    """
    weight: Any = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not is_dtensor(weight) or mesh.tp_size == 1:
        return None
    axes = axes_of(weight.device_mesh, mesh, site)
    if "tp" not in axes:
        return None
    placement = weight.placements[axes.index("tp")]
    dim = 0 if kind in ("forward", "full_backward_pre") else 1
    if not placement.is_shard(dim) or not shapes[0]:
        return None
    widths = [shape[-1] for shape in shapes]
    for start in range(0, len(widths), mesh.tp_size):
        if sum(widths[start : start + mesh.tp_size]) != weight.shape[dim]:
            return None
    ndim = len(shapes[0])
    dp = Shard(0) if mesh.dp_size > 1 else Replicate()
    return ShardLayout(dp, Shard(ndim - 1), source="the placements of its weight")


def to_local(tensor: Any) -> Tensor:
    """This rank's part as a plain tensor, in the graph."""
    return wait(tensor.to_local())


def like(shard: Tensor, tensor: Any) -> Tensor:
    """``shard`` as a DTensor with the mesh, placements and shape of ``tensor``, in the graph.
    Local.
    """
    stride, strides = 1, []
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= size
    return type(tensor).from_local(
        shard,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tuple(reversed(strides)),
    )


def without_partial(tensor: Any) -> Any:
    """The DTensor with its partial sums done. Collective over its mesh where there are any."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return tensor.redistribute(
        placements=[
            replicate if placement.is_partial() else placement for placement in tensor.placements
        ]
    )
