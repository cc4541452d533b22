"""What runs on each rank: a program's cells, with the answers in a file."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]


class OutOfStepError(Exception):
    """This rank can't go on: the pool gives the others little time then."""


def run_program(program, cells, number, folder):
    """Judge ``cells``, or ``number`` that are drawn, on this rank; write answers as JSON lines."""
    import torch
    import verdict
    from program import Program

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    with open(Path(folder, f"{rank}.json"), "w") as file:

        def tell(answer):
            file.write(json.dumps(answer) + "\n")
            file.flush()

        try:
            bench = verdict.Bench(Program.from_json(program))
        except Exception as error:
            tell({"verdict": verdict.INVALID, "text": last_lines(error)})
            raise OutOfStepError from error
        if bench.invalid:
            tell({"verdict": verdict.INVALID, "text": bench.invalid})
            return
        chosen = cells or bench.program.cells
        chosen = [verdict.Cell.from_json(cell) for cell in chosen] if chosen else bench.draw(number)
        for cell in chosen:
            tell({"started": True})
            answer = bench.judge(cell)
            tell(answer)
            if answer["verdict"] in (verdict.CRASH, verdict.HANG):
                raise OutOfStepError


def last_lines(error):
    where = [f for f in traceback.extract_tb(error.__traceback__) if "<program" in f.filename]
    line = f"line {where[-1].lineno} of the program: " if where else ""
    last = traceback.format_exception(error)[-2:]
    return line + "".join(last)[-1000:]
