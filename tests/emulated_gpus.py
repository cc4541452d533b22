"""Runs programs of the emulated CUDA code, and the tests of a GPU on emulated devices."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(*command, timeout=60):
    command = list(map(str, command))
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
    )


def run_tests(*arguments, timeout):
    """Run tests/cuda, all of which must pass."""
    if torch.version.cuda is None:
        pytest.skip("torch has no CUDA")
    plugin = ["-p", "tests.cuda.emulated.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *plugin, "tests/cuda", *arguments]
    done = run(*command, timeout=timeout)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    print(done.stdout)
