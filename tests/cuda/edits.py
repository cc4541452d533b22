"""Processes with a GPU each, whose hook edits a sharded tensor: what test_peers_cuda.py starts.

    python -m tests.cuda.edits RANK NUM_RANKS STORE_FILE

Prints nothing and exits with 0 if the edit is right, and its tensors do not pass through the host.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flex_model import FlexModel, HookFunction
from tests import models
from tests.cuda.processes import join_ranks

TIMEOUT_S = 60.0
MIN_BYTES = 1024  # headers are smaller


class Crossings(TorchDispatchMode):
    """Counts the operators that take tensors from a GPU to the host or back."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.nbytes >= MIN_BYTES}
        self.count += len(devices) > 1
        return result


class Model(nn.Module):
    """Watches from the output of its first module to the input of its second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.register_buffer("where_it_is", torch.zeros(1))
        self.crossings = Crossings()

    def forward(self, x):
        x = x * 3
        with self.crossings:
            x = self.first(x)
        return self.second(x)


def edit(module, full, save_ctx, modules):
    return full * full.sum(1, keepdim=True)


def check(rank, num_ranks, device):
    model = Model().to(device)
    flex = FlexModel(model, tensor_parallel_size=num_ranks)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    flex.register_forward_hook(HookFunction("first", editing_function=edit))
    full = models.random(64, 16 * num_ranks, dtype=torch.float32).requires_grad_()
    weight = models.random(64, 16 * num_ranks, seed=3, dtype=torch.float32)
    expected = edit(None, full * 3, None, None)
    (expected * weight).sum().backward()

    def part(tensor):
        return tensor.detach().chunk(num_ranks, 1)[rank]

    for is_first in (True, False):  # the first run finds the layouts
        model.crossings.count = 0
        x = part(full).to(device).requires_grad_()
        y = flex(x)
        loss = (y * part(weight).to(device)).sum()
        with model.crossings:
            loss.backward()
        torch.testing.assert_close(y.cpu(), part(expected))
        torch.testing.assert_close(x.grad.cpu(), part(full.grad))
        if not is_first:
            assert model.crossings.count == (rank == 0)  # the record, which goes to rank 0's host
    flex.restore()


def main():
    rank, num_ranks, path = *map(int, sys.argv[1:3]), sys.argv[3]
    device = join_ranks(rank, num_ranks, path, TIMEOUT_S)
    check(rank, num_ranks, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
