"""The doctor: reports what is installed, built and loaded, runs a CUDA kernel on each GPU, tries
each transport between two ranks of this machine, and says how to mend what is missing.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import resource
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from flex_model import _load
from flex_model.diagnostics.local_ranks import RankError, run_on_ranks
from flex_model.diagnostics.progress_bar import progress
from flex_model.distributed import kernels
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shard, ShardLayout

PACKAGES = ("transformers", "megatron-core", "fairscale", "accelerate", "deepspeed", "safetensors")
_TRANSPORTS = ("shared_memory", "gloo", "nccl", "peer_memory")
_TIMEOUT_S = 30.0
_BUILD = f"FLEX_MODEL_CUDA=1 {_load.REBUILD}"
_INSTALL_TORCH = "pip install --force-reinstall torch"


@dataclass
class Trial:
    """The result of trying one transport between two ranks of this machine.

    Attributes:
        works: Whether both ranks gathered the full tensor, bit for bit.
        reason: The reason why it is used, or can't be.
    """

    transport: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Missing:
    """Something that does not work here and could.

    Attributes:
        what: It, and the reason.
        mend: What to do.
    """

    what: str
    mend: str


@dataclass
class Report:
    """The report of ``doctor``; prints as text.

    Attributes:
        gpus: By device: its name, and whether a kernel of flex_model ran on it.
    """

    machine: dict[str, Any]
    gpus: dict[str, str]
    missing: list[Missing]
    build: dict[str, Any]
    packages: dict[str, str]
    settings: dict[str, str]
    trials: list[Trial] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether gloo moves tensors, and nothing is missing."""
        has_gloo = any(trial.works and trial.transport == "gloo" for trial in self.trials)
        return has_gloo and not self.missing

    def json(self) -> str:
        return json.dumps({**asdict(self), "is_well": self.is_well}, indent=2, default=str)

    def __str__(self) -> str:
        lines = ["machine:"] + [f"  {name:14} {value}" for name, value in self.machine.items()]
        lines += ["GPUs:"] * bool(self.gpus) + [f"  {name:14} {v}" for name, v in self.gpus.items()]
        lines += ["flex_model:", *(f"  {line}" for line in str(self.build).splitlines())]
        lines += ["packages:"] + [f"  {name:14} {value}" for name, value in self.packages.items()]
        lines += ["settings:"] + [f"  {name}={value}" for name, value in self.settings.items()]
        lines += ["between two ranks of this machine:"]
        for trial in self.trials:
            verdict = "works" if trial.works else "does not work"
            lines.append(f"  {trial.transport:14} {verdict} ({trial.reason})")
        for missing in self.missing:
            lines += [f"missing: {missing.what}", f"  to mend it: {missing.mend}"]
        lines.append("all is well" if self.is_well else "something is wrong: see above")
        return "\n".join(lines)


def examine(show_progress: bool = False) -> Report:
    """Inspect this machine, and try each transport with two processes. Takes some seconds."""
    gpus, missing = _gpus()
    report = Report(
        gpus=gpus,
        missing=missing,
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


def _gpus() -> tuple[dict[str, str], list[Missing]]:
    """Run a kernel on each GPU; return ``Report.gpus``, and what is missing for tensors on GPUs."""
    if not torch.cuda.is_available():
        has_gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
        return {}, [_missing_cuda()] if has_gpu else []
    gpus, missing = {}, []
    if not _load.has_cuda_kernels():
        reason = _load.build_info()["loaded"]["_cuda"]
        missing.append(
            Missing(f"the CUDA kernels: {reason}", f"{_BUILD} (in flex_model's sources)")
        )
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties: Any = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        why = kernels.why_unusable(device)
        gpus[str(device)] = f"{properties.name} ({capability}): {why or 'a CUDA kernel ran'}"
        if why and _load.has_cuda_kernels():
            missing.append(Missing(f"{device}: {why}", _mend_kernels(why, capability)))
    if len(gpus) > 1 and not dist.is_nccl_available():
        missing.append(Missing(f"NCCL, which torch {torch.__version__} lacks", _INSTALL_TORCH))
    return gpus, missing


def _missing_cuda() -> Missing:
    """Why torch does not find the GPUs for which the driver has made files."""
    if torch.version.cuda is None:
        return Missing(f"CUDA, which torch {torch.__version__} lacks", _INSTALL_TORCH)
    try:
        torch.cuda.init()
        why = "it sees no GPU"
    except RuntimeError as error:
        why = " ".join(str(error).split())
    return Missing(
        f"CUDA {torch.version.cuda} of torch: {why}",
        "if CUDA_VISIBLE_DEVICES hides no GPU, update the NVIDIA driver, or install a torch for a "
        "CUDA version that `nvidia-smi` shows or an older one",
    )


def _mend_kernels(why: str, capability: str) -> str:
    if "driver" in why:
        return (
            "update the NVIDIA driver, or build with a CUDA toolkit that it supports: "
            f"CUDA_HOME=FOLDER {_BUILD} (in flex_model's sources)"
        )
    return f'TORCH_CUDA_ARCH_LIST="{capability}" {_BUILD} (in flex_model\'s sources)'


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
    communicator.check_consistency(Header("tensor"), "a trial")
    dist.barrier()
    return Trial(name, works, reason)
