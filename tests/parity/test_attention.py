"""An attention block: called by keyword, returns a tuple, heads split over the ranks."""

import pytest

import models
from cells import Cell, differences, in_place, mixing_features, mixing_rows
from tiers import grid_but

WIDTH = 8

# Modules, and which of their tensors.
SITES = {
    "forward": [("norm", 0), ("attn", 0), ("attn", 1), ("attn.q", 0), ("mlp.act", 0), ("", 0)],
    "forward_pre": [("attn", 0), ("attn.o", 0)],
    "full_backward": [("attn.o", 0), ("attn.v", 0)],
}


def check_all_cells(parallelism, kind):
    wrong = []
    for site, leaf in SITES[kind]:
        for edit in (None, mixing_features, mixing_rows, in_place):
            cell = Cell(kind, site, edit, leaf)
            wrong += differences(parallelism, models.block(), models.random(4, 3, WIDTH), cell)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", SITES)
def test_attention_in_one_process(kind):
    check_all_cells(models.ONE_RANK, kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("name", grid_but(["tp", "dtensor", "dp"], "tp"))
def test_attention_on_two_ranks(name, kind):
    check_all_cells(models.TWO_RANKS[name], kind)


@pytest.mark.grid
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("name", ["tp", "tp x dp"])
def test_attention_on_four_ranks(name, kind):
    check_all_cells(models.FOUR_RANKS[name], kind)
