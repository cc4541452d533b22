"""docs/parity.md, of what `python tests/parity` has stored for each version of torch."""

import json
from collections import Counter, defaultdict
from pathlib import Path

from rows import CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
RESULTS = ROOT / "tests" / "parity" / "results"
PROGRAMS = ROOT / "tests" / "fuzz" / "results.json"

INTRODUCTION = """\
# Parity: sharded runs against the unsharded model

Written by `make parity`. Hooks of every kind read and edit models that frameworks have sharded, and
the unsharded model with the same weights under torch's own hooks, in the same run. Edits are
elementwise, a dense product along every dim, and in place at the last indices. A hook is right if
the tensor that it received, the output and all parameter gradients are equal: within 1e-9 (float64)
or 2e-5 (float32) of the largest value; in bfloat16 within three times what rounding does to the
unsharded model. No layout is stated but where a row says so. Micro-batches run no edits that mix
rows. With `dp_batch`, the unsharded model runs all rows padded to one length, or each rank's own
(`"local"`). GPUs are emulated.

What is not right is an error on every rank, listed below. `WRONG` would be a silent wrong number:
the tests fail if there is one.

Each row's figures are in `tests/parity/results`, a JSON file for each torch. In `cells` a kind of
hook has its right ones, `34 · 7 · 7+1e · 7`: read, elementwise, product, in place; `+1e` is an
error.
"""

RANDOM = """
## Random programs

Random programs that are right on shards by construction are compared with the unsharded model
(`make fuzz`; `FUZZ="--json tests/fuzz/results.json"` adds to these counts, whose seeds are there).
Each has up to three hooks. *Refused if followed*: of the hooks of programs without numpy, numbers
read from tensors, operations without a rule, sums over groups that are no axis of the mesh,
messages between ranks, and plain numbers that only a statement can settle. `bare`: layers that
state nothing. A program that was ever wrong is fixed, and stays in the tests.
"""
COUNTS = ("programs", "right", "refused", "wrong", "crash", "hang", "invalid")


def results():
    """The rows that were run, by version of torch, the newest first."""
    paths = sorted(RESULTS.glob("torch_*.json"), reverse=True)
    return {path.stem.removeprefix("torch_"): json.loads(path.read_text()) for path in paths}


def page():
    found = results()
    lines = [INTRODUCTION, *(f"- {summary(rows)}" for rows in found.values())]
    lines.append("\nA line counts right hooks in so many rows, and errors, on each torch.\n")
    lines += [*table(found), "\n## Errors\n", *(f"- {line}" for line in errors(found))]
    return "\n".join([*lines, RANDOM, *random_programs()]) + "\n"


def summary(rows):
    """What was run, when, with which packages, and how many hooks were right."""
    total = total_of(rows.values())
    dates = sorted(row["date"] for row in rows.values())
    versions = {row["versions"] for row in rows.values()}
    found = min(versions, key=lambda text: text.count("not installed"))
    counts = f"{total['right']} right, {total['error']} errors, {total['wrong']} WRONG"
    return f"{found}; {dates[0]} to {dates[-1]}; {len(rows)} of {len(CASES)} rows: {counts}"


def total_of(rows):
    return sum((Counter(row["total"]) for row in rows), Counter())


def table(found):
    """A line for each framework: its models, and how many hooks were right on each torch."""
    titles = ["framework", "models on ranks", *(f"right on {torch}" for torch in found), "errors"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for framework in dict.fromkeys(map(framework_of, CASES)):
        names = [name for name in CASES if framework_of(name) == framework]
        forms = dict.fromkeys(CASES[name].framework.partition(", ")[2] for name in names)
        cells, num_errors = [framework + in_brackets(forms), models(names)], []
        for rows in found.values():
            those = [rows[name] for name in names if name in rows]
            total = total_of(those)
            wrong = f" **{total['wrong']} WRONG**" * bool(total["wrong"])
            cells.append(f"{total['right']} in {len(those)}{wrong}" if those else "-")
            num_errors.append(str(total["error"]) if those else "-")
        yield f"| {' | '.join(cells)} | {', '.join(num_errors)} |"


def framework_of(name):
    return CASES[name].framework.partition(", ")[0]


def models(names):
    """Each model once, beside others with the same ranks, and what its rows vary."""
    ranks, variants, alike = defaultdict(set), defaultdict(dict), defaultdict(list)
    for name in names:
        model, _, variant = CASES[name].model.partition(", ")
        ranks[model].add(str(CASES[name].ranks))
        variants[model][variant] = None
    for model in ranks:
        alike[f"{', '.join(sorted(ranks[model]))}{in_brackets(variants[model])}"].append(model)
    return "; ".join(f"{', '.join(models)} on {where}" for where, models in alike.items())


def in_brackets(texts):
    texts = "; ".join(filter(None, texts))
    return f" ({texts})" if texts else ""


def errors(found):
    """Each error once, with the hooks and frameworks that gave it, and on which torch."""
    where = {}
    for torch, rows in found.items():
        for name, row in rows.items():
            for text in row["errors"]:
                why, _, cells = text.partition(" (")
                kinds, frameworks = where.setdefault(why, ({}, {}))
                kinds.update(dict.fromkeys(cells.partition(";")[0].split(", ")))
                frameworks.setdefault(framework_of(name), {})[torch] = None
    for why, (kinds, frameworks) in where.items():
        given = (
            name if len(on) == len(found) else f"{name} on {', '.join(on)}"
            for name, on in frameworks.items()
        )
        yield f"{why} ({', '.join(kinds)}): {'; '.join(given)}"


def random_programs():
    """What `python tests/fuzz --json tests/fuzz/results.json` has counted, by mode."""
    ranks, counts = defaultdict(set), defaultdict(Counter)
    for run in json.loads(PROGRAMS.read_text()):
        ranks[run["mode"]].add(str(run["ranks"]))
        counts[run["mode"]].update(run["counts"])
    columns = ("mode", "ranks", *COUNTS, "refused if followed")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    total = sum(counts.values(), Counter())
    for mode, count in [*sorted(counts.items()), ("all", total)]:
        numbers = [str(count[name]) for name in COUNTS]
        yield f"| {' | '.join([mode, ', '.join(sorted(ranks[mode])), *numbers, refused(count)])} |"


def refused(count):
    of = count["followed right"] + count["followed refused"]
    return f"{count['followed refused'] / of:.1%} of {of}" if of else "-"
