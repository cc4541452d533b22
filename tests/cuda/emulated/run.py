"""python -m tests.cuda.emulated.run MODULE ARGUMENTS: as ``python -m MODULE``, on emulated GPUs."""

import runpy
import sys

from tests.cuda.emulated import torch_device

if __name__ == "__main__":
    torch_device.install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
