"""Reads the dims of a ``DeviceMesh``: their names, and the dims that they were flattened from.

The names are torch's, Hugging Face's, accelerate's (``ParallelismConfig``) and torchtitan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from flex_model.integrations.torch_private import root_mesh

# Names of dims with data-parallel ranks that never include context-parallel ones; "fsdp" may.
_ROWS = {"dp", "data", "batch", "ddp", "replicate", "dp_replicate", "dp_shard"}

# Names that device meshes give to their dims, and our axis for each.
AXIS_OF_DIM = {
    "pp": "pp",
    "pipeline": "pp",
    "tp": "tp",
    "tensor": "tp",
    "model": "tp",
    **dict.fromkeys((*_ROWS, "fsdp", "hsdp", "shard"), "dp"),
}

# Words in the names of dims that split the sequence, alone or with others ("dp_shard_cp").
_CONTEXT = {"cp", "context", "ulysses", "ring"}
# Words in the names of dims that none of our axes stands for.
_FOREIGN = _CONTEXT | {"sp", "sequence", "ep", "etp", "efsdp", "expert"}


def is_foreign(name: str) -> bool:
    """Whether a dim of this name splits the sequence or the experts, which our axes don't."""
    return bool(_FOREIGN.intersection(_words(name)))


def names_of_dims(
    device_mesh: dist.DeviceMesh, origin: dist.DeviceMesh | None = None
) -> tuple[str, ...] | None:
    """Return the names of a mesh's dims. A dim flattened from data- and context-parallel dims
    (``dp_shard_cp``) is "dp" if it has no context-parallel ranks. Local.

    Args:
        origin: The mesh from which this one was made, if it is another.

    Raises:
        ValueError: this mesh, or the mesh that it is a part of, has a context-parallel dim.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        return None
    groups = list(_groups(device_mesh if origin is None else origin))
    lines = [_line(device_mesh, dim) for dim in range(device_mesh.ndim)]
    for name, ranks in groups:
        if len(ranks) > 1 and _CONTEXT.issuperset(_words(name)):
            inside = [
                other
                for other, line in zip(names, lines)
                if other != name and set(ranks) <= set(line)
            ]
            raise ValueError(_refusal(name, len(ranks), inside))
    found = []
    for name, line in zip(names, lines):
        if _CONTEXT.intersection(_words(name)) and _is_of_rows(line, groups):
            name = "dp"
        found.append(name)
    return tuple(found)


def _refusal(name: str, size: int, inside: list[str]) -> str:
    within = f", a part of {inside[0]!r}," if inside else ""
    return (
        f"FlexModel: the mesh dim {name!r}{within} splits the sequence over {size} ranks: context "
        "parallelism is not supported; shard the model over a mesh without it, or of size 1"
    )


def _is_of_rows(line: tuple[int, ...], groups: list[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether all these ranks are in one group of data-parallel ranks, so that rows differ."""
    return any(name.lower() in _ROWS and set(line) <= set(ranks) for name, ranks in groups)


def _words(name: str) -> set[str]:
    return set(name.lower().split("_")) - {"parallel"}


def _groups(device_mesh: dist.DeviceMesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield this rank's groups, with the names of their dims, in a mesh, in its root mesh, and in
    all meshes made from that. torch has no public function for these.
    """
    root = root_mesh(device_mesh) or device_mesh
    flattened = getattr(root, "_flatten_mapping", {}).values()
    for mesh in (device_mesh, root, *flattened):
        for dim, name in enumerate(mesh.mesh_dim_names or ()):
            yield name, _line(mesh, dim)
    for group in getattr(root, "_pg_registry", {}).values():
        kind, _, name = group.group_desc.partition("_")
        if kind == "mesh":
            yield name, tuple(dist.get_process_group_ranks(group))


def _line(mesh: dist.DeviceMesh, dim: int) -> tuple[int, ...]:
    """This rank's group along a dim; all ranks of the mesh if this rank is not in the mesh."""
    table = mesh.mesh
    places = (table == dist.get_rank()).nonzero()
    if len(places) == 0:
        return tuple(table.flatten().tolist())
    index: list[Any] = places[0].tolist()
    index[dim] = slice(None)
    return tuple(table[tuple(index)].tolist())
