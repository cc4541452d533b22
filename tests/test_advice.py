"""No error advises what cannot be done: each is provoked, its advice followed; then it works.

The files of ``advice/`` have an error a row: a part of its message as the source has it, then what
raises it and what the message advises. The last test finds every text in the source that says what
to do, and fails for one that no row and no reason accounts for.
"""

import re
from pathlib import Path

import pytest
import torch

from advice import (
    distributed,
    editing,
    files,
    inspection,
    model,
    pipelining,
    quantized,
    sequential,
    sharded,
)
from advice.texts import ELSEWHERE, texts

SOURCE = Path(__file__).parent.parent / "flex_model"
IN_ONE_PROCESS = (model, distributed, editing, files, inspection, pipelining, quantized, sequential)
ONE_PROCESS = [row for module in IN_ONE_PROCESS for row in module.ROWS.items()]
TWO_RANKS = [*sharded.TWO_RANKS.items(), *pipelining.TWO_RANKS.items()]
FOUR_RANKS = [*sharded.FOUR_RANKS.items()]


def check(says, functions):
    trigger, follow = functions
    with pytest.raises(Exception, match=re.escape(says).replace(r"\{\}", ".*")):
        trigger()
    follow()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("row", ONE_PROCESS, ids=lambda row: row[0])
def test_advice_in_one_process(row):
    check(*row)
    torch.compiler.reset()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(len(TWO_RANKS)), ids=lambda i: TWO_RANKS[i][0])
def test_advice_on_two_ranks(number):
    check(*TWO_RANKS[number])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("number", range(len(FOUR_RANKS)), ids=lambda i: FOUR_RANKS[i][0])
def test_advice_on_four_ranks(number):
    check(*FOUR_RANKS[number])


def test_every_advice_is_accounted_for():
    rows = [says for says, _ in (*ONE_PROCESS, *TWO_RANKS, *FOUR_RANKS)]
    found = {}
    for path in SOURCE.rglob("*.py"):
        for text in texts(path):
            found.setdefault(text, f"{path.relative_to(SOURCE)}: {text}")
    named = {says: [text for text in found if says in text] for says in (*rows, *ELSEWHERE)}
    missing = set(found) - {text for of_one in named.values() for text in of_one}
    places = sorted(found[text] for text in missing)
    assert not places, "\n".join(["no row follows these:", *places])
    assert not (gone := [says for says in named if not named[says]]), (
        f"no such text any more: {gone}"
    )
    several = [says for says in rows if len(named[says]) > 1]
    assert not several, f"several texts have these, and a row provokes one: {several}"
