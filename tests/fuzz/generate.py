"""A random program from a seed and a mode."""

from __future__ import annotations

import random
from dataclasses import replace

import steps_calls
import steps_data
import steps_layers
import steps_rare
import steps_rows
import steps_shapes
import steps_start
from program import (
    MODES,
    WEIGHTS,
    Batch,
    Code,
    IllegalStepError,
    Program,
    State,
    Step,
    take_step,
    write,
)

MODULES = (
    steps_start,
    steps_calls,
    steps_data,
    steps_layers,
    steps_rare,
    steps_rows,
    steps_shapes,
)  # they register operations
LISTS = ("arguments", "init", "forward", "outer")
DICTS = ("sites", "parameters", "plan")
FIRST = ("column", "fused_column", "attention", "split_by_hand", "lora", "plain_linear")
STATING = ("Column(", "Row(", "VocabEmbedding(")
# Steps of which no layout can be proven, by design: numpy, numbers read from a tensor, operations
# that have no rule, and messages from one rank to another.
UNFOLLOWED = {"numpy_round_trip", "python_numbers", "custom", "ring", "all_to_all"}
# The same of forms of other steps, by the number of tensor-parallel ranks from which on: a gather
# that reads from tensors which sizes the ranks have, and sums over groups that are no axis.
UNFOLLOWED_FORMS = {
    ("gather_by_hand", "function"): 2,
    ("reduce_split", "mean"): 2,
    ("row", "sum_in_two_steps"): 4,
    ("reduce_split", "sum_in_two_steps"): 4,
}
WITH_WEIGHTS = ("column", "plain_linear", "fused_column", "attention", "norm", "lora", "row")


def modes_of(ranks: int) -> list[str]:
    """Those that so many ranks can run."""
    if ranks == 1:
        return ["one"]
    products = [mode for mode, (layers, data) in MODES.items() if layers and data]
    single = [mode for mode in MODES if mode not in products and mode != "one"]
    return single + (products if ranks == 4 else [])


def can_be_followed(program: Program) -> bool:
    """Whether all its steps are such that layouts can be proven."""
    forms = [
        (step.op, form) for step in program.steps for form in step.choices if type(form) is str
    ]
    return not (
        UNFOLLOWED & {step.op for step in program.steps}
        or any(form in UNFOLLOWED_FORMS and program.tp >= UNFOLLOWED_FORMS[form] for form in forms)
        or write(program).code.is_ambiguous
    )


def generate(seed: int, mode: str, ranks: int) -> Program:
    """The program of a seed: the same wherever it is made."""
    rng = random.Random(f"{mode} on {ranks} with {seed}")
    program = frame(rng, seed, mode, ranks)
    for _ in range(200):
        steps = draw_steps(program, rng)
        if steps is not None:
            return replace(program, steps=steps)
    raise RuntimeError(f"no program for seed {seed} of {mode}")


def frame(rng: random.Random, seed: int, mode: str, ranks: int) -> Program:
    """All but the steps."""
    layers, data = MODES[mode]
    tp = {(True, True): ranks // 2, (True, False): ranks, (False, True): 1}.get(
        (bool(layers), bool(data)), 1
    )
    dp = ranks // tp
    return Program(
        mode,
        tp,
        dp,
        (),
        tuple(draw_batches(rng, tp, dp)),
        width=rng.choice([4, 8, 8]),
        run=rng.choice(["train", "train", "train", "eval", "no_grad", "inference"]),
        weights=rng.choice(
            ["normal"] * 6 + ["zero", "constant", "symmetric", "tiled", "tiled", "halves"]
        ),
        same_rows=rng.random() < 0.15,
        seed=seed,
    )


def draw_batches(rng: random.Random, tp: int, dp: int) -> list[Batch]:
    def rows() -> tuple[int, ...]:
        if dp > 1 and rng.random() < 0.2:
            return tuple(rng.choice([1, 2, 3]) for _ in range(dp))
        return (rng.choice([1, 1, 2, 2, 3]),) * dp

    multiple = tp if rng.random() < 0.6 else 1

    def length(of: tuple[int, ...]) -> int:
        lengths = [1, 2, 3, 4, of[0], 2, 4, sum(of)]
        return min(8, rng.choice(lengths) * (multiple if multiple > 1 else 1))

    first = rows()
    batches = [Batch(first, length(first))]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        kind = rng.choice(["same", "rows", "length", "both"])
        of = rows() if kind in ("rows", "both") else batches[-1].rows
        batches.append(Batch(of, length(of) if kind in ("length", "both") else batches[-1].length))
    return batches


def draw_steps(program: Program, rng: random.Random) -> tuple[Step, ...] | None:
    """Steps that are right one after the other; None where they lead nowhere."""
    code, state, steps = Code(program, rng), None, []
    number, uid = rng.choice([2, 3, 4, 5, 6, 8, 10]), 1

    def attempt(name: str) -> bool:
        nonlocal code, state, uid
        tried = copied(code)
        try:
            after = take_step(tried, state, Step(name, uid))
        except (IllegalStepError, IndexError):
            return False
        if after.ndim > 5 or any(too_large(after, dim) for dim in range(after.ndim)):
            return False
        steps.append(Step(name, uid, tuple(tried.drawn)))
        code, state = tried, after
        uid += 1
        return True

    if not attempt("start"):
        return None
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    if rng.random() < 0.75 and not attempt(rng.choice(FIRST if program.tp > 1 else WITH_WEIGHTS)):
        return None
    tries = 0
    while len(steps) < number + 1 and tries < 60:
        attempt(rng.choices(names, weights)[0])
        tries += 1
    if state is not None and state.is_dtensor:  # back to plain tensors
        for _ in range(20):
            attempt(rng.choice(["row", "row", "join_dims", "transpose"]))
            if not state.is_dtensor:
                break
    if state is None or not is_finished(program, code, state):
        return None
    return tuple(steps)


def is_finished(program: Program, code: Code, state: State) -> bool:
    has_rows = program.dp == 1 or state.dim_of("dp") is not None
    has_weights = not program.has_gradients or bool(code.parameters)
    states = program.layers in ("", "bare") or bool(code.plan)  # its tensor parallelism
    states = states or any(name in line for line in code.init for name in STATING)
    return state.is_float and not state.is_dtensor and has_rows and has_weights and states


def too_large(state: State, dim: int) -> bool:
    size = 1
    for atom in state.dims[dim]:
        size *= atom.size if isinstance(atom.size, int) else 2
    return size > 64


def copied(code: Code) -> Code:
    """A step that fails leaves no trace in the original."""
    lists = {name: list(getattr(code, name)) for name in LISTS}
    dicts = {name: dict(getattr(code, name)) for name in DICTS}
    return replace(code, **lists, **dicts, read_only=set(code.read_only))
