"""Records what transfers cost, in one process: the communicators of all ranks of a stage, whose
tensors have no values.

Between hosts they follow the code of real ranks, so what is recorded is what those send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_model._C import GatherPlan
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.costs import Cost, Spent, Traffic
from flex_model.distributed.header import Header
from flex_model.distributed.hosts import Hosts, Settings
from flex_model.distributed.mesh import Axis, Mesh
from flex_model.distributed.rounds import Round
from flex_model.distributed.transports.across_hosts import AcrossHosts
from flex_model.distributed.transports.gloo import Gloo
from flex_model.distributed.transports.transport import Gathered
from flex_model.integrations.torch_private import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)


class Transfer(NamedTuple):
    """One rank's part in a transfer.

    Attributes:
        name: The method of the transport.
        site: The hook for which it is counted.
        between: What the rank sends to other hosts.
    """

    name: str
    site: int
    between: Traffic = Traffic()


@dataclass(frozen=True)
class Recording:
    """What the transfers of all ranks of a stage cost.

    Attributes:
        spent: By rank and site.
        transfers: Those of all ranks.
    """

    spent: Sequence[dict[int, Spent]]
    transfers: Sequence[Transfer]

    def of_sites(self, sites: Sequence[int]) -> list[Cost]:
        """The costs of the hooks of one call; the bytes of what it shares with other calls are
        those of its last hook.
        """
        between = dict.fromkeys(sites, Traffic())
        for name, site, traffic in self.transfers:
            if name != "exchange" and site in between:
                between[site] += traffic
            elif name != "exchange_bytes":
                between[sites[-1]] += replace(traffic, messages=())  # which count once
        return [replace(self._spent_at({site}), between=between[site]) for site in sites]

    def of_others(self, sites: set[int]) -> Cost:
        """What calls of the hooks of these sites share: all but their own costs, ``of_sites``."""
        between = Traffic()
        for name, site, traffic in self.transfers:
            if name == "exchange" or site not in sites:
                is_header = name == "exchange_bytes"
                between += traffic if is_header else Traffic(messages=traffic.messages)
        others = {site for of_rank in self.spent for site in of_rank} - sites
        return replace(self._spent_at(others), bytes_by_rank=(), between=between)

    def total(self) -> Traffic:
        """What moves between hosts."""
        return sum((traffic for _, _, traffic in self.transfers), Traffic())

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

        recorder = CostRecorder(Mesh((0, 1, 2, 3), dp_size=2, tp_size=2), ("a", "a", "b", "b"))
        recorder.record(lambda to: to.exchange(torch.empty(64))).total().sent  # (512, 512)

    Every rank sees headers equal to its own, but those of rank 0, which runs first.

    Args:
        hosts: The name of each rank's host, in the order of ``Mesh.stage_ranks``. Of ranks that
            share no memory each has a name of its own.
    """

    def __init__(self, mesh: Mesh, hosts: tuple[str, ...]) -> None:
        self._hosts = hosts
        self._headers: list[bytes] = []  # rank 0's
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        places = [mesh.ranks.index(rank) for rank in mesh.stage_ranks]
        self.ranks = [
            RecordingCommunicator(replace(mesh, rank=place), hosts, self._mode, self._headers)
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
        return Recording(
            [communicator.meter.spent for communicator in self.ranks],
            [transfer for communicator in self.ranks for transfer in communicator.transfers],
        )


class RecordingCommunicator(Communicator):
    """The communicator of one rank, which moves nothing.

    Args:
        mode: Makes tensors without values.
        headers: Those of rank 0, in their order.

    Attributes:
        transfers: Those that it takes part in, in their order.
    """

    def __init__(
        self, mesh: Mesh, hosts: tuple[str, ...], mode: FakeTensorMode, headers: list[bytes]
    ) -> None:
        self._hosts, self._mode, self._headers = hosts, mode, headers
        self._recorded: dict[tuple[Axis, ...], Any] = {}
        self._exchanges: dict[int, Traffic] = {}  # by the bytes of a rank
        super().__init__(mesh, timeout_s=0.0)
        self.begin()

    def begin(self) -> None:
        """Begin a recording."""
        self.begin_run()
        self.transfers: list[Transfer] = []
        self._num_headers = 0

    def connect(self) -> None:
        """Do nothing: the other ranks are here."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._hosts

    def transport(self, axes: tuple[Axis, ...]) -> Any:
        to = self._recorded.get(axes)
        if to is None:
            places = self.mesh.ranks_along(axes)
            names = [self._hosts[place] for place in places]
            to = self._recorded[axes] = self._make(places.index(self.mesh.group_rank), names)
        return to

    def _make(self, rank: int, names: list[str]) -> Any:
        hosts = Hosts(names, None, Settings("auto", "", ""), [])
        if hosts.is_one:
            return _Inside(rank, len(names))
        leaders = list(hosts.by_name)
        here = hosts.ranks_of(names[rank])
        between = None
        if here[0] == rank:
            index = leaders.index(names[rank])
            between = _BetweenHosts(_Group(index, len(leaders)), leaders, self._note)
        inside: Any = _Inside(here.index(rank), len(here))
        group: Any = _Group(rank, len(names))
        return AcrossHosts(group, hosts, inside, between)

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
        """Record a transfer."""
        assert isinstance(transfer, str)
        self.transfers.append(Transfer(transfer, self.meter.site))
        if transfer not in ("exchange", "exchange_bytes"):
            return getattr(self.transport(axes), transfer)(*args)
        (own,), size = args, len(self._hosts)
        num_bytes = len(own) if isinstance(own, bytes) else own.nbytes
        if num_bytes not in self._exchanges:
            with self._mode:
                self.transport(axes).exchange(
                    torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                )
            self._exchanges[num_bytes] = self.transfers[-1].between
        self.transfers[-1] = self.transfers[-1]._replace(between=self._exchanges[num_bytes])
        if isinstance(own, bytes):
            if self._num_headers == len(self._headers):
                self._headers.append(own)
            self._num_headers += 1
            return [self._headers[self._num_headers - 1], *[own] * (size - 1)]
        with unset_fake_temporarily():
            if isinstance(own, FakeTensor):
                own = torch.zeros(own.shape, dtype=own.dtype, device="cpu")
            return torch.stack([own] * size)

    def _note(self, leaders: list[str], index: int, rounds: list[Round]) -> None:
        """Note the messages of this host, by its index, to others."""
        names = list(dict.fromkeys(self._hosts))
        sent, received, messages = ([0] * len(names) for _ in range(3))
        here = names.index(leaders[index])
        for sends, _ in rounds:
            for to, start, stop in sends:
                sent[here] += stop - start
                received[names.index(leaders[to])] += stop - start
                messages[here] += 1
        transfer = self.transfers[-1]
        between = transfer.between + Traffic(tuple(sent), tuple(received), tuple(messages))
        self.transfers[-1] = transfer._replace(between=between)


class _Group:
    """A rank of a group, for transports."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class _BetweenHosts(Gloo):
    """Notes the messages of one host."""

    def __init__(self, group: Any, hosts: list[str], note: Callable[..., None]) -> None:
        super().__init__(group, lambda works: None)
        self._hosts, self._note = hosts, note

    def _exchange(self, data: Tensor, all_rounds: list[Round]) -> None:
        self._note(self._hosts, self.group.rank, all_rounds)


class _Inside:
    """See ``Transport``: inside a host nothing is recorded."""

    name = "shared_memory"

    def __init__(self, rank: int, size: int) -> None:
        self.group = _Group(rank, size)

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
