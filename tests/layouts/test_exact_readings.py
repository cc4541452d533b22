"""What the propagation rules must say, and what they must not: views, slices, parts, arguments."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flex_model.distributed.placement import Shard, ShardLayout
from flex_model.layouts import register_rule
from flex_model.layouts.propagation import has_rule, propagate, rules
from flex_model.layouts.propagation.operation import Operand, Operation
from virtual_ranks import P, R, by_name

F = torch.float32


def operand(placement, *shapes, dtype=F):
    """Of one shape on two ranks, or of a shape for each rank."""
    shapes = shapes * 2 if len(shapes) == 1 else shapes
    return Operand(tuple(map(tuple, shapes)), dtype, placement)


def ask(name, *args, made, full_sizes=None, **kwargs):
    """The claim about one output. ``made`` has its shapes; lists of arguments in `Own` are by
    rank.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    shapes = made * 2 if len(made) == 1 else made
    given = by_name(op._schema, args, kwargs)
    arguments = tuple(
        {key: v.of_ranks[i] if isinstance(v, Own) else v for key, v in given.items()}
        for i in range(len(shapes))
    )
    operation = Operation(
        packet, arguments, (Operand(tuple(shapes), F),), overload, full_sizes or {}, op.tags
    )
    return propagate(operation)[0]


class Own:
    """An argument that each rank has its own of."""

    def __init__(self, *of_ranks):
        self.of_ranks = of_ranks


# ---- Views ---------------------------------------------------------------------------------------

VIEWS = {
    # name: local shape, sizes passed, local result, split, expected
    "into heads": ((2, 5, 8), (2, 5, 2, 4), Shard(2), Shard(2)),
    "one head a rank by -1, or its features": ((2, 5, 4), (2, 5, -1, 4), Shard(2), None),
    "one head a rank": ((2, 5, 4), (2, 5, 1, 4), Shard(2), None),
    "out of heads": ((2, 5, 2, 4), (2, 5, 8), Shard(2), Shard(2)),
    "out of one head a rank": ((2, 5, 1, 4), (2, 5, 4), Shard(2), None),
    "heads into the batch": ((2, 3, 5, 4), (6, 5, 4), Shard(1), Shard(0, 2)),
    "heads out of the batch": ((6, 5, 5), (2, 3, 5, 5), Shard(0, 2), None),
    "one head a rank into the batch": ((2, 1, 5, 4), (2, 5, 4), Shard(1), None),
    "one head a rank out of the batch": ((2, 5, 5), (2, 1, 5, 5), Shard(0, 2), None),
    "tokens": ((2, 5, 4), (10, 4), Shard(1), Shard(0, 2)),
    "tokens back": ((10, 4), (2, 5, 4), Shard(0, 2), None),
    "tokens back in fewer rows": ((20, 4), (2, 10, 4), Shard(0, 4), Shard(1, 2)),
    "rows": ((2, 5, 4), (10, 4), Shard(0), Shard(0)),
    "one row": ((1, 5, 4), (5, 4), Shard(0), Shard(0)),
    "one row, more dims": ((1, 5, 8), (1, 5, 2, 4), Shard(0), Shard(0)),
    "one row becomes two dims": ((1, 5), (1, 1, 5), Shard(0), None),
    "one token": ((2, 1, 8), (2, 8), Shard(2), Shard(1)),
    "one token, split": ((2, 1, 8), (2, 8), Shard(1), None),
    "a new dim before": ((2, 5, 8), (2, 1, 5, 8), Shard(2), Shard(3)),
    "a new dim beside": ((2, 5, 8), (2, 5, 1, 8), Shard(2), None),
    "a new dim behind": ((2, 5, 8), (2, 5, 8, 1), Shard(2), Shard(2)),
    "a dim less beside": ((2, 5, 1, 8), (2, 5, 8), Shard(3), Shard(2)),
    "fused parts as a dim": ((2, 5, 12), (2, 5, 3, 4), Shard(2, 3), None),
    "fused parts kept": ((2, 5, 12), (10, 12), Shard(2, 3), Shard(1, 3)),
    "fused parts in heads": ((2, 5, 24), (2, 5, 6, 4), Shard(2, 3), Shard(2, 3)),
    "a sum": ((2, 5, 8), (10, 8), P, P),
    "replicated": ((2, 5, 8), (10, 8), R, R),
    "no elements": ((0, 5), (5, 0), Shard(0), None),
    "no elements, kept": ((0, 5), (0, 5), Shard(0), Shard(0)),
    "pairs of rows, or more rows": ((6, 5), (3, 10), Shard(1), None),
    "parts that don't fit": ((6, 4), (8, 3), Shard(1), None),
    "a number or what it leaves": ((1, 1, 4), (-1, 2, 2), Shard(2), None),
    "columns that become rows": ((16, 2, 2), (8, 4, -1), Shard(1), None),
    "heads, and what is left": ((2, 5, 8), (2, 5, 2, -1), Shard(2), None),
    "rows, by what is left": ((2, 5, 4), (-1, 4), Shard(0), Shard(0)),
    "shared pieces": ((2, 5, 8), (2, 5, 2, 4), Shard(2, pieces=1), Shard(2, pieces=1)),
    "pairs, of each rank's rows or of all": ((4, 3), (2, -1, 3), Shard(0), None),
    "pairs of known rows": ((4, 3), (-1, 2, 3), Shard(0), Shard(0)),
    "rows, and what is left of the others": ((2, 5, 4), (2, -1), Shard(0), None),
    "as many rows as before, or what is left": ((2, 8), (2, -1), Shard(0), None),
}


def result_of(before, sizes):
    left = math.prod(before) // math.prod(s for s in sizes if s != -1) if -1 in sizes else 0
    return tuple(left if size == -1 else size for size in sizes)


@pytest.mark.parametrize("name", VIEWS)
def test_views_without_stated_sizes(name):
    before, sizes, placement, expected = VIEWS[name]
    found = ask("view", operand(placement, before), list(sizes), made=[result_of(before, sizes)])
    assert found == expected


STATED = {
    # local shape, sizes passed, the unsharded program's sizes, split, expected
    "one head a rank": ((2, 5, 4), (2, 5, 1, 4), (2, 5, 2, 4), Shard(2), Shard(2)),
    "its features": ((2, 5, 4), (2, 5, 1, 4), (2, 5, 1, 8), Shard(2), Shard(3)),
    "out of one head a rank": ((2, 5, 1, 4), (2, 5, -1), (2, 5, -1), Shard(2), Shard(2)),
    "one row becomes two dims": ((1, 5), (1, 1, 5), (2, 1, 5), Shard(0), Shard(0)),
    "a row and a head": ((1, 5), (1, 1, 5), (1, None, 5), Shard(0), Shard(1)),
    "fused parts as a dim": ((2, 5, 12), (2, 5, 3, 4), (2, 5, 3, 8), Shard(2, 3), Shard(3)),
    "parts among heads": ((2, 5, 12), (2, 5, 3, -1), (2, 5, 6, -1), Shard(2, 3), Shard(2, 3)),
    "one head a rank out of the batch": (
        (2, 5, 5),
        (2, 1, 5, 5),
        (2, 2, 5, 5),
        Shard(0, 2),
        Shard(1),
    ),
    "heads out of the batch": ((6, 5, 5), (2, 3, 5, 5), (2, None, 5, 5), Shard(0, 2), Shard(1)),
    "tokens back": ((10, 4), (2, -1, 4), (2, -1, 4), Shard(0, 2), Shard(1)),
    "one row flattened": ((1, 6), (1, -1), (1, -1), Shard(0), Shard(1)),
    "rows kept": ((1, 6), (1, -1), (2, -1), Shard(0), Shard(0)),
    "rows regrouped": ((2, 6), (2, -1), (2, -1), Shard(1), Shard(1)),
    "rows in two halves": ((4, 6), (2, -1), (2, -1), Shard(0), None),
    "not all known": ((2, 5, 8), (2, 5, 2, 4), (None, 5, None, 4), Shard(2), Shard(2)),
    "a size that no split gives": ((2, 5, 8), (2, 5, 2, 4), (2, 5, 2, 4), Shard(2), None),
    "replicated, one not known": ((4, 6), (4, 6), (None, 6), R, R),
    "replicated, two not known": ((4, 6), (4, -1), (None, -1), R, None),
    "replicated, otherwise": ((4, 6), (4, 6), (8, 3), R, None),
}


@pytest.mark.parametrize("name", STATED)
def test_views_with_the_unsharded_programs_sizes(name):
    before, sizes, stated, placement, expected = STATED[name]
    made = [result_of(before, sizes)]
    given = {"size": list(stated)}
    assert ask("view", operand(placement, before), list(sizes), made=made, full_sizes=given) == (
        expected
    )


def test_views_of_uneven_shards_show_the_split_dim():
    x = operand(Shard(2), (2, 5, 8), (2, 5, 4))
    assert ask("view", x, Own([2, 5, 2, 4], [2, 5, 1, 4]), made=[(2, 5, 2, 4), (2, 5, 1, 4)]) == (
        Shard(2)
    )
    assert (
        ask("view", x, Own([2, 5, 4, 2], [2, 5, 4, 1]), made=[(2, 5, 4, 2), (2, 5, 4, 1)]) is None
    )
    assert ask("view", x, [10, -1], made=[(10, 8), (10, 4)]) == Shard(1)


@st.composite
def views(draw):
    """A full shape, the split dim, and the same elements in another shape."""
    factors = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    split = draw(st.integers(0, len(factors) - 1))
    factors[split] *= 2

    def grouped():
        bounds = [0, *sorted(draw(st.sets(st.integers(1, 4), max_size=3))), len(factors)]
        bounds = sorted({min(bound, len(factors)) for bound in bounds})
        return [range(a, b) for a, b in itertools.pairwise(bounds)]

    return factors, split, grouped(), grouped(), draw(st.booleans())


@settings(max_examples=400, deadline=None, derandomize=True)
@given(views())
def test_any_view_with_stated_sizes_is_read_exactly(case):
    factors, split, before, after, flexible = case
    dim = next(i for i, group in enumerate(before) if split in group)
    if before[dim][0] != split:
        return  # the split dim's first factor is the one that is divided
    local = [size // 2 if i == split else size for i, size in enumerate(factors)]

    def shape(groups, sizes):
        return tuple(math.prod(sizes[i] for i in group) for group in groups)

    stated = list(shape(after, factors))
    passed = list(shape(after, local))
    if flexible:
        place = next(i for i, group in enumerate(after) if split in group)
        stated[place] = passed[place] = -1
    full = torch.arange(math.prod(factors)).view(shape(before, factors))
    shards = [half.reshape(shape(after, local)) for half in full.chunk(2, dim)]
    found = ask(
        "view",
        operand(Shard(dim), shape(before, local)),
        passed,
        made=[tuple(shards[0].shape)],
        full_sizes={"size": stated},
    )
    assert found is not None
    plan = ShardLayout(tp=found).plan([tuple(s.shape) for s in shards], 1, 2, 8)
    data = torch.cat([shard.contiguous().view(-1).view(torch.uint8) for shard in shards])
    offsets = [0, data.numel() // 2]
    joined = torch.ops.flex_model.assemble(data, offsets, plan.code, plan.full_sizes, torch.int64)
    assert torch.equal(joined, full.view(shape(after, factors)))


# ---- Slices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers, placement, expected",
    [
        ((1 / 3, 2 / 3), R, P),
        ((1.0, 0.0), R, P),
        ((0.0, 1.0), R, None),  # the unsharded program is as rank 0
        ((1.0, 2.0), R, None),
        ((0.5, 0.5), R, R),
        ((1 / 3, 2 / 3), Shard(0), None),
        ((1 / 3, 2 / 3), P, None),
    ],
)
def test_shares_by_numbers_that_add_up_to_one_are_parts_of_a_sum(numbers, placement, expected):
    x = operand(placement, (4, 6))
    assert ask("mul.Scalar", x, Own(*numbers), made=[(4, 6)]) == expected


def test_the_ranks_own_slices_of_a_replicated_tensor_are_its_shards():
    x = operand(R, *[(2, 8)] * 4)

    def take(*ranges):
        starts, ends = zip(*ranges)
        made = [(2, end - start) for start, end in ranges]
        return ask("slice.Tensor", x, 1, Own(*starts), Own(*ends), made=made)

    assert take((0, 2), (2, 4), (4, 6), (6, 8)) == Shard(1)
    assert take((0, 1), (1, 4), (4, 4), (4, 8)) == Shard(1)
    assert take((0, 4), (0, 4), (4, 8), (4, 8)) == Shard(1, pieces=2, stride=2)
    assert take((0, 4), (4, 8), (0, 4), (4, 8)) == Shard(1, pieces=2, stride=1)
    assert take((1, 3), (1, 3), (1, 3), (1, 3)) == R
    assert take((0, 2), (2, 4), (4, 6), (6, 7)) is None  # the last index is nowhere
    assert take((0, 3), (2, 4), (4, 6), (6, 8)) is None  # one index is twice
    assert take((2, 4), (0, 2), (4, 6), (6, 8)) is None  # in another order
    assert take((0, 4), (0, 4), (0, 4), (4, 8)) is None


def test_a_slice_as_long_as_the_shard_may_be_another_one_of_the_full_tensor():
    x = operand(Shard(0), (4, 6))  # the unsharded program's x[:4] is half of its rows
    assert ask("slice.Tensor", x, 0, 0, 4, made=[(4, 6)]) is None
    assert ask("slice.Tensor", x, 0, 0, 4, made=[(4, 6)], full_sizes={"end": [4]}) is None
    assert ask("slice.Tensor", x, 0, 0, 4, made=[(4, 6)], full_sizes={"end": [8]}) == Shard(0)
    assert ask("slice.Tensor", x, 0, 0, 2**63 - 1, made=[(4, 6)]) == Shard(0)
    assert ask("slice.Tensor", x, 0, None, None, made=[(4, 6)]) == Shard(0)
    assert ask("narrow", x, 0, 0, 4, made=[(4, 6)]) is None
    assert ask("narrow", x, 0, 0, 4, made=[(4, 6)], full_sizes={"length": [8]}) == Shard(0)
    whole = operand(R, (8, 6))
    found = ask("slice.Tensor", whole, 0, 0, 4, made=[(4, 6)], full_sizes={"end": [None]})
    assert found is None  # as many rows as some shard has


def test_chunks_of_parts_are_those_of_the_full_tensor():
    x = operand(Shard(1, 3), (2, 3))  # 3 parts of one on each rank: halves are [2, 1] and [3, 3]
    assert ask("chunk", x, 2, 1, made=[(2, 2)]) is None
    found = ask("split.Tensor", operand(Shard(1, 2), (2, 6)), 3, 1, made=[(2, 3)])
    assert found == Shard(1)


def test_fused_parts_of_unequal_sizes_are_taken_apart_and_joined():
    fused = Shard(1, part_sizes=(8, 4, 4))
    x = operand(fused, (2, 8))
    parts = Operation(
        "split_with_sizes",
        ({"self": x, "split_sizes": [4, 2, 2], "dim": 1},) * 2,
        tuple(Operand(((2, n), (2, n)), F) for n in (4, 2, 2)),
    )
    assert propagate(parts) == [Shard(1)] * 3
    q, k, v = operand(Shard(1), (2, 4)), operand(Shard(1), (2, 2)), operand(Shard(1), (2, 2))
    assert (
        ask("cat", [q, k, v], 1, made=[(2, 8)]) is None
    )  # which part has how much of it is not known
    assert ask("slice.Tensor", x, 1, 4, 8, made=[(2, 4)]) == Shard(1, parts=2)
    assert ask("view", x, [2, 4, 2], made=[(2, 4, 2)]) == Shard(1, part_sizes=(4, 2, 2))
    assert ask("mm", operand(R, (3, 2)), x, made=[(3, 8)]) == fused
    uneven = operand(Shard(1), (2, 3), (2, 1))
    assert ask("cat", [q, uneven], 1, made=[(2, 7), (2, 5)]) is None


# ---- Arguments -----------------------------------------------------------------------------------


def test_arguments_that_differ_between_ranks_leave_nothing_known():
    x = operand(R, (4, 6))
    assert ask("add.Scalar", x, 1, made=[(4, 6)]) == R
    assert ask("add.Scalar", x, Own(1, 2), made=[(4, 6), (4, 6)]) is None
    assert ask("add.Scalar", x, Own(1, 1.0), made=[(4, 6), (4, 6)]) is None
    assert ask("mul.Scalar", x, Own(0.0, -0.0), made=[(4, 6), (4, 6)]) is None
    nan = Own(float("nan"), float("nan"))
    assert ask("masked_fill.Scalar", x, x, nan, made=[(4, 6), (4, 6)]) == R
    devices = Own(torch.device("cuda:0"), torch.device("cuda:1"))
    assert ask("_to_copy", x, device=devices, made=[(4, 6), (4, 6)]) == R
    assert ask("select.int", x, 0, Own(0, 1), made=[(6,), (6,)]) is None


def test_operands_that_contradict_their_placement_leave_nothing_known():
    assert ask("neg", operand(R, (4, 6), (4, 5)), made=[(4, 6), (4, 5)]) is None
    assert ask("neg", operand(Shard(0), (4, 6), (4, 5)), made=[(4, 6), (4, 5)]) is None
    assert ask("neg", operand(None, (4, 6)), made=[(4, 6)]) is None


def test_a_shard_does_not_meet_a_replicated_tensor_of_its_local_size():
    x = operand(Shard(1), (4, 6))
    assert ask("add.Tensor", x, operand(R, (6,)), made=[(4, 6)]) is None
    assert ask("add.Tensor", x, operand(R, (1,)), made=[(4, 6)]) == Shard(1)
    assert ask("add.Tensor", x, operand(Shard(0), (6,)), made=[(4, 6)]) == Shard(1)
    one = operand(Shard(1), (4, 1))  # the full tensor has two columns, the other operand six
    assert ask("add.Tensor", one, operand(R, (4, 6)), made=[(4, 6)]) is None


def test_indices_of_what_is_true_are_no_shards():
    """Even where there are as many as a shard has columns."""
    condition = operand(Shard(1), (4, 3), dtype=torch.bool)
    assert ask("where", condition, made=[(3,)]) is None
    assert ask("nonzero", condition, made=[(4, 2)]) is None


def test_sums_pass_what_is_linear():
    x = operand(P, (4, 6))
    assert ask("_to_copy", x, dtype=torch.bfloat16, made=[(4, 6)]) == P
    assert ask("div.Scalar", x, 2.0, made=[(4, 6)]) == P
    assert ask("div.Tensor_mode", x, operand(R, ()), rounding_mode="floor", made=[(4, 6)]) is None
    assert ask("add.Scalar", x, 1.0, made=[(4, 6)]) is None
    assert ask("add.Tensor", x, operand(R, (4, 6)), made=[(4, 6)]) is None
    assert ask("sum", operand(Shard(0, pieces=2), (4, 6)), made=[()]) is None


def test_a_sum_rounded_to_integers_is_no_sum():
    operation = Operation(
        "_to_copy",
        ({"self": operand(P, (4, 6)), "dtype": torch.int64},) * 2,
        (Operand(((4, 6),) * 2, torch.int64),),
    )
    assert propagate(operation) == [None]


def test_like_and_new_tensors():
    for name in ("zeros_like", "ones_like", "rand_like", "empty_like"):
        assert ask(name, operand(Shard(1), (4, 6)), made=[(4, 6)]) == Shard(1)
        expected = R if name in ("zeros_like", "ones_like") else None
        assert ask(name, operand(P, (4, 6)), made=[(4, 6)]) == expected
    assert ask("new_zeros", operand(R, (4, 6)), [4, 6], made=[(4, 6)]) is None
    found = ask("copy", operand(None, (4, 6)), operand(Shard(1), (4, 6)), made=[(4, 6)])
    assert found == Shard(1)
    assert ask("copy", operand(None, (4, 6)), operand(Shard(0), (6,)), made=[(4, 6)]) is None


def test_an_operation_without_rule_needs_replicated_operands():
    assert not has_rule("linalg_eigvals")
    assert ask("linalg_eigvals", operand(R, (4, 4)), made=[(4,)]) == R
    assert ask("linalg_eigvals", operand(Shard(0), (2, 4, 4)), made=[(2, 4)]) is None
    other = Operation("mylib::op", ({"x": operand(R, (4, 6))},) * 2, (Operand(((4, 6),) * 2, F),))
    assert propagate(other) == [None]


def test_a_rule_that_raises_or_says_too_little_knows_nothing():
    made = (Operand(((4, 6),) * 2, F), Operand(((4, 6),) * 2, F))
    operation = Operation("mylib::two", ({"x": operand(R, (4, 6)), "n": 1},) * 2, made)
    differing = Operation(
        "mylib::two", ({"x": operand(R, (4, 6)), "n": 1}, {"x": operand(R, (4, 6)), "n": 2}), made
    )

    def raises(operation):
        raise RuntimeError("no")

    before = set(rules.RULES)
    try:
        register_rule("mylib::two", raises)
        assert propagate(operation) == [None, None]
        register_rule("mylib::two", lambda operation: [R], replace=True)
        assert propagate(operation) == [None, None]
        register_rule("mylib::two", lambda operation: operation["x"].placement, replace=True)
        assert propagate(operation) == [R, R]
        assert propagate(differing) == [None, None]
        register_rule("mylib::two", lambda operation: Shard(7), replace=True)
        assert propagate(operation) == [None, None]  # no such dim
        with pytest.raises(ValueError, match="mylib::two has a rule; pass replace=True"):
            register_rule("mylib::two", raises)
        with pytest.raises(ValueError, match="mm has a rule"):
            register_rule(torch.ops.aten.mm.default, raises)
        with pytest.raises(TypeError, match="a function of an Operation, or a text, got int"):
            register_rule("mylib::three", 3)
        with pytest.raises(TypeError, match="or its name, got function"):
            register_rule(ask, raises)
    finally:
        for name in set(rules.RULES) - before:
            del rules.RULES[name]
