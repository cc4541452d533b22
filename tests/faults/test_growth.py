"""Thousands of calls of hooks on four ranks, with tensors large enough for the shared pool: memory,
descriptors, threads, hooks and the pool stay as they are after the first few.
"""

import ctypes
import gc

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import models
from flex_model import _C, FlexModel, HookFunction
from models import torch_hooks
from shared_edits import double
from tiers import grid_but

pytestmark = pytest.mark.slow

HOOKS = 20
WARM_UP_CALLS = {"shared_memory": 2_000, "gloo": 6_000}  # whose threads take some memory once
MIB = 1 << 20
BATCH = models.random(256, 128, dtype=torch.float32)


def resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def counts(model):
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "hooks": len(torch_hooks(model)),
        "bytes of the pool": _C.arena_bytes()[0],
        "leased bytes": _C.arena_bytes()[1],
    }


@pytest.mark.ranks(4, timeout=200)
@pytest.mark.parametrize(
    ("transport", "calls"),
    grid_but(
        [("shared_memory", 2_000), ("shared_memory", 10_000), ("gloo", 2_000)],
        ("shared_memory", 2_000),
    ),
)
def test_nothing_grows_in_many_calls_on_four_ranks(transport, calls, monkeypatch):
    """Twenty hooks a step, of which two edit and two see gradients."""
    monkeypatch.setenv("FLEX_MODEL_TRANSPORT", transport)
    model, records = nn.Sequential(*(nn.Identity() for _ in range(HOOKS - 2))), {}
    flex = FlexModel(model, records, tensor_parallel_size=2, data_parallel_size=2)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    for i in range(HOOKS - 2):
        edit = double if i in (3, 11) else None
        flex.register_forward_hook(HookFunction(str(i), (256, 128), edit))
    for i, edit in ((2, None), (9, double)):
        hook = HookFunction(str(i), (256, 128), edit, output_name=f"{i}.grad")
        flex.register_full_backward_hook(hook)
    rank = dist.get_rank()
    batch = BATCH[rank // 2 * 128 :][:128, rank % 2 * 64 :][:, :64].clone().requires_grad_()

    def run(steps):
        for _ in range(steps):
            batch.grad = None
            flex(batch).sum().backward()

    run(WARM_UP_CALLS[transport] // HOOKS)
    before, resident = counts(model), resident_bytes()
    run(calls // HOOKS)
    grown, after = resident_bytes() - resident, counts(model)
    assert all(after[name] <= before[name] for name in before), (before, after)
    assert before["bytes of the pool"] > 0 or transport == "gloo"
    assert grown <= MIB, f"{grown / 1024:.0f} KiB"
    print(f"{grown / 1024:.0f} KiB on rank {rank}")
    flex.restore()
