"""The mesh that a model was sharded over, read from the model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from flex_model.distributed.mesh import AXIS_OF_DIM, Mesh, group_ranks
from flex_model.integrations import fsdp
from flex_model.integrations.dtensor import is_dtensor


def find(root: nn.Module) -> Mesh | None:
    """The mesh of a sharded model: of its DTensors, its Hugging Face ``_device_mesh``, its DDP or
    FSDP1 wrapper.

    None where the model says nothing. Local.

    Raises:
        ValueError: what it says can't be laid out as (dp, tp).
    """
    device_mesh = _device_mesh(root)
    group = fsdp.data_parallel_group(root)
    if device_mesh is None:
        if group is None:
            return None
        ranks = group_ranks(group)
        return Mesh(ranks, ranks.index(dist.get_rank()), dp_size=len(ranks))
    mesh = _from_device_mesh(root, device_mesh)
    if group is None or dist.get_world_size(group) == 1:
        return mesh
    return _with_data_parallel(mesh, group_ranks(group))


def _device_mesh(root: nn.Module) -> Any:
    """The largest mesh that a DTensor parameter lives on, or the one a Hugging Face model keeps."""
    best = None
    parameter: Any
    for parameter in root.parameters():
        mesh = parameter.device_mesh if is_dtensor(parameter) else None
        if mesh is not None and (best is None or mesh.size() > best.size()):
            best = mesh
    if best is not None:
        return best
    for module in root.modules():
        mesh = getattr(module, "_device_mesh", None)
        if isinstance(mesh, dist.DeviceMesh):
            return mesh
    return None


def _from_device_mesh(root: nn.Module, device_mesh: Any) -> Mesh:
    names = device_mesh.mesh_dim_names
    if names is not None and all(name.lower() in AXIS_OF_DIM for name in names):
        return Mesh.from_device_mesh(device_mesh)
    if device_mesh.ndim > 1:
        raise ValueError(
            f"the model's DTensors live on a {device_mesh.ndim}-D mesh whose dims {names} are not "
            "known axes; "
            'give device_mesh= with dims named "dp" and "tp"'
        )
    ranks = tuple(int(rank) for rank in device_mesh.mesh.flatten())
    place = ranks.index(dist.get_rank())
    if any(fsdp.is_fsdp2(module) for module in root.modules()):
        return Mesh(ranks, place, dp_size=len(ranks))
    return Mesh(ranks, place, tp_size=len(ranks))


def _with_data_parallel(mesh: Mesh, ranks: tuple[int, ...]) -> Mesh:
    """A tensor-parallel model inside DDP or FSDP1: ranks of one tp group are consecutive, or we do
    not guess.
    """
    size = mesh.tp_size * len(ranks)
    me = dist.get_rank()
    start = me - me % mesh.tp_size
    regular = (
        mesh.dp_size == 1
        and tuple(sorted(mesh.ranks)) == tuple(range(start, start + mesh.tp_size))
        and tuple(sorted(ranks)) == tuple(range(me % mesh.tp_size, size, mesh.tp_size))
    )
    if not regular:
        raise ValueError(
            f"the model is tensor-parallel over ranks {list(mesh.ranks)} and data-parallel over "
            f"ranks {list(ranks)}, "
            'which is not the order (dp, tp); give device_mesh= with dims named "dp" and "tp"'
        )
    return Mesh(tuple(range(size)), me, dp_size=len(ranks), tp_size=mesh.tp_size)
