#!/usr/bin/env python3
"""gpu.py [PART...] [--name NAME] [--dry-run]: all that there is to do where there is a GPU.

    build      the package, with the kernels for this GPU
    test       tests/cuda
    sanitize   some of them under compute-sanitizer
    bench      the benchmarks on GPUs; transports and hooks between processes, too

Without a PART, all of them, one after the other, also where one fails; each has a deadline, all of
them together ten minutes. What a part prints is in build/gpu/PART.log. Its result goes to
benchmarks/results/gpu_NAME.json, and from there to a page of figures, gpu_NAME.md. NAME is that of
the GPU. Needs a Python with torch, pytest, hypothesis and what building takes, and no network.
Exits with 1 if a part failed.

``--dry-run``, where there is no GPU: nothing is built, tests are collected only, and benchmarks run
tiny cases on emulated devices (tests/cuda/emulated), whose times mean nothing; results are in
build/gpu.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "gpu"
ROWS = LOGS / "rows"
LIMITS_S = {"build": 110, "test": 230, "sanitize": 80, "bench": 160}
# Of tests/cuda, under compute-sanitizer, which makes a test ten times slower and more: each kernel,
# the copy engine, and the barrier.
SANITIZED = "every_width or begin_anywhere or many or final_layout or misses or two_streams"
MIN_SHARE_MIB = 64  # below, a copy is partly in the cache

Rows = list[dict[str, Any]]


class Gpus:
    """The GPUs of this machine."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            sys.exit("gpu.py: torch sees no GPU; --dry-run needs none")
        properties = torch.cuda.get_device_properties(0)
        self.count = torch.cuda.device_count()
        self.architecture = f"{properties.major}.{properties.minor}"
        self.facts = {
            "gpu": f"{self.count} x {properties.name}",
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
        }
        self.name = re.sub(r"\W+", "_", properties.name.lower()).removeprefix("nvidia_")


class Emulated(Gpus):
    """Those of a dry run."""

    def __init__(self) -> None:
        self.count, self.architecture, self.name = 1, "9.0", "dry_run"
        self.facts = {"gpu": "emulated: the times mean nothing"}


# ---- What each part runs -------------------------------------------------------------------------

Command = list[str]
python = [sys.executable]


def build(gpus: Gpus, dry_run: bool) -> Iterable[Command]:
    if not dry_run:
        settings = ["FLEX_MODEL_CUDA=1", f"TORCH_CUDA_ARCH_LIST={gpus.architecture}"]
        yield ["env", *settings, *python, "setup.py", "build_ext", "--inplace"]
        yield ["env", "FLEX_MODEL_REQUIRE=cuda", *python, ".ci/smoke.py", str(ROOT)]


def pytest(dry_run: bool, *arguments: str) -> Command:
    plugin = ["-p", "tests.cuda.emulated.plugin", "--collect-only"] if dry_run else []
    return [*python, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *plugin, *arguments]


def test(gpus: Gpus, dry_run: bool) -> Iterable[Command]:
    yield pytest(dry_run, "tests/cuda", "--durations=10")


def sanitize(gpus: Gpus, dry_run: bool) -> Iterable[Command]:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [os.environ["PATH"], str(home / "bin"), str(home / "compute-sanitizer")]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join(folders)) or "compute-sanitizer"
    checked = [] if dry_run else [tool, "--tool", "memcheck", "--error-exitcode", "1"]
    yield [*checked, *pytest(dry_run, "tests/cuda", "-x", "-k", SANITIZED)]


def bench(gpus: Gpus, dry_run: bool) -> Iterable[Command]:
    shutil.rmtree(ROWS, ignore_errors=True)
    ROWS.mkdir()
    repeats = ["--repeats", "1" if dry_run else "10"]
    yield benchmark("boxes", dry_run, "bench_boxes_cuda", *repeats)
    yield benchmark("gather", dry_run, "bench_gather_cuda", *repeats)
    yield benchmark("offload", dry_run, "bench_offload", *repeats)
    yield benchmark("hooks", dry_run, "bench_hooks_cuda")
    yield benchmark("generate", dry_run, "bench_generate")
    if gpus.count > 1:
        yield benchmark("gather_ranks", dry_run, "bench_gather_cuda", *repeats, ranks=gpus.count)
        yield benchmark("hooks_ranks", dry_run, "bench_hooks_cuda", ranks=gpus.count)
    else:  # two processes take turns on the GPU: the bytes count, not the times
        few = ["--repeats", "1", "--max-mib", "16"]
        yield benchmark("gather_ranks", dry_run, "bench_gather_cuda", *few, ranks=2)


def benchmark(name: str, dry_run: bool, module: str, *arguments: str, ranks: int = 1) -> Command:
    """Run a benchmark in one process or several; its rows are those of ``name``."""
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    emulated = ["tests.cuda.emulated.run"] if dry_run else []
    return [
        *["env", f"PYTHONPATH={ROOT}:{ROOT / 'benchmarks'}"],
        *[*python, *(run if ranks > 1 else []), "-m", *emulated, module],
        *[*(["--dry-run"] if dry_run else []), *arguments, "--json", str(ROWS / f"{name}.json")],
    ]


PARTS: dict[str, Callable[[Gpus, bool], Iterable[Command]]] = {
    "build": build,
    "test": test,
    "sanitize": sanitize,
    "bench": bench,
}


# ---- Running them --------------------------------------------------------------------------------


def run_part(name: str, gpus: Gpus, dry_run: bool) -> dict[str, Any]:
    """Run the commands of a part until its deadline, each whatever became of the last one."""
    ends, passed, num_lines = [], True, 0
    deadline = time.monotonic() + LIMITS_S[name] * (10 if dry_run else 1)
    start = time.monotonic()
    with open(LOGS / f"{name}.log", "w+") as log:
        for command in PARTS[name](gpus, dry_run):
            print("$", *command, file=log, flush=True)
            failure = run(command, log, deadline - time.monotonic())
            passed = passed and not failure
            log.seek(0)
            lines = log.read().splitlines()[num_lines:]
            num_lines += len(lines)
            if failure:  # the log is gone with the machine
                ends.append(anywhere(f"{failure}: {' '.join(command)}"))
                ends += [anywhere(line) for line in lines if line.startswith(("FAILED ", "ERROR "))]
            ends.append(anywhere([line for line in lines if line.strip()][-1]))
    return {
        "passed": passed,
        "seconds": round(time.monotonic() - start),
        "date": datetime.date.today().isoformat(),
        "ends": ends,
    }


def anywhere(text: str) -> str:
    """The text without this machine's paths, for a page that others read."""
    return text.replace(sys.executable, "python3").replace(str(ROOT), ".")


def run(command: Command, log: Any, limit_s: float) -> str:
    """Return what went wrong; empty if nothing did."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = process.wait(max(limit_s, 0))
        return f"exit code {code}" if code else ""
    except FileNotFoundError as error:
        return f"not found: {error.filename}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"no end after {limit_s:.0f} s"


# ---- The page ------------------------------------------------------------------------------------


def table(headers: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def shares(rows: Rows) -> str:
    """By runs, levels and alignment: the share of each size."""
    sizes = sorted({row["mib"] for row in rows if row["mib"] >= MIN_SHARE_MIB})
    found: dict[tuple, dict[int, float]] = {}
    for row in rows:
        key = row["case"], row["run"], row["levels"], row["align"]
        found.setdefault(key, {})[row["mib"]] = row["share"]
    return table(
        ["case", "run", "levels", "aligned to", *(f"{size} MiB" for size in sizes)],
        [
            [*key, *(f"{of_size[size]:.2f}" if size in of_size else "" for size in sizes)]
            for key, of_size in sorted(found.items())
        ],
    )


def columns(*names: str) -> Callable[[Rows], str]:
    """A table of these columns, and of all rows."""

    def of(rows: Rows) -> str:
        texts = ([row.get(name, "") for name in names] for row in rows)
        texts = ([f"{x:.2f}" if isinstance(x, float) else x for x in line] for line in texts)
        return table(list(names), texts)

    return of


GATHERS = columns("case", "n", "dim", "mib", "min_us", "busbw", "speedup")
HOOKS = columns("case", "n", "mib", "bare_us", "min_us", "their_us", "ratio")
SECTIONS: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "boxes": ("Kernels: share of a device-to-device copy", shares),
    "gather": (
        "Shards of one GPU into the full tensor",
        columns("case", "n", "dim", "run", "mib", "min_us", "share", "speedup"),
    ),
    "offload": (
        "Shards to page-locked host memory: share of a contiguous copy",
        columns("case", "run", "mib", "min_us", "gbs", "share", "speedup"),
    ),
    "generate": (
        "Hooks on every layer while a model generates",
        columns("step", "case", "tool", "us", "median"),
    ),
    "hooks": ("Hooks against hooks by hand, one process", HOOKS),
    "hooks_ranks": ("Hooks against hooks by hand, several processes", HOOKS),
    "gather_ranks": ("Gathers between processes", GATHERS),
}


def page(results: dict[str, Any]) -> str:
    """The figures of a run as Markdown; nothing is in it that is not in its results."""
    parts = [
        [name, "passed" if part["passed"] else "failed", part["seconds"], part["date"]]
        + [end.replace("|", "/")]
        for name, part in results["parts"].items()
        for end in part["ends"]
    ]
    text = [
        f"# {results['gpu']}",
        ", ".join(f"{name} {results[name]}" for name in ("torch", "CUDA") if name in results),
        table(["part", "result", "seconds", "date", "ended with"], parts),
        "Columns are explained in the docstrings of the benchmarks (`benchmarks/bench_*.py`).",
    ]
    for name, (title, of) in SECTIONS.items():
        if results["rows"].get(name):
            text += [f"## {title}", of(results["rows"][name])]
    return "\n\n".join(filter(None, text)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="All that there is to do where there is a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--name", help="of the results; default: the GPU's")
    parser.add_argument("--dry-run", action="store_true", help="where there is no GPU")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"a part is one of {', '.join(PARTS)}, got {', '.join(unknown)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    gpus = Emulated() if args.dry_run else Gpus()
    folder = LOGS if args.dry_run else ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu_{args.name or gpus.name}.json"
    results = json.loads(file.read_text()) if file.exists() else {"parts": {}, "rows": {}}
    for name in args.parts or PARTS:
        part = run_part(name, gpus, args.dry_run)
        print(f"== {name}: {'passed' if part['passed'] else 'failed'}, {part['seconds']} s")
        print(*(f"   {end[:200]}" for end in part["ends"]), f"   see {LOGS / name}.log", sep="\n")
        results |= gpus.facts
        results["parts"][name] = part
        if name == "bench":
            results["rows"] = {f.stem: json.loads(f.read_text()) for f in ROWS.glob("*.json")}
        file.write_text(json.dumps(results, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(results))
    print(f"== {file.with_suffix('.md')}")
    return 0 if all(results["parts"][name]["passed"] for name in args.parts or PARTS) else 1


if __name__ == "__main__":
    sys.exit(main())
