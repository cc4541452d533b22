"""The doctor: reports what is installed, built and loaded, and tries each transport between two
ranks of this machine.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from flex_model import _load
from flex_model.diagnostics.local_ranks import RankError, run_on_ranks
from flex_model.diagnostics.progress_bar import progress
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shard, ShardLayout

PACKAGES = ("transformers", "megatron-core", "fairscale", "accelerate", "deepspeed", "safetensors")
_TRANSPORTS = ("shared_memory", "gloo", "nccl", "peer_memory")
_TIMEOUT_S = 30.0


@dataclass
class Trial:
    """The result of trying one transport between two ranks of this machine.

    Attributes:
        works: Whether both ranks gathered the full tensor, bit for bit.
        reason: The reason why it is used, or can't be.
        header_us: The time of one exchange of 64 bytes in microseconds, the least of many.
        gather_ms: The time of a gather of 16 MiB to both ranks in milliseconds, the least of some.
    """

    transport: str
    works: bool
    reason: str
    header_us: float | None = None
    gather_ms: float | None = None


@dataclass
class Report:
    """The report of ``doctor``; prints as text."""

    machine: dict[str, Any]
    build: dict[str, Any]
    packages: dict[str, str]
    settings: dict[str, str]
    trials: list[Trial] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether the required parts work: the binaries are loaded, and gloo moves tensors."""
        return any(trial.works and trial.transport == "gloo" for trial in self.trials)

    def json(self) -> str:
        return json.dumps({**asdict(self), "is_well": self.is_well}, indent=2, default=str)

    def __str__(self) -> str:
        lines = ["machine:"] + [f"  {name:14} {value}" for name, value in self.machine.items()]
        lines += ["flex_model:", *(f"  {line}" for line in str(self.build).splitlines())]
        lines += ["packages:"] + [f"  {name:14} {value}" for name, value in self.packages.items()]
        lines += ["settings:"] + [f"  {name}={value}" for name, value in self.settings.items()]
        lines += ["between two ranks of this machine:"]
        for trial in self.trials:
            figures = (
                f"header {trial.header_us:.1f} us, 16 MiB {trial.gather_ms:.2f} ms"
                if trial.works
                else "does not work"
            )
            lines.append(f"  {trial.transport:14} {figures} ({trial.reason})")
        lines.append("all is well" if self.is_well else "something is wrong: see above")
        return "\n".join(lines)


def examine(show_progress: bool = False) -> Report:
    """Inspect this machine, and try each transport with two processes. Takes some seconds."""
    report = Report(
        machine={
            "system": f"{platform.system()} {platform.release()}",
            "cores": len(os.sched_getaffinity(0)),
            "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
            "locked memory": _limit(resource.RLIMIT_MEMLOCK),
            "GPUs": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        },
        build=_load.build_info(),
        packages={name: _version(name) for name in PACKAGES},
        settings={name: value for name, value in os.environ.items() if name.startswith("FLEX_")},
    )
    report.trials = [_try(name) for name in progress(_TRANSPORTS, "transports", show_progress)]
    return report


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _try(transport: str) -> Trial:
    if transport in ("nccl", "peer_memory") and not torch.cuda.is_available():
        return Trial(transport, False, "there is no GPU")
    try:
        trials = run_on_ranks(2, _trial, transport)
    except RankError as error:
        return Trial(transport, False, str(error))
    return next((trial for trial in trials if not trial.works), trials[0])


def _trial(rank: int, transport: str) -> Trial:
    os.environ["FLEX_MODEL_TRANSPORT"] = transport
    on_gpu = transport in ("nccl", "peer_memory")
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else None
    communicator = Communicator(Mesh.from_sizes(2), _TIMEOUT_S, device)
    name, reason = next(iter(communicator.transports().values()))
    full = torch.arange(2048 * 2048, dtype=torch.int32, device=device).reshape(2048, 2048)
    shards = full.chunk(2, dim=1)
    shapes = [tuple(shard.shape) for shard in shards]
    spec = TensorSpec.of(communicator, ShardLayout(tp=Shard(1)), shapes, full.dtype)
    works = torch.equal(spec.all_gather(shards[rank]), full)
    gathers = [_seconds(lambda: spec.all_gather(shards[rank])) for _ in range(10)]
    headers = [
        _seconds(lambda: communicator.check_consistency(Header("tensor"), "a trial"))
        for _ in range(300)
    ]
    dist.barrier()
    return Trial(name, works, reason, 1e6 * min(headers), 1e3 * min(gathers))


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
