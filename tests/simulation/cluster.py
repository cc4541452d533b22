"""The simulated machines: hosts, their processes, the links between them, and what fails there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.scheduler import Scheduler, Signal, current_owner


@dataclass
class Speeds:
    """How fast the cluster is.

    Attributes:
        latency_s: Of a message between hosts; one inside a host takes a tenth of it.
        bytes_per_s: Of a host's link, in each direction.
        jitter: How much longer a request to the store takes at most, as a part of its time.
        poll_s: How often a wait that polls looks.
        slow_host: The number of a host whose messages and requests take ``times`` as long.
    """

    latency_s: float = 2e-5
    bytes_per_s: float = 12.5e9
    jitter: float = 0.0
    poll_s: float = 0.1
    slow_host: int = -1
    times: float = 1.0


@dataclass
class Fault:
    """What fails, when one rank is at one step.

    Attributes:
        rank, step: The rank, and the number of its step.
        kind: ``"rank"``: its process ends; ``"host"``: all processes of its host end;
            ``"silent host"``: its host is cut off, which nothing reports.
    """

    rank: int
    step: int
    kind: str = "rank"


class Host:
    """A machine.

    Attributes:
        changed: What its processes write to memory that they share.
        is_silent: Its link carries nothing any more.
        times: How many times as long its messages and requests take.
    """

    def __init__(self, name: str, times: float) -> None:
        self.name, self.times = name, times
        self.changed = Signal()
        self.processes: list[Process] = []
        self.is_silent = False
        self.sends_until = self.receives_until = 0.0  # when its link has done what it has to do


class Process:
    """The process of a rank.

    Attributes:
        changed: What its threads wait for where the product polls.
        steps: What it has done, as far as others may notice it.
        values: The values of the product's module-level state, of this process.
        environ: Its environment variables.
        phase: What it does, for what is counted.
    """

    def __init__(self, cluster: Cluster, rank: int, host: Host) -> None:
        self.cluster, self.rank, self.host = cluster, rank, host
        self.pid = 1000 + rank
        self.phase = ""
        self.is_dead = False
        self.changed = Signal()
        self.steps: list[str] = []
        self.values: dict[Any, Any] = {}
        self.environ: dict[str, str] = {}
        self.arena: dict[str, Any] = {}
        self.on_end: list[Callable[[], None]] = []  # the kernel closes its connections
        host.processes.append(self)

    def __repr__(self) -> str:
        return f"rank {self.rank}"


@dataclass
class Counted:
    """What was counted in a phase.

    Attributes:
        requests: To the store, by rank.
        store_bytes: That the store sent and received.
    """

    requests: Counter[int] = field(default_factory=Counter)
    store_bytes: int = 0


class Cluster:
    """Hosts with a number of ranks each, one host after the other.

    Attributes:
        counted: By phase.
        addresses: What other processes find by an address: gloo's listeners, shared memory.
        died: The ranks that have ended or were cut off, and when the first of them did.
    """

    def __init__(
        self, num_ranks: int, num_hosts: int, seed: int, speeds: Speeds | None = None
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.speeds = speeds or Speeds()
        slow = {self.speeds.slow_host: self.speeds.times}
        self.hosts = [Host(f"host{i}", slow.get(i, 1.0)) for i in range(num_hosts)]
        self.processes = [
            Process(self, rank, self.hosts[rank * num_hosts // num_ranks])
            for rank in range(num_ranks)
        ]
        self.of_pid = {process.pid: process for process in self.processes}
        self.counted: defaultdict[str, Counted] = defaultdict(Counted)
        self.addresses: dict[Any, Any] = {}
        self.fault: Fault | None = None
        self.died: dict[int, float] = {}

    # ---- Steps, at which processes fail ----------------------------------------------------------

    def step(self, what: str, process: Process | None = None) -> None:
        """Note what a process, by default the calling one, does next; here it may fail."""
        if process is None:
            process = current_owner()
        self.scheduler.check_lives(process)
        number = len(process.steps)
        process.steps.append(what)
        fault = self.fault
        if fault is not None and (fault.rank, fault.step) == (process.rank, number):
            self.fail(fault)
            self.scheduler.check_lives(process)

    def fail(self, fault: Fault) -> None:
        """Let a rank, or its host, fail now."""
        host = self.processes[fault.rank].host
        ranks = [fault.rank] if fault.kind == "rank" else [p.rank for p in host.processes]
        if fault.kind == "silent host":
            host.is_silent = True
            self.died.update(dict.fromkeys(ranks, self.scheduler.now))
            return
        for rank in ranks:
            self.end(rank)

    def end(self, rank: int) -> None:
        """End a process, as by SIGKILL."""
        process = self.processes[rank]
        if process.is_dead:
            return
        self.died[rank] = self.scheduler.now
        self.scheduler.kill(process)
        for close in process.on_end:
            close()

    # ---- Links -----------------------------------------------------------------------------------

    def can_reach(self, some: Host, other: Host) -> bool:
        return some is other or not (some.is_silent or other.is_silent)

    def latency(self, some: Host, other: Host) -> float:
        """The latency of a request between two hosts, with jitter."""
        base = self.speeds.latency_s * (0.1 if some is other else 1)
        base *= max(some.times, other.times)
        return base * (1 + self.speeds.jitter * self.scheduler.dice.random())

    def send(
        self, sender: Process, target: Host, num_bytes: int, arrive: Callable[[], None]
    ) -> None:
        """Send a message to a host, and call a function when it arrives, if it does."""
        source = sender.host
        times = max(source.times, target.times)
        now, seconds = self.scheduler.now, num_bytes / self.speeds.bytes_per_s * times
        start = max(now, source.sends_until)
        source.sends_until = start + seconds
        ends = max(start, target.receives_until) + seconds
        target.receives_until = ends

        def arrives() -> None:
            if self.can_reach(source, target):
                arrive()

        self.scheduler.after(ends - now + self.speeds.latency_s * times, arrives)
