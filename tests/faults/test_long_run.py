"""Nothing grows: memory, file descriptors, threads, torch hooks, process groups."""

import ctypes
import gc
import threading

import psutil
import pytest
from torch import nn
from torch.distributed.distributed_c10d import _world

import models
from flex_model import FlexModel, HookFunction
from models import torch_hooks
from tiers import ways

pytestmark = pytest.mark.slow

MIB = 1 << 20


def resources(module):
    """What must not grow in a long run, and what may grow a little: objects, resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    counts = {
        "file descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "Python threads": threading.active_count(),
        "process groups": len(_world.pg_map),
        "torch hooks": len(torch_hooks(module)),
    }
    return counts, len(gc.get_objects()), process.memory_info().rss


def check_no_growth(module, step, warm_up, steps):
    for _ in range(warm_up):
        step()
    counts, objects, resident_bytes = resources(module)
    for _ in range(steps):
        step()
    counts_after, objects_after, resident_bytes_after = resources(module)
    grown = {name: count for name, count in counts_after.items() if count > counts[name]}
    assert not grown, f"{grown} after {steps} steps, from {counts}"
    assert objects_after - objects < 2 * steps, "Python objects are kept alive"
    assert resident_bytes_after - resident_bytes <= 4 * MIB


def wrap_train_restore(model, parallelism, batch):
    flex = FlexModel(model, {}, **parallelism.sizes)
    flex.register_trainable_module("probe", nn.Linear(8, 8).double())
    edit = lambda module, full, save_ctx, modules: modules["probe"](full)  # noqa: E731
    shape = (None, 8) if parallelism.by_hand else None
    flex.register_forward_hook(HookFunction("fc1", shape, edit))
    flex.register_full_backward_hook(HookFunction("fc2", shape))
    flex.register_hook(HookFunction("out.bias"))
    flex(batch).sin().mean().backward()
    flex.restore()


@pytest.mark.parametrize("parallelism", ways("tp", grid=["one", "tp of 4"], timeout=300))
def test_fifty_wraps(parallelism):
    model = parallelism.shard(models.mlp())
    batch = parallelism.my_rows(models.random(4, 6))

    def step():
        wrap_train_restore(model, parallelism, batch)

    check_no_growth(model, step, 20, 50)
