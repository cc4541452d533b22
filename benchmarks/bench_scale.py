"""What a wrap costs as ranks grow: requests to torch's store, connections, files and threads of a
rank, and processor time.

Requests are counted at the store, torch's own included, of the rank that makes the most; what a
rank holds is what it did not before the wrap, of the rank that holds the most.

    python benchmarks/bench_scale.py --ranks 2 4 8 16 --hosts 1 2
    python benchmarks/bench_scale.py --ranks 4 --hosts 1 2 4 --stages 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ranks
import torch
import torch.distributed as dist
from ranks import Report
from store_proxy import MARK, StoreProxy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flex_model import FlexModel, HookFunction
from flex_model.integrations.torch_private import default_store
from flex_model.pipelining import PassThrough, PipelineStage, ScheduleGPipe

_WRAPS = "first wrap", "second wrap"  # a process's first one does what is kept
_RUNS = 5


def body(report: Report, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    rank, num_ranks, x = dist.get_rank(), dist.get_world_size(), torch.randn(4, 8)
    os.environ["FLEX_MODEL_HOST"] = f"host {rank * options.num_hosts // num_ranks}"
    make, sizes = _maker(num_ranks, options.num_stages)
    before = _held()
    for wrap in _WRAPS:
        model = make()
        dist.barrier()
        _begin(wrap)
        start, cpu_s = time.perf_counter(), _cpu_s()
        flex = FlexModel(model, {}, **sizes)
        cpu_s, wall_s = _cpu_s() - cpu_s, time.perf_counter() - start
        _begin("other")
        held = _more(_held(), before)
        flex.register_forward_hook(HookFunction("0", editing_function=_halve))
        flex(x)
        _begin(f"runs of the {wrap}")
        for _ in range(_RUNS):
            flex(x)
        _begin("other")
        dist.barrier()
        flex.restore()
        del flex
        row = [wall_s, cpu_s, *held.values(), *_more(_held(), before).values()]
        rows: list[list[float]] = [[]] * num_ranks
        dist.all_gather_object(rows, row)
        wall, cpu, *counts = zip(*rows)
        most = [int(max(count)) for count in counts]
        report(
            {
                "wrap": wrap,
                "hosts": options.num_hosts,
                "stages": options.num_stages,
                "ranks": num_ranks,
                **dict(zip(held, most)),
                "left": dict(zip(held, most[len(held) :])),
                "cpu_ms": 1e3 * statistics.mean(cpu),
                "wall_ms": 1e3 * max(wall),
            }
        )


def _maker(num_ranks: int, num_stages: int) -> tuple[Callable[[], Any], dict[str, int]]:
    """What makes the model, or the schedule of a pipeline of data-parallel stages, and its sizes.

    torch's groups are made before anything is counted.
    """
    if num_stages == 1:
        layers = nn.Linear(8, 8), nn.Linear(8, 8)
        return lambda: nn.Sequential(*layers), {"data_parallel_size": num_ranks}
    num_replicas = num_ranks // num_stages
    names = "pp", "dp"
    mesh = init_device_mesh("cpu", (num_stages, num_replicas), mesh_dim_names=names)

    def make() -> ScheduleGPipe:
        index, device = mesh.get_local_rank("pp"), torch.device("cpu")
        layers = [PassThrough() for _ in range(num_stages)]
        layers[index] = nn.Linear(8, 8)
        part = nn.Sequential(*layers)
        stage = PipelineStage(part, index, num_stages, device, group=mesh.get_group("pp"))
        return ScheduleGPipe(stage, 2)

    return make, {"pipeline_parallel_size": num_stages, "data_parallel_size": num_replicas}


def _halve(module: nn.Module, full: torch.Tensor, save_ctx, modules) -> torch.Tensor:
    return full / 2


def _begin(phase: str) -> None:
    default_store().set(MARK + phase, "")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _held() -> dict[str, int]:
    """What this process holds now."""
    time.sleep(0.05)  # threads that have done their work end
    targets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # listdir's own
            continue
    num_sockets = sum(target.startswith("socket:") for target in targets)
    return {
        "sockets": num_sockets,
        "files": len(targets) - num_sockets,
        "threads": len(os.listdir("/proc/self/task")),
    }


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in now.items()}


def _rows(num_ranks: int, num_hosts: int, num_stages: int) -> list[dict]:
    proxies: list[StoreProxy] = []

    def connect(port: int) -> int:
        proxies.append(StoreProxy(port))
        return proxies[-1].port

    def most(phase: str) -> tuple[int, str]:
        counts = [proxy.requests.get(phase, Counter()) for proxy in proxies]
        found = max(counts, key=lambda count: sum(count.values()))
        return sum(found.values()), ", ".join(f"{name} {n}" for name, n in found.items())

    options = argparse.Namespace(num_hosts=num_hosts, num_stages=num_stages)
    rows = list(ranks.rows_of(num_ranks, body, options, connect))
    for row in rows:
        row["requests"], row["by_kind"] = most(row["wrap"])
        row["requests_of_runs"], _ = most(f"runs of the {row['wrap']}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1])
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline's schedule")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    columns = "wrap hosts ranks requests requests_of_runs sockets files threads cpu_ms wall_ms"
    print(*(f"{name:>{max(len(name), 8)}}" for name in columns.split()), " by kind")
    kept = []
    for num_hosts in options.hosts:
        for num_ranks in options.ranks:
            if num_ranks < num_hosts:
                continue
            for row in _rows(num_ranks, num_hosts, options.stages):
                kept.append(row)
                texts = [
                    f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name])
                    for name in columns.split()
                ]
                aligned = (f"{t:>{max(len(n), 8)}}" for t, n in zip(texts, columns.split()))
                print(*aligned, "", row["by_kind"], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(kept, file, indent=1)


if __name__ == "__main__":
    main()
