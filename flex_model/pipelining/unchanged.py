"""Runs of modules that leave them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """No gradients; afterwards buffers and random states are what they were before."""
    buffers = [(buffer, buffer.clone()) for one in modules for buffer in one.buffers()]
    tensors = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
    devices = {tensor.device.index or 0 for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        try:
            yield
        finally:
            for tensor, before in buffers:  # what has not changed is not written to
                is_known = not tensor.is_meta and tensor.shape == before.shape
                if is_known and not torch.equal(tensor, before):
                    tensor.copy_(before)
