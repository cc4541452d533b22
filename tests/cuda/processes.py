"""One process for each rank, for tests that need a CUDA context of each."""

import contextlib
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """A module to put hooks on, with a device."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.register_buffer("where_it_is", torch.zeros(1))

    def forward(self, x):
        return self.inner(x)


@contextlib.contextmanager
def waits_are_errors():
    """What makes the host wait for a GPU is an error of torch inside, where torch sees it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_ranks(tmp_path, module, num_ranks, *arguments):
    """``python -m module RANK NUM_RANKS STORE_FILE *arguments``, by ranks; all must exit with 0.

    ``"share"`` among the arguments: the ranks have one GPU.
    """
    emulated = ["tests.cuda.emulated.run"] if "tests.cuda.emulated.runtime" in sys.modules else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *emulated, module, str(rank), str(num_ranks)]
            + [str(tmp_path / "store"), *arguments],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=240)[0])
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            outputs.append(process.communicate()[0] + "\n(timed out)")
    codes = [process.returncode for process in processes]
    assert codes == [0] * num_ranks, "\n\n".join(outputs)


def run_rank(check, timeout_s):
    """In a process of ``run_ranks``: join the others by gloo, and call ``check(rank, num_ranks,
    device, *arguments)``. It ends in a way that does not abort.

    autograd's threads free what a backward queued some time after it has failed: in an orderly
    exit that is an abort, if the interpreter is gone by then. So are gloo's threads, now and then.
    """
    rank, num_ranks = map(int, sys.argv[1:3])
    path, *arguments = sys.argv[3:]
    device = torch.device("cuda", 0 if "share" in arguments else rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    check(rank, num_ranks, device, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if (runtime := sys.modules.get("tests.cuda.emulated.runtime")) is not None:
        runtime.library.emulated_write_counts()
    os._exit(0)
