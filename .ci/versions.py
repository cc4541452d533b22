"""versions.py make | check | matrix: the tests under other versions of torch and transformers.

Each pair but .venv's own is in an environment of its own, in build/versions; the binaries are those
of .venv, which every torch from 2.11 on loads. `check` runs a row of each framework, and fault
tests, on the oldest pairs, whose environments `make` makes. `matrix` runs the rows on every torch
and writes docs/versions.md (`matrix 2.15.0`: on these only, and prints the page).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
OLDEST = (("2.11.0", "5.23.0"), ("2.11.0", "5.17.0"))
MATRIX = (
    *OLDEST,
    ("2.12.1", "5.24.0"),
    ("2.13.0", "5.24.0"),
    ("2.14.1", "5.24.0"),
    ("2.15.0", "5.24.0"),
)
# What 5.17.0 takes beside the packages of 5.23.0.
OF_5_17 = ("huggingface_hub>=1.5,<2", "httpx<1", "httpcore<2", "certifi", "idna")
HUGGING_FACE = ("hf-llama-2", "hf-pp-2")  # the only ones that transformers shards
ROWS = (
    "native-tp-2",
    "native-sp-2",
    *HUGGING_FACE,
    "megatron-tp-2",
    "fairscale-2",
    "ddp-2",
    "fsdp1-2",
    "fsdp2-2",
    "pp-1f1b-micro-2",
)
FAULTS = [
    f"tests/faults/test_{name}.py" for name in ("caught_errors", "hook_sets", "tensor_mismatches")
]
PAGE = """\
# Versions of torch and transformers

Written by `make matrix` on {date}; Python {python}, CPU, gloo.

Each line is an environment of its own, each column a row of the [parity table](parity.md): how many
hooks were right, `+2e` that two were refused with a clear error on every rank. `WRONG` would be a
silent wrong number. `failed`: the row could not be run. `make test` runs on the newest versions,
`make check` on the oldest, too. On versions that are newer than these the first FlexModel warns.

"""


def run(*command: object, **settings: object) -> int:
    return subprocess.run(list(map(str, command)), cwd=ROOT, check=False, **settings).returncode


def install(python: Path, *arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    if run(*command, "--no-compile", *arguments):
        sys.exit(f"versions: pip failed for {python}")


def environment(torch: str, transformers: str) -> Path:
    """Return the Python of an environment with these versions; make it where it is missing."""
    if [torch, transformers] == [version(name) for name in ("torch", "transformers")]:
        return Path(sys.executable)
    folder = FOLDER / f"torch-{torch}-transformers-{transformers}"
    python, is_made = folder / "bin" / "python", folder / "made"
    if is_made.exists():
        return python
    print(f"== making {folder.relative_to(ROOT)}", flush=True)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    if (torch, transformers) == OLDEST[1]:  # all but transformers is that of the other one
        shared = _site(environment(*OLDEST[0]))
        Path(_site(python), "shared.pth").write_text(shared)
        install(python, "--no-deps", f"transformers=={transformers}", *OF_5_17)
    else:
        lines = [
            line
            for name in ("build", "test", "integrations")
            for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
            if not line.startswith(("-r", "torch==", "transformers=="))
        ]
        listed = folder / "requirements.txt"
        listed.write_text("\n".join([f"torch=={torch}", f"transformers=={transformers}", *lines]))
        install(python, "-r", listed)
    is_made.touch()
    return python


def _site(python: Path) -> str:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([str(python), "-c", code], text=True).strip()


def test(pair: tuple[str, str], rows: tuple[str, ...], *files: str, **variables: str) -> int:
    """Run rows of the parity table, and files of tests, on a pair of versions."""
    python = environment(*pair)
    print(f"== torch {pair[0]}, transformers {pair[1]}", flush=True)
    chosen = [f"tests/parity/test_frameworks.py::test_two_ranks[{name}]" for name in rows]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return run(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not hosts"),
        *("-n", os.environ.get("JOBS", "2"), "--dist", "loadfile", "--no-loadscope-reorder"),
        *("-W", "ignore:flex_model was built against", *chosen, *files),
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables,
    )


def check() -> int:
    """Run the rows and the fault tests on the oldest versions."""
    return test(OLDEST[0], ROWS, *FAULTS) | test(OLDEST[1], HUGGING_FACE)


def matrix(only: list[str]) -> int:
    """Run the rows on each torch; write the page, or print that of some."""
    lines, status = [], 0
    for pair in MATRIX:
        if only and pair[0] not in only:
            continue
        rows = HUGGING_FACE if pair == OLDEST[1] else ROWS
        with tempfile.TemporaryDirectory() as folder:
            status |= test(pair, rows, PARITY_ROWS=folder)
            cells = [_cell(Path(folder, f"{name}.json"), name in rows) for name in ROWS]
        lines.append(f"| {' | '.join([*pair, *cells])} |")
    titles = ["torch", "transformers", *ROWS]
    table = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines]
    text = PAGE.format(date=date.today(), python=sys.version.split()[0]) + "\n".join(table) + "\n"
    if only:
        print(text)
    else:
        (ROOT / "docs" / "versions.md").write_text(text)
    return status


def _cell(path: Path, is_run: bool) -> str:
    if not path.exists():
        return "failed" if is_run else "-"
    count = Counter(row["result"] for row in json.loads(path.read_text()))
    errors = f" +{count['error']}e" if count["error"] else ""
    return f"{count['right']}{errors}" + (f" {count['wrong']} WRONG" if count["wrong"] else "")


if __name__ == "__main__":
    if sys.argv[1:] == ["make"]:
        for oldest in OLDEST:
            environment(*oldest)
    else:
        sys.exit(check() if sys.argv[1:] == ["check"] else matrix(sys.argv[2:]))
