"""The mesh of one ``FlexModel``: its ranks on the axes pp, dp and tp; and the names of the dims of
a ``DeviceMesh``: torch's, Hugging Face's, accelerate's (``ParallelismConfig``) and torchtitan's.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flex_model.integrations.torch_private import root_mesh

AXES = ("pp", "dp", "tp")  # slowest first

# An axis of a mesh, or a part of one: ``(axis, count, stride)`` are the ``count`` ranks of it that
# are ``stride`` apart.
Axis = str | tuple[str, int, int]
GRID: tuple[Axis, ...] = ("dp", "tp")  # all ranks of a stage


@dataclass(frozen=True)
class Mesh:
    """The ranks of one ``FlexModel`` on the axes pp, dp and tp, and this process among them.

    Example::

        mesh = Mesh.from_sizes(tp_size=2, dp_size=2)      # 4 processes
        mesh.stage_ranks           # (0, 1, 2, 3): global ranks of this stage, tp fastest
        mesh.ranks_along(("tp",))  # [2, 3] on the second data-parallel rank: group ranks
        mesh.axis_ranks("dp")      # (0, 2) on the first tensor-parallel rank: global ranks

    Attributes:
        ranks: Global ranks in the order (pp, dp, tp), tp fastest.
        rank: This process's index in ``ranks``, by which messages name a rank.
        left_out: Global ranks of the data-parallel axis that this mesh leaves out, this one with
            them; FSDP shards weights over them, and they have other rows.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    left_out: tuple[int, ...] = ()

    @staticmethod
    def from_sizes(
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> Mesh:
        """Arrange the ranks of ``process_group`` (default: the world) as (pp, dp, tp). Local; no
        collective.

        Raises:
            ValueError: a size is below 1, or the sizes do not multiply to the number of ranks.
        """
        check_sizes(tp_size, pp_size, dp_size)
        ranks = group_ranks(process_group)
        if tp_size * pp_size * dp_size != len(ranks):
            raise ValueError(
                f"tensor_parallel_size ({tp_size}) x pipeline_parallel_size ({pp_size}) x "
                f"data_parallel_size ({dp_size}) = {tp_size * pp_size * dp_size}, but the process "
                f"group has {len(ranks)} rank{'s' * (len(ranks) > 1)}; give sizes that multiply to "
                f"{len(ranks)}, or a process_group or device_mesh of the ranks that hold the model"
            )
        return Mesh._of(ranks, pp_size, dp_size, tp_size)

    @staticmethod
    def from_device_mesh(device_mesh: dist.DeviceMesh) -> Mesh:
        """Take the axes from a ``DeviceMesh`` whose dims are named (``tp``, ``dp``, ``pp``,
        ``fsdp``, ...). Dims of size 1 are ignored. Local.
        """
        if not isinstance(device_mesh, dist.DeviceMesh):
            raise TypeError(
                f"FlexModel: device_mesh must be a DeviceMesh, got {type(device_mesh).__name__}; "
                'make it with init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
            )
        names, axes = names_of_dims(device_mesh), known_axes(device_mesh)
        if names is None:
            raise ValueError(
                "device_mesh must have named dims, so that tensor- and data-parallel axes can be "
                'told apart; make it with init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
            )
        if "" in axes:
            raise ValueError(
                f"device_mesh dim {names[axes.index('')]!r} is not a known axis; name the dims "
                f"after {sorted(AXIS_OF_DIM)}"
            )
        for dim, name in enumerate(names):
            if (device_mesh.mesh.diff(dim=dim) < 0).any():
                raise ValueError(
                    f"device_mesh dim {name!r} has ranks that are not in ascending order "
                    f"({device_mesh.mesh.tolist()}), and torch numbers the members of a group in "
                    "ascending order; make the mesh in ascending order along each dim"
                )
        return Mesh.from_table(device_mesh.mesh, axes)

    @staticmethod
    def from_table(table: Tensor, axes: Sequence[str]) -> Mesh:
        """Take the axes from a table of global ranks, one axis for each of its dims. Several dims
        of one axis are flattened, the first of them slowest. Local.

        Raises:
            ValueError: this rank is not in the table.
        """
        order = sorted(range(len(axes)), key=lambda i: (AXES.index(axes[i]), i))
        table = table.permute(order)
        sizes = {
            axis: math.prod(n for i, n in zip(order, table.shape) if axes[i] == axis)
            for axis in AXES
        }
        ranks = tuple(int(rank) for rank in table.flatten())
        return Mesh._of(ranks, sizes["pp"], sizes["dp"], sizes["tp"])

    @staticmethod
    def from_lines(
        pp: tuple[int, ...], dp: tuple[int, ...], tp: tuple[int, ...], me: int, world_size: int
    ) -> Mesh:
        """Derive the mesh from the groups that one rank is in, each in the order of its axis.

        The other groups of an axis are assumed to be this rank's, shifted. That holds wherever
        consecutive ranks are numbered through the axes, in any order: fairscale's (dp, pp, tp),
        every ``order`` of Megatron's. Then all ranks derive the same mesh without communication.
        Local; no collective.

        Args:
            pp, dp, tp: Global ranks of the groups, ``(me,)`` for an axis of one rank.
            me: The global rank they were read on.
            world_size: Number of global ranks.

        Raises:
            ValueError: this rank is not in one of its groups, or the groups form no regular grid.
        """
        ranks = tuple(stage + row + column - 2 * me for stage in pp for row in dp for column in tp)
        regular = len(set(ranks)) == len(ranks) and min(ranks) >= 0 and max(ranks) < world_size
        if not regular or any(me not in line for line in (pp, dp, tp)):
            raise ValueError(
                f"global rank {me} is in the groups pp {list(pp)}, dp {list(dp)} and tp "
                f"{list(tp)}, which are not a regular grid of the {world_size} ranks; give "
                'device_mesh= with dims named "dp" and "tp"'
            )
        return Mesh(ranks, ranks.index(me), len(pp), len(dp), len(tp))

    @staticmethod
    def _of(ranks: tuple[int, ...], pp_size: int, dp_size: int, tp_size: int) -> Mesh:
        me = dist.get_rank() if is_distributed() else 0
        if me not in ranks:
            raise ValueError(
                f"global rank {me} is not one of the ranks of this model, {list(ranks)}; wrap the "
                "model on its own ranks only"
            )
        return Mesh(ranks, ranks.index(me), pp_size, dp_size, tp_size)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        stage, place = divmod(self.rank, self.dp_size * self.tp_size)
        return {"pp": stage, "dp": place // self.tp_size, "tp": place % self.tp_size}

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Global ranks of this pipeline stage, in the order (dp, tp), tp fastest."""
        size = self.dp_size * self.tp_size
        start = self.rank // size * size
        return self.ranks[start : start + size]

    @property
    def group_rank(self) -> int:
        """This rank's index in ``stage_ranks``."""
        return self.rank % (self.dp_size * self.tp_size)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return {"pp": self.pp_size, "dp": self.dp_size, "tp": self.tp_size}[axis]

    def rank_at(self, place: int) -> int:
        """The index in ``ranks``, by which messages name a rank, of an index in ``stage_ranks``."""
        return self.rank - self.group_rank + place

    def axis_ranks(self, axis: str) -> tuple[int, ...]:
        """Global ranks along this rank's "pp", "dp" or "tp" axis, in the order of the axis."""
        if axis == "pp":
            return self.ranks[self.group_rank :: len(self.stage_ranks)]
        return tuple(self.stage_ranks[place] for place in self.ranks_along((axis,)))

    def ranks_along(self, axes: tuple[Axis, ...], place: int | None = None) -> list[int]:
        """Group ranks (indices in ``stage_ranks``) of those that differ from ``place`` (default:
        this rank) along ``axes`` only.
        """
        dp, tp = divmod(self.group_rank if place is None else place, self.tp_size)
        rows, columns = [dp], [tp]
        for axis in axes:
            name, count, stride = axis if isinstance(axis, tuple) else (axis, None, 1)
            if name == "dp":
                rows = _along(dp, self.dp_size, count, stride)
            else:
                columns = _along(tp, self.tp_size, count, stride)
        return [row * self.tp_size + column for row in rows for column in columns]

    def equal_along(self, axis: str, of_ranks: Sequence[Any]) -> bool:
        """Whether ranks of the stage that differ along ``axis`` only have equal values."""
        return len(set(of_ranks)) == 1 or all(
            one == of_ranks[self.ranks_along((axis,), place)[0]]
            for place, one in enumerate(of_ranks)
        )

    def of_own_batch(self) -> Mesh:
        """Return the mesh of the ranks that share this rank's batch: its tensor-parallel group, in
        each pipeline stage.
        """
        if self.dp_size == 1:
            return self
        dp, me = self.coordinates["dp"], self.ranks[self.rank]
        ranks = tuple(
            rank for i, rank in enumerate(self.ranks) if i // self.tp_size % self.dp_size == dp
        )
        left_out = self.axis_ranks("dp")
        return Mesh(ranks, ranks.index(me), self.pp_size, 1, self.tp_size, left_out)

    def describe(self) -> str:
        """``pp 1 x dp 2 x tp 2``, for messages."""
        return f"pp {self.pp_size} x dp {self.dp_size} x tp {self.tp_size}"


def _along(index: int, size: int, count: int | None, stride: int) -> list[int]:
    if count is None:
        return list(range(size))
    first = index - index // stride % count * stride
    return [first + i * stride for i in range(count)]


def check_sizes(tp_size: int, pp_size: int, dp_size: int) -> None:
    """Raise ValueError where a size is not an int of at least 1."""
    for name, size in (("tensor", tp_size), ("pipeline", pp_size), ("data", dp_size)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}_parallel_size must be an int of at least 1, got {size!r}")


def is_distributed() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def initialize_from_launcher() -> None:
    """Initialise torch.distributed where a launcher started several processes, unless it is."""
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if (
        dist.is_available()
        and not dist.is_initialized()
        and started
        and int(os.environ["WORLD_SIZE"]) > 1
    ):
        dist.init_process_group()


def group_ranks(process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of a process group; ``(0,)`` where torch.distributed is not initialised."""
    is_left_out = dist.is_available() and process_group == dist.GroupMember.NON_GROUP_MEMBER
    if not is_left_out and not isinstance(process_group, (dist.ProcessGroup, type(None))):
        raise TypeError(
            "FlexModel: process_group must be a torch.distributed.ProcessGroup, got "
            f"{type(process_group).__name__}; make it with torch.distributed.new_group(ranks)"
        )
    if not is_distributed():
        if process_group is not None:
            raise ValueError(
                "a process_group was given, but torch.distributed is not initialised; call "
                "init_process_group first"
            )
        return (0,)
    if process_group is None:
        return tuple(range(dist.get_world_size()))
    if is_left_out:
        raise ValueError(
            "this rank is not a member of the process_group given; wrap the model on the group's "
            "ranks only"
        )
    return tuple(dist.get_process_group_ranks(process_group))


# ---- Names of the dims of DeviceMeshes -----------------------------------------------------------

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

# Words that say nothing of what the ranks of a dim hold, and more words for rows.
_NEUTRAL = {
    *("world", "global", "local", "all", "default", "mesh", "dim", "axis", "rank", "ranks"),
    *("device", "devices", "gpu", "gpus", "node", "nodes", "host", "hosts", "inter", "intra"),
    *("outer", "inner", "row", "rows", "rep", "replica", "replicas", "replicated", "sharded"),
    "zero",
}


def may_have_rows(name: str) -> bool:
    """Whether the ranks of a dim of this name, which FSDP or DDP is over, have rows of their own.

    Both are also used over ranks that hold parts of a sequence, an image or a domain, whose names
    no list can hold. So the names that are taken for rows are those of our axes, and those that say
    nothing, as no name does; others are refused, since ``device_mesh=`` settles them in one line.
    """
    known = _NEUTRAL | AXIS_OF_DIM.keys()
    return all(len(word) == 1 or word in known for word in _words(name))


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
    return tuple(
        "dp" if _CONTEXT.intersection(_words(name)) and _is_of_rows(line, groups) else name
        for name, line in zip(names, lines)
    )


def known_axes(device_mesh: dist.DeviceMesh) -> tuple[str, ...]:
    """Return our axis for each dim of a mesh; "" for one whose name is not known. Local."""
    names = names_of_dims(device_mesh) or ("",) * device_mesh.ndim
    return tuple(
        "dp" if size == 1 else AXIS_OF_DIM.get(name.lower(), "")
        for name, size in zip(names, device_mesh.shape)
    )


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
    return set(re.findall("[a-z]+", name.lower())) - {"parallel"}


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
        name = dim_of_group(group)
        if name:
            yield name, tuple(dist.get_process_group_ranks(group))


def dim_of_group(group: dist.ProcessGroup) -> str:
    """Return the name of the mesh dim that a group was made for; "" if it was made for none."""
    kind, _, name = group.group_desc.partition("_")
    return name if kind == "mesh" else ""


def _line(mesh: dist.DeviceMesh, dim: int) -> tuple[int, ...]:
    """This rank's group along a dim; all ranks of the mesh if this rank is not in the mesh."""
    table = mesh.mesh
    places = (table == dist.get_rank()).nonzero()
    if len(places) == 0:
        return tuple(table.flatten().tolist())
    index: list[Any] = places[0].tolist()
    index[dim] = slice(None)
    return tuple(table[tuple(index)].tolist())
