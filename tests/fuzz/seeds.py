"""Programs that failed once, made short or written by hand (``raw``): one a line in seeds.jsonl,
replayed by the tests.
"""

import json
from pathlib import Path

from program import Program

PATH = Path(__file__).with_name("seeds.jsonl")


def load() -> list[Program]:
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    return [Program.from_json(json.loads(line)) for line in lines]


def keep(program: Program) -> bool:
    """Add a failure that has been made short, unless one of its kind is there."""
    if any(kind_of(other) == kind_of(program) for other in load()):
        return False
    with PATH.open("a") as file:
        file.write(json.dumps(program.to_json()) + "\n")
    return True


def kind_of(program: Program) -> tuple:
    """What makes two failures alike: the mode, the operations and the hooks."""
    hooks = [
        (hook["kind"], hook["site"].rstrip("0123456789"), hook["doing"])
        for cell in program.cells or ()
        for hook in cell["hooks"]
    ]
    return program.mode, program.ranks, tuple(step.op for step in program.steps), tuple(hooks)
