"""Processes that share emulated GPUs; a file of its own, so that another worker runs it."""

import pytest

from emulated_gpus import run_tests
from tests.cuda.emulated import build

pytestmark = [pytest.mark.slow, pytest.mark.skipif(build.compiler() is None, reason="no g++")]


def test_gpu_tests_in_several_processes():
    run_tests("-k", "processes", timeout=1800)
