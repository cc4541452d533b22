"""pytest -p tests.cuda.emulated.plugin tests/cuda: the tests of this folder on emulated GPUs."""

import os
import random

import pytest

from tests.cuda.emulated import torch_device

SEED = os.environ.setdefault("FLEX_MODEL_EMULATED_SEED", str(random.randrange(1 << 30)))
torch_device.install()

# By a part of the test's name: what only a GPU, its driver or NVIDIA's libraries have.
NEEDS_HARDWARE = {
    "nccl": "NCCL runs kernels of its own",
    "test_runs_in_a_cuda_graph": "graphs are recorded by the driver",
    "test_opcheck": "tracing asks the driver about the device",
    "test_a_copy_of_more_than_4_gib": "it takes 10 GiB, and an hour on one core",
    "test_a_large_tensor": "it takes minutes on one core",
}


def pytest_terminal_summary(terminalreporter):
    if "failed" in terminalreporter.stats:
        terminalreporter.write_line(f"again in this order: FLEX_MODEL_EMULATED_SEED={SEED}")


def pytest_collection_modifyitems(items):
    for item in items:
        for name, reason in NEEDS_HARDWARE.items():
            if name in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
