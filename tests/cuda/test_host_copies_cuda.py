"""Shards of a GPU in one page-locked full tensor on the host. Needs a GPU."""

import pytest
import torch

from tests.test_ops import as_bytes, blocks, plan_of, random_tensor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
ops = torch.ops.flex_model

CASES = [
    ((64, 4096), ([32], [])),  # one run
    ((64, 4096), ([], [2048])),  # long rows
    ((300, 34), ([], [3, 17])),  # short rows
    ((6, 10, 20, 30), ([2], [], [7], [11])),  # several levels
    ((2, 40, 3, 2048), ([], [], [1], [])),  # copies of rows in a loop
    ((4, 6), ([], [0, 6])),  # empty shards
]


@pytest.fixture
def page_locked():
    """A tensor that CUDA knows by its address alone, as the arena of a host's ranks."""
    from flex_model.distributed.transports import host_copies

    buffer = torch.full((8 << 20,), 255, dtype=torch.uint8)
    host_copies.register(buffer.data_ptr(), buffer.nbytes)
    yield buffer
    torch.cuda.synchronize()
    host_copies.unregister(buffer.data_ptr())


@pytest.mark.parametrize("how", ["auto", "copy engine", "kernel"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes, cuts", CASES)
def test_shards_meet_in_final_layout(page_locked, sizes, cuts, dtype, how):
    full = random_tensor(sizes, dtype)
    slices = blocks(sizes, cuts)
    plan = plan_of(sizes, slices, dtype.itemsize)
    start = 64 * dtype.itemsize + dtype.itemsize  # off the alignment of wide stores
    for rank, block in enumerate(slices):
        shard = full[block].contiguous().cuda()
        ops.copy_to_host(shard, page_locked.data_ptr() + start, plan.code, rank, how)
    torch.cuda.synchronize()
    assert torch.equal(page_locked[start : start + full.nbytes], as_bytes(full))
    assert bool((page_locked[:start] == 255).all())
    assert bool((page_locked[start + full.nbytes :] == 255).all())


def test_memory_that_is_not_page_locked_is_refused():
    full = torch.zeros(4, 6)
    plan = plan_of((4, 6), blocks((4, 6), ([], [3])), 4)
    with pytest.raises(RuntimeError, match=r"copy_to_host: the host memory .* not page-locked"):
        ops.copy_to_host(torch.zeros(4, 3, device="cuda"), full.data_ptr(), plan.code, 0, "auto")


def test_what_is_copied_is_what_it_was(page_locked):
    """The model writes over its output at once."""
    from flex_model.distributed.transports.host_copies import HostCopies

    device = torch.device("cuda", torch.cuda.current_device())
    copies = HostCopies(device, max_pending_bytes=3 << 20)
    sizes = (512, 1024)
    plan = plan_of(sizes, blocks(sizes, ([], [])), 2)
    shard = torch.empty(sizes, dtype=torch.bfloat16, device=device)
    for i in range(8):
        torch.cuda._sleep(1_000_000)
        shard.fill_(i)
        copies.start(shard, page_locked.data_ptr() + i * shard.nbytes, plan, 0)
        shard.fill_(-1)
    copies.wait()
    assert copies.is_completed()
    got = page_locked.view(torch.bfloat16).reshape(8, -1)
    for i in range(8):
        assert bool((got[i] == i).all())
