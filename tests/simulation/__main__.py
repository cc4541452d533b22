"""`python tests/simulation`: a job of many ranks in one process, beside what is predicted of it.

python tests/simulation --ranks 1024 --hosts 128 --seed 0
python tests/simulation --ranks 64 --hosts 8 --fail "silent host" 9 20
python tests/simulation --ranks 64 --hosts 8 --slow 2 1e5
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tensors are tiny
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from simulation.cluster import Fault, Speeds  # noqa: E402
from simulation.job import Job, Plan  # noqa: E402


def report(job: Job) -> str:
    """What was counted, beside what is predicted."""
    wrap, runs, requests = job.counted("wrap"), job.counted("runs"), job.predicted_requests()
    rows = [
        ("requests of all ranks, wrap", sum(wrap.requests.values()), sum(requests)),
        ("requests of a rank at most, wrap", max(wrap.requests.values()), max(requests)),
        ("requests, runs", sum(runs.requests.values()), 0),
        ("bytes of the store, wrap", wrap.store_bytes, "-"),
    ]
    plan = job.plan
    title = f"{plan.num_ranks} ranks on {plan.num_hosts} hosts, {plan.num_runs} runs"
    lines = [f"{what:38} {counted:>14} {expected:>14}" for what, counted, expected in rows]
    return "\n".join([title, f"{'':38} {'simulated':>14} {'predicted':>14}", *lines])


def outcome(job: Job) -> str:
    """When ranks ended, with which errors, and what is wrong with them."""
    ended = job.ended_s.values()
    lines = [f"{len(ended)} ranks ended, at {min(ended):.1f} to {max(ended):.1f} virtual seconds"]
    texts = collections.Counter(str(error).splitlines()[0] for error in job.errors.values())
    lines += [f"{number} ranks: {text}" for text, number in texts.most_common()]
    return "\n".join(lines + [f"WRONG: {problem}" for problem in job.problems()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].partition(": ")[2])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--tp", type=int, help="default: the ranks of a host")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fail", nargs=3, metavar=("KIND", "RANK", "STEP"), help="see Fault")
    parser.add_argument("--slow", nargs=2, metavar=("HOST", "TIMES"), help="see Speeds")
    parser.add_argument("--held", action="store_true", help="rank 0 has the store")
    args = parser.parse_args()
    tp = args.tp or args.ranks // args.hosts
    speeds, fault = Speeds(), None
    if args.slow:
        speeds = Speeds(slow_host=int(args.slow[0]), times=float(args.slow[1]))
    if args.fail:
        fault = Fault(int(args.fail[1]), int(args.fail[2]), args.fail[0])
    is_whole = not (args.fail or args.slow)
    plan = Plan(args.ranks, args.hosts, tp, args.pp, num_runs=args.runs)
    start = time.perf_counter()
    job = Job(dataclasses.replace(plan, stays=not args.held), args.seed, speeds, fault).run()
    if is_whole and job.errors:
        raise SystemExit(f"seed {args.seed}: {next(iter(job.errors.values()))!r}")
    print(f"seed {args.seed}: {report(job) if is_whole else outcome(job)}")
    print(f"{time.perf_counter() - start:.1f} s, {time.process_time():.1f} s of CPU")


main()
