"""Cases on one GPU for the benchmarks: a clock for what it does, and how rows are reported."""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from flex_model._C import GatherPlan

MIB = 1 << 20


def plan_along(sizes, dim, n, itemsize):
    """Rank r holds the r-th of n equal parts of dim ``dim``."""
    return grid_plan(sizes, [n if d == dim else 1 for d in range(len(sizes))], itemsize)


def grid_plan(sizes, parts, itemsize):
    """Each dim has some equal parts; ranks count along the last one first."""
    shard = [size // n for size, n in zip(sizes, parts)]
    places = itertools.product(*(range(n) for n in parts))
    starts = [[size * i for size, i in zip(shard, place)] for place in places]
    boxes = [(rank, start, [0] * len(sizes), shard) for rank, start in enumerate(starts)]
    return GatherPlan(list(sizes), [shard] * math.prod(parts), boxes, itemsize)


def device():
    """The GPU, real or emulated; the CPU where a dry run finds none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_wrong(got, expected):
    got, expected = (t.contiguous().reshape(-1).view(torch.uint8) for t in (got, expected))
    return int((got != expected.to(got.device)).sum())


class Timer:
    """Times calls by the events of a GPU, whose L2 cache it overwrites before each; or on the CPU,
    by the clock.
    """

    def __init__(self, device, dry_run):
        self.device, self.dry_run = device, dry_run
        self.is_gpu = device.type == "cuda"
        self.synchronize = torch.cuda.synchronize if self.is_gpu else int
        if self.is_gpu:
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)

    def seconds(self, run, inner):
        if not self.is_gpu:
            start = time.perf_counter()
            for _ in range(inner):
                run()
            return (time.perf_counter() - start) / inner
        events = []
        for _ in range(inner):
            # Meanwhile the host prepares the call, so that the GPU does not wait for it.
            self._flush.zero_()
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            run()
            events[-1][1].record()
        events[-1][1].synchronize()
        return sum(first.elapsed_time(last) for first, last in events) / 1e3 / inner

    def measure(self, cases, repeats):
        """Seconds per call of each case, which take turns."""
        inner = {}
        for name, run in cases.items():
            run()
            inner[name] = max(1, min(100, int(1e-3 / max(self.seconds(run, 2), 1e-9))))
        times = {name: [] for name in cases}
        for _ in range(repeats):
            for name, run in cases.items():
                times[name].append(self.seconds(run, inner[name]))
        return times

    def peak_extra(self, run):
        """Bytes allocated beside the result."""
        if self.dry_run:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        kept, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated() - before
        del result
        return peak - (kept - before)


def row(case, times, **columns):
    return {
        "case": case,
        **columns,
        "min_us": min(times) * 1e6,
        "median_us": statistics.median(times) * 1e6,
    }


def arguments(description, repeats=30):
    """A parser of what all of them take; without ``repeats``, a benchmark chooses them by time."""
    parser = argparse.ArgumentParser(description=description)
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny cases, on the CPU where there is no GPU"
    )
    return parser


def parse(parser):
    """The arguments; ends here, with a line that says so, where a GPU is needed and there is
    none.
    """
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.dry_run:
        name = Path(sys.argv[0]).stem
        print(f"{name}: it needs a GPU, so nothing is measured here (--dry-run shows the cases)")
        sys.exit(0)
    return args


def report(rows, args):
    """Print the rows, and write them where they are wanted; an error if a byte was wrong."""
    for i, line in enumerate(rows):
        if i == 0 or list(line) != list(rows[i - 1]):
            print(f"{'case':>32}", *(f"{name:>10}" for name in list(line)[1:]))
        case, *values = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in line.values())
        print(f"{case:>32}", *(f"{value:>10}" for value in values))
    if args.json and rows:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    if any(line["wrong"] for line in rows):
        sys.exit("wrong bytes")
