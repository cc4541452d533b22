"""`python tests/parity`: run every cell of the parity table and write docs/parity.md.

Arguments go to pytest, for a part of the table: ``python tests/parity -k fsdp`` runs and replaces
these rows. Rows on emulated GPUs: ``-p tests.cuda.emulated.plugin -k gpus``. What every row gave is
kept in tests/parity/results, a file for each version of torch: run it in an environment with other
versions, and the page (`parity_page`) has both.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent), str(ROOT)]

import parity_page  # noqa: E402
from oracle import DOINGS, KINDS  # noqa: E402

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


def main(arguments):
    with tempfile.TemporaryDirectory() as folder:
        status = run_pytest(folder, *arguments)
        if not arguments:  # a process of its own, which has no other devices
            status |= run_pytest(folder, "-p", "tests.cuda.emulated.plugin", "-k", "gpus")
        store({path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")})
    parity_page.PAGE.write_text(parity_page.page())
    return status


def run_pytest(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "grid or not grid"]
    environment = os.environ | {"PARITY_ROWS": folder}
    command += [str(HERE / "test_frameworks.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def store(rows):
    """Replace these rows among the results of this version of torch."""
    path = parity_page.RESULTS / f"torch_{version('torch')}.json"
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
