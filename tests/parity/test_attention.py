"""An attention block: called by keyword, returns a tuple, heads split over the ranks."""

import pytest

import models
from cells import Cell, differences, in_place, mixing_features, mixing_rows

WIDTH, HEADS, HIDDEN = 8, 4, 12

# Site, leaf, full shape, and whether tensor parallelism by hand leaves a part of it on each rank.
FORWARD = [
    ("norm", 0, (None, None, WIDTH), False),
    ("attn", 0, (None, None, WIDTH), False),
    ("attn", 1, (None, HEADS, None, None), True),
    ("attn.q", 0, (None, None, WIDTH), True),
    ("mlp.act", 0, (None, None, HIDDEN), True),
    ("", 0, (None, None, WIDTH), False),
]
FORWARD_PRE = [
    ("attn", 0, (None, None, WIDTH), False),
    ("attn.o", 0, (None, None, WIDTH), True),
]
BACKWARD = [
    ("attn.o", 0, (None, None, WIDTH), True),
    ("attn.v", 0, (None, None, WIDTH), False),
]
SITES = {"forward": FORWARD, "forward_pre": FORWARD_PRE, "full_backward": BACKWARD}


def check_all_cells(parallelism, kind):
    wrong = []
    for site, leaf, shape, is_split in SITES[kind]:
        for edit in (None, mixing_features, mixing_rows, in_place):
            told = shape if is_split and parallelism.tp > 1 else None
            cell = Cell(kind, site, edit, leaf, told)
            wrong += differences(parallelism, models.block(), models.random(4, 3, WIDTH), cell)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", SITES)
def test_attention_in_one_process(kind):
    check_all_cells(models.ONE_RANK, kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("name", ["tp", "dtensor", "dp"])
def test_attention_on_two_ranks(name, kind):
    check_all_cells(models.TWO_RANKS[name], kind)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("name", [pytest.param("tp", marks=pytest.mark.slow), "tp x dp"])
def test_attention_on_four_ranks(name, kind):
    check_all_cells(models.FOUR_RANKS[name], kind)
