"""The parity table on real frameworks: each case in one session of its ranks.

`make parity` runs all cases and writes docs/parity.md; `make test` runs one, `make check` one of
each framework, on the oldest versions. No cell may be wrong; errors must be those that are listed
here, and the right cells at least as many as the results have.
"""

import json
import os
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from torch.testing import assert_close

import frameworks
import parity_page
import table
from rows import CASES

# Cells that can't be had, and why: patterns of case, kind, site and doing, and the reason.
ERRORS = [
    ("*hf-pp-*", "*", "", "*", "the root is spread over all stages"),
    ("*hf-pp-*", "*", "model", "*", "the module is spread over all stages"),
    ("*hf-pp-*", "*", "model.rotary_emb", "*", "every stage has one"),
    ("pp-llama-*", "*", "model", "*", "the module is spread over all stages"),
    ("pp-llama-*", "*", "model.rotary_emb", "*", "every stage has one"),
    *(
        (f"mixture-{how}-*", "*", "*.act_fn", "*", "rows are in the order of their experts there")
        for how in ("ddp", "fsdp2", "ep")
    ),
    ("quantised-bnb8-2", "*", "*", "*", "a batch's outliers are not those of its parts"),
    (
        "modality-gemma3-[24]",
        "*",
        "model.language_model.layers.0.self_attn.*",
        "*",
        "the mask of its window has sizes that may be a rank's own",
    ),
    *(
        (f"device-map-{n}", "parameter", f"{name}*", "*", "accelerate drops offloaded gradients")
        for n in ("one", "2", "4")
        for name in ("model.layers.1.", "model.norm.", "lm_head.")
    ),
]


def right_before(name):
    """How many cells of this row were right, on the versions on which the fewest were; a change may
    only raise it.
    """
    rows = (rows[name] for rows in parity_page.results().values() if name in rows)
    return min((row["total"].get("right", 0) for row in rows), default=0)


def cases(ranks):
    return [
        pytest.param(name, marks=[] if case.is_quick else pytest.mark.grid)
        for name, case in CASES.items()
        if case.ranks == ranks
    ]


def check(name, tmp_path):
    with frameworks.quiet(), CASES[name].build(tmp_path) as pair:
        outcomes = table.outcomes_of(pair)
    write_rows(name, outcomes)
    wrong = [outcome for outcome in outcomes if outcome.result == "wrong"]
    undocumented = [o for o in outcomes if o.result == "error" and reason(name, o.cell) is None]
    right = sum(outcome.result == "right" for outcome in outcomes)
    assert not wrong + undocumented, told(f"{name}: {right} of {len(outcomes)} right", outcomes)
    assert right >= right_before(name)


def told(title, outcomes):
    """Each hook that is not right, once with all that it was to do; rank 0 tells it."""
    groups = {}
    for outcome in outcomes:
        if outcome.result != "right":
            site = replace(outcome.cell, doing="")
            groups.setdefault((outcome.result, site), []).append(outcome)
    lines = [
        f"{result}: {site}{' / '.join(o.cell.doing for o in group)}: {group[0].text}"
        for (result, site), group in groups.items()
    ]
    return "\n".join([title, *lines]) if frameworks.rank() == 0 else title


def reason(name, cell):
    """Why this cell is an error; None if it should not be."""
    for *patterns, why in ERRORS:
        if all(map(fnmatchcase, (name, cell.kind, cell.site, cell.doing), patterns)):
            return why
    return None


def write_rows(name, outcomes):
    """For docs/parity.md, where `python tests/parity` has asked for them."""
    folder = os.environ.get("PARITY_ROWS")
    if folder and frameworks.rank() == 0:
        rows = [asdict(o) | {"reason": reason(name, o.cell)} for o in outcomes]
        Path(folder, f"{name}.json").write_text(json.dumps(rows, indent=1))


@pytest.mark.parametrize("name", cases(1))
def test_one_process(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("name", cases(2))
def test_two_ranks(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.ranks(4, timeout=600)
@pytest.mark.parametrize("name", cases(4))
def test_four_ranks(name, tmp_path):
    check(name, tmp_path)


# ---- The table itself ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # the embedding's
@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_the_oracle_sees_what_torch_s_backward_hooks_see(kind):
    model, seen, handles = frameworks.decoder(), {}, []
    pair = frameworks.Pair(model, None, (frameworks.tokens(2),), {}, (), None)
    cells = table.readable(pair, kind)
    expected = table.oracle_run(pair, cells)
    for cell in cells:

        def hook(module, grads, *_, record=cell.record):
            seen[record] = [grads[0].clone()]

        register = getattr(model.get_submodule(cell.site), f"register_{kind}_hook")
        handles.append(register(hook))
    model.zero_grad()
    (model(*pair.inputs) * table.random_targets(pair)).sum().backward()
    assert len(seen) == len(cells) > 20
    assert_close(seen, expected.records)
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected.gradients)


@pytest.mark.ranks(2)
def test_what_is_wrong_is_found(tmp_path):
    """The cell of one edit against the oracle of another, and of one site against another's."""
    with CASES["native-tp-2"].build(tmp_path) as pair:
        sharded = table.Sharded(pair)
        for kind, site in (
            ("forward", "layers.0.attention.wo"),
            ("full_backward", "layers.1"),
            ("parameter", "layers.1.n2.weight"),
        ):
            edited, other = (table.Cell(kind, site, doing) for doing in ("mixing", "in place"))
            read = table.Cell(kind, site)
            for cell, oracle, result in (
                (edited, edited, "right"),
                (edited, other, "wrong"),
                (read, edited, "wrong"),
                (edited, read, "wrong"),
            ):
                run = table.oracle_run(pair, [oracle])
                outcomes = table.merged(table.run_cells(sharded, [cell], run))
                assert [outcome.result for outcome in outcomes] == [result], outcomes
        oracle = table.oracle_run(pair, [read])
        oracle.records[read.record][0] += 1e-6
        assert table.merged(table.run_cells(sharded, [read], oracle))[0].result == "wrong"
