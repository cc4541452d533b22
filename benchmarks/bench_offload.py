"""Shards from a GPU into page-locked host memory in final layout, as collected activations go.

    python benchmarks/bench_offload.py [--repeats N] [--json FILE]

One GPU, whose shard is half the width of the full tensor. ``--dry-run``: tiny cases, whose times
mean nothing; on the CPU where there is no GPU.

Cases take turns, so that drift of the machine falls on all alike, and are timed by CUDA events.
What arrived is compared bit for bit, in the same run.

Columns:
    case       ``host``: a shard into page-locked host memory, by ``how``, ``contiguous`` being what
               a plain copy needs; ``GEMM``, ``GEMM + host``: matrix products alone, and while
               shards go to the host
    run        bytes that are contiguous on both sides
    mib        of the shards
    min_us, median_us   of one call
    gbs        bytes over the bus / min_us
    share      the contiguous copy / this case, by min_us; the goal is 0.9 for runs from 4 KiB on
    speedup    of ``GEMM + host``: ``GEMM`` / this case; the goal is 0.97
    wrong      bytes that differ: 0
"""

import gpus
import torch
from gpus import MIB, Timer, num_wrong, plan_along, row

ops = torch.ops.flex_model


def host_rows(timer, repeats):
    """Half the width of a full tensor into page-locked memory, for short and long rows."""
    rows = []
    for run_bytes in [64, 4096] if timer.dry_run else [64, 256, 512, 1024, 4096, 65536]:
        count = (MIB if timer.dry_run else 64 * MIB) // run_bytes
        plan = plan_along((count, 2 * run_bytes), 1, 2, 1)
        shard = torch.randint(0, 256, (count, run_bytes), dtype=torch.uint8, device=timer.device)
        host = torch.zeros(count, 2 * run_bytes, dtype=torch.uint8, pin_memory=timer.is_gpu)
        flat = torch.empty(count, run_bytes, dtype=torch.uint8, pin_memory=timer.is_gpu)

        def copy(how, shard=shard, host=host, plan=plan):
            ops.copy_to_host(shard, host.data_ptr(), plan.code, 1, how)

        cases = {how: (lambda how=how: copy(how)) for how in ("auto", "copy engine", "kernel")}
        cases["contiguous"] = lambda flat=flat, shard=shard: flat.copy_(shard, non_blocking=True)
        times = timer.measure(cases, repeats)
        contiguous = min(times["contiguous"])
        for how, seconds in times.items():
            timer.synchronize()
            host.zero_()
            cases[how]()
            timer.synchronize()
            got = flat if how == "contiguous" else host[:, run_bytes:]
            rows.append(
                row(f"host, {how}", seconds, run=run_bytes, mib=shard.nbytes / MIB)
                | {
                    "gbs": 1e-9 * shard.nbytes / min(seconds),
                    "share": contiguous / min(seconds),
                    "speedup": 0.0,
                    "wrong": num_wrong(got, shard),
                }
            )
    return rows


def overlap_rows(timer, repeats):
    """Matrix products, alone and while shards go to the host."""
    from flex_model.distributed.transports.host_copies import HostCopies

    device = timer.device
    width, rows = (64, 64) if timer.dry_run else (8192, 4096)
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = a @ b
    shard = torch.randn(rows, 2048, dtype=torch.bfloat16, device=device)
    plan = plan_along((rows, 4096), 1, 2, 2)
    host = torch.empty(8, rows, 4096, dtype=torch.bfloat16, pin_memory=True)
    copies = HostCopies()

    def gemms():
        for _ in range(20):
            torch.mm(a, b, out=product)

    def gemms_and_copies():
        for i in range(8):
            copies.start(shard, host[i].data_ptr(), plan, 1)
        gemms()

    times = {"GEMM": [], "GEMM + host": []}
    for _ in range(repeats + 1):
        for case, run in (("GEMM", gemms), ("GEMM + host", gemms_and_copies)):
            times[case].append(timer.seconds(run, 1))
            copies.wait()
    wrong = sum(num_wrong(host[i, :, 2048:].clone(), shard.cpu()) for i in range(8))
    alone = min(times["GEMM"][1:])
    return [
        row(case, seconds[1:], run=4096, mib=8 * shard.nbytes / MIB)
        | {"gbs": 0.0, "share": 0.0, "speedup": alone / min(seconds[1:])}
        | {"wrong": wrong if "host" in case else 0}
        for case, seconds in times.items()
    ]


def main():
    args = gpus.parse(gpus.arguments(__doc__.splitlines()[0]))
    timer = Timer(gpus.device(), args.dry_run)
    rows = host_rows(timer, args.repeats)
    gpus.report(rows + overlap_rows(timer, args.repeats) if timer.is_gpu else rows, args)


if __name__ == "__main__":
    main()
