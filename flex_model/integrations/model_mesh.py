"""The mesh of a wrap: what the user gave, filled in from what the model was sharded over."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from flex_model.distributed.channel import Channel
from flex_model.distributed.mesh import AXES, Mesh, check_sizes, group_ranks
from flex_model.distributed.mesh_dims import AXIS_OF_DIM
from flex_model.integrations import mesh_sources
from flex_model.integrations.mesh_sources import Source


@dataclass(frozen=True)
class ModelGroups:
    """The groups that this rank is in, by what the model says.

    Attributes:
        lines: Global ranks of this rank's group along an axis, for axes of more than one rank.
        names: What says so, by axis.
        exact: Whole meshes that were read.
        unknown: A mesh of the model that could not be read; empty if there is none.
        untold: A group that it does not tell; likewise.
    """

    lines: dict[str, tuple[int, ...]]
    names: dict[str, str]
    exact: tuple[Mesh, ...] = ()
    unknown: str = ""
    untold: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis; 1 where the model says nothing."""
        return {axis: len(self.lines.get(axis, (0,))) for axis in AXES}

    def describe(self) -> str:
        """``tp over ranks [0, 1] (fc1.weight), dp over ranks [0, 2] (...)``, for messages."""
        return ", ".join(
            f"{axis} over ranks {list(line)} ({self.names[axis]})"
            for axis, line in sorted(self.lines.items(), key=lambda item: -AXES.index(item[0]))
        )

    def check(self, mesh: Mesh, given: str) -> None:
        """That ``mesh`` has the model's groups. Local.

        Args:
            given: What the user gave, for the message.

        Raises:
            ValueError: it has others.
        """
        differ = [axis for axis, line in self.lines.items() if mesh.line(axis) != line]
        # A group says who has rows of the batch, not in which order: torch sorts its ranks.
        if "dp" in differ and set(mesh.line("dp")) == set(self.lines["dp"]):
            differ.remove("dp")
        if differ:
            ours = ", ".join(f"{axis} over ranks {list(mesh.line(axis))}" for axis in self.lines)
            raise ValueError(
                f"FlexModel: {given}: {mesh.describe()}, which puts global rank "
                f"{mesh.ranks[mesh.rank]} in {ours}; but the model itself is sharded as "
                f"{self.describe()}; leave the sizes out, or give a device_mesh with the model's "
                "groups"
            )

    def mesh(self, timeout_s: float) -> Mesh:
        """The whole mesh. Local where one source says it all or the framework counts consecutive
        ranks through its axes; else collective over the groups of this rank.

        Raises:
            ValueError: the model's mesh can't be read, or its groups are no regular grid; on every
                rank.
        """
        if not self.lines:
            raise ValueError(
                f"FlexModel: {self.unknown}, which are not known axes (tp, dp, pp); give "
                'device_mesh= with dims named "dp" and "tp"'
            )
        sizes = self.sizes
        for mesh in self.exact:
            if mesh.num_ranks == math.prod(sizes.values()) and all(
                mesh.line(axis) == line for axis, line in self.lines.items()
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
                f"FlexModel: the model is sharded as {self.describe()}, and its ranks make no "
                "regular grid of these groups; give the device_mesh= of which they are the dims "
                '"dp" and "tp", or, where no mesh has them all, shard the model over the dims of '
                "one mesh"
            ) from error
        assert found is not None  # nobody agrees on an empty grid
        return found


def find(root: nn.Module, stages: Sequence[Source] = ()) -> ModelGroups | None:
    """What a sharded model says of its ranks; None where it says nothing.

    Read are the meshes of its DTensor parameters (torch's and Hugging Face's tensor parallelism,
    FSDP2, HSDP), Hugging Face's ``_device_mesh``, the groups of DDP and FSDP1 wrappers, and, for
    layers of Megatron-core or fairscale, the groups of their parallel state. Local.

    Args:
        stages: What the stages of its pipeline say.

    Raises:
        ValueError: this rank is not one of the model's; two of these contradict each other; or
            the model is context parallel.
    """
    sources, unknown, untold = mesh_sources.find_all(root)
    sources = [*sources, *stages]
    lines, names = merge(sources)
    if not lines and not unknown and not untold:
        return None
    exact = tuple(source.mesh for source in sources if source.is_exact)
    first = (found[0] if found else "" for found in (unknown, untold))
    return ModelGroups(lines, names, exact, *first)


def choose(
    own: ModelGroups | None,
    sizes: tuple[int, int, int],
    process_group: dist.ProcessGroup | None,
    device_mesh: dist.DeviceMesh | None,
    timeout_s: float,
) -> Mesh:
    """The mesh that the user gave, filled in from the model's own; they must not contradict.

    Args:
        own: What the model says.
        sizes: (tp, pp, dp); 1 is filled in from the model.

    Local, or collective as ``ModelGroups.mesh`` is.

    Raises:
        ValueError: sizes that do not multiply to the number of ranks, or what the user gave
            contradicts the model's own groups or itself.
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
            own.check(mesh, "the device_mesh says")
        return mesh
    if own is not None and own.untold:
        raise ValueError(
            f"FlexModel: {own.untold}; give device_mesh= with dims named after "
            f"{sorted(AXIS_OF_DIM)}, such as dp_replicate and dp_shard"
        )
    says_ranks = sizes != (1, 1, 1) or process_group is not None
    if own is None or (says_ranks and not own.lines):
        return Mesh.from_sizes(*sizes, process_group)
    if not says_ranks:
        mesh = own.mesh(timeout_s)
        if mesh.tp_size == mesh.pp_size == 1 and mesh.num_ranks < len(ranks):
            raise ValueError(
                f"FlexModel: the model says dp over ranks {list(mesh.ranks)}, but not what the "
                f"other ranks of {list(ranks)} hold; give a process_group of its ranks if it is "
                "not sharded otherwise, or tensor_parallel_size"
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
        own.check(mesh, "sizes and process_group say")
        return mesh
    mesh = own.mesh(timeout_s)
    if set(mesh.ranks) != set(ranks):
        raise ValueError(
            f"FlexModel: the process_group has ranks {list(ranks)}, but the model itself is "
            f"sharded as {own.describe()}"
        )
    return mesh


def pipeline_refusal(module: nn.Module, pp_size: int) -> str:
    """Why stages without a schedule can't be wrapped, and what can be."""
    schedule = (
        "split the whole model with flex_model.pipelining.pipeline(...), or into stages by hand, "
        "and wrap the torch.distributed.pipelining schedule that runs them: FlexModel(schedule, "
        "output_ptr)"
    )
    if any("_pp_stage" in vars(part) for part in module.modules()):  # Hugging Face's own
        return (
            f"FlexModel: the model was loaded with pp_size={pp_size}: its forward runs the stages "
            "by itself, without a schedule whose hooks could be merged; load it with "
            "DistributedConfig(tp_size=...) or (fsdp_size=...) and without pp_size; or load it "
            f"without distributed_config, {schedule}"
        )
    return (
        f"pipeline_parallel_size is {pp_size}, but a module alone does not say when its stages "
        f"run; {schedule}; or shard the model without a pipeline"
    )


def merge(
    sources: Sequence[Source],
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """This rank's group along each axis, by all sources together, and what says so. Pure.

    Along dp the largest counts: some layers are sharded over a part of the ranks that have their
    own rows of the batch.

    Raises:
        ValueError: two sources contradict each other.
    """
    lines: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for source in sources:
        for axis in AXES:
            line = source.mesh.line(axis)
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
    """Whether all ranks arrived at the same grid. Collective over each of ``lines`` in turn.

    First each rank hears what those in its groups arrived at, then whether they heard the same from
    theirs: so along a grid all know of all, and the verdict is the same.
    """
    me = dist.get_rank()
    channels = [
        Channel(Mesh(line, line.index(me), tp_size=len(line)), timeout_s)
        for line in lines
        if len(line) > 1
    ]
    try:
        digest = int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "big")
        heard = [channel.exchange(torch.tensor([digest])) for channel in channels]
        agreed = bool(ranks) and all(bool((row == digest).all()) for row in heard)
        for channel in channels:
            agreed = bool(channel.exchange(torch.tensor([int(agreed)])).all())
    finally:
        for channel in channels:
            channel.close()
    return agreed
