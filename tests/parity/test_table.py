"""Every hook kind, site and edit, on every way to run the MLP on one and many ranks; the page of
other rows.
"""

import pytest

import models
import parity_page
from cells import EDITS, SITES, differences, table_cell
from oracle import KINDS
from rows import CASES
from tiers import grid_but, ways


def check_all_cells(parallelism, kind, hidden=8, rows=4):
    wrong = []
    for site in SITES[kind]:
        for edit in EDITS:
            model, batch = models.mlp(hidden=hidden), models.random(rows, 6)
            cell = table_cell(model, batch, kind, site, edit)
            try:
                wrong += differences(parallelism, model, batch, cell)
            except (NotImplementedError, ValueError) as error:
                # A parameter's averaged gradient, or an error that names it; never a local one.
                if not (kind == "parameter" and parallelism.dp > 1 and site in str(error)):
                    raise
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_equals_torch_hooks(kind):
    check_all_cells(models.ONE_RANK, kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", grid_but(models.TWO_RANKS, "tp", "dp", "ddp"))
def test_two_ranks_equal_one(name, kind):
    check_all_cells(models.TWO_RANKS[name], kind)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", grid_but(KINDS, "forward"))
@pytest.mark.parametrize("name", grid_but(models.FOUR_RANKS, "tp x dp"))
def test_four_ranks_equal_one(name, kind):
    check_all_cells(models.FOUR_RANKS[name], kind)


@pytest.mark.parametrize("kind", grid_but(KINDS, "forward"))
@pytest.mark.parametrize("way", ways("tp", grid=["tp of 4", "tp x dp"]))
def test_uneven_rows_and_columns_equal_one(way, kind):
    check_all_cells(way, kind, hidden=7)


def test_the_page_is_what_the_results_give():
    assert parity_page.PAGE.read_text() == parity_page.page()
    assert set().union(*parity_page.results().values()) == set(CASES)
