"""Release 0.1.0's parallel state: this rank's place on the axes tp, pp, dp, and its neighbours."""

from __future__ import annotations

import logging
import weakref

import torch
import torch.distributed as dist
from torch import nn

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.mesh import Mesh, initialize_from_launcher, is_distributed
from flex_model.distributed.placement import chunk_sizes
from flex_model.integrations.torch_private import new_group_of_members

logger = logging.getLogger(__name__)


class ParallelState:
    """Where this process stands on the axes (pp, dp, tp), tp fastest; what 0.1.0's functions take
    as ``fmps``.

    Example::

        fmps = initialize_distributed_state(model, 2, 1, 2)     # 4 processes: tp 2, pp 1, dp 2
        fmps.get_tensor_parallel_rank()                         # 0, 1, 0, 1
        dist.all_reduce(total, group=fmps.get_data_parallel_group())

    ``local`` counts inside the ranks of this state, ``subset`` is 0.1.0's word for the same ranks
    by their global number.
    All getters are local, but for the four that return a process group: these make it when first
    asked, with all its members. The connections that the functions of ``flex_model.distributed``
    use are private; they are made when first used and freed with the state.

    Args:
        mesh: The ranks and the sizes of the axes.
        process_group: The group that the ranks were taken from, if any.
        timeout_s: How long one wait for other ranks may take, in seconds.
    """

    def __init__(
        self, mesh: Mesh, process_group: dist.ProcessGroup | None = None, timeout_s: float = 60.0
    ) -> None:
        self.mesh = mesh
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._communicators: dict[str, Communicator] = {}
        self._sizes: dict[tuple[str, int, int], list[int]] = {}
        weakref.finalize(self, _close, self._communicators).atexit = False

    def __repr__(self) -> str:
        mesh = self.mesh
        return f"ParallelState({mesh.describe()}, ranks={list(mesh.ranks)}, rank={mesh.rank})"

    # 0.1.0's getters.

    def get_local_rank(self) -> int:
        """This process's place among the ranks of this state."""
        return self.mesh.rank

    def get_local_world_size(self) -> int:
        """How many ranks this state has."""
        return self.mesh.num_ranks

    def get_subset_rank(self) -> int:
        """This process's global rank."""
        return self.mesh.ranks[self.mesh.rank]

    get_subset_world_size = get_local_world_size

    def get_subset_process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of this state. See ``get_tensor_parallel_group``."""
        return self._torch_group(self.mesh.ranks)

    def get_tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's tensor-parallel neighbours, for functions of
        ``torch.distributed``.

        None where torch.distributed is not initialised. Collective over the members when it is
        first asked for; then it is kept, one for each set of ranks, until
        ``destroy_process_group``. Its backend is that of the world.

        Raises:
            ValueError: the ranks are not in ascending order, which is the order of all of torch's
                groups.
        """
        return self._torch_group(self.mesh.axis_ranks("tp"))

    def get_pipeline_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of the stages of this rank's pipeline. See ``get_tensor_parallel_group``."""
        return self._torch_group(self.mesh.axis_ranks("pp"))

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's data-parallel neighbours. See ``get_tensor_parallel_group``."""
        return self._torch_group(self.mesh.axis_ranks("dp"))

    def get_tensor_parallel_rank(self) -> int:
        """This process's place on the axis tp."""
        return self.mesh.coordinates["tp"]

    def get_pipeline_parallel_rank(self) -> int:
        """This process's pipeline stage."""
        return self.mesh.coordinates["pp"]

    def get_data_parallel_rank(self) -> int:
        """This process's place on the axis dp."""
        return self.mesh.coordinates["dp"]

    def get_tensor_parallel_world_size(self) -> int:
        """Size of the axis tp."""
        return self.mesh.tp_size

    def get_pipeline_parallel_world_size(self) -> int:
        """Number of pipeline stages."""
        return self.mesh.pp_size

    def get_data_parallel_world_size(self) -> int:
        """Size of the axis dp."""
        return self.mesh.dp_size

    # What the functions of this package use.

    def _torch_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if not is_distributed():
            return None
        if list(ranks) != sorted(ranks):
            raise ValueError(
                f"process group of the ranks {list(ranks)}: torch.distributed numbers the members "
                "of every group in ascending order, so they would have other ranks in it than they "
                "have here; lay the ranks of the model out in ascending order"
            )
        own = self._process_group
        if own is not None and tuple(dist.get_process_group_ranks(own)) == ranks:
            return own
        return _torch_group(ranks, self._timeout_s)

    def communicator(self, axis: str) -> Communicator:
        """Transfers along "tp", "pp" or "dp", or over the "grid" of a stage.

        Collective over their ranks when it is new.
        """
        if axis not in self._communicators:
            mesh = self.mesh
            if axis != "grid":
                ranks = mesh.axis_ranks(axis)
                # only dp counts as dp: the gradients of the other axes are not averaged
                dp, tp = (len(ranks), 1) if axis == "dp" else (1, len(ranks))
                mesh = Mesh(ranks, mesh.coordinates[axis], dp_size=dp, tp_size=tp)
            self._communicators[axis] = Communicator(mesh, self._timeout_s)
        return self._communicators[axis]

    def remember_sizes(self, axis: str, dim: int, sizes: list[int]) -> None:
        """Keep the ranks' sizes of a gather, for the scatter that undoes it."""
        self._sizes[axis, dim, sum(sizes)] = sizes

    def sizes(self, axis: str, dim: int, total: int) -> list[int]:
        """How a dim of ``total`` is split: as in the last gather to it, else as ``torch.chunk``."""
        return self._sizes.get((axis, dim, total)) or chunk_sizes(
            total, len(self.mesh.axis_ranks(axis))
        )


def check_state(fmps: object, name: str) -> None:
    """Raise a TypeError that names the function if ``fmps`` is not a state."""
    if not isinstance(fmps, ParallelState):
        raise TypeError(
            f"{name}: fmps must be a ParallelState, got {type(fmps).__name__}; "
            "initialize_distributed_state makes it"
        )


def initialize_distributed_state(
    module: nn.Module,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout: float = 60.0,
) -> ParallelState:
    """Lay the ranks of ``process_group`` (default: the world) out as (pp, dp, tp), tp fastest.

    Example::

        fmps = initialize_distributed_state(model, 1, 1, 1)      # one process needs no torchrun
        full = all_gather_tensor_parallel(shard, -1, fmps)

    If torch.distributed is not initialised, but a launcher (torchrun) has started several processes
    and the sizes ask for them, it is initialised here, as 0.1.0 did, with torch's default backends
    (gloo on CPU, NCCL on CUDA).

    Args:
        module: The model. It is not touched; several models have several states, which share their
            connections.
        timeout: How long one wait for other ranks may take, in seconds.

    Collective over the ranks of each pipeline if ``pipeline_parallel_size`` > 1 (their torch group
    is made), else local.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
        ValueError: the sizes do not multiply to the number of ranks; this rank is not one of them.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"initialize_distributed_state: expected an nn.Module, got {type(module).__name__}"
        )
    sizes = (tensor_parallel_size, pipeline_parallel_size, data_parallel_size)
    if sizes != (1, 1, 1):
        initialize_from_launcher()
    mesh = Mesh.from_sizes(*sizes, process_group)
    state = ParallelState(mesh, process_group, timeout)
    if mesh.pp_size > 1:  # sends have two ends: they could not make a group of all stages
        state.get_pipeline_parallel_group()
    logger.debug("%s", state)
    return state


def _close(communicators: dict[str, Communicator]) -> None:
    for communicator in communicators.values():
        communicator.close()
    communicators.clear()


_torch_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_torch_world: dist.ProcessGroup | None = None


def _torch_group(ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup:
    """The torch group of ascending global ranks, made once. Collective over them when it is new."""
    global _torch_world
    world = dist.group.WORLD
    assert world is not None  # the caller has seen that torch.distributed is initialised
    if world is not _torch_world:  # destroyed and initialised again: the old groups went with it
        _torch_groups.clear()
        _torch_world = world
    if len(ranks) == dist.get_world_size():
        return world
    if ranks not in _torch_groups:
        logger.debug("new torch group of the global ranks %s", ranks)
        # Members that do not come are named here, where torch would wait for half an hour.
        mesh = Mesh(ranks, ranks.index(dist.get_rank()), tp_size=len(ranks))
        communicator = Communicator(mesh, timeout_s)
        try:
            communicator.exchange(torch.zeros(1, device="cpu"))
        finally:
            communicator.close()
        _torch_groups[ranks] = new_group_of_members(ranks)
    return _torch_groups[ranks]
