"""`python tests/fuzz`: random programs, sharded under FlexModel against the unsharded model.

    python tests/fuzz --seconds 600 --ranks 2 --mode all --start 0 --json out.json
    python tests/fuzz --replay '{...}'    # one program, as a failure prints it
    python tests/fuzz --seeds             # the failures that were kept

Failures are confirmed, made short and printed with what ``--replay`` takes; ``--keep`` adds them to
the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

import seeds  # noqa: E402
from generate import can_be_followed, generate, modes_of  # noqa: E402
from program import BAD, INVALID, MODES, VERDICTS, Program  # noqa: E402
from ranks import Outcome, Ranks, shown  # noqa: E402
from shrink import shrink  # noqa: E402

import rank_pool  # noqa: E402


def main() -> int:
    options = arguments()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # the fork server's
    rank_pool.PRELOAD = [*(n for n in rank_pool.PRELOAD if "transformers" not in n), "verdict"]
    with Ranks() as ranks:
        if options.replay:
            return replay(ranks, options.replay)
        if options.seeds:
            return replay_seeds(ranks)
        return fuzz(ranks, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--mode", default="all", help=f"all, or some of: {', '.join(MODES)}")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, help="counts, added to those of former runs")
    parser.add_argument(
        "--shrink", type=float, default=20, help="seconds for each failure; 0: none"
    )
    parser.add_argument("--keep", action="store_true", help="add failures to the seeds")
    parser.add_argument("--cells", type=int, default=3, help="cells of each program")
    parser.add_argument("--replay", help="one program, as JSON or in a file")
    parser.add_argument("--seeds", action="store_true", help="replay those of seeds.jsonl")
    return parser.parse_args()


# ---- Fuzzing -------------------------------------------------------------------------------------


def fuzz(ranks: Ranks, options: argparse.Namespace) -> int:
    modes = modes_of(options.ranks) if options.mode == "all" else options.mode.split(",")
    counts: dict[str, Counter] = {mode: Counter() for mode in modes}
    refusals: dict[str, Counter] = {mode: Counter() for mode in modes}
    ranks.judge(generate(options.start, modes[0], options.ranks))  # starts them
    spent = 0.0  # on confirming and shrinking, which is not fuzzing
    began, seed = time.monotonic(), options.start
    while time.monotonic() - began - spent < options.seconds:
        for mode in modes:
            program = generate(seed, mode, options.ranks)
            counts[mode]["programs"] += 1
            is_followed = can_be_followed(program)
            worst = set()
            for outcome in ranks.judge(program, number=options.cells):
                if outcome.verdict in BAD:
                    start = time.monotonic()
                    outcome = looked_into(ranks, program, outcome, options)
                    spent += time.monotonic() - start
                counts[mode][outcome.verdict] += 1
                if outcome.verdict == "refused":
                    refusals[mode][reason_of(outcome.text)] += 1
                if is_followed and outcome.verdict in ("right", "refused"):
                    counts[mode][f"followed {outcome.verdict}"] += 1
                worst.add(outcome.verdict)
                if outcome.verdict == INVALID:
                    print(f"INVALID: {mode} {seed}: {outcome.text}", flush=True)
            for verdict in worst - {"right"}:
                counts[mode][f"programs {verdict}"] += 1
        seed += 1
    seconds = time.monotonic() - began - spent
    total = sum(count["programs"] for count in counts.values())
    print(table(counts))
    for mode, reasons in refusals.items():
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(8))
        print(f"refused, {mode}: {told}")
    print(f"{total} programs, seeds {options.start} to {seed - 1}, {total / seconds:.1f} a second")
    if options.json:
        write_json(options, counts, seed)
    return int(any(count[verdict] for count in counts.values() for verdict in (*BAD, INVALID)))


def looked_into(
    ranks: Ranks, program: Program, outcome: Outcome, options: argparse.Namespace
) -> Outcome:
    """The outcome confirmed; what fails for good is made short, printed and kept."""
    if outcome.cell is None:
        return outcome
    again = ranks.confirmed(program, outcome)
    if again.verdict not in BAD:
        print(f"not confirmed: {program.mode} {program.seed}: {outcome.verdict}: {outcome.text}")
        return again
    one = replace(program, cells=(again.cell or outcome.cell,))
    again.cell = again.cell or outcome.cell
    if options.shrink:
        one, again = shrink(ranks, one, again, options.shrink)
    if options.keep:
        seeds.keep(one)
    title = f"{program.mode}, seed {program.seed}"
    print(f"\n{'=' * 20} {title} {'=' * 20}\n{shown(one, again)}", flush=True)
    return again


def reason_of(refusal: str) -> str:
    """Where a refusal says that the proof ended; else the error."""
    lost = re.search(r"lost at ([^)]*)\)", refusal)
    return lost[1].partition(" in '")[0] if lost else " ".join(refusal.split())[:60]


def table(counts: dict[str, Counter]) -> str:
    head = f"{'mode':16} programs " + " ".join(f"{verdict:>8}" for verdict in VERDICTS)
    rows = [
        f"{mode:16} {count['programs']:8} "
        + " ".join(f"{count[verdict]:8}" for verdict in VERDICTS)
        + f"   programs wrong: {count['programs wrong']}, refused: {count['programs refused']}"
        + f"; of what can be followed {share_refused(count):.1%} refused"
        for mode, count in counts.items()
    ]
    return "\n".join([head, *rows])


def share_refused(count: dict[str, int]) -> float:
    """Of the hooks in programs that can be followed: how many were refused."""
    refused, right = count.get("followed refused", 0), count.get("followed right", 0)
    return refused / max(1, refused + right)


def write_json(options: argparse.Namespace, counts: dict[str, Counter], end: int) -> None:
    """Add this run: ``[{commit, ranks, mode, first, last, counts}]``, one row a mode and commit."""
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    for mode, count in counts.items():
        rows.append(
            {
                "commit": commit(),
                "ranks": options.ranks,
                "mode": mode,
                "first": options.start,
                "last": end - 1,
                "counts": dict(count),
            }
        )
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


def commit() -> str:
    """The commit, marked where there are changes beside it."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()


# ---- One program, and those that are kept --------------------------------------------------------


def replay(ranks: Ranks, text: str) -> int:
    path = Path(text) if len(text) < 200 else None
    data = json.loads(path.read_text() if path and path.exists() else text)
    program = Program.from_json(data)
    outcomes = ranks.judge(program)
    for outcome in outcomes:
        print(shown(program, outcome), end="\n\n")
    return int(any(outcome.verdict in BAD for outcome in outcomes))


def replay_seeds(ranks: Ranks) -> int:
    """Print each cell's verdict."""
    bad = 0
    for number, program in enumerate(seeds.load()):
        for outcome in ranks.judge(program):
            bad += outcome.verdict in BAD
            hooks = outcome.cell["hooks"] if outcome.cell else ()
            doing = ", ".join(f"{h['kind']} {h['site']} {h['doing']}" for h in hooks)
            text = " ".join(outcome.text.split())[-200:]
            print(f"{outcome.verdict:8} seed {number} | {doing} | {text}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
