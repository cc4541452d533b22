"""The meshes that the parts of a sharded model, and its framework's state, provide. All local."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from flex_model.distributed.mesh import (
    AXIS_OF_DIM,
    Mesh,
    dim_of_group,
    group_ranks,
    is_foreign,
    known_axes,
    may_have_rows,
    names_of_dims,
)
from flex_model.integrations import fsdp1, fsdp2, refused, transformers_private
from flex_model.integrations.dtensor import is_dtensor
from flex_model.integrations.torch_private import root_mesh
from flex_model.names import clean


@dataclass(frozen=True)
class Source:
    """A mesh, or a part of it, that one part of a model provides.

    Attributes:
        name: The part of the model, for messages.
        mesh: The mesh; an axis that is not known has size 1.
        is_exact: Whether the whole mesh was read, not only the groups of this rank.
    """

    name: str
    mesh: Mesh
    is_exact: bool = True


def find_all(root: nn.Module) -> tuple[list[Source], list[str], list[str]]:
    """Return all meshes that a model provides, and in words: the meshes that can't be read, and the
    groups that exist but are not accessible.

    Raises:
        ValueError: this rank is not one of the model's, or the model is context parallel.
    """
    refused.check_context_parallel(root)
    unknown: list[str] = []
    hidden: list[str] = []
    sources = [
        *_dtensor_meshes(root, unknown),
        *_hugging_face_mesh(root),
        *_wrapper_groups(root, hidden),
        *_megatron_groups(root),
        *_fairscale_groups(root),
    ]
    return sources, unknown, hidden


def axes_of_dims(
    names: Sequence[str] | None, sizes: Sequence[int], *, is_fsdp2: bool, replicates_first: bool
) -> tuple[str, ...] | None:
    """Return our axis for each dim of a parameter's mesh; None if it can't be inferred. Pure.

    Args:
        names: Names of the dims; dims of size 1 may have any name.
        is_fsdp2: Whether FSDP2 manages the parameter: its dims come before those of tensor
            parallelism.
        replicates_first: Whether the parameter is replicated along the first dim, as under HSDP,
            and never under plain FSDP2.
    """
    counts = [size > 1 for size in sizes]
    known = [AXIS_OF_DIM.get(name.lower()) for name in names or ()]
    if names is not None and all(axis or not big for axis, big in zip(known, counts)):
        return tuple(axis or "dp" for axis in known)
    if any(big and is_foreign(name) for name, big in zip(names or (), counts)):
        return None
    if is_fsdp2:
        num_dp = 2 if replicates_first and len(sizes) > 1 else 1
        axes = ("dp",) * num_dp + ("tp",) * (len(sizes) - num_dp)
    else:
        axes = ("tp",) * len(sizes)
    dims = zip(names or [""] * len(sizes), known or axes, axes, counts)
    fits = all(
        not big or (axis == (other or axis) and (axis == "tp" or may_have_rows(name)))
        for name, other, axis, big in dims
    )
    num_tp = sum(axis == "tp" and big for axis, big in zip(axes, counts))
    return axes if fits and num_tp <= 1 else None


def why_once(root: nn.Module) -> str:
    """Return why the second derivatives of a sharded model would be wrong: its framework's own
    collectives have none, or lose them without an error. Empty if they are not known to be.
    """
    found = ""
    for module in root.modules():
        if fsdp1.is_fsdp1(module) or fsdp2.is_fsdp2(module):
            return "FSDP frees its weights after the first backward" + _WITHOUT
        if transformers_private.device_mesh(module) is not None:
            found = "transformers"
        elif any(is_dtensor(parameter) for parameter in module.parameters(recurse=False)):
            found = found or "DTensor"
    for package in ("megatron.core", "fairscale"):
        found = package if any(_layers(root, f"{package}.")) else found
    return f"the collectives of {found} have no second derivative{_WITHOUT}" if found else ""


_WITHOUT = "; use DDP, or one process, for it"


def _dtensor_meshes(root: nn.Module, unknown: list[str]) -> Iterator[Source]:
    """Yield a source for each mesh of DTensor parameters; append unreadable ones to ``unknown``."""
    module: Any
    for module in filter(fsdp2.is_fsdp2, root.modules()):
        module.reshard()  # its parameters may be unsharded after a forward; not collective
    managed = fsdp2.managed_parameters(root)
    seen, names = set(), {}
    parameter: Any
    for name, parameter in root.named_parameters():
        if not is_dtensor(parameter):
            continue
        name = clean(root, name)
        device_mesh, origin = parameter.device_mesh, managed.get(id(parameter))
        if (device_mesh, id(origin)) not in names:
            names[device_mesh, id(origin)] = names_of_dims(device_mesh, origin)
        axes = axes_of_dims(
            names[device_mesh, id(origin)],
            device_mesh.shape,
            is_fsdp2=id(parameter) in managed,
            replicates_first=parameter.placements[0].is_replicate(),
        )
        if (device_mesh, axes) in seen:
            continue
        seen.add((device_mesh, axes))
        if axes is None:
            unknown.append(
                f"the parameter {name!r} is a DTensor on a {device_mesh.ndim}-D mesh with dims "
                f"{device_mesh.mesh_dim_names}"
            )
            continue
        kind = "FSDP2" if id(parameter) in managed else "DTensor"
        yield Source(f"{kind} parameter {name!r}", Mesh.from_table(device_mesh.mesh, axes))


def _hugging_face_mesh(root: nn.Module) -> Iterator[Source]:
    """Yield the mesh that ``from_pretrained(distributed_config=...)`` keeps on a model."""
    for module in root.modules():
        mesh = transformers_private.device_mesh(module)
        if mesh is not None and not fsdp1.is_fsdp1(module):
            axes = known_axes(mesh)
            if all(axes):
                yield Source("Hugging Face's _device_mesh", Mesh.from_table(mesh.mesh, axes))


def _wrapper_groups(root: nn.Module, hidden: list[str]) -> Iterator[Source]:
    """Yield the groups of DDP and FSDP1, and the root mesh of a mesh that was passed to them.
    Append to ``hidden`` groups that are not accessible, or may have no rows of their own.
    """
    seen = set()
    module: Any
    for module in root.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            name, device_mesh = "DistributedDataParallel", getattr(module, "device_mesh", None)
        elif fsdp1.is_fsdp1(module):
            name, device_mesh = "FSDP1", getattr(module, "_device_mesh", None)
        else:
            continue
        dims = [(dim_of_group(module.process_group), module.process_group.size())]
        if device_mesh is not None:
            dims = list(zip(names_of_dims(device_mesh) or (), device_mesh.shape))  # refuses cp
        foreign = [dim for dim, size in dims if size > 1 and not may_have_rows(dim)]
        if foreign:
            hidden.append(f"{name} is over the mesh dim {foreign[0]!r}, which may hold no rows")
            continue
        strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
        is_hybrid, me = "HYBRID" in strategy, dist.get_rank()
        ranks = group_ranks(module.process_group)
        if is_hybrid:
            # Torch has no public attribute for the replication group.
            between = getattr(module, "_inter_node_pg", None)
            if between is None:
                hidden.append(f"FSDP1 with {strategy} does not expose the group it replicates over")
                continue
            replicas, world_size = group_ranks(between), dist.get_world_size()
            ranks = Mesh.from_lines((me,), replicas, ranks, me, world_size).ranks
        if ranks not in seen:
            seen.add(ranks)
            mesh = Mesh(ranks, ranks.index(me), dp_size=len(ranks))
            yield Source(name, mesh, is_exact=not is_hybrid)
        # They turn DTensors of a tensor-parallel mesh into plain tensors, but the root of their own
        # mesh still has the tp dim.
        whole = root_mesh(device_mesh)
        if whole is not None and whole != device_mesh and whole not in seen:
            seen.add(whole)
            axes = known_axes(whole)
            if all(axes) and "pp" not in axes:
                yield Source(f"the mesh of {name}", Mesh.from_table(whole.mesh, axes))


def _megatron_groups(root: nn.Module) -> Iterator[Source]:
    """Yield Megatron-core's parallel state if its layers use it, else the groups of the layers."""
    layers = list(_layers(root, "megatron.core."))
    if not layers:
        return
    groups = (getattr(layer, "tp_group", None) for layer in layers)
    of_layers = {group_ranks(group) for group in groups if isinstance(group, dist.ProcessGroup)}
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        tp = group_ranks(state.get_tensor_model_parallel_group())
        if not of_layers or tp in of_layers:  # experts may have another group
            num_context = state.get_context_parallel_world_size()
            if num_context > 1:
                raise ValueError(
                    f"FlexModel: Megatron's context parallelism (size {num_context}) splits the "
                    "sequence over ranks, which is not supported; use context_parallel_size=1"
                )
            yield _from_lines(
                "Megatron's parallel_state",
                group_ranks(state.get_pipeline_model_parallel_group()),
                group_ranks(state.get_data_parallel_group()),
                tp,
            )
            return
    for ranks in of_layers:
        mesh = Mesh(ranks, ranks.index(dist.get_rank()), tp_size=len(ranks))
        yield Source("tp_group of Megatron's layers", mesh)


def _fairscale_groups(root: nn.Module) -> Iterator[Source]:
    """Yield fairscale's model-parallel state; its rank order is (dp, pp, tp)."""
    state = sys.modules.get("fairscale.nn.model_parallel.initialize")
    if state is None or not state.model_parallel_is_initialized():
        return
    if any(_layers(root, "fairscale.nn.model_parallel.")):
        yield _from_lines(
            "fairscale's model-parallel state",
            tuple(state.get_pipeline_parallel_ranks()),
            group_ranks(state.get_data_parallel_group()),
            group_ranks(state.get_model_parallel_group()),
        )


def _from_lines(name: str, pp: tuple[int, ...], dp: tuple[int, ...], tp: tuple[int, ...]) -> Source:
    return Source(name, Mesh.from_lines(pp, dp, tp, dist.get_rank(), dist.get_world_size()))


def _layers(root: nn.Module, package: str) -> Iterator[nn.Module]:
    """Yield the modules whose class, or a base of it, is from ``package``."""
    for module in root.modules():
        if any(cls.__module__.startswith(package) for cls in type(module).__mro__):
            yield module
