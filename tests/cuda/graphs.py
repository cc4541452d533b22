"""Processes with a GPU each, that capture a hooked model: what test_peers_cuda.py starts.

    python -m tests.cuda.graphs RANK NUM_RANKS STORE_FILE

Prints nothing and exits with 0 if hooks that can't be captured are refused, by name and before
anything, and the others are captured.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from flex_model import FlexModel, HookError, HookFunction
from tests import models
from tests.cuda.processes import Model, run_rank

TIMEOUT_S = 60.0


class Scaled(Model):
    def forward(self, x):
        return super().forward(x * 3) * 2


def wrapped(x, device, num_ranks, *hooks):
    """A FlexModel whose layouts are known."""
    flex = FlexModel(Scaled().to(device), records := {}, tensor_parallel_size=num_ranks)
    if num_ranks > 1:
        flex.annotate_layout(models.INPUT, kind="forward_pre", tp=Shard(1))
    for hook in hooks:
        flex.register_forward_hook(hook)
    for _ in range(2):
        flex(x)
    return flex, records


def check_an_edit(x, device, num_ranks):
    edit = HookFunction("inner", editing_function=lambda m, full, s, ms: full + 1)
    flex, _ = wrapped(x, device, num_ranks, edit)
    refused = pytest.raises(HookError, match=r"(?s)forward hook on 'inner'.*can't repeat")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        flex(x)
    assert torch.equal(flex(x).cpu(), (x.cpu() * 3 + 1) * 2)  # it remains usable
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()), flex.active([]):
        y = flex(x)
    graph.replay()
    assert torch.equal(y.cpu(), x.cpu() * 6)
    flex.restore()


def check_a_record(x, device, num_ranks, full):
    flex, records = wrapped(x, device, num_ranks, HookFunction("inner"))
    where = "on the host" if num_ranks == 1 else "the run ends"
    refused = pytest.raises(HookError, match=rf"(?s)forward hook on 'inner'.*{where}")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        flex(x)
    assert not records.get("inner")
    flex(x)
    if num_ranks > 1:
        with flex.active():  # the graph copies the shard, and the run ends after its replay
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                flex(x)
            graph.replay()
    if dist.get_rank() == 0:
        (record,) = records["inner"]
        assert torch.equal(record, full * 3)
    flex.restore()


def check(rank, num_ranks, device):
    full = models.random(64, 16 * num_ranks, dtype=torch.float32)
    x = full.chunk(num_ranks, 1)[rank].to(device)
    check_an_edit(x, device, num_ranks)
    check_a_record(x, device, num_ranks, full)


if __name__ == "__main__":
    run_rank(check, TIMEOUT_S)
