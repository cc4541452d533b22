"""Plans and index maths of the CUDA kernels, run on the CPU by the same code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["box_copy_on_cpu", "host_copy_on_cpu"])
def test_copies_that_a_gpu_would_make(tmp_path, name):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = ROOT / "tests" / "cuda" / f"{name}.cpp", tmp_path / name
    command = [compiler, "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name, case", [("gather_cuda", "assemble"), ("offload", "contiguous")])
def test_the_gpu_benchmarks_run_through(name, case):
    """Their cases and checks, on the CPU."""
    command = [sys.executable, ROOT / "benchmarks" / f"bench_{name}.py", "--repeats", "1"]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert case in done.stdout
