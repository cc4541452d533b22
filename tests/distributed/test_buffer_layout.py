"""Where shards lie in the buffers of a collective."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flex_model  # noqa: F401  (loads the ops)
from flex_model._C import GatherPlan
from flex_model.distributed.transports import buffer_layout
from tests.ops.test_ops import as_bytes, blocks, plan_of, random_tensor


def plan_along(sizes, dim, parts, itemsize):
    """Rank r holds ``parts[r]`` of dim ``dim``."""
    cuts = [[] for _ in sizes]
    cuts[dim] = list(itertools.accumulate(parts))[:-1]
    return plan_of(sizes, blocks(sizes, cuts), itemsize)


def test_width_of_equal_shards_is_theirs_and_of_others_the_widest_rounded_up():
    assert buffer_layout.even_width(plan_along((6, 5), 0, [3, 3], 1)) == 15
    assert buffer_layout.even_width(plan_along((7, 5), 0, [4, 3], 1)) == 32
    assert buffer_layout.even_width(plan_along((2, 5), 0, [2, 0], 8)) == 80


@pytest.mark.parametrize(
    ("sizes", "dim", "parts", "expected"),
    [
        ((6, 5), 0, [3, 3], True),
        ((6, 5), 0, [2, 2, 2], True),
        ((1, 1, 6, 5), 2, [3, 3], True),
        ((6, 5), 0, [4, 2], False),
        ((2, 6), 1, [3, 3], False),
        ((0, 5), 0, [0, 0], False),
        ((6, 5), 0, [6], True),
    ],
)
def test_what_a_concatenation_is(sizes, dim, parts, expected):
    assert buffer_layout.is_concatenation(plan_along(sizes, dim, parts, 2)) == expected


def test_shards_in_another_order_are_no_concatenation():
    boxes = [(0, [1], [0], [1]), (1, [0], [0], [1])]
    assert not buffer_layout.is_concatenation(GatherPlan([2], [[1], [1]], boxes, 4))


def test_rounds_hold_what_fits_and_large_tensors_alone():
    plans = [plan_along((size,), 0, [size], 16) for size in (1, 2, 9, 1, 1, 3)]
    assert buffer_layout.rounds(plans, 64) == [range(2), range(2, 3), range(3, 5), range(5, 6)]
    assert buffer_layout.rounds([], 64) == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_packed_shards_of_all_ranks_are_assembled(data):
    num_ranks = data.draw(st.integers(1, 4))
    fulls, plans, shards = [], [], [[] for _ in range(num_ranks)]
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from([torch.bool, torch.bfloat16, torch.complex128]))
        parts = [data.draw(st.integers(0, 3)) for _ in range(num_ranks)]
        dim = data.draw(st.integers(0, 1))
        full = random_tensor((sum(parts), 3) if dim == 0 else (3, sum(parts)), dtype)
        fulls.append(full)
        plans.append(plan_along(full.shape, dim, parts, dtype.itemsize))
        for rank, shard in enumerate(full.split(parts, dim)):
            shards[rank].append(shard)
    packing = buffer_layout.Packing.of(
        [(plan, list(range(num_ranks))) for plan in plans], num_ranks
    )
    assert all(at % buffer_layout.ALIGNMENT == 0 for placed in packing.offsets for at in placed)
    packed = []
    for rank, total in enumerate(packing.totals):
        offsets = [offset for _, offset in packing.of_rank(rank)]
        packed.append(torch.ops.flex_model.pack_tensors(shards[rank], offsets, total))
    gathered = torch.cat(packed)
    for full, tensor in zip(fulls, buffer_layout.assemble_tensors(gathered, packing, plans, fulls)):
        assert (tensor.shape, tensor.dtype) == (full.shape, full.dtype)
        assert torch.equal(as_bytes(tensor), as_bytes(full))


def test_tensors_that_some_ranks_hold():
    plan = plan_along((20,), 0, [5, 15], 1)
    packing = buffer_layout.Packing.of([(plan, [2, 0]), (plan, [0, 1])], 3)
    assert packing.totals == [32, 16, 16]
    assert packing.starts == [0, 32, 48]
    assert [packing.of_rank(rank) for rank in range(3)] == [[(0, 0), (1, 16)], [(1, 0)], [(0, 0)]]
    assert packing.among_all() == [[48, 0], [16, 32]]


def test_bytes_of_any_tensor():
    assert (
        buffer_layout.as_bytes(torch.empty_strided((0,), (2,), dtype=torch.bfloat16)).numel() == 0
    )
    strided = torch.randn(4, 6).t()
    one = torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16)[:, :1].t().expand(1, 1)
    one = torch.stack([one, one], -1)[..., 0]
    assert buffer_layout.as_bytes(one).view(torch.bfloat16).tolist() == [1.5]
    assert torch.equal(buffer_layout.as_bytes(strided).view(torch.float32).view(6, 4), strided)
