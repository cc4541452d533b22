"""GatherPlan and ShardLayout: where bytes go, checked against torch's own slicing. No ranks are
needed.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flex_model._C import GatherPlan
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Shard, ShardLayout
from tests.ops.test_ops import as_bytes, same_bits


def parts(total: int, count: int, draw) -> list[int]:
    """``count`` sizes that add up to ``total``, zeros included."""
    cuts = sorted(draw(st.integers(0, total)) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


@st.composite
def cases(draw):
    """A full shape, a layout over dp x tp, and the sizes of the parts."""
    shape = [draw(st.integers(0, 5)) for _ in range(draw(st.integers(1, 4)))]
    dims = range(len(shape))
    dp_size, tp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dp = Shard(draw(st.sampled_from(dims)))
    tp = Shard(draw(st.sampled_from(dims)))
    dp_parts = parts(shape[dp.dim], dp_size, draw)
    if dp.dim == tp.dim:
        tp_parts = [parts(n, tp_size, draw) for n in dp_parts]
    else:
        tp_parts = [parts(shape[tp.dim], tp_size, draw)] * dp_size
    return shape, ShardLayout(dp, tp), dp_parts, tp_parts


def cut(full, layout, dp_parts, tp_parts):
    """The shards, by torch's own split, in the order (dp, tp)."""
    rows = full.split(dp_parts, layout.dp.dim)
    return [
        shard for row, sizes in zip(rows, tp_parts) for shard in row.split(sizes, layout.tp.dim)
    ]


def assembled(plan, shards, dtype):
    """The full tensor, by the op that follows the plan."""
    data = [as_bytes(shard) for shard in shards]
    offsets = [sum(part.numel() for part in data[:rank]) for rank in range(len(data))]
    return torch.ops.flex_model.assemble(
        torch.cat(data), offsets, plan.code, plan.full_sizes, dtype
    )


def check_copies(plan, shards, full):
    """The ops assemble the full tensor by the plan, and split it back: the same bytes."""
    same_bits(assembled(plan, shards, full.dtype), full)
    for rank, shard in enumerate(shards):
        same_bits(torch.ops.flex_model.split(full, plan.code, rank, list(shard.shape)), shard)


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]))
def test_ops_follow_the_plan_to_what_torch_splits_and_back(case, dtype):
    shape, layout, dp_parts, tp_parts = case
    data = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8)
    full = data.view(dtype).reshape(shape)
    shards = [shard.contiguous() for shard in cut(full, layout, dp_parts, tp_parts)]
    shapes = [tuple(shard.shape) for shard in shards]
    sizes = len(dp_parts), len(tp_parts[0])

    assert layout.full_shape(shapes, *sizes) == tuple(shape)
    check_copies(layout.plan(shapes, *sizes, dtype.itemsize), shards, full)


def test_a_shard_on_dim_0_is_one_run():
    plan = ShardLayout(tp=Shard(0)).plan([(2, 3, 4), (5, 3, 4)], 1, 2, element_bytes=4)
    num_ranks, full_bytes, *rest = plan.code
    assert (num_ranks, full_bytes, rest[:3]) == (2, 336, [96, 240, 2])
    assert rest[3:] == [0, 0, 0, 96, 0, 1, 96, 0, 240, 0]  # rank, offsets, run, no levels


def test_a_shard_on_the_last_dim_is_one_level_of_runs():
    plan = ShardLayout(tp=Shard(2)).plan([(2, 3, 4), (2, 3, 1)], 1, 2, element_bytes=2)
    boxes = plan.code[5:]
    assert boxes == [0, 0, 0, 8, 1, 6, 10, 8, 1, 8, 0, 2, 1, 6, 10, 2]


@pytest.mark.parametrize(
    ("full", "shards", "boxes", "message"),
    [
        (
            [4],
            [[2], [2]],
            [(0, [0], [0], [2]), (1, [1], [0], [2])],
            "boxes of ranks 0 and 1 overlap",
        ),
        ([5], [[2], [2]], [(0, [0], [0], [2]), (1, [2], [0], [2])], "hold 4 of the 5 elements"),
        ([4], [[2], [2]], [(0, [0], [0], [2]), (1, [3], [0], [2])], "leaves its shard"),
        ([2], [[2], [1]], [(0, [0], [0], [2])], "rank 1 has elements that are in no box"),
        ([2], [[2]], [(1, [0], [0], [2])], "rank 1 is not one of 1 ranks"),
        ([2**40, 2**40], [[1, 1]], [], "more elements than 64 bits can count"),
        ([-1], [[1]], [], "negative size"),
    ],
)
def test_plan_refuses_boxes_that_do_not_tile(full, shards, boxes, message):
    with pytest.raises(ValueError, match=message):
        GatherPlan(full, shards, boxes, 1)


def of_parts(full, dim, part_sizes, count, split=torch.tensor_split):
    """What each of ``count`` ranks holds, by torch's own split: its pieces of all parts."""
    by_part = [split(part, count, dim) for part in full.split(part_sizes, dim)]
    return [torch.cat(pieces, dim) for pieces in zip(*by_part)]


def check_round_trip(full, layout, shards, dp_size, tp_size):
    shards = [shard.contiguous() for shard in shards]
    shapes = [tuple(shard.shape) for shard in shards]
    assert layout.full_shape(shapes, dp_size, tp_size) == tuple(full.shape)
    plan = layout.plan(shapes, dp_size, tp_size, full.element_size())
    check_copies(plan, shards, full)


PART_SIZES = [
    ((8, 2, 2), 2),  # grouped-query heads
    ((32, 8, 8), 4),
    ((6, 6), 3),  # equal parts
    ((12,), 2),  # one part
    ((7, 3, 3), 2),  # uneven
    ((5, 2), 4),  # fewer of a part than ranks
    ((1, 0, 4), 2),
    ((9, 4), 1),
]


@pytest.mark.parametrize(("part_sizes", "count"), PART_SIZES)
@pytest.mark.parametrize("dim", [0, 2])
def test_parts_of_other_sizes_are_put_together(part_sizes, count, dim):
    shape = [3, 2, 4]
    shape[dim] = sum(part_sizes)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    layout = ShardLayout(tp=Shard(dim, part_sizes=part_sizes))
    check_round_trip(full, layout, of_parts(full, dim, part_sizes, count), 1, count)


@pytest.mark.parametrize(("part_sizes", "count"), [((10, 10), 4), ((10, 4, 4), 4), ((5, 3), 4)])
def test_parts_split_as_dtensor_chunks_are_put_together(part_sizes, count):
    def chunk(part, count, dim):  # DTensor leaves the last ranks empty where chunk gives fewer
        chunks = part.chunk(count, dim)
        return [*chunks, *[part.narrow(dim, 0, 0)] * (count - len(chunks))]

    full = torch.arange(sum(part_sizes) * 3).reshape(-1, 3)
    shards = of_parts(full, 0, part_sizes, count, chunk)
    check_round_trip(full, ShardLayout(tp=Shard(0, part_sizes=part_sizes)), shards, 1, count)


@pytest.mark.parametrize(("part_sizes", "count"), PART_SIZES)
def test_parts_of_other_sizes_beside_rows_of_a_batch(part_sizes, count):
    rows = [2, 3]
    full = torch.arange(5 * sum(part_sizes)).reshape(5, -1)
    shards = [shard for row in full.split(rows) for shard in of_parts(row, 1, part_sizes, count)]
    layout = ShardLayout(Shard(0), Shard(1, part_sizes=part_sizes))
    check_round_trip(full, layout, shards, 2, count)


@pytest.mark.parametrize(("part_sizes", "count"), PART_SIZES)
def test_parts_of_other_sizes_split_once_more_along_their_dim(part_sizes, count):
    # FSDP2 over a fused tensor-parallel weight: dp splits what a tp rank holds
    full = torch.arange(sum(part_sizes) * 3).reshape(-1, 3)
    of_tp = of_parts(full, 0, part_sizes, count)
    shards = [held.tensor_split(2)[dp] for dp in range(2) for held in of_tp]
    layout = ShardLayout(Shard(0), Shard(0, part_sizes=part_sizes), tp_first=True)
    check_round_trip(full, layout, shards, 2, count)


def test_parts_of_other_sizes_in_fewer_pieces_than_ranks():
    full = torch.arange(12 * 3).reshape(-1, 3)
    shards = of_parts(full, 0, (8, 2, 2), 2)
    shapes = [tuple(shards[rank // 2].shape) for rank in range(4)]
    layout = ShardLayout(tp=Shard(0, part_sizes=(8, 2, 2), pieces=2, stride=2))
    assert layout.full_shape(shapes, 1, 4) == (12, 3)
    check_round_trip(full, layout.without_copies, shards, 1, 2)


@pytest.mark.parametrize(("stride", "pieces"), [(2, [0, 0, 1, 1]), (1, [0, 1, 0, 1])])
def test_ranks_that_share_a_piece_are_neighbours_or_a_replica_apart(stride, pieces):
    shard = Shard(0, pieces=2, stride=stride)
    assert [shard.piece(rank) for rank in range(4)] == pieces


def test_a_part_of_a_tensor_of_parts_is_found():
    full = torch.arange(12.0)
    layout = ShardLayout(tp=Shard(0, part_sizes=(8, 2, 2)))
    chosen = [9, 0, 5, 11, 8]
    plan, held, _ = layout.plan_of({0: chosen}, [(6,), (6,)], 1, 2, 4)
    shards = of_parts(full, 0, (8, 2, 2), 2)
    parts = [shard[h[0]] for shard, h in zip(shards, held)]
    assert torch.equal(assembled(plan, parts, full.dtype), full[chosen])


@pytest.mark.parametrize(
    ("layout", "shapes", "message"),
    [
        (
            ShardLayout(tp=Shard(0, part_sizes=(8, 2, 2))),
            [(6,), (5,)],
            r"ranks hold \[6, 5\] along dim 0 .* does not fit the layout dp R, tp "
            r"S\(0, parts 8\+2\+2\)",
        ),
        (ShardLayout(tp=Shard(0, part_sizes=(8, 2, 2))), [(5,), (7,)], "does not fit the layout"),
        (ShardLayout(tp=Shard(0, part_sizes=(12,))), [(4,), (8,)], "does not fit the layout"),
        (
            ShardLayout(tp=Shard(0, part_sizes=(8, 2, 2)), dp=Shard(0)),
            [(3,), (3,), (3,), (3,)],
            "interleaves parts along dim 0 inside the shards of another axis",
        ),
    ],
)
def test_parts_that_do_not_make_what_ranks_hold_are_refused(layout, shapes, message):
    with pytest.raises(ValueError, match=message):
        layout.full_shape(shapes, len(shapes) // 2, 2)


def test_part_sizes_are_part_of_what_a_shard_is():
    shard = Shard(2, part_sizes=[32, 8, 8])
    assert shard == Shard(2, part_sizes=(32, 8, 8)) == Shard(2, 3, part_sizes=(32, 8, 8))
    assert len({shard, Shard(2, part_sizes=(32, 8, 8)), Shard(2, 3), Shard(2)}) == 3
    assert str(shard) == "S(2, parts 32+8+8)"
    assert str(Shard(2, part_sizes=(8, 8), pieces=2)) == "S(2, parts 8+8, 2 pieces)"
    with pytest.raises(ValueError, match="parts=2 contradicts part_sizes"):
        Shard(2, 2, part_sizes=(32, 8, 8))
    for sizes in [(), (4, -1)]:
        with pytest.raises(ValueError, match="full size of each part"):
            Shard(2, part_sizes=sizes)


def test_layout_refuses_sizes_that_do_not_fit_it():
    with pytest.raises(ValueError, match=r"ranks hold \[3, 4\] along dim 0"):
        ShardLayout(tp=Shard(1)).full_shape([(3, 2), (4, 2)], 1, 2)


TP2 = Mesh((0, 1), 0, tp_size=2)
DP2 = Mesh((0, 1), 0, dp_size=2)
GRID = Mesh((0, 1, 2, 3), 0, dp_size=2, tp_size=2)


@pytest.mark.parametrize(
    ("mesh", "axes", "members"),
    [
        (GRID, ("tp",), [0, 1]),
        (GRID, ("dp",), [0, 2]),
        (GRID, ("dp", "tp"), [0, 1, 2, 3]),
        (GRID, (), [0]),
    ],
)
def test_members_of_axes(mesh, axes, members):
    assert mesh.ranks_along(axes) == members


def test_mesh_order_is_pp_dp_tp_with_tp_fastest():
    mesh = Mesh(tuple(range(8)), 5, pp_size=2, dp_size=2, tp_size=2)
    assert mesh.coordinates == {"pp": 1, "dp": 0, "tp": 1}
    assert mesh.stage_ranks == (4, 5, 6, 7)
    assert mesh.ranks_along(("dp",)) == [1, 3]
