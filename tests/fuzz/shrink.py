"""The shortest program with the same verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from program import INVALID, Batch, IllegalStepError, Program, write
from ranks import Outcome, Ranks


def shrink(
    ranks: Ranks, program: Program, outcome: Outcome, seconds: float = 30.0
) -> tuple[Program, Outcome]:
    """Remove what the verdict does not need, as long as ``seconds`` last."""
    best = replace(program, cells=(outcome.cell,)), outcome
    deadline = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for tried in simpler(best[0]):
            if time.monotonic() > deadline:
                break
            try:
                write(tried)
            except (IllegalStepError, IndexError, KeyError):
                continue
            after = ranks.judge(tried)
            if len(after) == 1 and is_same(after[0], outcome):
                best, found = (tried, after[0]), True
                break
    return best


def is_same(found: Outcome, wanted: Outcome) -> bool:
    if found.verdict != wanted.verdict or found.verdict == INVALID:
        return False
    return found.verdict == "wrong" or found.kind_of_error == wanted.kind_of_error


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, what removes most first."""
    steps = program.steps
    for length in range(len(steps) // 2, 0, -1):
        for first in range(1, len(steps) - length + 1):
            yield replace(program, steps=steps[:first] + steps[first + length :])
    if steps[0].op == "start" and steps[0].choices != ("x",):
        yield replace(program, steps=(replace(steps[0], choices=("x",)), *steps[1:]))
    batches = program.batches
    for index in range(len(batches) if len(batches) > 1 else 0):
        yield replace(program, batches=batches[:index] + batches[index + 1 :])
    for name, value in {"weights": "normal", "run": "eval", "same_rows": False}.items():
        if getattr(program, name) != value and (name != "run" or program.run == "train"):
            yield replace(program, **{name: value})
    cell = dict(program.cells[0])  # type: ignore[index]
    simple = {"edit_on": "all", "output_ranks": "rank0", "is_stated": False, "dp_batch": None}
    for name, value in simple.items():
        if cell.get(name) not in (value, None):
            yield replace(program, cells=(cell | {name: value},))
    hooks = cell["hooks"]
    if len(hooks) > 1:
        for index in range(len(hooks)):
            less = [*hooks[:index], *hooks[index + 1 :]]
            yield replace(program, cells=(cell | {"hooks": less},))
    for index, hook in enumerate(hooks):
        if hook["doing"] != "read":
            changed = [*hooks[:index], hook | {"doing": "read"}, *hooks[index + 1 :]]
            yield replace(program, cells=(cell | {"hooks": changed},))
    for index, batch in enumerate(batches):
        smaller = [Batch((1,) * len(batch.rows), batch.length), Batch(batch.rows, 1)]
        smaller.append(Batch((2,) * len(batch.rows), batch.length))
        for other in smaller:
            if other.rows < batch.rows or other.length < batch.length:
                yield replace(program, batches=(*batches[:index], other, *batches[index + 1 :]))
