"""`make gpu`, all that there is to do where there is a GPU, as far as it goes without one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda.emulated import build

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("gpu", ROOT / ".ci" / "gpu.py")
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)


def run(*command, timeout=900):
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
    )


def test_all_parts_fit_ten_minutes():
    assert gpu.LIMITS_S.keys() == gpu.PARTS.keys()
    assert sum(gpu.LIMITS_S.values()) <= 600 - 20  # which starting and ending them may take


@pytest.mark.slow
def test_an_unknown_part_and_no_gpu_are_errors():
    done = run(sys.executable, ".ci/gpu.py", "tests")
    assert (done.returncode, "one of build, test, sanitize, bench" in done.stderr) == (2, True)
    if not torch.cuda.is_available():
        done = run(sys.executable, ".ci/gpu.py", "test")
        assert (done.returncode, "torch sees no GPU" in done.stderr) == (1, True)


def test_a_command_that_fails_is_late_or_missing_is_reported(tmp_path):
    with open(tmp_path / "log", "w") as log:
        assert gpu.run([sys.executable, "-c", ""], log, 60) == ""
        assert gpu.run([sys.executable, "-c", "exit(3)"], log, 60) == "exit code 3"
        late = gpu.run([sys.executable, "-c", "import time; time.sleep(60)"], log, 1)
        assert late == "no end after 1 s"
        assert gpu.run(["no_such_tool"], log, 60) == "not found: no_such_tool"


def test_what_a_part_ended_with_names_the_tests_that_failed(tmp_path, monkeypatch):
    says = "FAILED tests/a.py::test_b - assert 1 == 2\n1 failed, 2 passed\n"
    commands = [[sys.executable, "-c", f"print({says!r}); exit({code})"] for code in (1, 0)]
    monkeypatch.setattr(gpu, "LOGS", tmp_path)
    monkeypatch.setitem(gpu.PARTS, "test", lambda *_: commands)
    part = gpu.run_part("test", None, dry_run=False)
    first, *others = part["ends"]
    assert not part["passed"]
    assert first.startswith("exit code 1: python3 -c ")
    assert others == [*says.splitlines(), "1 failed, 2 passed"]


def test_the_page_has_what_was_measured():
    part = {"passed": False, "seconds": 7, "date": "2000-01-01", "ends": ["exit code 3: x"]}
    box = {"case": "pack", "run": 512, "levels": 2, "align": 16, "min_us": 1.0, "wrong": 0}
    rows = {"boxes": [box | {"mib": mib, "share": mib / 1024} for mib in (16, 64, 512)]}
    page = gpu.page({"gpu": "1 x card", "torch": "2", "parts": {"test": part}, "rows": rows})
    assert "| test | failed | 7 | 2000-01-01 | exit code 3: x |" in page
    assert "| case | run | levels | aligned to | 64 MiB | 512 MiB |" in page
    assert "| pack | 512 | 2 | 16 | 0.06 | 0.50 |" in page
    assert page.count("##") == 1  # nothing else was


@pytest.mark.grid
@pytest.mark.skipif(build.compiler() is None or not torch.version.cuda, reason="no emulated GPUs")
def test_a_dry_run():
    """Every command, but for the build and compute-sanitizer; the benchmarks run."""
    done = run(sys.executable, ".ci/gpu.py", "--dry-run", "--name", "test")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((ROOT / "build" / "gpu" / "gpu_test.json").read_text())
    assert list(results["parts"]) == list(gpu.PARTS)
    rows = results["rows"]
    assert sorted(rows) == ["boxes", "gather", "gather_ranks", "hooks", "offload"]
    assert {row["n"] for row in rows["gather_ranks"]} == {2}
    assert "peer_memory" in {row["case"] for row in rows["gather_ranks"]}
    assert not any(row["wrong"] for of_one in rows.values() for row in of_one)
    page = (ROOT / "build" / "gpu" / "gpu_test.md").read_text()
    assert page.startswith("# emulated: the times mean nothing")
    assert page.count("##") == 5


@pytest.mark.grid
@pytest.mark.parametrize("name", ["gather_cuda", "hooks_cuda"])
def test_benchmarks_of_two_processes_without_a_gpu(name):
    """As they are run by hand: on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*command, f"benchmarks/bench_{name}.py", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" in done.stdout
