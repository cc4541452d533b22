"""Shards into the final layout on GPUs: our kernels and transports against copies and collectives.

    python benchmarks/bench_gather_cuda.py [--repeats N] [--max-mib N] [--json FILE]
    torchrun --nproc-per-node N benchmarks/bench_gather_cuda.py [...]

The first takes one GPU: the shards of n ranks are n tensors on it, so it shows the kernels at the
speed of its memory. The second times transports between processes, each with a GPU of its own or
all sharing one (then only `wrong` counts, for they take turns on it). ``--dry-run``: tiny cases,
whose times mean nothing; on the CPU where there is no GPU.

Cases take turns, so that drift of the machine falls on all alike. Those of the first are timed by
CUDA events, with an L2 cache that was overwritten; those of the second by the clock. Results are
compared with the full tensor, bit for bit, in the same run.

Columns of the first:
    case       ``pull``: the full tensor from n shards, by their addresses and by the few blocks
               that fill a link between GPUs; ``assemble``: from one buffer with all shards, as
               after NCCL; ``split``: all n shards out of the full tensor; ``flat + cat``: the
               shards copied into one buffer, as a collective leaves them, then chunk and cat;
               ``list + cat``: a clone of one shard, the shards copied into n new tensors, then cat
    n, dim     ranks, and the dim they split; ``odd``: the last one, 513 elements of bfloat16 per
               rank, so that runs are aligned to two bytes; ``odd short``: 33
    run        bytes that are contiguous on both sides, of one rank
    mib        of the full tensor
    min_us, median_us   of one call
    gbs        bytes read and written / min_us
    share      ``copy_`` of the full tensor / this case, by min_us: see bench_boxes_cuda.py
    speedup    ``flat + cat`` / this case, the goal for ``assemble`` at 64 MiB being 1.8
    extra_mib  memory beside inputs and result, at its peak
    wrong      bytes that differ: 0

Columns of the second:
    case       a transport of ours; ``nccl + cat`` or ``gloo + cat``: all_gather_into_tensor, chunk
               and cat
    n, dim, mib, min_us, median_us, wrong   as above; times are the slowest rank's
    busbw      (n - 1) / n of the full tensor's bytes / min_us, GB/s
    speedup    ``nccl + cat`` (``gloo + cat`` where ranks share a GPU) / this case
"""

import itertools
import os
import time

import gpus
import torch
import torch.distributed as dist
from gpus import MIB, Timer, num_wrong, plan_along, row

ops = torch.ops.flex_model


def grid_of_cases(max_mib, dry_run):
    """(n, name of the dim, dim, sizes) of bfloat16 tensors."""
    for mib in [1] if dry_run else [m for m in (1, 16, 64, 256, 1024) if m <= max_mib]:
        elements = mib * MIB // 2
        for n in (2,) if dry_run else (2, 4, 8):
            yield n, "0", 0, (8 * 16, elements // (8 * 16))
            yield n, "1", 1, (32, elements // (32 * 2048), 2048)
            yield n, "-1", 1, (elements // 4096, 4096)
            for name, run in (("odd", 513), ("odd short", 33)):
                yield n, name, 1, (elements // (n * run), n * run)


def reorder_rows(timer, n, name, dim, sizes, repeats):
    device = timer.device
    full = torch.randint(-9999, 9999, sizes, dtype=torch.int16, device=device).view(torch.bfloat16)
    plan = plan_along(sizes, dim, n, 2)
    shards = [part.contiguous() for part in full.chunk(n, dim)]
    addresses = [shard.data_ptr() for shard in shards]
    width = plan.shard_bytes[0]
    gathered = torch.cat([shard.reshape(-1).view(torch.uint8) for shard in shards])
    offsets = [rank * width for rank in range(n)]
    copied = torch.empty_like(full)

    def pull():
        out = torch.empty_like(full)
        ops.pull_(out, addresses, plan.code, 0)
        return out

    def flat_and_cat():
        flat = torch.empty(n * shards[0].numel(), dtype=full.dtype, device=device)
        for place, shard in zip(flat.chunk(n), shards):
            place.copy_(shard.view(-1))
        return torch.cat([part.view(shards[0].shape) for part in flat.chunk(n)], dim)

    def list_and_cat():
        shards[0].clone()
        parts = [torch.empty_like(shard) for shard in shards]
        for part, shard in zip(parts, shards):
            part.copy_(shard)
        return torch.cat(parts, dim)

    def split():
        return [ops.split(full, plan.code, rank, plan.shard_sizes[rank]) for rank in range(n)]

    cases = {
        "pull": pull,
        "assemble": lambda: ops.assemble(gathered, offsets, plan.code, list(sizes), full.dtype),
        "split": split,
        "flat + cat": flat_and_cat,
        "list + cat": list_and_cat,
        "copy": lambda: copied.copy_(full),
    }
    times = timer.measure(cases, repeats)
    copy = min(times.pop("copy"))
    run_bytes = full.nbytes // n if dim == 0 else full[0].nbytes // n
    rows = []
    for case, seconds in times.items():
        result = cases[case]()
        wrong = num_wrong(torch.cat(result, dim) if case == "split" else result, full)
        rows.append(
            row(case, seconds, n=n, dim=name, run=run_bytes, mib=full.nbytes / MIB)
            | {
                "gbs": 2e-9 * full.nbytes / min(seconds),
                "share": copy / min(seconds),
                "speedup": min(times["flat + cat"]) / min(seconds),
                "extra_mib": timer.peak_extra(cases[case]) / MIB,
                "wrong": wrong,
            }
        )
    return rows


def bench_one_gpu(args):
    timer = Timer(gpus.device(), args.dry_run)
    rows = []
    for case in grid_of_cases(args.max_mib, args.dry_run):
        rows += reorder_rows(timer, *case, args.repeats)
    return rows


def bench_ranks(args):
    from flex_model.distributed import process_groups
    from flex_model.distributed.transports import choice, nccl
    from flex_model.distributed.transports.choice import choose

    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own_gpu = torch.cuda.device_count() >= n
    with_nccl = own_gpu and not args.dry_run
    device = gpus.device()
    synchronize = int
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if own_gpu else 0)
        torch.cuda.set_device(device)
        synchronize = torch.cuda.synchronize
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_nccl else "gloo")
    group, _ = process_groups.acquire(tuple(range(n)), 60.0)

    def wait(works):
        while not all(work.is_completed() for work in works):
            time.sleep(0)
        for work in works:
            work.wait()

    on_cpu, _ = choose(group, wait, torch.device("cpu"))
    transports = {}
    if device.type == "cuda":
        best, _ = choice.connect(on_cpu, "", wait, device, "peer_memory")
        transports[best.name] = best.on_gpu
    else:
        transports[on_cpu.name] = on_cpu
    if with_nccl:
        transports["nccl"] = nccl.Nccl(on_cpu, wait, device)
    baseline = "nccl + cat" if with_nccl else "gloo + cat"

    rows = []
    sizes_mib = [1] if args.dry_run else [m for m in (1, 16, 64, 256) if m <= args.max_mib]
    for mib, dim in itertools.product(sizes_mib, (0, 1)):
        sizes = (n * 128, mib * MIB // 2 // (n * 128) // n * n)
        full = torch.arange(sizes[0] * sizes[1], dtype=torch.int32, device=device)
        full = full.to(torch.int16).view(torch.bfloat16).view(sizes)
        plan = plan_along(sizes, dim, n, 2)
        shard = full.chunk(n, dim)[rank].contiguous()

        def gather_and_cat(shard=shard, dim=dim):
            mine = shard if with_nccl else shard.cpu()
            flat = mine.new_empty((n * mine.shape[0], *mine.shape[1:]))
            dist.all_gather_into_tensor(flat, mine)
            full = flat if dim == 0 else torch.cat(flat.chunk(n), dim)
            return full.to(device)

        cases = {
            name: lambda t=t, shard=shard, plan=plan: t.all_gather(shard, plan)[0]
            for name, t in transports.items()
        } | {baseline: gather_and_cat}
        times = {name: [] for name in cases}
        for _ in range(args.repeats + 2):
            for name, run in cases.items():
                synchronize()
                dist.all_reduce(torch.zeros(1))
                start = time.perf_counter()
                run()
                synchronize()
                slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[name].append(slowest.item())
        base = min(times[baseline][2:])
        for name, seconds in times.items():
            wrong = torch.tensor([num_wrong(cases[name](), full)])
            dist.all_reduce(wrong)
            rows.append(
                row(name, seconds[2:], n=n, dim=str(dim), mib=full.nbytes / MIB)
                | {
                    "busbw": 1e-9 * (n - 1) / n * full.nbytes / min(seconds[2:]),
                    "speedup": base / min(seconds[2:]),
                    "wrong": wrong.item(),
                }
            )
    if device.type == "cuda":
        for transport in transports.values():
            transport.close()
    group.release()
    dist.destroy_process_group()
    return rows if rank == 0 else []


def main():
    parser = gpus.arguments(__doc__.splitlines()[0])
    parser.add_argument("--max-mib", type=int, default=1024, help="of the largest full tensor")
    args = gpus.parse(parser)
    many = int(os.environ.get("WORLD_SIZE", 1)) > 1
    gpus.report(bench_ranks(args) if many else bench_one_gpu(args), args)


if __name__ == "__main__":
    main()
