"""Which layout a tensor has, from what is proven and stated of it; no ranks are needed."""

import importlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import tensor as dtensor

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Partial, Replicate, Shard, ShardLayout
from flex_model.distributed.values import Fingerprints
from flex_model.errors import LayoutMismatchError
from flex_model.layouts.obstacle import Obstacle
from flex_model.layouts.placement_encoding import decode, encode
from flex_model.layouts.resolve import Site, differing_axes, resolve
from flex_model.layouts.statements import Statement, Statements, placement_of

TP2 = Mesh((0, 1), 0, tp_size=2)
DP2 = Mesh((0, 1), 0, dp_size=2)
GRID = Mesh((0, 1, 2, 3), 0, dp_size=2, tp_size=2)
SITE = Site("forward hook on 'fc'", "fc", "forward")
R, P = Replicate(), Partial()
TWO = [(2, 8), (2, 8)]


def layout_of(shapes, mesh, proven=(None, None), stated=None, expected=None, **kwargs):
    return resolve(SITE, shapes, mesh, proven, stated or {}, expected, **kwargs)


@pytest.mark.parametrize(
    ("mesh", "proven", "stated", "layout"),
    [
        (TP2, (R, Shard(1)), {}, ShardLayout(tp=Shard(1))),
        (TP2, (R, R), {}, ShardLayout()),
        (TP2, (R, P), {}, ShardLayout(tp=P)),
        (TP2, (R, None), {"tp": Shard(0)}, ShardLayout(tp=Shard(0))),
        (TP2, (R, Shard(1)), {"tp": Shard(1)}, ShardLayout(tp=Shard(1))),
        (DP2, (Shard(0), R), {}, ShardLayout(dp=Shard(0))),
        (TP2, (None, Shard(1)), {}, ShardLayout(tp=Shard(1))),  # one data-parallel rank
    ],
)
def test_what_is_proven_or_stated_is_the_layout(mesh, proven, stated, layout):
    assert layout_of(TWO, mesh, proven, stated) == layout


@pytest.mark.parametrize("order", ["dp tp", "tp dp"])
@pytest.mark.parametrize("inside", [1, 3])
def test_rows_and_heads_that_were_joined(order, inside):
    """As many parts of the inner axis as the outer one has indices on a rank."""
    full = torch.arange(4 * 6 * inside)
    outer, inner = (4, 6) if order == "dp tp" else (6, 4)
    of_both = full.view(outer, inner, inside)
    tensors = []
    for rank in range(4):
        places = {"dp": rank // 2, "tp": rank % 2}
        first, second = order.split()
        part = of_both.chunk(2)[places[first]].chunk(2, 1)[places[second]]
        tensors.append(part.flatten())
    shards = {order.split()[0]: Shard(0), order.split()[1]: Shard(0, outer // 2)}
    shapes = [tuple(tensor.shape) for tensor in tensors]
    layout = layout_of(shapes, GRID, (shards["dp"], shards["tp"]))
    stated = layout_of(shapes, GRID, (None, None), shards)
    assert replace(stated, source=layout.source) == layout
    full_shape = layout.full_shape(shapes, 2, 2)
    _, _, boxes = layout.plan_of({}, shapes, 2, 2, 8)
    found = torch.full(full_shape, -1)
    for rank, (start,), (own,), (size,) in boxes:
        found[start : start + size] = tensors[rank][own : own + size]
    assert found.equal(full)


@pytest.mark.parametrize("tp", [Shard(0), Shard(0, part_sizes=(4, 8))])
def test_rows_and_heads_whose_order_is_not_known(tp):
    """One index of each a rank; parts of unequal sizes."""
    proven = (Shard(0), tp)
    with pytest.raises(ValueError, match="both axes split dim 0, and it is not known which"):
        layout_of([(3,)] * 4, GRID, proven)


def test_rows_and_heads_of_one_index_a_rank():
    proven = (Shard(0), Shard(0))
    with pytest.raises(ValueError, match="which of them is the outer one"):
        layout_of([(3,)] * 4, GRID, proven, {"tp": Shard(0)})
    stated = dict(zip(("dp", "tp"), proven))
    assert layout_of([(3,)] * 4, GRID, proven, stated) == ShardLayout(*proven)


def test_of_parameters_what_a_layer_holds_is_split_once_more():
    parameter = replace(SITE, kind="parameter")
    layout = resolve(parameter, [(3,)] * 4, GRID, (Shard(0), Shard(0)), {})
    assert layout == ShardLayout(Shard(0), Shard(0), tp_first=True)


def lines_of(*args, **kwargs):
    """The refusal, and the lines that it lists."""
    with pytest.raises(ValueError, match="is not known") as raised:
        layout_of(*args, **kwargs)
    text = str(raised.value)
    return text, [line.split("  #")[0].strip() for line in text.splitlines()[1:-1]]


def prints(mesh, *hashes):
    return Fingerprints(mesh, hashes)


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (None, ["Shard(1)", "Shard(0)", "Partial()", "Replicate()"]),
        ((1, 2), ["Shard(1)", "Shard(0)", "Partial()", "Replicate()"]),
        ((1, 1), ["Replicate()", "Shard(1)", "Shard(0)", "Partial()"]),
    ],
)
def test_a_refusal_lists_all_that_the_sizes_allow(values, order):
    """It prints no guess: (2, 16) may be [g0 u0 g1 u1] of a fused projection as well as shards."""
    hashes = None if values is None else prints(TP2, *values)
    text, lines = lines_of(TWO, TP2, prints=hashes)
    assert lines == [f"flex.annotate_layout('fc', kind='forward', tp={one})" for one in order]
    assert "forward hook on 'fc'" in text
    assert "in full (2, 16): a part on each rank" in text
    assert "in full (2, 8): a sum over the ranks" in text
    assert ("whose values differ" in text) == (values == (1, 2))
    assert "expected_shape" not in text


def test_each_line_can_be_used():
    for line in lines_of(TWO, TP2)[1]:
        flex = SimpleNamespace(annotate_layout=lambda name, **stated: stated)
        stated = eval(line, {"flex": flex, **vars(dtensor)})
        placed = {"tp": placement_of(stated["tp"], "tp")}
        assert layout_of(TWO, TP2, (R, None), placed).tp == placed["tp"]


def test_along_dp_each_rank_may_see_its_own_rows():
    _, lines = lines_of(TWO, DP2, prints=prints(DP2, 1, 2))
    stated = "flex.annotate_layout('fc', kind='forward', dp="
    assert lines == [
        'FlexModel(..., dp_batch="local")',
        *(f"{stated}{one})" for one in ("Shard(0)", "Shard(1)", "Partial()", "Replicate()")),
    ]
    _, lines = lines_of(TWO, DP2, rows_dim=1)
    assert lines[1] == f"{stated}Shard(1))"


def test_rows_in_blocks_are_stated_in_parts():
    """As consecutive rows they were a permutation of the unsharded program's."""
    text, lines = lines_of(TWO, DP2, obstacles={"dp": Obstacle("flip", num_parts=2)})
    assert lines[1] == "flex.annotate_layout('fc', kind='forward', dp=Shard(0, parts=2))"
    assert not any("Shard(0))" in line for line in lines)
    assert "a part on each rank of each of 2 blocks of rows" in text
    (where,) = re.findall("from (.*) import", text)
    flex = SimpleNamespace(annotate_layout=lambda name, **stated: stated)
    stated = eval(lines[1], {"flex": flex, **vars(importlib.import_module(where))})
    layout = layout_of(TWO, DP2, (None, R), {"dp": placement_of(stated["dp"], "dp")})
    assert layout.dp == Shard(0, parts=2)
    text, lines = lines_of(TWO, DP2, obstacles={"dp": Obstacle("cat", num_parts=2)})
    assert "part_sizes=" in text
    assert not any("Shard(0" in line for line in lines)


def test_rows_of_other_lengths_are_to_be_padded():
    """A Shard(1) that fits their sizes joined them end to end."""
    text, lines = lines_of([(2, 4, 8), (2, 6, 8)], DP2)
    assert "pad the inputs of the data-parallel ranks" in text
    assert lines == ['FlexModel(..., dp_batch="local")']
    _, lines = lines_of([(2, 4, 8), (3, 4, 8)], DP2)
    assert lines[1:] == ["flex.annotate_layout('fc', kind='forward', dp=Shard(0))"]


def test_a_gradient_is_stated_by_its_hook():
    gradient = replace(SITE, is_gradient=True, index=1)
    with pytest.raises(ValueError, match="is not known") as raised:
        resolve(gradient, TWO, TP2, (None, None), {})
    line = "HookFunction('fc', unpack_idx=1, placements={\"tp\": Shard(1)})"
    assert line in str(raised.value)
    assert "annotate_layout" not in str(raised.value)


def test_a_parameter_is_no_sum():
    parameter = replace(SITE, kind="parameter", module="fc.weight")
    with pytest.raises(ValueError, match="is not known") as raised:
        resolve(parameter, TWO, TP2, (R, None), {})
    assert "annotate_layout('fc.weight', kind='parameter', tp=Shard(1))" in str(raised.value)
    assert "tp=Partial()" not in str(raised.value)


def test_a_line_states_its_own_module_alone():
    """'1' is a part of '10', too: such a line stated both."""
    model = nn.Sequential(*(nn.Identity() for _ in range(11)))
    statements = Statements(model)
    for name, text in (("10", "'10'"), ("1", "re.compile('^1$')"), ("", "re.compile('^$')")):
        site = Site(f"forward hook on {name!r}", name, "forward")
        with pytest.raises(ValueError, match="is not known") as raised:
            resolve(site, TWO, TP2, (None, None), {}, statements=statements)
        assert f"flex.annotate_layout({text}, kind='forward', tp=Shard(1))" in str(raised.value)
        assert statements.names(Statement(eval(text, {"re": re}), "forward")) == [name]


def test_what_is_not_known_names_each_axis_and_where_it_was_lost():
    lost = {"dp": Obstacle("tril"), "tp": Obstacle("aten::fft")}
    with pytest.raises(ValueError, match="data-parallel") as raised:
        layout_of([(2, 8)] * 4, GRID, obstacles=lost)
    text = str(raised.value)
    assert "(lost at tril)" in text
    assert "(lost at aten::fft)" in text
    assert "tensor-parallel" in text


def test_a_statement_against_a_proof_is_an_error():
    with pytest.raises(ValueError, match="stated to be split along dim 0 along tp, but by"):
        layout_of(TWO, TP2, (R, Shard(1)), {"tp": Shard(0)})


def test_expected_shape_checks_a_known_layout():
    assert layout_of(TWO, TP2, (R, Shard(1)), expected=(None, 16)) == ShardLayout(tp=Shard(1))
    with pytest.raises(ValueError, match=r"contradicts .* the full tensor has shape \(2, 16\)"):
        layout_of(TWO, TP2, (R, Shard(1)), expected=(None, 32))
    with pytest.raises(ValueError, match="has 1 dims, the tensor has 2"):
        layout_of(TWO, TP2, (R, R), expected=(8,))


def test_shapes_that_fit_no_layout_are_a_mismatch():
    with pytest.raises(LayoutMismatchError, match=r"forward hook on 'fc'.*does not fit"):
        layout_of([(2, 8), (3, 4)], TP2, (R, Shard(1)))


@pytest.mark.parametrize(
    ("layout", "values", "differing"),
    [
        (ShardLayout(), (1, 1), []),
        (ShardLayout(), (1, 2), ["tp"]),
        (ShardLayout(tp=Shard(1)), (1, 1), []),  # equal shards mean nothing
        (ShardLayout(tp=P), (1, 1), []),
    ],
)
def test_values_refute_that_a_tensor_is_replicated(layout, values, differing):
    prints = Fingerprints(TP2, tuple(values))
    assert differing_axes(layout, prints) == differing


@pytest.mark.parametrize(
    "placement",
    [None, R, P, Shard(1), Shard(2, 3), Shard(1, pieces=2, stride=4), Shard(2, part_sizes=(8, 2))],
)
def test_placements_survive_the_exchange(placement):
    assert decode(encode(placement)) == placement
