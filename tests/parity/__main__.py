"""`python tests/parity`: run every cell of the parity table and write docs/parity.md.

Arguments go to pytest, for a part of the table: ``python tests/parity -k fsdp`` runs and replaces
these rows. Rows on emulated GPUs: ``-p tests.cuda.emulated.plugin -k gpus``. What every row gave is
kept in tests/parity/results, a file for each version of torch: run it in an environment with other
versions, and the page compares them.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(ROOT)]

from rows import CASES  # noqa: E402
from table import DOINGS, KINDS  # noqa: E402

PACKAGES = (
    "torch",
    "transformers",
    "fairscale",
    "megatron-core",
    "accelerate",
    "peft",
    "torchao",
    "bitsandbytes",
    "compressed-tensors",
)

INTRODUCTION = """\
# Parity: sharded runs against the unsharded model

Written by `make parity`; in an environment with other versions: `python tests/parity`.

Each row is a model that a framework has sharded over the given number of ranks. Each column is a
kind of hook. A cell counts the hooks that were **right**, in four numbers: *read* (every module, or
parameter, that has a float tensor), *elementwise* edit, *mixing* edit (a dense product along every
dim, including the sharded one), *in-place* edit (the last index of every dim, which is on the last
rank). A hook is right if the tensor that it received, the model's output after it and all parameter
gradients equal those of the unsharded model with the same weights under torch's own hooks, in the
same run, within 1e-9 (float64) or 2e-5 (float32, or models that compute parts in it) of the largest
value. A row in bfloat16 runs beside float32 with the same weights: its numbers may differ by three
times what rounding does to the unsharded model in that run, and what rounding does not touch there
is equal bit for bit. No layout was stated but where a row says so, and no hook had an
`expected_shape`; `batch_dim` is stated where the activations have positions first, or all rows
share an input that is as long as a rank's batch. Under `inference_mode`, and in `generate`, there
are no gradients. Pipelines run their hooks with the whole batch, or in micro-batches; edits that
mix rows are not run in micro-batches.

The last rows are what users' scripts do. With `dp_batch`, the unsharded model runs all rows padded
to one length, and its hooks see zeros there, or each rank's own rows in turn (`"local"`; hooks on
gradients of parameters are then of a second FlexModel without it). Compiled blocks are captured by
dynamo anew for each hook. GPUs are emulated (`tests/cuda/emulated`). These rows edit fewer sites.

`+2e`: two more hooks gave a clear error on every rank, listed below. `WRONG` would be a silent
wrong number: there must be none, and the tests fail if there is one.
"""

PROGRAMS = """
## Random programs

Random programs that are right on shards by construction are compared with the unsharded model
(`make fuzz`, with `FUZZ="--json tests/fuzz/results.json"` to add to these counts). Each has up to
three hooks. *Refused if followed*: the share of errors among the hooks of programs that can be
followed. These have no numpy, no numbers read from tensors, no operation without a rule, no sum
over groups that are not an axis of the mesh, no message from one rank to another, and no plain
number that only a statement can settle, such as `view(rows, length, -1, 2)` with one head a rank.
`bare`: layers that state nothing. Every program that was ever wrong is fixed, and stays as a
program that the tests run (tests/fuzz).
"""
COUNTS = ("programs", "right", "refused", "wrong", "crash", "hang", "invalid")


def main(arguments):
    with tempfile.TemporaryDirectory() as folder:
        status = run_pytest(folder, *arguments)
        if not arguments:  # a process of its own, which has no other devices
            status |= run_pytest(folder, "-p", "tests.cuda.emulated.plugin", "-k", "gpus")
        store({path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")})
    (ROOT / "docs" / "parity.md").write_text(page())
    return status


def run_pytest(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "grid or not grid"]
    environment = os.environ | {"PARITY_ROWS": folder}
    command += [str(HERE / "test_frameworks.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def store(rows):
    """Replace these rows among the results of this version of torch."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"torch_{version('torch')}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    for name, outcomes in rows.items():
        cells = {kind: cell(outcomes, kind) for kind in KINDS}
        total = Counter(row["result"] for row in outcomes)
        known[name] = {
            "date": str(date.today()),
            "versions": f"Python {platform.python_version()}, {versions}",
            "cells": cells,
            "total": total,
            "errors": list(errors(outcomes)),
        }
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def page():
    """The newest version's table, and the rows of others that differ from it, or are not in it."""
    paths = sorted(RESULTS.glob("*.json"), key=lambda path: natural(path.stem), reverse=True)
    newest, *others = [json.loads(path.read_text()) for path in paths]
    titles = " | ".join(kind.replace("_", " ") for kind in KINDS[:-1])
    header = [
        f"| framework | model | ranks | {titles} | parameter gradient |",
        "|---" * (3 + len(KINDS)) + "|",
    ]
    lines = [INTRODUCTION, *summary(newest), "", *header, *table(newest, CASES), ""]
    for rows in others:
        differ = [name for name in CASES if name in rows and is_other(rows[name], newest.get(name))]
        lines += [*summary(rows), ""]
        lines += ["Rows that differ:\n", *header, *table(rows, differ), ""] if differ else []
    lines += ["## Errors\n", *all_errors(newest)]
    return "\n".join([*lines, *random_programs()]) + "\n"


def all_errors(rows):
    """Each error once, with the rows that gave it."""
    where = {}
    for name, row in rows.items():
        case = CASES[name]
        for why in row["errors"]:
            models = where.setdefault(why, {}).setdefault(case.framework, [])
            models.append(f"{case.model} on {case.ranks}")
    for why, found in where.items():
        of = "; ".join(f"{framework} ({', '.join(models)})" for framework, models in found.items())
        yield f"- {why}: {of}"


def natural(text):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def is_other(row, newest):
    return newest is None or row["cells"] != newest["cells"]


def summary(rows):
    """What was run, when, with which packages, and how many hooks were right."""
    total = sum((Counter(row["total"]) for row in rows.values()), Counter())
    dates = sorted({row["date"] for row in rows.values()})
    versions = Counter(row["versions"] for row in rows.values()).most_common(1)[0][0]
    return [
        f"**{versions}**; CPU, gloo; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        f"{len(rows)} of {len(CASES)} rows: {total['right']} hooks right, {total['error']} errors, "
        f"{total['wrong']} wrong."
    ]


def table(rows, names):
    for name in names:
        case, row = CASES[name], rows.get(name)
        cells = ["not run" if row is None else row["cells"][kind] for kind in KINDS]
        yield f"| {case.framework} | {case.model} | {case.ranks} | {' | '.join(cells)} |"


def random_programs():
    """What `python tests/fuzz --json tests/fuzz/results.json` has counted, by mode and ranks."""
    path = HERE.parent / "fuzz" / "results.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    columns = ("mode", "ranks", *COUNTS, "refused if followed", "seeds")
    lines = [PROGRAMS, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    total = Counter()
    for mode, ranks in sorted({(run["mode"], run["ranks"]) for run in runs}):
        selected = [run for run in runs if (run["mode"], run["ranks"]) == (mode, ranks)]
        count = sum((Counter(run["counts"]) for run in selected), Counter())
        total += count
        seeds = ", ".join(f"{run['first']}-{run['last']} ({run['commit']})" for run in selected)
        numbers = " | ".join(str(count[name]) for name in COUNTS)
        lines.append(f"| {mode} | {ranks} | {numbers} | {refused(count)} | {seeds} |")
    numbers = " | ".join(str(total[name]) for name in COUNTS)
    lines.append(f"| all | | {numbers} | {refused(total)} | |")
    return lines


def refused(count):
    of = count["followed right"] + count["followed refused"]
    return f"{count['followed refused'] / of:.1%} of {of}" if of else "-"


def version(package):
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def cell(outcomes, kind):
    if not any(row["cell"]["kind"] == kind for row in outcomes):
        return "-"
    texts = []
    for doing in DOINGS:
        count = Counter(
            row["result"]
            for row in outcomes
            if (row["cell"]["kind"], row["cell"]["doing"]) == (kind, doing)
        )
        error = f"+{count['error']}e" * bool(count["error"])
        wrong = f" **{count['wrong']} WRONG**" * bool(count["wrong"])
        texts.append(f"{count['right']}{error}{wrong}")
    return " · ".join(texts)


def errors(outcomes):
    """The errors of a row by reason, with the sites and hooks that they are about."""
    by_reason = {}
    for row in outcomes:
        if row["result"] != "right":
            why = row["reason"] if row["result"] == "error" else f"WRONG: {row['text']}"
            by_reason.setdefault(why or row["text"], []).append(row["cell"])
    for why, cells in by_reason.items():
        sites = sorted({f"`{cell['site']}`" for cell in cells})
        kinds = [kind for kind in KINDS if any(cell["kind"] == kind for cell in cells)]
        doings = [doing for doing in DOINGS if any(cell["doing"] == doing for cell in cells)]
        yield f"{why} ({', '.join(kinds)}; {', '.join(doings)}; {', '.join(sites)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
