"""Ranks for the benchmarks, and a clock for what they do together.

A rank is a fork of a process that has imported torch: 0.05 s each instead of 5 s. What counts as
the time of a collective operation is that of its slowest rank, from a start that is common to all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores

import torch
import torch.distributed as dist
from torch import Tensor

Report = Callable[[dict], None]

_START_S = 5e-4  # until when the last rank has heard of the start: a wake-up takes some 0.1 ms


# ---- Starting and ending them --------------------------------------------------------------------


def rows_of(
    num_ranks: int,
    body: Callable[[Report, Any], None],
    options: Any,
    port_of: Callable[[int], int] = lambda port: port,
) -> Iterator[dict]:
    """Run ``body(report, options)`` on every rank of a gloo world; the rows that rank 0 reports, as
    they come. The first rank that fails ends them all. ``port_of``: called with the store's port
    for each rank in turn, returns the one that the rank connects to.
    """
    context = get_context("fork")
    processes, pipes = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        process = context.Process(target=_live, args=(rank, num_ranks, there, body, options))
        process.daemon = True
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        # Only now: a store has a thread, and threads do not survive a fork.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            pipe.send(port_of(store.port))
        waiting = dict(zip(pipes, processes))
        while waiting:
            connection.wait([*waiting, *(process.sentinel for process in waiting.values())])
            for pipe, process in list(waiting.items()):
                is_alive = process.is_alive()  # asked first: its last words come before it ends
                if not pipe.poll():
                    if is_alive:
                        continue
                    sys.exit(f"{process.name} died, exit code {process.exitcode}")
                message = pipe.recv()
                if isinstance(message, dict):
                    yield message
                    continue
                del waiting[pipe]
                if message:
                    sys.exit(message)
    finally:
        for process in processes:
            process.join(2 if not waiting else 0)
            process.kill()


def _live(rank: int, num_ranks: int, pipe: Any, body: Callable, options: Any) -> None:
    torch.set_num_threads(1)
    failure = None
    try:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5)
        )
        body(pipe.send if rank == 0 else lambda row: None, options)
        dist.barrier()
    except BaseException:
        failure = f"rank {rank}:\n{traceback.format_exc()}"
    pipe.send(failure)
    os._exit(0)  # gloo's threads abort an orderly exit now and then


# ---- The clock -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Of one call, in microseconds, over repeats; ``wrong`` elements on all ranks together."""

    min_us: float
    median_us: float
    wrong: int


def measure(
    cases: dict[str, Callable[[], Any]],
    num_wrong: Callable[[str, Any], int],
    budget_s: float,
    calls: int = 1,
) -> dict[str, Timing]:
    """Time the cases in turns, so that drift of the machine meets all of them, and in another order
    each time, so that none always finds the caches that the same other one left.

    Args:
        cases: Collective over the world. Their results live until the clock has stopped.
        num_wrong: Counts, of a case and its result, the elements that are not what they should be.
            Applied to the results of the first and of the last repeat.
        budget_s: How long the repeats may take together, in seconds; there are at least two.
        calls: How many calls one timing is the mean of.
    """
    wrong = dict.fromkeys(cases, 0)
    order = list(cases)
    dice = random.Random(0)  # alike on all ranks

    def repeat(checked: bool) -> list[float]:
        times = {}
        dice.shuffle(order)
        for name in order:
            run = cases[name]
            result = None  # frees the last one before the clock runs
            start = _together()
            for _ in range(calls):
                result = run()
            times[name] = (time.perf_counter() - start) / calls
            if checked:
                wrong[name] += num_wrong(name, result)
        return [times[name] for name in cases]

    repeat(checked=True)  # connects, allocates
    repeat(checked=False)
    start = time.perf_counter()
    times = [repeat(checked=False)]
    took_s = _slowest(torch.tensor([time.perf_counter() - start])).item()
    left = min(100, int(budget_s / took_s)) - 1
    times += [repeat(checked=False) for _ in range(left - 1)]
    times.append(repeat(checked=True))

    us = (_slowest(torch.tensor(times, dtype=torch.float64)) * 1e6).T.tolist()
    totals = torch.tensor(list(wrong.values()))
    dist.all_reduce(totals)
    return {
        name: Timing(min(values), statistics.median(values), total)
        for name, values, total in zip(cases, us, totals.tolist())
    }


def _together() -> float:
    """Waits until all ranks start, and returns when that was. A barrier lets its ranks go one after
    the other: what they do then would not be concurrent. The clock is the host's. Collective.
    """
    start = _slowest(torch.tensor(time.perf_counter(), dtype=torch.float64)).item() + _START_S
    while time.perf_counter() < start:
        os.sched_yield()
    return start


def _slowest(times: Tensor) -> Tensor:
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times


# ---- What they report ----------------------------------------------------------------------------


def compared(ours: Timing, theirs: Timing, against: str, goal: str) -> dict:
    """The columns of one comparison; ``goal`` is ``"<= 0.9"``, of our time in theirs, ``">= 8"``,
    how many times faster we are, or ``"-"``.
    """
    ratio = theirs.min_us / ours.min_us
    met = "-"
    if goal.startswith("<="):
        ratio = 1 / ratio
        met = "yes" if ratio <= float(goal[2:]) else "no"
    elif goal != "-":
        met = "yes" if ratio >= float(goal[2:]) else "no"
    return {
        "us": ours.min_us,
        "median_us": ours.median_us,
        "against": against,
        "their_us": theirs.min_us,
        "their_median_us": theirs.median_us,
        "ratio": ratio,
        "goal": goal,
        "met": met,
        "wrong": ours.wrong + theirs.wrong,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    parser.add_argument(
        "--original",
        metavar="PATH",
        default=os.environ.get("FM_PATH"),
        help="folder that holds release 0.1.0's flex_model (default: $FM_PATH)",
    )


def report(rows: Iterator[dict], options: argparse.Namespace) -> None:
    """Print the rows as they come, those without a goal only with ``--all``; then what became of
    each goal. Exits with an error if a result was wrong.
    """
    kept, widths = [], None
    for row in rows:
        kept.append(row)
        if row["goal"] == "-" and not options.all and not row["wrong"]:
            continue
        if widths is None:
            widths = [max(len(name), 9) for name in row]
            widths[0] = widths[list(row).index("against")] = 22
            print(*(f"{name:>{width}}" for name, width in zip(row, widths)))
        texts = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
        print(*(f"{text:>{width}}" for text, width in zip(texts, widths)), flush=True)
    _summarize(kept)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(kept, file, indent=1)
    if any(row["wrong"] for row in kept):
        sys.exit("wrong results")


def _summarize(rows: list[dict]) -> None:
    goals: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        if row["goal"] != "-":
            key = row["operation"], row["against"].partition(":")[0], row["goal"]
            goals.setdefault(key, []).append(row)
    print(f"\nof {len(rows)} rows, {sum(row['wrong'] for row in rows)} elements wrong; goals:")
    for (operation, against, goal), of_goal in goals.items():
        ratios = sorted(row["ratio"] for row in of_goal)
        met = sum(row["met"] == "yes" for row in of_goal)
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"  {operation} against {against} {goal}: {span}; met in {met} of {len(ratios)} rows")
