"""Ranks that stay up and judge programs; what each of them answers becomes one verdict."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from program import CRASH, HANG, INVALID, REFUSED, RIGHT, WRONG, Program, write

import rank_pool

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 25  # for one program


@dataclass
class Outcome:
    """A cell's verdict. ``cell`` is None where the program itself is not right."""

    cell: dict | None
    verdict: str
    text: str = ""
    answers: list[dict] = field(default_factory=list)

    @property
    def kind_of_error(self) -> str:
        """What outcomes of one cause have in common."""
        errors = {answer.get("error", "") + " " + answer.get("at", "") for answer in self.answers}
        return f"{self.verdict} {' '.join(sorted(errors))}"


class Ranks:
    """A pool of ranks for each size that is asked for; a pool out of step is replaced."""

    def __init__(self) -> None:
        self.pools: dict[int, rank_pool.RankPool] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="fuzz-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.close()
        self.folder.cleanup()

    def fresh(self, ranks: int) -> None:
        """Drop the pool of this size: the next program gets a new one."""
        if ranks in self.pools:
            self.pools.pop(ranks).close()

    def judge(
        self, program: Program, cells: list[dict] | None = None, number: int = 3
    ) -> list[Outcome]:
        """Run cells of a program: the given ones, its own, or some that are drawn."""
        ranks = program.ranks
        if ranks not in self.pools:
            self.pools[ranks] = rank_pool.RankPool(ranks)
        pool = self.pools[ranks]
        files = [Path(self.folder.name, f"{rank}.json") for rank in range(ranks)]
        for file in files:
            file.unlink(missing_ok=True)
        arguments = {
            "program": program.to_json(),
            "cells": cells,
            "number": number,
            "folder": self.folder.name,
        }
        failures = pool.run(WORKER, "run_program", arguments, LIMIT_S)
        answers = [list(read(file)) for file in files]
        if not pool.alive:
            self.fresh(ranks)
        return list(merged(answers, failures))

    def confirmed(self, program: Program, outcome: Outcome) -> Outcome:
        """The cell's outcome again, alone: ranks that an error left out of step fail before it,
        where the program is checked without hooks.
        """
        return self.judge(program, [outcome.cell] if outcome.cell else None)[0]  # it has begun


def read(file: Path) -> Iterator[dict]:
    with suppress(FileNotFoundError):
        for line in file.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def merged(ranks: list[list[dict]], failures: dict) -> Iterator[Outcome]:
    """One outcome for each cell, of all ranks' answers."""
    for answers in ranks:
        for answer in answers:
            if answer.get("verdict") == INVALID and "cell" not in answer:
                yield Outcome(None, INVALID, answer["text"])
                return
    begun = max((sum("started" in a for a in answers) for answers in ranks), default=0)
    if not begun:
        yield Outcome(
            None, INVALID, "no rank began: " + "; ".join(map(str, failures.values()))[-1500:]
        )
        return
    for index in range(begun):
        told = [[a for a in answers if "started" not in a] for answers in ranks]
        of_cell = [answers[index] for answers in told if index < len(answers)]
        cell = of_cell[0]["cell"] if of_cell and "cell" in of_cell[0] else None
        yield one_outcome(cell, of_cell, len(ranks), failures)


def one_outcome(cell: dict | None, answers: list[dict], ranks: int, failures: dict) -> Outcome:
    verdicts = {answer["verdict"] for answer in answers}
    texts = "; ".join(dict.fromkeys(a["text"] for a in answers if a["text"]))
    if INVALID in verdicts:
        return Outcome(cell, INVALID, texts, answers)
    if CRASH in verdicts:
        return Outcome(cell, CRASH, texts, answers)
    if len(answers) < ranks or HANG in verdicts:
        died = [text for text in failures.values() if "died" in str(text)]
        if died:
            return Outcome(cell, CRASH, f"{died[0]} {texts}", answers)
        return Outcome(cell, HANG, texts or str(next(iter(failures.values()), ""))[-1500:], answers)
    if REFUSED in verdicts:
        if len(verdicts) > 1 or len({answer["error"] for answer in answers}) > 1:
            kinds = [answer.get("error", answer["verdict"]) for answer in answers]
            return Outcome(cell, CRASH, f"ranks differ: {kinds}: {texts}", answers)
        return Outcome(cell, REFUSED, texts, answers)
    return Outcome(cell, WRONG if WRONG in verdicts else RIGHT, texts, answers)


def shown(program: Program, outcome: Outcome) -> str:
    """The module's text, the hooks, what came of them, and what ``--replay`` takes."""
    one = replace(program, cells=(outcome.cell,) if outcome.cell else program.cells)
    batches = ", ".join(f"{batch.rows} rows of {batch.length}" for batch in program.batches)
    return "\n".join(
        [
            f"# {program.mode}, {program.ranks} ranks, {program.run}; batches: {batches}",
            write(program).text,
            *(f"# {name}: {value}" for name, value in (outcome.cell or {}).items()),
            f"# {outcome.verdict}: {outcome.text}",
            f"python tests/fuzz --replay {shlex.quote(json.dumps(one.to_json()))}",
        ]
    )
