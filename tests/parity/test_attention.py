"""An attention block: called by keyword, returns a tuple, heads split over the ranks."""

import pytest

import models
from cells import Cell, differences, in_place
from shared_edits import mixing_features, mixing_rows
from tiers import ways

WIDTH = 8

# Modules, and which of their tensors.
SITES = {
    "forward": [("norm", 0), ("attn", 0), ("attn", 1), ("attn.q", 0), ("mlp.act", 0), ("", 0)],
    "forward_pre": [("attn", 0), ("attn.o", 0)],
    "full_backward": [("attn.o", 0), ("attn.v", 0)],
}


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("way", ways("one", "tp", grid=["dtensor", "dp", "tp of 4", "tp x dp"]))
def test_attention(way, kind):
    wrong = []
    for site, leaf in SITES[kind]:
        for edit in (None, mixing_features, mixing_rows, in_place):
            cell = Cell(kind, site, edit, leaf)
            wrong += differences(way, models.block(), models.random(4, 3, WIDTH), cell)
    assert not wrong, "\n".join(wrong)
