"""torch.ops.flex_model on CUDA gives the CPU's bytes. Needs a GPU."""

import pytest
import torch

import flex_model
from tests.ops.test_ops import blocks, check_plan, plan_of, random_tensor, same_bits

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ops = torch.ops.flex_model

DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128]


def grid_plan(sizes, cuts, itemsize):
    """Rank r holds the r-th block of a tensor cut at ``cuts[dim]``."""
    return plan_of(sizes, blocks(sizes, cuts), itemsize)


def check(full, cuts, gap=0):
    check_plan(full, blocks(full.shape, cuts), "cuda", gap)


def test_the_library_is_loaded():
    assert flex_model.build_info()["loaded"]["_cuda"] == "loaded"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_dim_and_dtype(dtype, dim):
    sizes = (6, 10, 64)
    check(random_tensor(sizes, dtype), [[n // 2] if d == dim else [] for d, n in enumerate(sizes)])


@pytest.mark.parametrize("run", [1, 2, 3, 4, 7, 8, 12, 16, 24, 48, 100, 1000, 4096])
@pytest.mark.parametrize("gap", [0, 1, 16])
def test_every_width_of_chunk(run, gap):
    check(random_tensor((333, 2 * run), torch.uint8), [[], [run]], gap)


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ((70, 33, 129), [[1, 40], [16], [5, 64, 100]]),
        ((8, 300), [[], list(range(1, 300))]),  # more boxes than one launch holds
        ((4, 0), [[2], []]),
        ((4, 6), [[], [0, 3, 3]]),
        ((64, 5000), [[], [*range(1, 600), 601]]),  # copies of very different sizes
        ((4096, 5000), [[], [1250, 2500, 3750]]),
    ],
    ids=str,
)
def test_any_boxes(sizes, cuts):
    check(random_tensor(sizes, torch.bfloat16), cuts)


@pytest.mark.parametrize("run", [33, 40, 257, 1001])
@pytest.mark.parametrize("start", [0, 1, 2, 7])
def test_runs_that_begin_anywhere(start, run):
    """Runs of two bytes' alignment, in tensors of two bytes' alignment."""
    sizes = (500, 3 * run)
    plan = grid_plan(sizes, [[], [run, 2 * run]], 2)
    memory = random_tensor((500 * 3 * run + start,), torch.bfloat16)
    full = memory[start:].view(sizes)
    on_gpu = memory.cuda()[start:].view(sizes)
    for rank, shard_sizes in enumerate(plan.shard_sizes):
        got = ops.split(on_gpu, plan.code, rank, shard_sizes)
        same_bits(got, ops.split(full, plan.code, rank, shard_sizes))
    target = torch.full((on_gpu.numel() + 64,), -1, dtype=torch.bfloat16, device="cuda")
    shards = [
        ops.split(on_gpu, plan.code, rank, shard_sizes)
        for rank, shard_sizes in enumerate(plan.shard_sizes)
    ]
    part = target[start + 1 : start + 1 + on_gpu.numel()].view(sizes)
    ops.pull_(part, [shard.data_ptr() for shard in shards], plan.code, 1)
    same_bits(part, full)
    assert bool((target[: start + 1] == -1).all())
    assert bool((target[start + 1 + on_gpu.numel() :] == -1).all())


def test_many_tensors_in_one_buffer():
    tensors = [random_tensor((7, 2 * i + 1, 5), DTYPES[i % 5]).transpose(0, 1) for i in range(100)]
    plans = [grid_plan(tensor.shape, [[], [], []], tensor.itemsize) for tensor in tensors]
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += tensor.nbytes + 3
    on_gpu = [tensor.cuda() for tensor in tensors]
    packed = ops.pack_tensors(on_gpu, offsets, total)
    assert torch.equal(packed.cpu(), ops.pack_tensors(tensors, offsets, total))
    rebuilt = ops.assemble_tensors(
        packed,
        offsets,
        [number for plan in plans for number in (len(plan.code), *plan.code)],
        [size for tensor in tensors for size in (3, *tensor.shape)],
        on_gpu,
    )
    for tensor, got in zip(tensors, rebuilt):
        assert got.is_cuda
        same_bits(got, tensor)


@pytest.mark.parametrize("first", range(4))
def test_pull_and_push(first):
    full = random_tensor((50, 70), torch.bfloat16)
    plan = grid_plan(full.shape, [[20], [33]], 2)
    on_gpu = full.cuda()
    shards = [torch.zeros(sizes, dtype=full.dtype, device="cuda") for sizes in plan.shard_sizes]
    addresses = [shard.data_ptr() for shard in shards]
    ops.push(on_gpu, addresses, plan.code, first)
    pulled = torch.empty_like(on_gpu)
    ops.pull_(pulled, addresses, plan.code, first)
    same_bits(pulled, full)


def test_a_copy_of_more_than_4_gib():
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("a small GPU")
    rows = 5 << 30
    full = torch.randint(0, 256, (2 * rows,), dtype=torch.uint8, device="cuda")
    plan = grid_plan((2 * rows,), [[rows]], 1)
    assert torch.equal(ops.split(full, plan.code, 1, [rows]), full[rows:])


def test_runs_on_the_current_stream():
    """Work queued before on the same stream is seen, without a synchronization."""
    full = torch.zeros(2048, 2048, device="cuda")
    plan = grid_plan(full.shape, [[], [1024]], 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        full.fill_(3)
        shard = ops.split(full, plan.code, 1, [2048, 1024])
    stream.synchronize()
    assert bool((shard == 3).all())


def test_runs_in_a_cuda_graph():
    full = torch.zeros(64, 64, device="cuda")
    plan = grid_plan(full.shape, [[], [32]], 4)
    ops.split(full, plan.code, 1, [64, 32])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shard = ops.split(full, plan.code, 1, [64, 32])
    full.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((shard == 5).all())


def test_works_on_the_device_of_its_input():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    full = random_tensor((16, 16), torch.float32)
    plan = grid_plan(full.shape, [[], [8]], 4)
    shard = ops.split(full.to("cuda:1"), plan.code, 1, [16, 8])
    assert shard.device == torch.device("cuda:1")
    assert torch.equal(shard.cpu(), ops.split(full, plan.code, 1, [16, 8]))


def test_opcheck():
    full = torch.randn(4, 6, device="cuda")
    plan = grid_plan((4, 6), [[], [3]], 4)
    packed = ops.pack(full, plan.code, [0, 48], 96)
    arguments = (packed, [0, 48], plan.code, [4, 6], torch.float32)
    torch.library.opcheck(ops.assemble.default, arguments)
    torch.library.opcheck(ops.split.default, (full, plan.code, 1, [4, 3]))
    torch.library.opcheck(ops.pack.default, (full, plan.code, [0, 48], 96))


def test_wrong_calls_are_refused():
    full = torch.zeros(6, 4, device="cuda").t()
    plan = grid_plan((4, 6), [[], [3]], 4)
    with pytest.raises(RuntimeError, match=r"split: `full` must be contiguous"):
        ops.split(full, plan.code, 0, [4, 3])
