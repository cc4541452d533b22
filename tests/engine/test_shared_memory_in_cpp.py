"""Programs in C++ for what Python can't see of shared memory: its protocols in every order, and
under sanitizers; and machines of other kinds.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tiers import grid_but

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "csrc" / "engine"
TIMEOUT_S = 50
# The programs and their compiler are run without the sanitizers of the tests' own process.
ENVIRONMENT = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}


def build(program, name, *options, sources=()):
    """Build a program of tests/engine, or one at a path; skip where that is not possible."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", "-O1", "-o", program, *options]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ENGINE}", Path(__file__).parent / name]
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


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    program = tmp_path_factory.mktemp("machine") / "machine"
    names = ("machine", "arena", "segment", "descriptor", "fork_gate")
    sources = [ENGINE / "shared_memory" / f"{name}.cpp" for name in names]
    build(program, "machine.cpp", "-Wl,--wrap=sysconf", sources=sources)
    return program


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
GIB = 1 << 30
LIMITS = {
    "none": ({}, 40 * GIB),
    "v2, of the job far up": (
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0/user/task_0",
            f"{V2}/slurm/job_7/memory.max": 8 * GIB,
            f"{V2}/slurm/job_7/memory.current": 3 * GIB,
            f"{V2}/slurm/job_7/step_0/memory.max": "max",
            f"{V2}/slurm/job_7/step_0/memory.current": 2 * GIB,
        },
        5 * GIB,
    ),
    "v2, the least of several": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{V2}/a/memory.max": 8 * GIB,
            f"{V2}/a/memory.current": 7 * GIB,
            f"{V2}/a/b/memory.max": 6 * GIB,
            f"{V2}/a/b/memory.current": 2 * GIB,
        },
        1 * GIB,
    ),
    "v2, cached files are as good as free": (
        {
            "proc/self/cgroup": "0::/a",
            f"{V2}/a/memory.max": 8 * GIB,
            f"{V2}/a/memory.current": 8 * GIB,
            f"{V2}/a/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {2 * GIB}\nx 1",
        },
        3 * GIB,
    ),
    "v2, in a container": (
        {"proc/self/cgroup": "0::/", f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": 1 * GIB},
        3 * GIB,
    ),
    "v1, of the job": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slurm/job_7/task_0\n0::/",
            f"{V1}/slurm/job_7/memory.limit_in_bytes": 8 * GIB,
            f"{V1}/slurm/job_7/memory.usage_in_bytes": 3 * GIB,
            f"{V1}/slurm/job_7/memory.stat": f"active_file 7\ntotal_active_file {GIB}",
            f"{V1}/memory.limit_in_bytes": 9223372036854771712,
            f"{V1}/memory.usage_in_bytes": 30 * GIB,
        },
        6 * GIB,
    ),
    "v1, a path of the host in a container": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc",
            f"{V1}/memory.limit_in_bytes": 8 * GIB,
            f"{V1}/memory.usage_in_bytes": 3 * GIB,
        },
        5 * GIB,
    ),
}


@pytest.mark.parametrize("files, expected", LIMITS.values(), ids=LIMITS)
def test_memory_is_limited_by_the_control_groups_of_the_job(machine, tmp_path, files, expected):
    available = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {40 << 20} kB\nHuge: 0\n"}
    for name, text in (available | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert int(run(machine, "memory", tmp_path)) == expected


@pytest.mark.parametrize("page_bytes", [4 << 10, 16 << 10, 64 << 10])
def test_the_pool_with_pages_of_other_sizes(machine, page_bytes):
    run(machine, "pages", page_bytes)


def test_the_ends_of_processes_are_seen(machine):
    run(machine, "processes", "-")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", grid_but(["thread", "address,undefined"], "thread"))
def test_the_protocol_under_sanitizers(sanitizer, tmp_path):
    """With threads for ranks, on one mapping, so that every access is seen.

    Compiled as one file, whose headers are read once, and not optimised: in a third of the time.
    """
    program = tmp_path / "threads_as_ranks"
    files = [Path(__file__).with_name("threads_as_ranks.cpp"), *shared_memory_sources()]
    whole = tmp_path / "whole.cpp"
    whole.write_text("".join(f'#include "{file}"\n' for file in files))
    build(program, whole, "-g1", "-O0", f"-fsanitize={sanitizer}")
    for ranks, steps in ((2, 200), (5, 60)):
        run(program, ranks, steps)
