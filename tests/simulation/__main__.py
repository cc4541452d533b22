"""`python tests/simulation`: a job of many ranks in one process, beside what the costs predict.

python tests/simulation --ranks 1024 --hosts 128 --seed 0
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tensors are tiny
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from simulation.cluster import Speeds  # noqa: E402
from simulation.job import Job, Plan  # noqa: E402


def report(job: Job) -> str:
    """What was counted, beside what is predicted."""
    wrap, runs, predicted = job.counted("wrap"), job.counted("runs"), job.predicted_by_host()
    requests = job.predicted_requests()
    rows = [
        ("requests of all ranks, wrap", sum(wrap.requests.values()), sum(requests)),
        ("requests of a rank at most, wrap", max(wrap.requests.values()), max(requests)),
        ("requests, runs", sum(runs.requests.values()), 0),
        ("bytes of the store, wrap", wrap.store_bytes, "-"),
    ]
    for what, counted, expected in (
        ("messages", runs.messages, predicted.messages),
        ("bytes sent", runs.sent, predicted.sent),
        ("bytes received", runs.received, predicted.received),
    ):
        rows += [
            (f"{what} of all hosts, runs", sum(counted.values()), sum(expected.values())),
            (
                f"{what} of a host at most, runs",
                max(counted.values(), default=0),
                max(expected.values(), default=0),
            ),
        ]
    rows += [
        ("virtual seconds, wrap", f"{job.seconds('wrap', 'runs'):.6f}", "-"),
        ("virtual seconds, runs", f"{job.seconds('runs', 'end'):.6f}", f"{job.predicted_s():.6f}"),
    ]
    plan = job.plan
    title = f"{plan.num_ranks} ranks on {plan.num_hosts} hosts, {plan.num_runs} runs"
    lines = [f"{what:38} {counted:>14} {expected:>14}" for what, counted, expected in rows]
    return "\n".join([title, f"{'':38} {'simulated':>14} {'cost model':>14}", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].partition(": ")[2])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--tp", type=int, help="default: the ranks of a host")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tp = args.tp or args.ranks // args.hosts
    plan = Plan(args.ranks, args.hosts, tp, args.pp, num_runs=args.runs, is_in_step=True)
    start = time.perf_counter()
    job = Job(plan, args.seed, Speeds()).run()
    if job.errors:
        raise SystemExit(f"seed {args.seed}: {next(iter(job.errors.values()))!r}")
    print(f"seed {args.seed}: {report(job)}")
    print(f"{time.perf_counter() - start:.1f} s, {time.process_time():.1f} s of CPU")


main()
