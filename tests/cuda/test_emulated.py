"""The emulated devices find what they are for: work that does not wait for other work."""

import sys

import pytest
import torch

from tests.ops.test_ops import blocks, plan_of

pytestmark = pytest.mark.skipif(
    "tests.cuda.emulated.plugin" not in sys.modules, reason="test_cuda_emulated.py runs these"
)
SIZES, HALF = (64, 64), (64, 32)
PLAN = plan_of(SIZES, blocks(SIZES, ([], [32])), 4)


def split(full):
    return torch.ops.flex_model.split(full, PLAN.code, 0, HALF)


def test_a_stream_that_does_not_wait_reads_nonsense():
    full, side, main = torch.randn(SIZES), torch.cuda.Stream(), torch.cuda.current_stream()
    on_gpu = full.cuda()
    torch.cuda._sleep(1_000_000_000)
    shard = split(on_gpu)
    with torch.cuda.stream(side):
        too_early = shard.clone()
        side.wait_stream(main)
        in_time = shard.clone()
        assert torch.equal(in_time.cpu(), full[:, :32])
        assert not torch.equal(too_early.cpu(), full[:, :32])


def test_transfers_with_peers_leave_multiprocessors_to_the_model():
    """An emulated GPU has two, and a full grid 12 blocks on each."""
    from tests.cuda.emulated import runtime

    sizes = (4096, 256)  # 512 tiles of 8 KiB
    plan = plan_of(sizes, blocks(sizes, ([], [128])), 4)
    full = torch.randn(sizes).cuda()
    shards = [torch.ops.flex_model.split(full, plan.code, rank, (4096, 128)) for rank in (0, 1)]
    assert runtime.library.emulated_last_num_blocks() == 24
    addresses = [shard.data_ptr() for shard in shards]
    for op in (torch.ops.flex_model.pull_, torch.ops.flex_model.push):
        op(full, addresses, plan.code, 0)
        assert runtime.library.emulated_last_num_blocks() == 64


def test_memory_that_is_freed_too_early_holds_nonsense():
    """As torch's allocator, which gives it to the stream on which it was allocated."""
    full, side = torch.randn(SIZES), torch.cuda.Stream()
    on_gpu = full.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        shard = split(on_gpu)
        del on_gpu  # without a wait of the other stream
        assert not torch.equal(shard.cpu(), full[:, :32])


def test_a_copy_to_pinned_memory_is_not_waited_for():
    full = torch.randn(SIZES)
    on_gpu, pinned = full.cuda(), torch.zeros(SIZES, pin_memory=True)
    torch.cuda._sleep(1_000_000_000)
    pinned.copy_(on_gpu, non_blocking=True)
    assert not pinned.any()
    torch.cuda.synchronize()
    assert torch.equal(pinned, full)


def test_freed_memory_goes_to_the_next_tensor_of_the_stream():
    """Also a smaller one, and before what used it there is done."""
    size = 123_457  # no other test frees memory of about this size
    freed = torch.zeros(size, device="cuda")
    place = freed.data_ptr()
    torch.cuda._sleep(1_000_000_000)
    del freed
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.empty(size, device="cuda").data_ptr() != place
    assert torch.empty(size - 1, device="cuda").data_ptr() == place
    assert not torch.cuda.current_stream().query()


def test_tensors_of_several_devices():
    """A kernel takes tensors of one device, numbers of the CPU besides; copies wait for both."""
    full = torch.randn(SIZES)
    first, second = full.to("cuda:0"), torch.zeros(SIZES, device="cuda:1")
    for other in (second, full):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first + other
    assert torch.equal((first * torch.tensor(2.0)).cpu(), full * 2)
    assert torch.equal(first[torch.tensor([1, 0])].cpu(), full[[1, 0]])
    for _ in range(5):
        torch.cuda._sleep(200_000_000)
        first.add_(1)
        full = full + 1
        assert torch.equal((first.to("cuda:1") + 1).cpu(), full + 1)
        second.copy_(first)
        assert torch.equal(second.cpu(), full)
