"""One cell: hooks on a program's model, run under FlexModel and judged by the unsharded model.

Right: records, outputs and gradients of all runs equal the oracle's. Refused: an error of
flex_model. Wrong: anything differs. Crash: an exception that is not flex_model's own.
"""

from __future__ import annotations

import linecache
import math
import random as python_random
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import generate  # registers the operations  # noqa: F401
import torch
import torch.distributed as dist
from execution import (
    Data,
    Maker,
    Result,
    data_of,
    difference,
    gradient_differences,
    invalid_text,
    place_of,
    run_oracle,
    run_sharded,
)
from program import (
    CRASH,
    HANG,
    INVALID,
    REFUSED,
    RIGHT,
    WRONG,
    Program,
    Value,
    local_part,
    tuples,
    write,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import flex_model
import oracle
from flex_model import FlexModel, HookError, HookFunction
from oracle import DOINGS, KINDS, apply, register, torch_hook

TIMEOUT_S = 8.0
LIBRARY = str(Path(flex_model.__file__).parent)


class Hook(oracle.Hook):
    @property
    def record(self) -> str:
        return f"{self.kind} {self.site} {self.leaf}"


@dataclass(frozen=True)
class Cell:
    """Hooks of one FlexModel. ``is_stated``: the user says how the site is split."""

    hooks: tuple[Hook, ...]
    edit_on: str = "all"
    output_ranks: str = "rank0"
    is_stated: bool = False
    dp_batch: str | None = None

    @staticmethod
    def from_json(data: dict) -> Cell:
        data = dict(tuples(data))
        return Cell(**data | {"hooks": tuple(Hook(**hook) for hook in data["hooks"])})


# ---- The oracle's hooks --------------------------------------------------------------------------


def seeing(hook: Hook, seen: list[Tensor]):
    """What a hook does at its tensor: it keeps what it sees, not what is recomputed, and edits."""

    def see(value):
        record, edited = apply(value, hook.edit)
        in_backward = torch._C._current_graph_task_id() != -1
        if not (in_backward and hook.kind.startswith("forward")):
            seen.append(record)
        return edited

    return see


def oracle_runs(
    program: Program, maker: Maker, data: list[Data], hooks: tuple[Hook, ...]
) -> list[Result]:
    """All batches through one unsharded model."""
    model, results = maker.make(False), []
    seen: dict[str, list[Tensor]] = {hook.record: [] for hook in hooks}
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(torch_hook(model, hook, seeing(hook, seen[hook.record])))
        for one in data:
            for values in seen.values():
                values.clear()
            result = run_oracle(program, model, one)
            result.records = {name: list(values) for name, values in seen.items()}
            results.append(result)
    return results


# ---- Under FlexModel -----------------------------------------------------------------------------


def make_flex(bench: Bench, model: nn.Module, cell: Cell, records: dict) -> FlexModel:
    program, code = bench.program, bench.written.code
    settings: dict[str, Any] = {}
    if code.needs_follow:
        settings["follow"] = "always"
    row_dims = {
        argument.name: next((d for d, dim in enumerate(argument.dims) if dim[0].size == "B"), None)
        for argument in code.arguments
    }
    if program.dp > 1:
        settings["batch_dim"] = row_dims
    if cell.dp_batch is not None:
        settings["dp_batch"] = cell.dp_batch
    return FlexModel(
        model,
        records,
        tensor_parallel_size=program.tp,
        data_parallel_size=program.dp,
        edit_on=cell.edit_on,
        output_ranks=cell.output_ranks,
        timeout=TIMEOUT_S,
        **settings,
    )


def state_layout(flex: FlexModel, hook: Hook, value: Value, batch: Any) -> None:
    """Say how a site is split, as an error would have the user do."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    sizes = batch.sizes
    placements: dict[str, Any] = {"tp": Partial() if value.is_partial else Replicate()}
    for number, dim in enumerate(value.dims):
        for at, atom in enumerate(dim):
            if atom.axis:
                placements[atom.axis] = Shard(number)
            if atom.axis and at:
                parts, inner = (
                    math.prod(sizes.get(one.size, one.size) for one in atoms)
                    for atoms in (dim[:at], dim[at:])
                )
                placements["part_sizes"] = (inner,) * parts
    flex.annotate_layout(hook.site, kind="forward", **placements)


class Bench:
    """A program on this rank: its models, data, and the oracle's runs without hooks."""

    def __init__(self, program: Program):
        self.program, self.place = program, place_of(program)
        self.written = write(program)
        self.maker = Maker(program, self.written)
        self.data = data_of(program, self.written, self.place)
        self.sites: list[dict[str, Tensor]] = []
        self.plain = self.look()
        text = invalid_text(
            program, self.written, self.maker, self.data, self.plain, self.sites, self.place
        )
        self.invalid = text
        if program.ranks > 1:  # the others go no further either
            is_invalid = torch.tensor([bool(text)], dtype=torch.int)
            dist.all_reduce(is_invalid, dist.ReduceOp.MAX)
            self.invalid = text or ("on another rank" if is_invalid.item() else "")

    def look(self) -> list[Result]:
        """The oracle's outputs and gradients, and what its sites give."""
        model, results = self.maker.make(False), []
        self.leaves: dict[tuple[str, str], int] = {}

        def keep(name, kind, tree, into):
            tensors = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
            self.leaves[kind, name] = len(tensors)
            if tensors and kind == "forward":
                into[name] = tensors[0].detach().clone()
            self.floats |= {
                (kind, name, i) for i, leaf in enumerate(tensors) if leaf.is_floating_point()
            }

        self.floats: set[tuple[str, str, int]] = set()
        for one in self.data:
            seen: dict[str, Tensor] = {}
            with ExitStack() as stack:
                for name, module in model.named_modules():

                    def after(module, args, output, name=name, seen=seen):
                        keep(name, "forward", output, seen)

                    def before(module, args, name=name, seen=seen):
                        keep(name, "forward_pre", args, seen)

                    stack.callback(module.register_forward_hook(after).remove)
                    stack.callback(module.register_forward_pre_hook(before).remove)
                results.append(run_oracle(self.program, model, one))
            self.sites.append(seen)
        return results

    # Cells.

    def draw(self, number: int) -> list[Cell]:
        rng = python_random.Random(f"cells of {self.program.seed}")
        cells = []
        for _ in range(number):
            hooks = [self.draw_hook(rng)]
            if rng.random() < 0.25:
                more = [self.draw_hook(rng) for _ in range(rng.choice([1, 2, 3]))]
                hooks = [Hook(h.kind, h.site, "read", h.leaf) for h in hooks + more]
                hooks = list(dict.fromkeys(hooks))
            is_stated = (
                len(hooks) == 1
                and hooks[0].kind == "forward"
                and hooks[0].site in self.written.code.sites
                and self.program.layers in ("states", "bare")
                and rng.random() < 0.25
            )
            edit_on = "rank0" if rng.random() < 0.2 else "all"
            output_ranks = "all" if rng.random() < 0.2 else "rank0"
            # Of other lengths in no program: its rows would have to be right with padding, too.
            dp_batch = "global" if self.program.dp > 1 and rng.random() < 0.2 else None
            cells.append(Cell(tuple(hooks), edit_on, output_ranks, is_stated, dp_batch))
        return cells

    def draw_hook(self, rng: python_random.Random) -> Hook:
        for _ in range(50):
            kind = rng.choice(KINDS if self.program.has_gradients else KINDS[:2])
            if kind == "parameter":
                names = sorted(self.plain[0].gradients)
                if not names:
                    continue
                return Hook(kind, rng.choice(names), rng.choice(list(DOINGS)))
            at = "forward" if kind in ("forward", "full_backward_pre") else "forward_pre"
            names = sorted(name for where, name in self.leaves if where == at)
            site = rng.choice(names)
            if not self.leaves[at, site]:
                continue
            leaf = rng.randrange(self.leaves[at, site])
            is_float = (at, site, leaf) in self.floats
            if site in self.written.code.read_only and kind != "forward":
                continue
            if not is_float and kind not in ("forward", "forward_pre"):
                continue
            doing = rng.choice(["read", "read", *DOINGS])
            if not is_float or site in self.written.code.read_only:
                doing = "read"
            return Hook(kind, site, doing, leaf)
        return Hook("forward", "")

    def judge(self, cell: Cell) -> dict:
        """The verdict on this rank, as JSON. Collective where the program is."""
        answer: dict[str, Any] = {"cell": asdict(cell), "verdict": RIGHT, "text": ""}
        try:
            expected = oracle_runs(self.program, self.maker, self.data, cell.hooks)
        except Exception as error:
            return answer | {"verdict": INVALID, "text": f"oracle: {error}"}
        try:
            lines = self.compare(cell, expected)
        except Exception as error:
            return answer | verdict_of(error)
        if lines:
            answer |= {"verdict": WRONG, "text": "; ".join(lines)}
        return answer

    def compare(self, cell: Cell, expected: list[Result]) -> list[str]:
        program, records = self.program, {}
        model = self.maker.make(True)
        lines: list[str] = []
        with make_flex(self, model, cell, records) as flex:
            for hook in cell.hooks:
                if cell.is_stated:
                    value = self.written.code.sites[hook.site]
                    state_layout(flex, hook, value, program.batches[0])
                edit = hook.edit
                function = HookFunction(hook.site, None, edit, hook.leaf, output_name=hook.record)
                register(flex, hook.kind, function)
            for number, (one, oracle) in enumerate(zip(self.data, expected)):
                model.zero_grad()
                shape, state = oracle.output.shape, self.written.state
                output = run_sharded(program, flex, one, state, self.place, shape)
                full_output = local_part(oracle.output, state.dims, one.batch, self.place)
                found = [difference("output", output, full_output)]
                found += gradient_differences(program, self.written, model, oracle, self.place)
                if self.keeps_records(cell):
                    for hook in cell.hooks:
                        found += record_differences(hook, records, oracle)
                lines += [f"run {number}: {line}" for line in found if line]
        return lines

    def keeps_records(self, cell: Cell) -> bool:
        return cell.output_ranks == "all" or self.program.ranks == 1 or dist.get_rank() == 0


def record_differences(hook: Hook, records: dict, oracle: Result) -> list[str]:
    ours, theirs = records.get(hook.record, []), oracle.records[hook.record]
    if len(ours) != len(theirs):
        return [f"record of {hook.record}: {len(ours)} calls, expected {len(theirs)}"]
    return [difference(f"record of {hook.record}", a, b) for a, b in zip(ours, theirs)]


# ---- Errors --------------------------------------------------------------------------------------


def verdict_of(error: BaseException) -> dict[str, str]:
    """Whether an exception is flex_model's refusal, a wait that ended, or a crash."""
    name, text = type(error).__name__, " ".join(str(error).split())
    verdict = REFUSED if is_ours(error) else CRASH
    if verdict == REFUSED and ("no answer" in text or "timeout" in text or "timed out" in text):
        verdict = HANG
    where = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{Path(where.filename).name}:{where.name}"
    cause = error.__cause__
    if verdict == CRASH and cause is not None:
        text += f" (from {type(cause).__name__}: {' '.join(str(cause).split())[:300]})"
    return {"verdict": verdict, "text": text[:1500], "error": name, "at": at}


def is_ours(error: BaseException) -> bool:
    """Raised by a ``raise`` in flex_model, and not a foreign error in its clothes."""
    cause = error.__cause__
    if isinstance(error, HookError):
        return cause is None or is_ours(cause)
    if not isinstance(error, ValueError | TypeError | IndexError | NotImplementedError):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return frame.filename.startswith(LIBRARY) and line.startswith("raise")
