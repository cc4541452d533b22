"""Starts the ranks of a notebook, and has them end with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import ipyparallel
from traitlets.config import Config

from flex_model.notebook import keeper
from flex_model.notebook.driver import Ranks

_END_S = 20  # the keeper needs less than a second
_POLL_S = 0.05


def launch(
    num_ranks: int | None = None,
    *,
    hosts: Mapping[str, int] | None = None,
    cluster: ipyparallel.Cluster | ipyparallel.Client | None = None,
    device: str | None = None,
    grace_s: float = 10.0,
    start_timeout_s: float = 120.0,
    master_addr: str | None = None,
) -> Ranks:
    """Start ranks in processes of their own, one world of ``torch.distributed``, for cells that
    begin with ``%%px``.

    Example::

        ranks = flex_model.notebook.launch(4)
        # or, in a script
        with flex_model.notebook.launch(4) as ranks:
            ...

    A rank is an ipyparallel engine with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
    as torchrun sets them, one device, and ``torch`` and ``dist`` in the namespace of its cells.
    The ranks end with this process, also when it is killed.

    Args:
        num_ranks: Default: one for each GPU of this host, or as many as the cluster has engines.
        hosts: How many to start on which host, by ssh, as ``{"node1": 8, "node2": 8}``; Python has
            the same path there.
        cluster: An ipyparallel ``Cluster`` (started here if it is not: Slurm, MPI and other
            launchers are ipyparallel's), or a ``Client`` of one that runs.
        device: ``"cpu"`` or ``"cuda"``; default: GPUs where a host has some.
        grace_s: Seconds between an error on one rank, or Ctrl-C, and an interrupt of the ranks that
            still run; after as many again they are ended.
        start_timeout_s: Seconds until all engines must have started.
        master_addr: The name or address of this host for the ranks of other hosts; default: its
            full name.

    Raises:
        ValueError: neither a number of ranks nor a GPU; more ranks on a host than it has GPUs.
        TimeoutError: engines did not start in time.
    """
    if isinstance(cluster, ipyparallel.Client):
        return Ranks(cluster, None, grace_s, device, master_addr)
    if cluster is not None and cluster.engines:
        client = cluster.connect_client_sync()
        return Ranks(client, None, grace_s, device, master_addr)
    if num_ranks is None and hosts is None and cluster is None:
        import torch

        num_ranks = torch.cuda.device_count()
        if not num_ranks:
            raise ValueError("launch: there is no GPU here; give the number of ranks")
    processes = Processes(num_ranks, hosts, cluster, start_timeout_s, master_addr)
    try:
        return Ranks(processes.client, processes, grace_s, device, master_addr)
    except BaseException:
        processes.close()
        raise


class Processes:
    """The processes that were started for ranks: ipyparallel's controller and engines, and the
    keeper, which ends them all when this process ends.

    Attributes:
        client: ipyparallel's.
    """

    def __init__(
        self,
        num_ranks: int | None,
        hosts: Mapping[str, int] | None,
        cluster: ipyparallel.Cluster | None,
        timeout_s: float,
        master_addr: str | None,
    ) -> None:
        token = uuid.uuid4().hex
        folder = tempfile.mkdtemp(prefix="flex_model_notebook_")
        self._environment = {keeper.VARIABLE: token}
        self._is_local = hosts is None and cluster is None
        self._keeper = subprocess.Popen(
            [sys.executable, str(Path(keeper.__file__)), token, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self.client: Any = None
        self._cluster = cluster or _cluster(num_ranks, hosts, folder, timeout_s, master_addr)
        try:
            with mock.patch.dict(os.environ, self._environment):  # which they inherit
                self._cluster.start_cluster_sync()
                self.client = self._cluster.connect_client_sync()
                self._wait_for_engines()
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Start new engines in place of those that were ended.

        Raises:
            TimeoutError: ipyparallel did not notice the end of the old ones, or the new ones did
                not start in time.
        """
        deadline = time.monotonic() + self._cluster.engine_timeout
        while self.client.ids:
            if time.monotonic() > deadline:
                raise TimeoutError("restart: ended ranks are still registered; use close, launch")
            time.sleep(_POLL_S)
        num_ranks = sum(engines.n for engines in self._cluster.engines.values())
        with mock.patch.dict(os.environ, self._environment):  # which they inherit
            self._cluster.stop_engines_sync()
            self._cluster.start_engines_sync(num_ranks)
        self._wait_for_engines()

    def _wait_for_engines(self) -> None:
        num_ranks = sum(engines.n for engines in self._cluster.engines.values())
        timeout_s = self._cluster.engine_timeout
        self.client.wait_for_engines(num_ranks, timeout=timeout_s, interactive=False)

    def close(self) -> None:
        if self._keeper.poll() is not None:
            return
        if self.client is not None:
            self.client.close()
        if not self._is_local:
            self._cluster.stop_cluster_sync()
        self._keeper.communicate(timeout=_END_S)  # closes the pipe


def _cluster(
    num_ranks: int | None,
    hosts: Mapping[str, int] | None,
    folder: str,
    timeout_s: float,
    master_addr: str | None,
) -> ipyparallel.Cluster:
    """Return a cluster of this host, or of hosts that ssh reaches, that keeps its files here."""
    settings: dict[str, Any] = {"n": num_ranks}
    if hosts is not None:
        engines = {"engines": dict(hosts), "remote_python": sys.executable}
        settings = {
            "n": sum(hosts.values()),
            "engines": "ssh",
            "controller_ip": "*",
            "controller_location": master_addr or "",
            "config": Config({"SSHEngineSetLauncher": engines}),
        }
    return ipyparallel.Cluster(
        **settings,
        profile_dir=folder,
        load_profile=False,
        delay=0,
        log_level=logging.ERROR,
        shutdown_atexit=False,
        engine_timeout=int(timeout_s),
    )
