"""Which transport a group uses: decided by what its ranks found out together when it was made."""

from __future__ import annotations

from flex_model.distributed.groups import PrivateGroup
from flex_model.distributed.transports.across_hosts import AcrossHosts
from flex_model.distributed.transports.gloo import Gloo
from flex_model.distributed.transports.shared_memory import SharedMemory
from flex_model.distributed.transports.transport import Transport, Wait


def choose(group: PrivateGroup, wait: Wait) -> tuple[Transport, str]:
    """The transport of CPU tensors, and why it is this one. Local, and alike on all ranks."""
    hosts = group.hosts
    if hosts.here is None:
        return Gloo(group, wait), hosts.why_not_shared
    inside = SharedMemory(group, hosts.here)
    if hosts.is_one:
        return inside, "the ranks are on one host"
    between = None if group.leaders is None else Gloo(group.leaders, wait)
    names = ", ".join(dict.fromkeys(hosts.names))
    return AcrossHosts(group, hosts, inside, between), f"the ranks are on several hosts: {names}"
