"""The kernels that copy boxes, against a plain copy of as many bytes in the memory of one GPU.

    python benchmarks/bench_boxes_cuda.py [--repeats N] [--max-mib N] [--json FILE]

A full tensor of bytes is split into equal boxes, of which each rank has one. A box has runs, which
are contiguous in the full tensor too, and levels above them, which are not: a split of the last dim
is one level, and each further dim that is split is one more. ``--dry-run``: tiny cases, whose times
mean nothing; on the CPU where there is no GPU.

Cases take turns, so that drift of the machine falls on all alike. The L2 cache is overwritten
before each call, and CUDA events time the GPU alone: a call's work on the host is not in it.

Columns:
    case       ``assemble``: the full tensor from a buffer with all shards; ``pack``: the reverse
    run        bytes of a run
    levels     above it
    align      the largest power of two, up to 16, that divides addresses and runs
    mib        of the full tensor
    min_us, median_us   of one call
    gbs        bytes read and written / min_us
    share      ``copy_`` of the full tensor / this case, by min_us. Below 64 MiB it says little: the
               copy is partly in the cache. Goals from there on: 0.9 for 16-byte alignment, 0.5 for
               2-byte
    wrong      bytes that differ: 0
"""

import itertools

import gpus
import torch
from gpus import MIB, Timer, grid_plan, num_wrong, row

ops = torch.ops.flex_model

SIZES_MIB = (16, 64, 256, 1024)
RUNS = (512, 4096, 65536)
ALIGNMENTS = (2, 8, 16)
PARTS = 8  # of a dim that is split: half of it are steps of a level


def box_rows(timer, run, levels, align, mib, repeats):
    run += align % 16
    inner = [PARTS] * (levels - 1)
    size = run * 2 * PARTS ** (levels - 1)
    sizes = (max(2, round(mib * MIB / size)), *inner, 2 * run)
    plan = grid_plan(sizes, [1, *[2] * levels], 1)
    full = torch.randint(0, 256, sizes, dtype=torch.uint8, device=timer.device)
    total = full.nbytes
    width = plan.shard_bytes[0]
    offsets = [rank * width for rank in range(len(plan.shard_bytes))]
    packed = ops.pack(full, plan.code, offsets, total)
    copied = torch.empty_like(full)
    cases = {
        "assemble": lambda: ops.assemble(packed, offsets, plan.code, list(sizes), torch.uint8),
        "pack": lambda: ops.pack(full, plan.code, offsets, total),
        "copy": lambda: copied.copy_(full),
    }
    results = {"assemble": full, "pack": torch.cat([s.reshape(-1) for s in plan_parts(plan, full)])}
    wrong = {name: num_wrong(cases[name](), expected) for name, expected in results.items()}
    del results
    times = timer.measure(cases, repeats)
    copy = min(times.pop("copy"))
    return [
        row(case, seconds, run=run, levels=levels, align=align, mib=round(total / MIB))
        | {"gbs": 2e-9 * total / min(seconds), "share": copy / min(seconds), "wrong": wrong[case]}
        for case, seconds in times.items()
    ]


def plan_parts(plan, full):
    """The shards of a plan of ``grid_plan``, in rank order, by torch's indexing."""
    parts = [full]
    for dim in range(1, full.dim()):
        if plan.shard_sizes[0][dim] != full.shape[dim]:
            parts = [half for part in parts for half in part.chunk(2, dim)]
    return parts


def main():
    parser = gpus.arguments(__doc__.splitlines()[0], repeats=10)
    parser.add_argument("--max-mib", type=int, default=1024, help="of the largest full tensor")
    args = gpus.parse(parser)
    timer = Timer(gpus.device(), args.dry_run)
    runs, sizes = (RUNS[:1], [0.01]) if args.dry_run else (RUNS, SIZES_MIB)
    rows = []
    for mib, run, levels, align in itertools.product(sizes, runs, (1, 2, 3), ALIGNMENTS):
        if mib <= args.max_mib:
            rows += box_rows(timer, run, levels, align, mib, args.repeats)
    gpus.report(rows, args)


if __name__ == "__main__":
    main()
