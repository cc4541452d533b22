"""Chooses the transport of a group: by all its ranks together, at their first transfer."""

from __future__ import annotations

import torch

from flex_model.distributed.process_groups import PrivateGroup
from flex_model.distributed.transports import on_gpu
from flex_model.distributed.transports.gloo import BetweenHosts, Gloo
from flex_model.distributed.transports.shared_memory import SharedMemory
from flex_model.distributed.transports.transport import Transport, Wait


def choose(group: PrivateGroup, wait: Wait, device: torch.device) -> tuple[Transport, str]:
    """Choose the transport of a group; return it with the reason. Collective where a rank's
    ``device`` is a GPU; the same on all ranks.

    Raises:
        HookError: ``FLEX_MODEL_TRANSPORT`` is a transport that is not available; on every rank.
    """
    on_cpu, why = _choose_on_cpu(group, wait)
    if "cuda" not in group.hosts.devices:
        return on_cpu, why
    return on_gpu.connect(on_cpu, why, wait, device, group.hosts.settings.transport)


def _choose_on_cpu(group: PrivateGroup, wait: Wait) -> tuple[Transport, str]:
    hosts = group.hosts
    if hosts.here is None:
        return Gloo(group, BetweenHosts(group, wait)), hosts.why_not_shared
    inside = SharedMemory(group, hosts.here)
    if hosts.is_one:
        return inside, "the ranks are on one host"
    between = None if group.leaders is None else BetweenHosts(group.leaders, wait)
    names = ", ".join(dict.fromkeys(hosts.names))
    return Gloo(group, between, inside), f"the ranks are on several hosts: {names}"
