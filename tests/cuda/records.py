"""Processes on one GPU or one each, whose hooks collect: test_host_copies_cuda.py starts them.

    python -m tests.cuda.records RANK NUM_RANKS STORE_FILE SHARE

Prints nothing and exits with 0 if every record has the right bits.
"""

import functools
import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from flex_model import FlexModel, HookError, HookFunction
from flex_model.distributed import values
from flex_model.distributed.transports import host_copies
from flex_model.records.snapshots import Snapshots
from tests import models
from tests.cuda.processes import run_rank

TIMEOUT_S = 60.0


def wrapped(records, tp, dp, device):
    model = models.Overwriting()
    model.register_buffer("where_it_is", torch.zeros(1))  # a model's device is that of its tensors
    flex = FlexModel(model.to(device), records, tensor_parallel_size=tp, data_parallel_size=dp)
    flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    return flex


@functools.cache
def inputs(dtype, rows):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, width, generator=generator).to(dtype) for width in (2400, 6)]


def check_records(rank, num_ranks, dp, device):
    """Sharded and replicated, small and large."""
    tp, records = num_ranks // dp, {}
    flex = wrapped(records, tp, dp, device)
    flex.register_forward_hook(HookFunction("wide", expected_shape=(None, 2400)))
    flex.register_forward_hook(HookFunction("narrow", expected_shape=(None, 6)))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for rows in (8, 600, 6000):
            wide, narrow = inputs(dtype, rows)
            part = wide.chunk(dp)[rank // tp].chunk(tp, 1)[rank % tp].to(device)
            flex(part, narrow.chunk(dp)[rank // tp].to(device))
            if rank:
                assert not records
                continue
            for name, expected in (("wide", wide + 1), ("narrow", narrow * 2)):
                (record,) = records[name]
                assert record.device.type == "cpu"
                assert torch.equal(record, expected), (name, dtype, rows)
    if rank == 0:
        text = str(flex.explain())
        assert "host_copies" in text, text
        assert "staged" not in text, text  # page-locking was granted
    flex.restore()


class Noisy(nn.Module):
    """An activation that is replicated, but for a fraction of its largest value on one rank."""

    def __init__(self, fraction):
        super().__init__()
        self.register_buffer("moved", torch.tensor(float(fraction)))

    def forward(self, x):
        return x + x.abs().max() * self.moved


def check_replicas(rank, num_ranks, device):
    """As on the CPU: all keep the first rank's values, or it is an error."""
    bound = values.tolerance(torch.zeros(1))
    for fraction, is_close in ((0.0, True), (bound / 2, True), (bound * 2, False)):
        records, model = {}, nn.Sequential(Noisy(fraction * (rank == num_ranks - 1))).to(device)
        flex = FlexModel(model, records, tensor_parallel_size=num_ranks, output_ranks="all")
        flex.annotate_layout("moved", kind="parameter", tp=Replicate())
        flex.register_forward_hook(HookFunction("0"))
        x = torch.ones(600, 64, device=device)
        if is_close:
            flex(x)
            assert torch.equal(records["0"][0], torch.ones(600, 64))
        else:
            with pytest.raises(ValueError, match="hold different values"):
                flex(x)
        flex.restore()


def check_interrupted(rank, num_ranks, device):
    """Ctrl-C while the GPUs are late: they write to memory that is still mapped and locked."""
    flex = wrapped({}, num_ranks, 1, device)
    flex.register_forward_hook(HookFunction("wide"))
    x = torch.ones(600, 1200, device=device), torch.ones(600, 6, device=device)
    flex(*x)
    run = host_copies.SideStream.run

    def late(self, start, ready):
        run(self, lambda: torch.cuda._sleep(4_000_000_000), ready)
        run(self, start, ready)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies.SideStream, "run", late)
        if rank == 1:
            patch.setattr(host_copies.HostCopies, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt if rank == 1 else HookError):
            flex(*x)
    flex.restore()
    del flex
    gc.collect()
    torch.cuda.synchronize()
    assert not host_copies.of_process.may_run()


def check_all(rank, num_ranks, device, _):
    check_interrupted(rank, num_ranks, device)
    for max_gpu_bytes in (1 << 30, 1 + rank << 20):  # ranks move different shards to the CPU
        Snapshots.__init__.__defaults__ = (max_gpu_bytes,)
        check_replicas(rank, num_ranks, device)
        for dp in (1, 2):
            check_records(rank, num_ranks, dp, device)


if __name__ == "__main__":
    run_rank(check_all, TIMEOUT_S)
