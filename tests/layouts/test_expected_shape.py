"""What the sizes of the full tensor state, where nothing is proven."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import models
import pipelines
from flex_model import FlexModel, HookFunction
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Partial, Replicate, Shard, ShardLayout
from flex_model.layouts.expected_shape import rows_dim, stated_by
from flex_model.layouts.resolve import Site, resolve
from shared_edits import mixing_features

TP2 = Mesh((0, 1), 0, tp_size=2)
TP3 = Mesh((0, 1, 2), 0, tp_size=3)
DP2 = Mesh((0, 1), 0, dp_size=2)
GRID = Mesh((0, 1, 2, 3), 0, dp_size=2, tp_size=2)
R, P = Replicate(), Partial()
UNKNOWN = (None, None)
TWO = [(2, 8), (2, 8)]


# ---- Without ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "mesh", "known", "sizes", "layout"),
    [
        (TWO, TP2, UNKNOWN, (None, 16), (R, Shard(1))),
        (TWO, TP2, UNKNOWN, (2, 16), (R, Shard(1))),
        (TWO, TP2, UNKNOWN, (4, None), (R, Shard(0))),
        (TWO, TP2, UNKNOWN, (None, 8), (R, R)),
        (TWO, TP2, UNKNOWN, (None, None), (R, R)),
        ([(2, 3), (2, 5)], TP2, UNKNOWN, (None, 8), (R, Shard(1))),
        ([(2, 8), (2, 0)], TP2, UNKNOWN, (None, 8), (R, Shard(1))),
        ([(2, 4), (2, 3), (2, 3)], TP3, UNKNOWN, (None, 10), (R, Shard(1))),
        ([(), ()], TP2, UNKNOWN, (), (R, R)),
        # Along dp the rows alone count.
        (TWO, DP2, UNKNOWN, (4, None), (Shard(0), R)),
        ([(2, 8), (1, 8)], DP2, UNKNOWN, (3, 8), (Shard(0), R)),
        (TWO, DP2, UNKNOWN, (2, 8), (R, R)),
        (TWO, DP2, UNKNOWN, (None, 8), (None, R)),
        # On a grid.
        ([(2, 8)] * 4, GRID, UNKNOWN, (4, 16), (Shard(0), Shard(1))),
        ([(2, 8)] * 4, GRID, UNKNOWN, (2, 16), (R, Shard(1))),
        ([(2, 8)] * 4, GRID, UNKNOWN, (None, 16), (None, Shard(1))),
        ([(2, 8)] * 4, GRID, (Shard(0), None), (None, 16), (Shard(0), Shard(1))),
        ([(2, 8)] * 4, GRID, (Shard(0), None), (4, 8), (Shard(0), R)),
        ([(2, 8)] * 4, GRID, (None, Shard(1, 2)), (4, 16), (Shard(0), Shard(1, 2))),
        ([(2, 8)] * 2 + [(1, 8)] * 2, GRID, (Shard(0), None), (3, 16), (Shard(0), Shard(1))),
        ([(2, 8)] * 4, GRID, (None, P), (4, 8), (Shard(0), P)),
        ([(4, 3)] * 4, GRID, UNKNOWN, (16, 3), (Shard(0), Shard(0))),
    ],
)
def test_sizes_state_the_shards_that_add_up_to_them(shapes, mesh, known, sizes, layout):
    assert stated_by("'fc'", sizes, shapes, mesh, known) == layout


@pytest.mark.parametrize(("rows", "layout"), [(0, (R, Shard(1))), (1, (Shard(1), R)), (5, None)])
def test_rows_are_in_the_dim_of_the_batch(rows, layout):
    mesh, sizes = (TP2, (None, 16)) if layout == (R, Shard(1)) else (DP2, (None, 16))
    if layout is None:
        with pytest.raises(ValueError, match="says 16 along dim 1"):
            stated_by("'fc'", sizes, TWO, mesh, UNKNOWN, rows)
    else:
        assert stated_by("'fc'", sizes, TWO, mesh, UNKNOWN, rows) == layout


@pytest.mark.parametrize(
    ("shapes", "mesh", "known", "sizes", "says"),
    [
        (TWO, TP2, UNKNOWN, (None, 12), r"says 12 along dim 1, but the ranks hold \[8\] there"),
        (TWO, TP2, UNKNOWN, (None, 4), r"says 4 along dim 1"),
        (TWO, TP2, UNKNOWN, (4, 16), r"says 4 along dim 0.*no consecutive parts of one dim"),
        ([(2, 3), (2, 5)], TP2, UNKNOWN, (2, None), r"says None along dim 1.*hold \[3, 5\]"),
        (TWO, DP2, UNKNOWN, (3, None), r"says 3 along dim 0"),
        ([(2, 8)] * 4, GRID, UNKNOWN, (None, 12), r"says 12 along dim 1"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(shapes, mesh, known, sizes, says):
    with pytest.raises(ValueError, match=rf"'fc'.*{says}.*give the size of the full tensor there"):
        stated_by("'fc'", sizes, shapes, mesh, known)


@pytest.mark.parametrize(
    ("batch_dim", "dim"),
    [(0, 0), (1, 1), ({"x": 1}, 1), ({"mask": None}, 0), ({"x": 1, "y": 0}, None)],
)
def test_the_dim_of_rows_by_arguments(batch_dim, dim):
    assert rows_dim(batch_dim) == dim


def layout_of(proven, expected, stated=None, shapes=TWO, mesh=TP2):
    return resolve(Site("'fc'", "fc", "forward"), shapes, mesh, proven, stated or {}, expected)


def test_what_is_proven_or_stated_wins():
    interleaved = Shard(1, 2)
    assert layout_of((R, interleaved), (None, 16)) == ShardLayout(tp=interleaved)
    assert layout_of((R, P), (None, 8)) == ShardLayout(tp=P)
    assert layout_of((R, None), (None, 8), {"tp": P}) == ShardLayout(tp=P)
    for proven, stated in (((R, R), {}), ((R, None), {"tp": R})):
        with pytest.raises(ValueError, match=r"expected_shape \(None, 16\) contradicts"):
            layout_of(proven, (None, 16), stated)


def test_a_layout_shows_which_axes_only_the_sizes_state():
    layout = layout_of((Shard(0), None), (4, 16), shapes=[(2, 8)] * 4, mesh=GRID)
    assert (layout.sized_axes, layout.source) == (("tp",), "its expected_shape")
    assert layout_of((R, Shard(1)), (None, 16)).sized_axes == ()


def test_both_axes_in_one_dim_have_no_order():
    with pytest.raises(ValueError, match="both axes split dim 0, and it is not known which"):
        layout_of(UNKNOWN, (16, 3), shapes=[(4, 3)] * 4, mesh=GRID)


# ---- On ranks: layers that state nothing, as scripts of 0.1.0 have them --------------------------


BATCH = models.random(4, 6)


def by_hand(model=None, **settings):
    model = models.mlp() if model is None else model
    group = models.mesh(1, dist.get_world_size())["tp"].get_group()
    sharded = models.tensor_parallel(model, group, states_sizes=False)
    return FlexModel(sharded, {}, tensor_parallel_size=dist.get_world_size(), **settings), model


def in_full(model, site, editing_function):
    """The record and the output of the model as it is."""
    with FlexModel(model, records := {}, process_group=pipelines.alone_group()) as whole:
        whole.register_forward_hook(HookFunction(site, editing_function=editing_function))
        output = whole(BATCH)
    return records[site], output


@pytest.mark.ranks(2)
@pytest.mark.parametrize("edit", [None, mixing_features], ids=["read", "edit"])
@pytest.mark.parametrize(
    ("site", "sizes"),
    [("fc1", (None, 8)), ("act", (4, 8)), ("fc2", (None, 6)), ("inp", (None, None))],
)
def test_sizes_alone_give_the_full_tensor(site, sizes, edit):
    flex, model = by_hand()
    with flex:
        flex.register_forward_hook(HookFunction(site, sizes, edit))
        output = flex(BATCH)
        records, expected = in_full(model, site, edit)
        assert_close(output, expected)
        assert_close(flex.output_ptr.get(site, []), records if dist.get_rank() == 0 else [])


@pytest.mark.ranks(2)
def test_sizes_do_not_tell_whole_gradients_from_parts_of_sums():
    flex, _ = by_hand()
    with flex:
        flex.register_full_backward_pre_hook(HookFunction("inp", (None, 6)))
        with pytest.raises(ValueError, match=r"'inp': how the ranks along tp hold the gradient"):
            flex(BATCH).sum().backward()


@pytest.mark.ranks(2)
def test_sizes_say_nothing_against_sums_or_other_values():
    flex, _ = by_hand()
    with flex:
        flex.register_forward_hook(HookFunction("fc1", (None, 4)))
        with pytest.raises(ValueError, match="by its expected_shape all should hold the same"):
            flex(BATCH)


class Mixed(nn.Module):
    """Rows in a rank's own order, of which nothing is proven."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Identity()

    def forward(self, x):
        return self.mixed(x[x[:, 0].argsort()])


@pytest.mark.ranks(2)
def test_rows_of_data_parallel_ranks():
    rows = BATCH.chunk(2)[dist.get_rank()]
    with FlexModel(Mixed(), {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("mixed", (4, None)))
        flex(rows)
        if dist.get_rank() == 0:
            own = [part[part[:, 0].argsort()] for part in BATCH.chunk(2)]
            assert_close(flex.output_ptr["mixed"], [torch.cat(own)])
    with FlexModel(Mixed(), {}, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("mixed", (None, 6)))
        with pytest.raises(ValueError, match="data-parallel ranks is not known"):
            flex(rows)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [4, None])
def test_columns_and_rows_on_four_ranks(rows):
    """tp 2 x dp 2: the batch dim is the global batch, or it is left out."""
    mesh, model = models.mesh(2, 2), models.mlp()
    place = mesh["dp"].get_local_rank()
    sharded = models.tensor_parallel(model, mesh["tp"].get_group(), states_sizes=False)
    with FlexModel(sharded, {}, tensor_parallel_size=2, data_parallel_size=2) as flex:
        flex.register_forward_hook(HookFunction("fc1", (rows, 8)))
        output = flex(BATCH.chunk(2)[place])
        records, expected = in_full(model, "fc1", None)
        assert_close(output, expected.chunk(2)[place])
        assert_close(flex.output_ptr.get("fc1", []), records if dist.get_rank() == 0 else [])
