"""Ops on several tensors, and on memory that no tensor owns, on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flex_model  # noqa: F401  (loads the ops)
from flex_model._C import GatherPlan
from tests.ops.test_ops import as_bytes, blocks, plan_of, random_tensor

ops = torch.ops.flex_model

CONTIGUOUS = torch.contiguous_format
DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e5m2]


def lists(rows):
    """Each row's length, then the row, one after the other."""
    return [number for row in rows for number in (len(row), *row)]


def packed_at(tensors, gap):
    offsets, at = [], 0
    for tensor in tensors:
        offsets.append(at)
        at += tensor.nbytes + gap
    return offsets, at


def random_view(data):
    """A tensor of any strides: permuted, stepped over, expanded."""
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=4))
    steps = [data.draw(st.integers(1, 2)) for _ in sizes]
    tensor = random_tensor(
        [size * step for size, step in zip(sizes, steps)], data.draw(st.sampled_from(DTYPES))
    )
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    tensor = tensor.permute(data.draw(st.permutations(range(len(sizes)))))
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if data.draw(st.booleans()) else tensor


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tensors_are_packed_in_their_own_order(data):
    tensors = [random_view(data) for _ in range(data.draw(st.integers(1, 4)))]
    gap = data.draw(st.integers(0, 3))
    offsets, total = packed_at(tensors, gap)
    expected = torch.zeros(total, dtype=torch.uint8)
    for tensor, offset in zip(tensors, offsets):
        expected[offset : offset + tensor.nbytes] = as_bytes(tensor.clone(memory_format=CONTIGUOUS))
    assert torch.equal(ops.pack_tensors(tensors, offsets, total), expected)


@pytest.mark.parametrize("gap", [0, 16])
def test_what_ranks_pack_is_assembled_by_tensor(gap):
    """Two ranks, each with its shards of three tensors in one buffer, as for one all-gather."""
    fulls = [
        random_tensor((4, 6)),
        random_tensor((3, 5), torch.bfloat16),
        random_tensor((0, 2), torch.bool),
    ]
    slices = [
        blocks((4, 6), ([], [2])),
        blocks((3, 5), ([1], [])),
        [(slice(0, 0), slice(0, 1)), (slice(0, 0), slice(1, 2))],
    ]
    plans = [plan_of(full.shape, parts, full.itemsize) for full, parts in zip(fulls, slices)]
    buffers, offsets, at = [], [[] for _ in fulls], 0
    for rank in range(2):
        shards = [full[parts[rank]] for full, parts in zip(fulls, slices)]
        own, total = packed_at(shards, gap)
        buffers.append(ops.pack_tensors(shards, own, total))
        for places, offset in zip(offsets, own):
            places.append(at + offset)
        at += total
    rebuilt = ops.assemble_tensors(
        torch.cat(buffers),
        [offset for places in offsets for offset in places],
        lists([plan.code for plan in plans]),
        lists([list(full.shape) for full in fulls]),
        fulls,
    )
    for full, tensor in zip(fulls, rebuilt):
        assert (tensor.dtype, tensor.shape) == (full.dtype, full.shape)
        assert torch.equal(as_bytes(tensor), as_bytes(full))


@pytest.fixture
def case():
    """Uneven shards of a (5, 7) tensor over a 2 x 2 grid of ranks."""
    full = random_tensor((5, 7), torch.bfloat16)
    slices = blocks((5, 7), ([2], [3]))
    shards = [full[block].contiguous() for block in slices]
    return full, plan_of(full.shape, slices, 2), shards


@pytest.mark.parametrize("first", range(4))
def test_pull_writes_the_full_tensor_from_addresses(case, first):
    full, plan, shards = case
    pulled = torch.zeros_like(full)
    ops.pull_(pulled, [shard.data_ptr() for shard in shards], plan.code, first)
    assert torch.equal(as_bytes(pulled), as_bytes(full))


@pytest.mark.parametrize("first", range(4))
def test_push_writes_shards_to_addresses(case, first):
    full, plan, shards = case
    got = [torch.zeros_like(shard) for shard in shards]
    addresses = [0 if rank == 2 else shard.data_ptr() for rank, shard in enumerate(got)]
    ops.push(full, addresses, plan.code, first)
    for rank, (mine, theirs) in enumerate(zip(got, shards)):
        assert torch.equal(as_bytes(mine), as_bytes(theirs)) == (rank != 2)


@pytest.mark.parametrize("how", ["auto", "copy engine", "kernel"])
def test_shards_meet_in_host_memory(case, how):
    full, plan, shards = case
    host = torch.zeros_like(full)
    for rank, shard in enumerate(shards):
        ops.copy_to_host(shard, host.data_ptr(), plan.code, rank, how)
    assert torch.equal(as_bytes(host), as_bytes(full))


def test_a_rank_without_a_shard_needs_no_address():
    plan = GatherPlan([2], [[2], [0]], [(0, [0], [0], [2])], 4)
    full, pulled = random_tensor((2,)), torch.zeros(2)
    ops.pull_(pulled, [full.data_ptr(), 0], plan.code, 1)
    with pytest.raises(RuntimeError, match="pull_: only GPUs have a `barrier`"):
        ops.pull_(pulled, [full.data_ptr(), 0], plan.code, 1, [0, 1, 1, 1, 1])
    assert torch.equal(as_bytes(pulled), as_bytes(full))
    ops.copy_to_host(torch.zeros(0), 0, plan.code, 1, "auto")


# ---- wrong calls ----


def pack_of(tensors, offsets, total):
    return lambda case: ops.pack_tensors(tensors, offsets, total)


TWO = [torch.zeros(2), torch.zeros(3)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (pack_of(TWO, [0], 20), r"`offsets` must have one entry for each of the 2 tensors, got 1"),
        (pack_of(TWO, [0, 7], 20), r"ranks 0 and 1 overlap"),
        (pack_of(TWO, [0, 9], 20), r"12 bytes at offset 9\) must lie inside the buffer of 20"),
        (
            lambda case: ops.pull_(case[0], [1, 2], case[1].code, 0),
            r"pull_: `addresses` must have one entry for each of the plan's 4 ranks, got 2",
        ),
        (
            lambda case: ops.pull_(case[0], [0, 2, 3, 4], case[1].code, 0),
            r"pull_: the plan needs the shard of rank 0, whose address is 0",
        ),
        (
            lambda case: ops.pull_(case[0], [0] * 4, case[1].code, 4),
            r"pull_: rank must be in \[0, 3\]",
        ),
        (
            lambda case: ops.push(case[0].t(), [0] * 4, case[1].code, 0),
            r"push: `full` must be contiguous",
        ),
        (
            lambda case: ops.push(case[0], [0], case[1].code, 0),
            r"push: `addresses` must have one entry",
        ),
        (
            lambda case: ops.copy_to_host(case[2][0], 1, case[1].code, 1, "auto"),
            r"copy_to_host: `shard` must have 16 bytes by the plan, got 12",
        ),
        (lambda case: ops.copy_to_host(case[2][0], 0, case[1].code, 0, "auto"), r"`address` is 0"),
        (
            lambda case: ops.copy_to_host(case[2][0], 1, case[1].code, 0, "dma"),
            r"`how` must be .* got \"dma\"",
        ),
    ],
)
def test_wrong_calls_are_refused(case, call, message):
    with pytest.raises(RuntimeError, match=message):
        call(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": [0]}, r"`offsets` must have one entry for each rank of each tensor, got 1"),
        ({"offsets": [0, 4, 8]}, r"have more than the 1 tensors of `like`"),
        ({"offsets": [0, 5]}, r"must lie inside the buffer of 8 bytes"),
        ({"plans": [90, 1, 2]}, r"`plans` is cut short"),
        ({"plans": [-1]}, r"`plans` is cut short"),
        ({"plans": []}, r"`plans` is cut short"),
        ({"sizes": [1, 3]}, r"`sizes` must have 8 bytes by the plan, got 12"),
    ],
)
def test_assemble_tensors_refuses(change, message):
    plan = GatherPlan([2], [[1], [1]], [(0, [0], [0], [1]), (1, [1], [0], [1])], 4)
    arguments = {"gathered": torch.zeros(8, dtype=torch.uint8), "offsets": [0, 4]}
    arguments |= {"plans": lists([plan.code]), "sizes": [1, 2], "like": [torch.zeros(())]}
    with pytest.raises(RuntimeError, match=message):
        ops.assemble_tensors(**(arguments | change))


# ---- torch ----


def test_opcheck(case):
    full, plan, shards = case
    offsets, total = packed_at(shards, 0)
    gathered = ops.pack_tensors(shards, offsets, total)
    addresses = [shard.data_ptr() for shard in shards]
    host = torch.zeros_like(full)
    for op, arguments in [
        (ops.pack_tensors, (shards, offsets, total)),
        (ops.assemble_tensors, (gathered, offsets, lists([plan.code]), [2, 5, 7], [full])),
        (ops.pull_, (torch.zeros_like(full), addresses, plan.code, 1)),
        (ops.push, (full, addresses, plan.code, 1)),
        (ops.copy_to_host, (shards[0], host.data_ptr(), plan.code, 0, "auto")),
    ]:
        torch.library.opcheck(op.default, arguments)


def test_fake_kernels_give_sizes_and_dtypes(case):
    full, plan, shards = case
    full = full.to("meta")
    packed = ops.pack_tensors([shard.to("meta") for shard in shards], [0] * 4, 70)
    assert (packed.shape, packed.dtype) == ((70,), torch.uint8)
    (rebuilt,) = ops.assemble_tensors(packed, [0] * 4, lists([plan.code]), [2, 5, 7], [full])
    assert (rebuilt.shape, rebuilt.dtype) == (full.shape, full.dtype)
