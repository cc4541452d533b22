"""What transfers move between hosts, recorded in one process: the code of real ranks runs on
tensors without values, with a transport between hosts that adds up its messages.
"""

from dataclasses import dataclass

import torch

from flex_model.distributed.costs import added
from flex_model.distributed.hosts import Hosts, Settings
from flex_model.distributed.transports.gloo import BetweenHosts, Gloo
from flex_model.inspection.call_costs import (
    CostRecorder,
    Place,
    RecordingCommunicator,
    WithoutValues,
)


@dataclass(frozen=True)
class Traffic:
    """What transfers move between hosts.

    Attributes:
        sent, received: The bytes of each host, without those of protocols.
        messages: The messages that each host sends.
    """

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()

    def __add__(self, other):
        return Traffic(
            added(self.sent, other.sent),
            added(self.received, other.received),
            added(self.messages, other.messages),
        )

    @property
    def most_bytes(self):
        """The bytes on the busiest link, in its busier direction. A link connects one host to all
        others.
        """
        return max(*self.sent, *self.received, 0, 0)

    @property
    def most_messages(self):
        return max(self.messages, default=0)


class TrafficRecorder:
    """The ranks of a stage, each on the host of its name.

    Example::

        recorder = TrafficRecorder(Mesh((0, 1, 2, 3), dp_size=2, tp_size=2), ("a", "a", "b", "b"))
        recorder.record(lambda to: to.exchange(torch.empty(64))).sent  # (512, 512)
    """

    def __init__(self, mesh, hosts):
        self._recorder = CostRecorder(mesh, lambda *args: _Communicator(hosts, *args))

    def record(self, run):
        """What ``run``, called for the communicator of each rank, moves between hosts."""
        for communicator in self._recorder.communicators:
            communicator.traffic = Traffic()
        self._recorder.record(run)
        return sum((one.traffic for one in self._recorder.communicators), Traffic())


class _Communicator(RecordingCommunicator):
    def __init__(self, hosts, mesh, mode, headers):
        self._hosts, self._recorded, self.traffic = hosts, {}, Traffic()
        super().__init__(mesh, mode, headers)

    @property
    def hosts(self):
        return self._hosts

    def transport(self, axes):
        if axes not in self._recorded:
            places = self.mesh.ranks_along(axes)
            names = [self._hosts[place] for place in places]
            self._recorded[axes] = self._make(places.index(self.mesh.group_rank), names)
        return self._recorded[axes]

    def _make(self, rank, names):
        hosts = Hosts(names, None, Settings("auto", "", ""), [])
        if hosts.is_one:
            return WithoutValues(rank, len(names))
        leaders, here = list(hosts.by_name), hosts.by_name[names[rank]]
        between = None
        if here[0] == rank:
            place = Place(leaders.index(names[rank]), len(leaders))
            between = _Between(place, leaders, self._note)
        inside = WithoutValues(here.index(rank), len(here))
        group = Place(rank, len(names))
        group.hosts = hosts
        return Gloo(group, between, inside)

    def call(self, transfer, axes, *args, num_bytes=0):
        if transfer in ("exchange", "exchange_bytes"):
            (own,) = args
            size = len(own) if isinstance(own, bytes) else own.nbytes
            with self._mode:
                self.transport(axes).exchange(torch.empty(size, dtype=torch.uint8))
        return super().call(transfer, axes, *args, num_bytes=num_bytes)

    def _note(self, leaders, index, rounds):
        """Add the messages of this host, by its index, to others."""
        names = list(dict.fromkeys(self._hosts))
        sent, received, messages = ([0] * len(names) for _ in range(3))
        here = names.index(leaders[index])
        for sends, _ in rounds:
            for to, start, stop in sends:
                sent[here] += stop - start
                received[names.index(leaders[to])] += stop - start
                messages[here] += 1
        self.traffic += Traffic(tuple(sent), tuple(received), tuple(messages))


class _Between(BetweenHosts):
    """Notes the messages of one host."""

    def __init__(self, group, hosts, note):
        super().__init__(group, lambda works: None)
        self._hosts, self._note = hosts, note

    def _exchange(self, data, all_rounds):
        self._note(self._hosts, self.group.rank, all_rounds)
