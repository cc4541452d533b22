"""The mesh of a FlexModel: the user's arguments, completed from the meshes of a sharded model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import AXES, AXIS_OF_DIM, Mesh, check_sizes, group_ranks
from flex_model.integrations import mesh_sources, transformers_private
from flex_model.integrations.mesh_sources import Source


@dataclass(frozen=True)
class ModelGroups:
    """The groups of this rank, as the model's own meshes state them.

    Attributes:
        lines: The global ranks of this rank's group along each axis of more than one rank.
        names: The part of the model that states it, by axis.
        exact: The whole meshes that were read.
        unknown: A mesh of the model that could not be read, in words; else empty.
        hidden: A group of the model that is not accessible, in words; else empty.
    """

    lines: dict[str, tuple[int, ...]]
    names: dict[str, str]
    exact: tuple[Mesh, ...] = ()
    unknown: str = ""
    hidden: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis; 1 if it is not known."""
        return {axis: len(self.lines.get(axis, (0,))) for axis in AXES}

    def describe(self) -> str:
        """Return ``tp over ranks [0, 1] (fc1.weight), dp over ranks [0, 2] (...)``."""
        return ", ".join(
            f"{axis} over ranks {list(line)} ({self.names[axis]})"
            for axis, line in sorted(self.lines.items(), key=lambda item: -AXES.index(item[0]))
        )

    def check(self, mesh: Mesh, given: str) -> None:
        """Check that ``mesh`` has the model's groups. Local.

        Args:
            given: The user's argument, for the message.

        Raises:
            ValueError: it has other groups.
        """
        differ = [axis for axis, line in self.lines.items() if mesh.axis_ranks(axis) != line]
        # A dp group defines which ranks have rows, not their order: torch sorts its ranks.
        if "dp" in differ and set(mesh.axis_ranks("dp")) == set(self.lines["dp"]):
            differ.remove("dp")
        if differ:
            ours = ", ".join(
                f"{axis} over ranks {list(mesh.axis_ranks(axis))}" for axis in self.lines
            )
            raise ValueError(
                f"FlexModel: {given}: {mesh.describe()}, which puts global rank "
                f"{mesh.ranks[mesh.rank]} in {ours}; but the model itself is sharded as "
                f"{self.describe()}; leave the sizes out, or give a device_mesh with the model's "
                "groups"
            )

    def mesh(self, timeout_s: float) -> Mesh:
        """Return the whole mesh. Local if one source has it all; else collective over the groups of
        this rank.

        Raises:
            ValueError: the model's mesh can't be read, or its groups form no regular grid; on
                every rank.
        """
        if not self.lines:
            raise ValueError(
                f"FlexModel: {self.unknown}, which are not known axes (tp, dp, pp); give "
                'device_mesh= with dims named "dp" and "tp"'
            )
        sizes = self.sizes
        for mesh in self.exact:
            if mesh.num_ranks == math.prod(sizes.values()) and all(
                mesh.axis_ranks(axis) == line for axis, line in self.lines.items()
            ):
                return mesh
        me = dist.get_rank()
        pp, dp, tp = (self.lines.get(axis, (me,)) for axis in AXES)
        error = None
        try:
            found = Mesh.from_lines(pp, dp, tp, me, dist.get_world_size())
        except ValueError as irregular:
            found, error = None, irregular
        if not is_agreed(() if found is None else found.ranks, (tp, dp, pp), timeout_s):
            raise ValueError(
                f"FlexModel: the model is sharded as {self.describe()}, and these groups make no "
                'regular grid of ranks; give the device_mesh= whose dims "dp" and "tp" they are, '
                "or, if no mesh has them all, shard the model over the dims of one mesh"
            ) from error
        assert found is not None  # is_agreed is False for an empty grid
        return found


def find(root: nn.Module, stages: Sequence[Source] = ()) -> ModelGroups | None:
    """Return the groups that a sharded model states; None if it states none.

    The sources are the meshes of its DTensor parameters (torch's and Hugging Face's tensor
    parallelism, FSDP2, HSDP), Hugging Face's ``_device_mesh``, the groups of DDP and FSDP1
    wrappers, and, for layers of Megatron-core or fairscale, the groups of their parallel state.
    Local.

    Args:
        stages: The sources of its pipeline's stages.

    Raises:
        ValueError: this rank is not one of the model's; two sources contradict each other; or the
            model is context parallel.
    """
    sources, unknown, hidden = mesh_sources.find_all(root)
    sources = [*sources, *stages]
    lines, names = merge(sources)
    if not lines and not unknown and not hidden:
        return None
    exact = tuple(source.mesh for source in sources if source.is_exact)
    first = (found[0] if found else "" for found in (unknown, hidden))
    return ModelGroups(lines, names, exact, *first)


def choose(
    own: ModelGroups | None,
    sizes: tuple[int, int, int],
    process_group: dist.ProcessGroup | None,
    device_mesh: dist.DeviceMesh | None,
    timeout_s: float,
) -> Mesh:
    """Return the mesh that the user gave, completed from the model's own groups.

    Args:
        own: The model's own groups.
        sizes: (tp, pp, dp); sizes of 1 are taken from the model.

    Local, or collective as ``ModelGroups.mesh`` is.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks, or the user's arguments
            contradict the model's own groups or each other.
    """
    check_sizes(*sizes)
    ranks = group_ranks(process_group)
    if device_mesh is not None:
        mesh = Mesh.from_device_mesh(device_mesh)
        found = (mesh.tp_size, mesh.pp_size, mesh.dp_size)
        if sizes != (1, 1, 1) and sizes != found:
            raise ValueError(
                f"FlexModel: sizes (tp, pp, dp) = {sizes} contradict the device_mesh, which has "
                f"{found}"
            )
        if process_group is not None and set(ranks) != set(mesh.ranks):
            raise ValueError(
                f"FlexModel: the process_group has ranks {list(ranks)}, but the device_mesh "
                f"{list(mesh.ranks)}; give one of them"
            )
        if own is not None:
            own.check(mesh, "the device_mesh gives")
        return mesh
    if own is not None and own.hidden:
        raise ValueError(
            f"FlexModel: {own.hidden}; give device_mesh= with dims named after "
            f"{sorted(AXIS_OF_DIM)}, such as dp_replicate and dp_shard"
        )
    has_ranks = sizes != (1, 1, 1) or process_group is not None
    if own is None or (has_ranks and not own.lines):
        return Mesh.from_sizes(*sizes, process_group)
    if not has_ranks:
        mesh = own.mesh(timeout_s)
        if mesh.tp_size == mesh.pp_size == 1 and mesh.num_ranks < len(ranks):
            raise ValueError(
                f"FlexModel: the model has a dp group of ranks {list(mesh.ranks)}, but it does not "
                f"state the axes of the other ranks of {list(ranks)}; give a process_group of its "
                "ranks if it is not sharded otherwise, or tensor_parallel_size"
            )
        return mesh
    return _fill_in(own, sizes, ranks, process_group, timeout_s)


def _fill_in(
    own: ModelGroups,
    sizes: tuple[int, int, int],
    ranks: tuple[int, ...],
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
) -> Mesh:
    given = dict(zip(("tp", "pp", "dp"), sizes))
    filled = {axis: max(given[axis], size) for axis, size in own.sizes.items()}
    num_own = math.prod(own.sizes.values())
    differ = any(1 < given[axis] != size > 1 for axis, size in own.sizes.items())
    if differ or math.prod(filled.values()) != len(ranks):
        raise ValueError(
            f"FlexModel: sizes (tp, pp, dp) = {sizes} over the ranks {list(ranks)} contradict the "
            f"model itself, which is sharded as {own.describe()}; sizes left at 1 are taken from "
            "the model, and all multiply to the number of ranks"
        )
    if num_own < len(ranks):
        mesh = Mesh.from_sizes(filled["tp"], filled["pp"], filled["dp"], process_group)
        own.check(mesh, "sizes and process_group give")
        return mesh
    mesh = own.mesh(timeout_s)
    if set(mesh.ranks) != set(ranks):
        raise ValueError(
            f"FlexModel: the process_group has ranks {list(ranks)}, but the model itself is "
            f"sharded as {own.describe()}"
        )
    return mesh


def pipeline_refusal(module: nn.Module, pp_size: int) -> str:
    """Return the error text for stages without a schedule: why, and what to wrap instead."""
    if any(transformers_private.pipeline_stage(part) is not None for part in module.modules()):
        return (
            f"FlexModel: a model loaded with pp_size={pp_size} is inside a "
            f"{type(module).__name__}, and its stages are run by the model that from_pretrained "
            "returned; wrap that one"
        )
    return (
        f"pipeline_parallel_size is {pp_size}, but a module alone does not define when its stages "
        "run; split the whole model with flex_model.pipelining.pipeline(...), or into stages by "
        "hand, and wrap the torch.distributed.pipelining schedule that runs them: "
        "FlexModel(schedule, output_ptr); or shard the model without a pipeline"
    )


def merge(sources: Sequence[Source]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return this rank's group along each axis from all sources, and the name of its source. Pure.

    Along dp the largest group counts: some layers may be sharded over only a part of the ranks
    that have their own rows of the batch.

    Raises:
        ValueError: two sources contradict each other.
    """
    lines: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for source in sources:
        for axis in AXES:
            line = source.mesh.axis_ranks(axis)
            known = lines.get(axis, line)
            if len(line) == 1:
                continue
            smaller, larger = sorted((line, known), key=len)
            if line != known and (axis != "dp" or not set(smaller) < set(larger)):
                raise ValueError(
                    f"FlexModel: the model contradicts itself: {axis} is over ranks {list(known)} "
                    f"by {names[axis]}, and over ranks {list(line)} by {source.name}"
                )
            if axis not in lines or len(line) > len(known):
                lines[axis], names[axis] = line, source.name
    return lines, names


def is_agreed(ranks: tuple[int, ...], lines: Sequence[tuple[int, ...]], timeout_s: float) -> bool:
    """Whether all ranks computed the same grid. Collective over each of ``lines`` in turn.

    Each rank first compares its grid with those of its groups, then exchanges the verdicts along
    each axis: in a grid these reach every rank, so all ranks get the same result.
    """
    me = dist.get_rank()
    communicators = [
        Communicator(Mesh(line, line.index(me), tp_size=len(line)), timeout_s)
        for line in lines
        if len(line) > 1
    ]
    try:
        digest = int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "big")
        digests = [
            communicator.exchange(torch.tensor([digest], device="cpu"))
            for communicator in communicators
        ]
        agreed = bool(ranks) and all(bool((row == digest).all()) for row in digests)
        for communicator in communicators:
            agreed = bool(communicator.exchange(torch.tensor([int(agreed)], device="cpu")).all())
    finally:
        for communicator in communicators:
            communicator.close()
    return agreed
