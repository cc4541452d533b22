"""Processes with a GPU each, one of which misses a transfer: what test_peers_cuda.py starts.

    python -m tests.cuda.failures RANK NUM_RANKS STORE_FILE HOW

``HOW``: the last rank's GPU does not take part ("missing"; "backward": where gradients move), or
its host ends there ("interrupted").
Prints nothing and exits with 0 if every rank has the error, nothing left the run, and no kernel
waits on.
"""

import time

import pytest
import torch
from torch.distributed.tensor import Shard

from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed.transports.peer_memory import PeerMemory
from tests import models
from tests.cuda.processes import Model, run_rank

TIMEOUT_S = 120.0


def takes_no_part(transport, shard, plan, num_copies=1, num_read=0):
    return [shard.new_zeros(plan.full_sizes) for _ in range(num_copies)]


def impatient(all_gather):
    """With a short deadline of the GPU, whatever that of the hosts is."""

    def transfer(transport, *args):
        transport._peers._timeout_s = 3.0
        return all_gather(transport, *args)

    return transfer


def is_interrupted(*args):
    raise KeyboardInterrupt


def check(rank, num_ranks, device, how):
    ran, records, ones = [], {}, torch.ones(8, 4 * num_ranks, device=device)

    def edit(module, full, save_ctx, modules):
        ran.append(full.shape)
        if how == "backward":
            return full * 2
        return full.copy_(ones)  # for which the host does not wait on emulated GPUs, either

    is_missing, last = how != "interrupted", num_ranks - 1
    model = Model().to(device)
    flex = FlexModel(model, records, tensor_parallel_size=num_ranks, timeout=TIMEOUT_S)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    flex.register_forward_hook(HookFunction("inner", editing_function=edit))
    x = models.random(8, 4, dtype=torch.float32).to(device)
    y = flex(x.requires_grad_(how == "backward"))
    if rank == last:
        PeerMemory.all_gather = takes_no_part if is_missing else is_interrupted
    elif is_missing:
        PeerMemory.all_gather = impatient(PeerMemory.all_gather)
    del ran[:]
    start = time.monotonic()
    found = rf"missing: rank {last} \(global rank {last}\)" if is_missing else "Interrupt"
    if how == "backward":
        if rank == last:
            y.sum().backward()
        with pytest.raises(HookError, match=found):
            (flex(x) if rank == last else y.sum()).backward()
    elif rank == last and not is_missing:
        with pytest.raises(KeyboardInterrupt):
            flex(x)
    else:
        with pytest.raises(HookError, match=found):
            flex(x)
        assert len(ran) == 1  # with what was there
    assert how == "backward" or not records.get("inner")
    torch.cuda.synchronize()
    flex.restore()
    assert time.monotonic() - start < TIMEOUT_S / 2


if __name__ == "__main__":
    run_rank(check, TIMEOUT_S)
