"""The CUDA code without a GPU: compiled for the CPU, it runs on emulated devices."""

import pytest

from emulated_gpus import run, run_tests
from tests.cuda.emulated import build

pytestmark = [pytest.mark.slow, pytest.mark.skipif(build.compiler() is None, reason="no g++")]


def test_gpu_tests_in_one_process():
    run_tests("-k", "not processes", timeout=600)


def test_copies_of_random_boxes():
    done = run(build.program("copies", build.UNDEFINED), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_threads_of_a_launch_have_no_data_race():
    done = run(build.program("copies", build.THREAD), timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_a_misaligned_access_is_found():
    done = run(build.program("copies", build.UNDEFINED), "misaligned")
    assert done.returncode != 0
    assert "requires 16 byte alignment" in done.stderr


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_transfers_with_the_barrier_have_no_data_race(num_ranks):
    done = run(build.program("barrier", build.THREAD), num_ranks, 2, 60, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 wrong\n", "")


@pytest.mark.parametrize("name, arguments", [("barrier", (3, 1, 60)), ("copies", ("overlap",))])
def test_a_data_race_is_found(name, arguments):
    """With one slot, a rank writes where another one still reads; boxes that overlap."""
    done = run(build.program(name, build.THREAD), *arguments, timeout=300)
    assert done.returncode != 0
    assert "data race" in done.stderr
