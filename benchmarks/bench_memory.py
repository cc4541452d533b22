"""What hooks cost in memory, on tensor-parallel ranks of one host.

    python benchmarks/bench_memory.py [--ranks 2] [--mib 128] [--json FILE]

A model computes one activation, of which each rank has some columns, and hooks see it in full.
Every case runs in processes of its own, after three forwards; what pools keep is counted.

Columns:
    case         ``read``: a hook without a function; ``edit``: its function returns
                 ``full * 0.5``; ``edit in place``: ``full.mul_(0.5)``; ``, no record``:
                 ``record=False``; ``on rank 0``: ``edit_on="rank0"``; ``one position``:
                 ``select=Select(positions="last")``
    ranks
    mib          the full activation, float32
    rank_0, rank_1  what the hook adds to the peak of the rank's own memory, in full activations
    shared       the memory that the ranks share, counted once, in full activations
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flex_model import FlexModel, HookFunction, Select

WIDTH, MIB = 4096, 1 << 20


def halved(module: nn.Module, full: Tensor, save_ctx, modules) -> Tensor:
    return full * 0.5


def halved_in_place(module: nn.Module, full: Tensor, save_ctx, modules) -> None:
    full.mul_(0.5)


LAST = {"select": Select(positions="last")}
CASES: dict[str, tuple[Callable | None, dict, str]] = {
    "read": (None, {}, "all"),
    "read, one position": (None, LAST, "all"),
    "edit": (halved, {}, "all"),
    "edit, no record": (halved, {"record": False}, "all"),
    "edit in place": (halved_in_place, {}, "all"),
    "edit in place, no record": (halved_in_place, {"record": False}, "all"),
    "edit on rank 0": (halved, {}, "rank0"),
    "edit, one position": (halved, LAST, "all"),
}


class Columns(nn.Module):
    """Of (1, tokens, 1), each rank's columns of (1, tokens, ``WIDTH``)."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 1, WIDTH
        self.weight = nn.Parameter(torch.ones(WIDTH // dist.get_world_size(), 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.site = Columns(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.site(self.up(x))[..., :1].clone()


def memory_of(case: str | None, mib: int) -> tuple[int, int]:
    """The peak of this rank's own memory, and its share of the shared memory, in bytes."""
    x = torch.ones(1, mib * MIB // WIDTH // 4, 1)
    function, settings, edit_on = CASES.get(case, (None, {}, "all"))
    with FlexModel(
        Model(), records := {}, tensor_parallel_size=dist.get_world_size(), edit_on=edit_on
    ) as flex:
        if case is not None:
            flex.register_forward_hook(HookFunction("site", None, function, **settings))
        for _ in range(3):
            flex(x)
        records.clear()
        gc.collect()
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        flex(x)
        dist.barrier()
        peak, touched = of_process("status", "VmHWM"), of_process("status", "RssShmem")
        shared = of_process("smaps_rollup", "Pss_Shmem")
        dist.barrier()
    return peak - touched, shared


def of_process(file: str, name: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def body(report: ranks.Report, options: argparse.Namespace) -> None:
    torch.set_grad_enabled(False)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, memory_of(options.case, options.mib))
    report({"own": [own for own, _ in found], "shared": sum(shared for _, shared in found)})


def measured(options: argparse.Namespace):
    """Yield the rows."""
    for options.case in (None, *CASES):
        (found,) = ranks.rows_of(options.ranks, body, options)
        if options.case is None:
            bare = found
            continue
        of_full = options.mib * MIB
        added = [(own - base) / of_full for own, base in zip(found["own"], bare["own"])]
        yield {
            "case": options.case,
            "ranks": options.ranks,
            "mib": options.mib,
            "rank_0": round(added[0], 1),
            "rank_1": round(added[1], 1),
            "shared": round((found["shared"] - bare["shared"]) / of_full, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    for row in measured(options):
        rows.append(row)
        print(f"{row['case']:>24}", row["rank_0"], row["rank_1"], row["shared"], flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
