"""torch.ops.flex_model on the CPU: bytes are moved exactly, wrong calls say what to do."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flex_model  # noqa: F401  (loads the ops)
from flex_model._C import GatherPlan

ops = torch.ops.flex_model

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def random_tensor(sizes, dtype=torch.float32, generator=None):
    """Random bits, NaN payloads and denormals too; for bool, random truth."""
    count = torch.Size(sizes).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(sizes)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(as_bytes(got.cpu()), as_bytes(expected.cpu()))


def blocks(sizes, cuts):
    """Slices of the blocks that ``cuts[dim]``, sorted positions, cut a tensor into; by rank."""
    edges = [[0, *cut, size] for cut, size in zip(cuts, sizes, strict=True)]
    ranges = [[slice(a, b) for a, b in itertools.pairwise(edge)] for edge in edges]
    return list(itertools.product(*ranges))


def plan_of(sizes, slices, itemsize):
    """A plan in which rank r holds the block ``slices[r]``."""
    starts = [[part.start for part in block] for block in slices]
    shards = [[part.stop - part.start for part in block] for block in slices]
    zero = [0] * len(sizes)
    boxes = [(rank, starts[rank], zero, shards[rank]) for rank in range(len(slices))]
    return GatherPlan(list(sizes), shards, boxes, itemsize)


def gather_buffer(shards, gap=0):
    """Shards in one buffer, ``gap`` bytes apart, and their offsets."""
    offsets, parts, at = [], [], 0
    for shard in shards:
        offsets.append(at)
        parts += [as_bytes(shard), torch.full((gap,), 255, dtype=torch.uint8)]
        at += shard.nbytes + gap
    return torch.cat(parts), offsets


def check_plan(full, slices, device="cpu", gap=0):
    """The copies that a device makes of a tensor on the CPU, and of its shards."""
    plan = plan_of(full.shape, slices, full.itemsize)
    shards = [full[block] for block in slices]
    gathered, offsets = gather_buffer(shards, gap)
    there = full.to(device)
    packed = ops.pack(there, plan.code, offsets, gathered.numel())
    for offset, shard in zip(offsets, shards):  # gaps are packed as zeros
        gathered[offset + shard.nbytes :][:gap] = 0
    assert torch.equal(packed.cpu(), gathered)
    rebuilt = ops.assemble(packed, offsets, plan.code, list(full.shape), full.dtype)
    same_bits(rebuilt, full)
    for rank, shard in enumerate(shards):
        part = ops.split(there, plan.code, rank, list(shard.shape))
        assert part.is_contiguous()
        same_bits(part, shard)
    assert packed.device == rebuilt.device == there.device


@pytest.fixture
def case():
    """A (4, 6) tensor in two shards of columns: full, plan, gathered buffer, offsets."""
    full = random_tensor((4, 6))
    slices = blocks((4, 6), ([], [3]))
    plan = plan_of((4, 6), slices, 4)
    return full, plan, *gather_buffer([full[block] for block in slices])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_bytes_are_moved_exactly(dtype, dim):
    sizes = (4, 6, 10)
    cuts = [[size // 2] if d == dim else [] for d, size in enumerate(sizes)]
    check_plan(random_tensor(sizes, dtype), blocks(sizes, cuts))


@pytest.mark.parametrize("run", [*range(1, 40), 63, 64, 65, 127, 128, 129, 1000])
def test_every_length_of_run(run):
    full = random_tensor((37, 2 * run + 3), torch.uint8)
    check_plan(full, blocks(full.shape, ([], [run, 2 * run])))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_grid_of_blocks(data):
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=4))
    positions = [st.lists(st.integers(0, size), max_size=2).map(sorted) for size in sizes]
    dtype = data.draw(
        st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
    )
    check_plan(random_tensor(sizes, dtype), blocks(sizes, data.draw(st.tuples(*positions))))


def test_large_interleaved_blocks():
    full = random_tensor((3, 700, 1200))
    check_plan(full, blocks(full.shape, ([], [200], [7, 600, 1193])))


def test_a_shard_of_several_boxes():
    """Interleaved columns, as fused projections have: rank r holds columns r, r + 2, r + 4."""
    full = random_tensor((5, 6))
    boxes = [(column % 2, [0, column], [0, column // 2], [5, 1]) for column in range(6)]
    plan = GatherPlan([5, 6], [[5, 3], [5, 3]], boxes, 4)
    shards = [full[:, rank::2] for rank in range(2)]
    gathered, offsets = gather_buffer(shards)
    same_bits(ops.assemble(gathered, offsets, plan.code, [5, 6], full.dtype), full)
    for rank in range(2):
        same_bits(ops.split(full, plan.code, rank, [5, 3]), shards[rank])


def test_gaps_between_shards_are_skipped_and_packed_as_zeros(case):
    full, plan, *_ = case
    gathered, offsets = gather_buffer([full[:, :3], full[:, 3:]], gap=5)
    same_bits(ops.assemble(gathered, offsets, plan.code, [4, 6], full.dtype), full)
    packed = ops.pack(full, plan.code, offsets, gathered.numel())
    gathered[gathered.numel() - 5 :] = 0
    gathered[48:53] = 0
    assert torch.equal(packed, gathered)


def test_an_absent_rank_without_a_shard_is_fine():
    plan = GatherPlan([2], [[2], [0]], [(0, [0], [0], [2])], 4)
    full = random_tensor((2,))
    same_bits(ops.assemble(as_bytes(full), [0, -1], plan.code, [2], full.dtype), full)
    assert torch.equal(ops.pack(full, plan.code, [0, -1], 8), as_bytes(full))


def test_a_scalar():
    check_plan(random_tensor(()), [()])


def test_a_conjugated_tensor_is_resolved_first():
    full = torch.randn(4, 6, dtype=torch.complex64)
    plan = plan_of((4, 6), blocks((4, 6), ([], [3])), 8)
    assert torch.equal(ops.split(full.conj(), plan.code, 1, [4, 3]), full[:, 3:].conj())


# ---- wrong calls ----


GATHERED = torch.zeros(192, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gathered": GATHERED[::2]},
            r"assemble: `gathered` must be contiguous, got .* \(96,\); call \.contiguous",
        ),
        ({"gathered": GATHERED[:96].view(torch.int32)}, r"`gathered` must be a 1-D uint8 buffer"),
        ({"gathered": GATHERED.view(2, 96)}, r"1-D uint8 buffer, got 2 dims of 1-byte elements"),
        ({"offsets": [0]}, r"`offsets` must have one entry for each of the plan's 2 ranks, got 1"),
        ({"offsets": [0, -1]}, r"needs the shard of rank 1, whose offset is -1"),
        ({"offsets": [0, -2]}, r"rank 1 \(48 bytes at offset -2\) must lie inside"),
        ({"offsets": [0, 49]}, r"rank 1 \(48 bytes at offset 49\) must lie inside .* 96 bytes"),
        ({"sizes": [4, 5]}, r"`sizes` must have 96 bytes by the plan, got 80 of sizes \(4, 5\)"),
        ({"dtype": torch.float64}, r"`sizes` must have 96 bytes by the plan, got 192"),
    ],
)
def test_assemble_refuses(case, change, message):
    _, plan, gathered, offsets = case
    arguments = {"gathered": gathered, "offsets": offsets, "plan": plan.code}
    arguments |= {"sizes": [4, 6], "dtype": torch.float32}
    with pytest.raises(RuntimeError, match=message):
        ops.assemble(**(arguments | change))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            [],
            "assemble: gather plan: the encoded plan is cut short; pass the `code` of a GatherPlan",
        ),
        ([1, 8, 8, 1, 0, 0, 0, 8], "cut short"),
        ([1, 8, 8, 1, 0, 0, 0, 8, 0, 0], "the encoded plan is too long"),
        ([1, 8, 8, 0], "the plan fills 0 of the 8 bytes of the full tensor"),
        ([1, 8, 8, 1, 0, 4, 0, 8, 0], "a box leaves its buffer"),
        ([1, 8, 8, 1, 1, 0, 0, 8, 0], "a box names a rank that the plan does not have"),
        ([1, 8, 8, 1, 0, 0, 0, 8, 1, 9, 0, 0], "a box copies more bytes than its shard has"),
        ([1, 8, 8, 1, 0, 0, 0, 8, 1, 2**62, 0, 0], "a box copies more bytes than its shard has"),
        ([1, 8, 8, 1, 0, 0, 0, 8, 1, 2**62, 2**62, 0], "a box leaves its buffer"),
        ([1, 8, 8, 1, 0, 0, 0, -8, 0], "negative run"),
    ],
)
def test_assemble_refuses_what_is_no_plan(code, message):
    gathered = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=message):
        ops.assemble(gathered, [0], code, [2], torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"full": torch.zeros(6, 4).t()},
            r"split: `full` must be contiguous, got a strided tensor of sizes \(4, 6\)",
        ),
        (
            {"full": torch.zeros(4, 7)},
            r"split: `full` must have 96 bytes by the plan, got 112 of sizes \(4, 7\)",
        ),
        ({"rank": 2}, r"split: rank must be in \[0, 1\] for this plan, got 2"),
        ({"rank": -1}, r"split: rank must be in \[0, 1\] for this plan, got -1"),
        ({"sizes": [4, 2]}, r"split: `sizes` must have 48 bytes by the plan, got 32"),
        ({"plan": [2, 96, 48, 48, 0]}, r"split: the plan fills 0 of the 48 bytes of the shard"),
    ],
)
def test_split_refuses(case, change, message):
    full, plan, *_ = case
    arguments = {"full": full, "plan": plan.code, "rank": 0, "sizes": [4, 3]}
    with pytest.raises(RuntimeError, match=message):
        ops.split(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full": torch.zeros(6, 4).t()}, r"pack: `full` must be contiguous"),
        ({"total": 95}, r"pack: the shard of rank 1 .* must lie inside the buffer of 95 bytes"),
        ({"total": -1}, r"pack: `total` must be a number of bytes, got -1"),
        (
            {"offsets": [0, 47]},
            r"pack: the shard of rank 1 .* must lie inside|shards of ranks 0 and 1 overlap",
        ),
        (
            {"offsets": [0, 40], "total": 100},
            r"pack: the shards of ranks 0 and 1 overlap in the buffer",
        ),
        ({"offsets": [-1, 0]}, r"pack: the plan needs the shard of rank 0, whose offset is -1"),
    ],
)
def test_pack_refuses(case, change, message):
    full, plan, _, offsets = case
    arguments = {"full": full, "plan": plan.code, "offsets": offsets, "total": 96}
    with pytest.raises(RuntimeError, match=message):
        ops.pack(**(arguments | change))


def test_no_code_reaches_beyond_its_buffers(case):
    """Any change of one number of a plan is harmless: an error, or another valid plan."""
    full, plan, gathered, offsets = case
    refused = 0
    for i, value in itertools.product(
        range(len(plan.code)), [-1, 0, 1, 2, 7, 12, 13, 48, 97, 2**31, 2**62]
    ):
        code = list(plan.code)
        code[i] = value
        for call in [
            lambda code: ops.assemble(gathered, offsets, code, [4, 6], torch.float32),
            lambda code: ops.split(full, code, 1, [4, 3]),
            lambda code: ops.pack(full, code, offsets, 96),
        ]:
            try:
                call(code)
            except RuntimeError:
                refused += 1
    assert refused > 100


# ---- moments ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 1003])
def test_moments_are_sums_in_float64(dtype, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    wide = values.double()
    largest = wide.abs().max() if size else wide.sum()
    expected = torch.stack([wide.sum(), wide.square().sum(), largest])
    torch.testing.assert_close(ops.moments(values), expected, rtol=1e-14, atol=1e-13)
    for at, odd in itertools.product(range(0, size, 7), (torch.nan, torch.inf, -torch.inf)):
        changed = values.clone()
        changed[at] = odd
        torch.testing.assert_close(ops.moments(changed)[2].item(), abs(odd), equal_nan=True)


def test_moments_refuse_other_dtypes_and_strides():
    with pytest.raises(RuntimeError, match="must be of float32, float64 or bfloat16"):
        ops.moments(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="moments: `tensor` must be contiguous"):
        ops.moments(torch.zeros(4, 6).t())


# ---- torch ----


def test_opcheck(case):
    full, plan, gathered, offsets = case
    for op, arguments in [
        (ops.assemble, (gathered, offsets, plan.code, [4, 6], torch.float32)),
        (ops.split, (full, plan.code, 1, [4, 3])),
        (ops.pack, (full, plan.code, offsets, 100)),
        (ops.moments, (full,)),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_fake_kernels_give_sizes_and_dtypes(case):
    _, plan, _, offsets = case
    gathered = torch.empty(96, dtype=torch.uint8, device="meta")
    full = ops.assemble(gathered, offsets, plan.code, [4, 6], torch.bfloat16)
    assert (full.shape, full.dtype, full.device.type) == ((4, 6), torch.bfloat16, "meta")
    assert ops.split(full, plan.code, 0, [4, 3]).shape == (4, 3)
    assert ops.pack(full, plan.code, offsets, 96).dtype == torch.uint8
