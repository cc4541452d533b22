"""The fuzzer: its parts; in ``make check`` the seeds that failed; in ``make grid`` some random
programs.
"""

import time

import pytest
import seeds
import torch
from generate import generate, modes_of
from program import (
    BAD,
    CRASH,
    HANG,
    INVALID,
    REFUSED,
    RIGHT,
    WRONG,
    Batch,
    Place,
    Program,
    Step,
    local_part,
    write,
)
from ranks import Outcome, Ranks, merged, shown
from shrink import shrink
from steps_rare import dims

#: Whether no program may be wrong, crash or hang. While it is False, only the fuzzer is tested.
IS_SOUND = True
RANDOM_S = 10  # for random programs


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as pools:
        yield pools


def check(program, outcomes):
    """Every program is right on shards, whatever FlexModel makes of it."""
    for outcome in outcomes:
        text = shown(program, outcome)
        assert outcome.verdict != INVALID, text
        assert not (IS_SOUND and outcome.verdict in BAD), text


@pytest.mark.grid
def test_random_programs(ranks):
    end, seed, judged = time.monotonic() + RANDOM_S, 0, 0
    while time.monotonic() < end:
        for mode in modes_of(2):
            program = generate(seed, mode, 2)
            outcomes = ranks.judge(program, number=2)
            check(program, outcomes)
            judged += len(outcomes)
        seed += 1
    assert judged > 10


@pytest.mark.slow
def test_seeds_that_failed_once(ranks):
    for program in seeds.load():
        if program.ranks <= 2:
            check(program, ranks.judge(program))


@pytest.mark.grid
def test_seeds_of_four_ranks(ranks):
    programs = [program for program in seeds.load() if program.ranks > 2]
    assert programs
    for program in programs:
        check(program, ranks.judge(program))


# ---- The fuzzer itself ---------------------------------------------------------------------------


def test_a_program_is_the_same_after_json():
    for seed in range(50):
        program = generate(seed, "states", 2)
        again = Program.from_json(program.to_json())
        assert again == program and write(again).text == write(program).text


def test_a_seed_gives_the_same_program():
    for mode in modes_of(4):
        assert generate(3, mode, 4) == generate(3, mode, 4)
        assert generate(3, mode, 4) != generate(4, mode, 4)


@pytest.mark.parametrize(
    "shape, take",
    [
        ("B/dp S 8/tp", lambda t: t[1:3, :, 4:]),
        ("B/dp*S 8", lambda t: t.view(3, 4, 8)[1:3].reshape(8, 8)),
        ("B*4/tp S", lambda t: t.view(3, 4, 4)[:, 2:].reshape(6, 4)),
        ("2*4/tp", lambda t: torch.stack([t[2], t[3], t[6], t[7]])),
        ("3/tp*2 1", lambda t: t[4:]),
    ],
)
def test_a_local_part_is_a_slice_of_atoms(shape, take):
    batch = Batch((1, 2), 4)
    sizes = [[batch.sizes.get(atom.size, atom.size) for atom in dim] for dim in dims(shape)]
    full_shape = [torch.Size(dim).numel() for dim in sizes]
    full = torch.arange(torch.Size(full_shape).numel()).view(full_shape)
    part = local_part(full, dims(shape), batch, Place(2, 1, 2, 1))
    assert torch.equal(part, take(full))


@pytest.mark.parametrize(
    "verdicts, expected",
    [
        ((RIGHT, RIGHT), RIGHT),
        ((RIGHT, WRONG), WRONG),
        ((REFUSED, REFUSED), REFUSED),
        ((REFUSED, RIGHT), CRASH),
        ((REFUSED, CRASH), CRASH),
        ((RIGHT, None), HANG),
        ((INVALID, INVALID), INVALID),
    ],
)
def test_the_ranks_answers_make_one_verdict(verdicts, expected):
    answers = [
        [{"started": True}]
        + [{"cell": {}, "verdict": verdict, "text": "", "error": "ValueError"}] * bool(verdict)
        for verdict in verdicts
    ]
    (outcome,) = merged(answers, {})
    assert outcome.verdict == expected


def test_ranks_that_raise_different_errors_are_a_crash():
    errors = ("ValueError", "HookError")
    answers = [
        [{"started": True}, {"cell": {}, "verdict": REFUSED, "text": "", "error": error}]
        for error in errors
    ]
    (outcome,) = merged(answers, {})
    assert outcome.verdict == CRASH and "ranks differ" in outcome.text


class Pretended:
    """Finds every program wrong that has a transpose."""

    def judge(self, program):
        is_wrong = any(step.op == "transpose" for step in program.steps)
        return [Outcome(program.cells[0], WRONG if is_wrong else RIGHT)]


def test_shrinking_removes_all_that_the_verdict_does_not_need():
    program = next(
        program
        for program in (generate(seed, "ddp", 2) for seed in range(300))
        if "transpose" in (ops := [step.op for step in program.steps]) and len(ops) > 5
        if "unsqueeze" not in ops  # a transpose of the dim that it makes would need it
    )
    hooks = ({"kind": "forward", "site": "", "doing": "mixing", "leaf": 0},)
    cell = {"hooks": hooks, "edit_on": "rank0", "output_ranks": "all", "is_stated": False}
    small, outcome = shrink(Pretended(), program, Outcome(cell, WRONG), 10)
    assert [step.op for step in small.steps] == ["start", "transpose"]
    assert len(small.batches) == 1 and outcome.verdict == WRONG
    assert small.cells[0]["edit_on"] == "all"


@pytest.mark.slow
def test_what_shows_a_program_is_right_on_shards_can_fail(ranks):
    """A sum of this rank's part alone is not what the unsharded model has."""
    parts = {
        "arguments": (("x", "B 8", "float", 0),),
        "forward": ("h = take_part(x, 1).sum(1)",),
        "output": "B",
    }
    step = Step("raw", 0, (tuple(parts.items()),))
    program = Program("bare", 2, 1, (step,), (Batch((2,), 1),), run="no_grad")
    (outcome,) = ranks.judge(program)
    assert outcome.verdict == INVALID and "output" in outcome.text
