"""Every hook kind, site and edit, on every way to run the MLP on one and many ranks; the page of
other rows.
"""

import pytest

import models
import parity_page
from cells import check_cells
from oracle import KINDS
from rows import CASES
from tiers import grid_but, ways


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ways("one", "tp", "dp", "ddp", grid=["fsdp2", "dtensor"]))
def test_one_process_and_two_ranks_equal_torch_hooks(way, kind):
    check_cells(way, kind)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", grid_but(KINDS, "forward"))
@pytest.mark.parametrize("name", grid_but(models.FOUR_RANKS, "tp x dp"))
def test_four_ranks_equal_one(name, kind):
    check_cells(models.FOUR_RANKS[name], kind)


@pytest.mark.parametrize("kind", grid_but(KINDS, "forward"))
@pytest.mark.parametrize("way", ways("tp", grid=["tp of 4", "tp x dp"]))
def test_uneven_rows_and_columns_equal_one(way, kind):
    check_cells(way, kind, hidden=7)


def test_the_page_is_what_the_results_give():
    assert parity_page.PAGE.read_text() == parity_page.page()
    assert set().union(*parity_page.results().values()) == set(CASES)
