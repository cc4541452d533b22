"""Records what transfers cost, in one process: the communicators of all ranks of a stage, whose
tensors have no values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.costs import Cost, Spent
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Axis, Mesh
from flex_model.distributed.transports.transport import Gathered
from flex_model.integrations.torch_private import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)


@dataclass(frozen=True)
class Recording:
    """What the transfers of all ranks of a stage cost.

    Attributes:
        spent: By rank and site.
    """

    spent: Sequence[dict[int, Spent]]

    def of_site(self, site: int) -> Cost:
        """The costs of the hook of one site."""
        return self._spent_at({site})

    def of_others(self, sites: set[int]) -> Cost:
        """What calls of the hooks of these sites share: all but their own costs."""
        others = {site for of_rank in self.spent for site in of_rank} - sites
        return replace(self._spent_at(others), bytes_by_rank=())

    def _spent_at(self, sites: set[int]) -> Cost:
        of_ranks = [[of_rank.get(site, Spent()) for site in sites] for of_rank in self.spent]
        num_bytes = tuple(sum(one.num_bytes for one in of_rank) for of_rank in of_ranks)
        return Cost(
            sum(one.headers for one in of_ranks[0]),
            sum(one.payloads for one in of_ranks[0]),
            num_bytes if any(num_bytes) else (),
        )


class CostRecorder:
    """The ranks of a stage, one after the other in this process.

    Example::

        recorder = CostRecorder(Mesh((0, 1, 2, 3), dp_size=2, tp_size=2))
        recorder.record(lambda to: to.broadcast(None, torch.empty(64))).of_site(0).payloads  # 1

    Every rank sees headers equal to its own, but those of rank 0, which runs first.

    Args:
        make: Makes the communicator of a rank.
    """

    def __init__(
        self, mesh: Mesh, make: Callable[..., RecordingCommunicator] | None = None
    ) -> None:
        self._headers: list[bytes] = []  # rank 0's
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        places = [mesh.ranks.index(rank) for rank in mesh.stage_ranks]
        self.ranks = [
            (make or RecordingCommunicator)(replace(mesh, rank=place), self._mode, self._headers)
            for place in places
        ]

    def record(self, run: Callable[[RecordingCommunicator], object]) -> Recording:
        """Call ``run`` for the communicator of each rank; the tensors that it makes have no values.

        Raises:
            Exception: what ``run`` raises.
        """
        self._headers.clear()
        for communicator in self.ranks:
            communicator.begin()
            with self._mode:
                run(communicator)
        return Recording([communicator.meter.spent for communicator in self.ranks])


class RecordingCommunicator(Communicator):
    """The communicator of one rank, which moves nothing.

    Args:
        mode: Makes tensors without values.
        headers: Those of rank 0, in their order.
    """

    def __init__(self, mesh: Mesh, mode: FakeTensorMode, headers: list[bytes]) -> None:
        self._mode, self._headers = mode, headers
        super().__init__(mesh, timeout_s=0.0)
        self.begin()

    def begin(self) -> None:
        """Begin a recording."""
        self.begin_run()
        self._num_headers = 0

    def connect(self) -> None:
        """Do nothing: the other ranks are here."""

    def transport(self, axes: tuple[Axis, ...]) -> Any:
        places = self.mesh.ranks_along(axes)
        return WithoutValues(places.index(self.mesh.group_rank), len(places))

    def check_consistency(self, header: Header, where: str) -> list[Header]:
        with unset_fake_temporarily():
            return super().check_consistency(header, where)

    def call(
        self,
        transfer: str | Callable[..., Any],
        axes: tuple[Axis, ...],
        *args: Any,
        num_bytes: int = 0,
    ) -> Any:
        """Return what the transfer would, with the values of this rank alone."""
        assert isinstance(transfer, str)
        if transfer not in ("exchange", "exchange_bytes"):
            return getattr(self.transport(axes), transfer)(*args)
        (own,), size = args, len(self.mesh.stage_ranks)
        if isinstance(own, bytes):
            if self._num_headers == len(self._headers):
                self._headers.append(own)
            self._num_headers += 1
            return [self._headers[self._num_headers - 1], *[own] * (size - 1)]
        with unset_fake_temporarily():
            if isinstance(own, FakeTensor):
                own = torch.zeros(own.shape, dtype=own.dtype, device="cpu")
            return torch.stack([own] * size)


class Place:
    """A rank of a group, for transports."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class WithoutValues:
    """See ``Transport``: tensors of the right shapes."""

    name = "shared_memory"

    def __init__(self, rank: int, size: int) -> None:
        self.group = Place(rank, size)

    def exchange(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.group.size, *tensor.shape))

    def all_gather(
        self, shard: Tensor, plan: GatherPlan, num_copies: int = 1, num_read: int = 0
    ) -> list[Tensor]:
        return [shard.new_empty(plan.full_sizes) for _ in range(num_copies)]

    def gather_to_first(self, tensors: list[Gathered]) -> list[Tensor] | None:
        if self.group.rank > 0:
            return None
        return [t.shard.new_empty(t.plan.full_sizes) for t in tensors for _ in range(t.num_copies)]

    def scatter_from_first(self, full: Tensor | None, like: Tensor, plan: GatherPlan) -> Tensor:
        return torch.empty_like(like)

    def broadcast(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        return torch.empty_like(like) if tensor is None else tensor

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)
