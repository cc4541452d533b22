"""Programs in C++ for what Python can't see of shared memory: its protocols in every order, and
under sanitizers.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "csrc" / "engine"
TIMEOUT_S = 50
# The programs and their compiler are run without the sanitizers of the tests' own process.
ENVIRONMENT = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}


def build(program, name, *options, sources=()):
    """Build a program of tests/engine; skip where that is not possible."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", "-O1", "-o", program, *options]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ENGINE}", Path(__file__).with_name(name)]
    built = subprocess.run(
        [*command, *sources, "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no {options}")
    assert built.returncode == 0, built.stderr


def run(program, *arguments):
    done = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def shared_memory_sources():
    python = {"bind_shared_memory.cpp", "dlpack.cpp", "span.cpp"}
    sources = [s for s in (ENGINE / "shared_memory").glob("*.cpp") if s.name not in python]
    return [*sources, ENGINE / "gather_plan" / "gather_plan.cpp"]


def test_the_protocols_hold_in_every_order_and_their_broken_controls_do_not(tmp_path):
    build(tmp_path / "protocols", "protocols.cpp")
    assert run(tmp_path / "protocols").endswith("all as expected\n")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_protocol_under_sanitizers(sanitizer, tmp_path):
    """With threads for ranks, on one mapping, so that every access is seen."""
    program = tmp_path / "threads_as_ranks"
    options = ["-g", f"-fsanitize={sanitizer}"]
    build(program, "threads_as_ranks.cpp", *options, sources=shared_memory_sources())
    for ranks, steps in ((2, 200), (5, 60)):
        run(program, ranks, steps)
