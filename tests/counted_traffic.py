"""Counts what real runs send between simulated hosts."""

import contextlib
import os
from dataclasses import dataclass

import torch.distributed as dist

from flex_model.distributed.rendezvous import Rendezvous

HOSTS = {
    "one host": "host",
    "two hosts": "host{half}",
    "interleaved hosts": "host{parity}",
    "four hosts": "host{quarter}",
    "a host of each": "host{rank}",
}


def host_of(where, rank, size):
    half, quarter = 2 * rank // size, 4 * rank // size
    return HOSTS[where].format(rank=rank, half=half, quarter=quarter, parity=rank % 2)


@contextlib.contextmanager
def hosts(where):
    of_rank = host_of(where, dist.get_rank(), dist.get_world_size())
    before = os.environ.get("FLEX_MODEL_HOST")
    os.environ["FLEX_MODEL_HOST"] = f"{of_rank} of costs"
    try:
        yield
    finally:
        os.environ.pop("FLEX_MODEL_HOST")
        if before is not None:
            os.environ["FLEX_MODEL_HOST"] = before


def payloads_of(communicator):
    """The collectives that moved tensors since the run began."""
    return sum(one.payloads for one in communicator.meter.spent.values())


class Counted:
    """A gloo backend that counts what its rank sends and receives."""

    def __init__(self, backend):
        self.backend = backend
        self.sent = self.received = self.messages = 0

    def send(self, tensors, rank, tag):
        self.sent += tensors[0].nbytes
        self.messages += 1
        return self.backend.send(tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        self.received += tensors[0].nbytes
        return self.backend.recv(tensors, rank, tag)


def counting(monkeypatch):
    """Count in all gloo groups made from now on; return them."""
    made, backend = [], Rendezvous.backend

    def make(rendezvous):
        made.append(Counted(backend(rendezvous)))
        return made[-1]

    monkeypatch.setattr(Rendezvous, "backend", make)
    return made


def take(backends, host_names):
    """What each host sent, received and in how many messages since the last call."""
    counts = [sum(getattr(b, what) for b in backends) for what in ("sent", "received", "messages")]
    for backend in backends:
        backend.sent = backend.received = backend.messages = 0
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, counts)
    names = list(dict.fromkeys(host_names))
    of_hosts = [
        [row for row, name in zip(rows, host_names) if name == of_host] for of_host in names
    ]
    return tuple(tuple(sum(row[i] for row in of_one) for of_one in of_hosts) for i in range(3))


@dataclass(frozen=True, order=True)
class Connected:
    """What ``FlexModel(...)`` takes of one rank, whose hosts share memory.

    Attributes:
        requests: To torch's store, torch's own included. In later rendezvous of the same ranks
            three ranks make one more each (one of two ranks two), to forget the one before.
        sockets: Those that it holds until ``restore()``.
    """

    requests: int
    sockets: int

    @staticmethod
    def of(num_hosts, is_first_of_host):
        """That of a rank. The first ranks of several hosts meet, and connect by gloo."""
        rendezvous, second_connection = 4, 2
        if num_hosts == 1 or not is_first_of_host:
            return Connected(rendezvous + second_connection, 1)
        by_gloo = 3 * num_hosts + 1
        return Connected(2 * rendezvous + second_connection + by_gloo, num_hosts + 1)
