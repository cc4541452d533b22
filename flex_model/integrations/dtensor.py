"""DTensor and AsyncCollectiveTensor: their layouts, and conversion to plain tensors and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flex_model.distributed.mesh import Axis, Mesh
from flex_model.distributed.placement import Partial, Placement, Replicate, Shard, ShardLayout
from flex_model.integrations.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    local_shape_and_offset,
    unset_fake_temporarily,
)


def dtensor_class() -> Any:
    """Return DTensor, or no class if it is not imported, which would take over a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def unsplit_dims(tensor: Any) -> Collection[int]:
    """Return the dims that no placement of a DTensor shards; every dim of other tensors."""
    if not is_dtensor(tensor):
        return range(tensor.dim())
    split = {getattr(placement, "dim", None) for placement in tensor.placements}
    return set(range(tensor.dim())) - split


def range_in_dim(tensor: Any, dim: int) -> tuple[int, int] | None:
    """Return the first index and the number of this rank's part of a dim; None if the part is not
    consecutive.
    """
    if not is_dtensor(tensor):
        return 0, tensor.shape[dim]
    if any(_is_strided(one) and one.dim % tensor.dim() == dim for one in tensor.placements):
        return None
    with unset_fake_temporarily():
        sizes, offsets = local_shape_and_offset(tensor)
    return offsets[dim], sizes[dim]


def indices_in_dim(tensor: Any, dim: int) -> Tensor:
    """Return the indices of a dim that this rank has, in the order of its part. Of a
    ``_StridedShard`` each rank has a piece of each of ``split_factor`` parts.
    """
    found, mesh = torch.arange(tensor.shape[dim], device="cpu"), tensor.device_mesh
    for i, placement in enumerate(tensor.placements):
        if not _is_shard(placement) or placement.dim % tensor.dim() != dim:
            continue
        parts = found.chunk(placement.split_factor) if _is_strided(placement) else [found]
        of_ranks = [[*part.chunk(mesh.size(i)), *[part[:0]] * mesh.size(i)] for part in parts]
        found = torch.cat([pieces[mesh.get_local_rank(i)] for pieces in of_ranks])
    return found


def wait(tensor: Tensor) -> Tensor:
    """Return a plain tensor for an AsyncCollectiveTensor, in the graph; other tensors unchanged.

    Its own ``wait()`` would detach it from the graph, so this clones it where there is one.
    """
    module = sys.modules.get(FUNCTIONAL_COLLECTIVES)
    if module is not None and isinstance(tensor, module.AsyncCollectiveTensor):
        return tensor.clone() if torch.is_grad_enabled() else tensor.wait()
    return tensor


def is_awaited(tensor: Any) -> bool:
    """Whether the collective that makes the tensor, if one does, was waited for. Local."""
    module = sys.modules.get(FUNCTIONAL_COLLECTIVES)
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    of_collective = () if module is None else module.AsyncCollectiveTensor
    return not isinstance(local, of_collective) or local.completed


BOTH: Axis = "dp x tp"  # a dim over all ranks: experts that are split over both axes


def axes_of(device_mesh: dist.DeviceMesh, mesh: Mesh, site: str) -> list[Axis | None]:
    """Return our axis, or part of an axis, for each dim of a DTensor's mesh; None for dims of size
    1, and over data-parallel ranks that our mesh leaves out. Local.

    HSDP's two dims are the parts ``("dp", replicas, stride)`` and ``("dp", shards, 1)`` of dp.

    Raises:
        ValueError: the ranks of a dim are neither an axis of this FlexModel nor evenly spaced ranks
            of one, or are not in ascending order.
    """
    axes, why_not = _axes_of(device_mesh, mesh)
    if why_not:
        raise ValueError(f"{site}: {why_not}")
    return axes


@lru_cache(maxsize=256)  # reading a mesh runs tensor operations
def _axes_of(device_mesh: dist.DeviceMesh, mesh: Mesh) -> tuple[list[Axis | None], str]:
    here = device_mesh.get_coordinate()
    if here is None:
        return [], f"its DTensor's {device_mesh} does not have this rank"
    axes: list[Axis | None] = []
    for dim in range(device_mesh.ndim):
        if device_mesh.size(dim) == 1:
            axes.append(None)
            continue
        line = tuple(slice(None) if i == dim else place for i, place in enumerate(here))
        with unset_fake_temporarily():  # a dry run needs the mesh's values too
            ranks = device_mesh.mesh[line].tolist()
        if ranks != sorted(ranks):
            return [], (
                f"its DTensor's mesh has the ranks {ranks}, not in ascending order, and torch "
                "then orders shards inconsistently; make the mesh in ascending order"
            )
        if set(ranks) <= set(mesh.left_out):
            axes.append(None)
            continue
        if mesh.dp_size > 1 and mesh.tp_size > 1 and ranks == list(mesh.stage_ranks):
            axes.append(BOTH)
            continue
        matching = [axis for name in ("dp", "tp") if (axis := _axis_over(ranks, name, mesh))]
        tp_ranks = {mesh.stage_ranks[place] for place in mesh.ranks_along(("tp",))}
        if not matching and mesh.dp_size > 1 and tp_ranks < set(ranks) < set(mesh.stage_ranks):
            return [], (
                f"its DTensor is on ranks {ranks}, which span tp and a part of dp of this "
                f"FlexModel ({mesh.describe()}), in parts of which no order is known; split it "
                "over tp, a part of dp, or all ranks: of experts, choose another ep_size"
            )
        if not matching:
            return [], (
                f"its DTensor is on ranks {ranks}, which are not an axis of this FlexModel "
                f"({mesh.describe()} over ranks {list(mesh.ranks)}); give the sizes or the "
                "device_mesh of the model"
            )
        axes.append(matching[0])
    return axes, ""


def _axis_over(ranks: list[int], name: str, mesh: Mesh) -> Axis | None:
    """Return the axis ``name``, or the part of it, with these global ranks in this order; None if
    there is none.
    """
    line = [mesh.stage_ranks[place] for place in mesh.ranks_along((name,))]
    if ranks == line:
        return name
    if not set(ranks) < set(line):
        return None
    first, second = line.index(ranks[0]), line.index(ranks[1])
    part = (name, len(ranks), second - first)
    if part[2] < 1 or len(line) % (part[1] * part[2]):
        return None
    return (
        part if [mesh.stage_ranks[place] for place in mesh.ranks_along((part,))] == ranks else None
    )


def layout(tensor: Any, mesh: Mesh, site: str, *, by_fsdp2: bool = False) -> ShardLayout:
    """Return the layout of a DTensor; replicated along an axis that its mesh does not cover. Local.

    Args:
        by_fsdp2: Whether FSDP2 sharded it: a parameter that it manages, or the gradient of one.

    Raises:
        ValueError: a placement that is not Shard, Replicate or a partial sum, a dim that both axes
            split as no layout does, or a mesh that does not match this FlexModel's.
    """
    axes = axes_of(tensor.device_mesh, mesh, site)
    parts: dict[str, list[tuple[Axis, Any]]] = {"dp": [], "tp": []}
    for axis, placement in zip(axes, tensor.placements):
        for name in _names(axis):
            parts[name].append((name if axis == BOTH else axis, placement))  # type: ignore[arg-type]
    dp, tp = (_on_axis(parts[name], tensor, mesh, site) for name in ("dp", "tp"))
    found = ShardLayout(dp, tp, source="its DTensor placements")
    if not found.splits_one_dim:
        return found
    assert isinstance(dp, Shard) and isinstance(tp, Shard)
    if by_fsdp2:  # it splits what tp leaves; its placements don't say so of fused projections
        return replace(found, dp=replace(dp, parts=1), tp_first=True)
    # Torch splits by the mesh's dims in their order: with Shard what the earlier ones leave, with
    # _StridedShard each of that many equal parts of it.
    order = [
        name
        for axis, placement in zip(axes, tensor.placements)
        if _is_shard(placement)
        for name in _names(axis)
    ]
    if order != sorted(order, key=order.index):  # one axis is between dims of the other
        raise _not_gathered(tensor, site)
    first, last = order[0], order[-1]
    outer, inner = (dp, tp) if first == "dp" else (tp, dp)
    outer_size, inner_size = outer.pieces or mesh.size(first), inner.pieces or mesh.size(last)
    tp_first = first == "tp"
    if inner.parts == 1 and outer.parts == inner_size:  # they are the other axis' shards
        outer, tp_first = replace(outer, parts=1), not tp_first
    elif inner.parts > 1 and outer.parts == 1:
        inner, tp_first = replace(inner, parts=inner.parts * outer_size), not tp_first
    elif inner.parts > 1 or (outer.parts > 1 and outer.parts % inner_size):
        raise _not_gathered(tensor, site)
    dp, tp = (outer, inner) if first == "dp" else (inner, outer)
    return replace(found, dp=dp, tp=tp, tp_first=tp_first)


def _not_gathered(tensor: Any, site: str) -> ValueError:
    return ValueError(
        f"{site}: DTensor placements {tuple(tensor.placements)} can't be gathered; redistribute it "
        "to Shard or Replicate"
    )


def _name(axis: Axis) -> str:
    return axis if isinstance(axis, str) else axis[0]


def _names(axis: Axis | None) -> tuple[str, ...]:
    """Return the axes over which a dim of a DTensor's mesh runs."""
    return () if axis is None else ("dp", "tp") if axis == BOTH else (_name(axis),)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _is_shard(placement: Any) -> bool:
    return _is_strided(placement) or type(placement).__name__ == "Shard"


def _on_axis(parts: list[tuple[Axis, Any]], tensor: Any, mesh: Mesh, site: str) -> Placement:
    """Return the placement on one axis, from those on its parts."""
    placed = [(axis, placement) for axis, placement in parts if not placement.is_replicate()]
    if not placed:
        return Replicate()
    axis, placement = placed[0]
    if len(placed) == 1 and _is_shard(placement):
        split = placement.split_factor if _is_strided(placement) else 1
        dim = placement.dim % tensor.ndim
        if isinstance(axis, str):
            return Shard(dim, split)
        return Shard(dim, split, pieces=axis[1], stride=axis[2])
    if (
        len(placed) == 1
        and isinstance(axis, str)
        and type(placement).__name__ == "Partial"  # not masked or norm partials, also "sum"
        and placement.reduce_op == "sum"
    ):
        return Partial()
    size = mesh.size(_name(axis))
    shards = [other for _, other in placed if _is_shard(other)]
    dims = {other.dim % tensor.ndim for other in shards}
    if len(shards) == len(placed) > 1 and len(dims) == 1:
        counts = [other[1] for other, _ in placed if not isinstance(other, str)]
        strides = [other[2] for other, _ in placed if not isinstance(other, str)]
        in_order = strides == sorted(strides, reverse=True) and strides[-1] == 1
        first, *others = shards
        if in_order and math.prod(counts) == size and not any(map(_is_strided, others)):
            if not _is_strided(first):
                return Shard(dims.pop())
            if first.split_factor == size // counts[0]:  # FSDP2 splits what others split before
                order = tuple(
                    i % first.split_factor * counts[0] + i // first.split_factor
                    for i in range(size)
                )
                return Shard(dims.pop(), order=order)
    raise _not_gathered(tensor, site)


def axis_names(tensor: Any, mesh: Mesh, site: str) -> set[str]:
    """Return our axes that a DTensor's mesh covers, in full or in part; none for other tensors.
    Local.
    """
    if not is_dtensor(tensor):
        return set()
    axes = axes_of(tensor.device_mesh, mesh, site)
    return {name for axis in axes for name in _names(axis)}


def is_whole_along_dp(tensor: Any, mesh: Mesh) -> bool:
    """Whether a DTensor's mesh covers dp, along all of which it is replicated. Local."""
    if not is_dtensor(tensor):
        return False
    placed = zip(_axes_of(tensor.device_mesh, mesh)[0], tensor.placements)
    along = {axis: placement.is_replicate() for axis, placement in placed if "dp" in _names(axis)}
    parts = math.prod(axis[1] for axis in along if isinstance(axis, tuple))
    is_covered = "dp" in along or BOTH in along or parts == mesh.dp_size
    return mesh.dp_size > 1 and is_covered and all(along.values())


def plain_and_stated(
    tensor: Any, mesh: Mesh, site: str, *, by_fsdp2: bool = False
) -> tuple[Tensor, tuple[Placement | None, Placement | None], ShardLayout | None]:
    """Return this rank's plain tensor, in the graph; the placements along dp and tp that a DTensor
    states (None for an axis that its mesh does not cover); its layout if both are stated. Local;
    collective over the mesh of a DTensor of which a mean, a maximum or a minimum is due.
    """
    if type(tensor) is Tensor:
        return tensor, (None, None), None
    if not is_dtensor(tensor):
        return wait(tensor), (None, None), None
    if any(_is_mean_or_extreme(one) for one in tensor.placements):
        tensor = without_partial(tensor)  # of equal values, as an edit leaves them, it is the value
    own = layout(tensor, mesh, site, by_fsdp2=by_fsdp2)
    axes = axis_names(tensor, mesh, site)
    has_dp, has_tp = mesh.dp_size == 1 or "dp" in axes, mesh.tp_size == 1 or "tp" in axes
    stated = own.dp if has_dp else None, own.tp if has_tp else None
    return to_local(tensor), stated, own if has_dp and has_tp else None


def _is_mean_or_extreme(placement: Any) -> bool:
    return type(placement).__name__ == "Partial" and placement.reduce_op in ("avg", "max", "min")


def to_local(tensor: Any) -> Tensor:
    """Return a DTensor's shard on this rank as a plain tensor, in the graph; others unchanged."""
    return wait(tensor.to_local()) if is_dtensor(tensor) else tensor


def like(shard: Tensor, tensor: Any) -> Tensor:
    """Return ``shard`` as a DTensor with the mesh, placements and shape of ``tensor``, in the
    graph; itself, if that is none. Local.
    """
    if not is_dtensor(tensor):
        return shard
    return type(tensor).from_local(
        shard,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tuple(math.prod(tensor.shape[i + 1 :]) for i in range(tensor.ndim)),
    )


def without_partial(tensor: Any) -> Any:
    """Return a DTensor with partial placements reduced, and others unchanged. Collective over its
    mesh if any are.
    """
    if not is_dtensor(tensor) or not any(one.is_partial() for one in tensor.placements):
        return tensor
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    reduced = [replicate if one.is_partial() else one for one in tensor.placements]
    return tensor.redistribute(placements=reduced)
