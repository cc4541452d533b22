"""Processes with a GPU each, some of which lack something: test_fallback_cuda.py starts them.

    python -m tests.cuda.fallback RANK NUM_RANKS STORE_FILE

Prints nothing and exits with 0 if each edit is right, by a transport that all ranks have, and
``explain()`` says why it is not a better one.
"""

import contextlib
import os
import warnings
import weakref
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import Shard

from flex_model import FlexModel, HookFunction
from flex_model.distributed import kernels
from flex_model.distributed.transports import nccl, peer_memory
from tests import models
from tests.cuda.processes import run_rank

TIMEOUT_S = 60.0
SMALL, LARGE = 16, 1 << 14  # rows of 2 x 32 numbers; the large ones do not fit the first buffers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.register_buffer("where_it_is", torch.zeros(1))

    def forward(self, x):
        return self.second(self.first(x))


def edit(module, full, save_ctx, modules):
    return full * full.sum(1, keepdim=True)


@contextlib.contextmanager
def with_one_visible_gpu(rank):
    """All ranks have GPU 0, as CUDA IPC sees it."""

    def no_handle(buffer):
        raise RuntimeError("ipc_handle: invalid device ordinal")

    with patch.object(torch.ops.flex_model, "ipc_handle", no_handle):
        yield


@contextlib.contextmanager
def with_little_memory(rank):
    """On one rank, there is no more memory when the buffers must grow; the other frees its part."""
    allocate, allocated = peer_memory.CudaIpc._allocate, []

    def refuse(self, num_bytes):
        if rank == 1 and num_bytes > 3 << 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        handle = allocate(self, num_bytes)
        allocated.append(weakref.ref(self._buffer.untyped_storage()))
        return handle

    with patch.object(peer_memory.CudaIpc, "_allocate", refuse):
        yield
        assert allocated[-1]() is None


@contextlib.contextmanager
def without_an_image(rank):
    """A build without code for the GPU of one rank."""
    os.environ["FLEX_MODEL_EMULATED_NO_IMAGE"] = "1"
    kernels.why_unusable.cache_clear()
    yield
    del os.environ["FLEX_MODEL_EMULATED_NO_IMAGE"]
    kernels.why_unusable.cache_clear()


# What is lacking, the transport, and what explain() says.
CASES = [
    (contextlib.nullcontext, "peer_memory", "because the ranks' GPUs reach each other; nccl: "),
    (
        with_one_visible_gpu,
        "shared_memory",
        "peer_memory: ranks [0, 1]: RuntimeError: ipc_handle: invalid device ordinal",
    ),
    (
        with_little_memory,
        "shared_memory",
        "peer_memory can't be used any more: ranks [1]: OutOfMemoryError: CUDA out of memory",
    ),
    (
        without_an_image,
        "shared_memory",
        "peer_memory, nccl: ranks [1]: the CUDA kernels don't run on the GPU: split: CUDA device 1 "
        "failed to start the op: no kernel image is available for execution on the device",
    ),
]


def check(rank, device, lacking, transport, text):
    with lacking(rank), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flex = FlexModel(Model().to(device), tensor_parallel_size=2)
        warned = [str(warning.message) for warning in caught]
        assert len(warned) == (lacking is without_an_image), warned
        assert all("pass through the CPU: ranks [1]: " in message for message in warned)
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
        flex.register_forward_hook(HookFunction("first", editing_function=edit))
        for rows in (SMALL, LARGE):
            full = models.random(rows, 64, dtype=torch.float32)
            y = flex(full.chunk(2, 1)[rank].to(device))
            expected = edit(None, full, None, None).chunk(2, 1)[rank]
            torch.testing.assert_close(y.cpu(), expected)
        explained = flex.explain()
        assert explained.transports["dp x tp"][0] == transport, explained
        assert text in str(explained), explained
        flex.restore()


def check_all(rank, num_ranks, device):
    nccl.is_available = lambda: False
    for case in CASES:
        check(rank, device, *case)


if __name__ == "__main__":
    run_rank(check_all, TIMEOUT_S)
