"""A program as one file that runs by itself: the parts that it uses, the model, and the hooks."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from program import Program, write
from ranks import Outcome

import models
import oracle

HERE = Path(__file__).parent

HEAD = '''\
"""{mode}, {ranks} ranks: {verdict}. {text}

torchrun --standalone --nproc-per-node {ranks} this_file.py
"""

from argparse import Namespace
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import *
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from flex_model import FlexModel, HookFunction

# The unsharded model's; each rank's are set in main().
tp, tp_rank, tp_group, dp, dp_rank, dp_group = 1, 0, None, 1, 0, None
states, tiles = {states}, {tp}
'''

MAIN = '''\
HOOKS = {hooks}
BATCHES = {batches}


def inputs(batch, rank=None):
    """The model's arguments, of all rows or of a rank's. ``batch``: rows of each rank, length."""
    (rows, length), found = batch, []
    sizes = {{"B": sum(rows), "S": length}}
    for kind, high, shape in {arguments}:
        full = [sizes.get(size, size) for size in shape]
        if {same_rows} and "B" in shape:
            full[shape.index("B")] = 1
        generator = torch.Generator().manual_seed(31 * BATCHES.index(batch) + len(found))
        value = {{
            "float": lambda: torch.randn(full, generator=generator, dtype=torch.float64),
            "ids": lambda: torch.randint(0, high, full, generator=generator),
            "positions": lambda: torch.arange(full[0]),
            "ones": lambda: torch.ones(full, dtype=torch.float64),
            "zeros": lambda: torch.zeros(full, dtype=torch.float64),
        }}[kind]()
        value = value.expand([sizes.get(size, size) for size in shape]).clone()
        if rank is not None and "B" in shape:
            value = value.split(rows, shape.index("B"))[rank].clone()
        found.append(value)
    return found


def run(model, arguments, divide):
    with {context}:
        output = model(*arguments)
    if output.requires_grad:
        (output.sin().sum() / divide).backward()
    return output.detach()


def main():
    global tp, tp_rank, tp_group, dp, dp_rank, dp_group
    dist.init_process_group("gloo")
    oracle, seen, expected = Model().train({train}), [[] for _ in HOOKS], []
    with ExitStack() as stack:
        for hook, into in zip(HOOKS, seen):
            stack.enter_context(torch_hook(oracle, hook, seeing(hook, into)))
        for batch in BATCHES:
            [into.clear() for into in seen]
            output = run(oracle, inputs(batch), {dp})
            expected.append((output, [list(into) for into in seen]))

    mesh = init_device_mesh("cpu", ({dp}, {tp}), mesh_dim_names=("dp", "tp"))
    tp, tp_rank, tp_group = {tp}, mesh["tp"].get_local_rank(), mesh["tp"].get_group()
    dp, dp_rank, dp_group = {dp}, mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    model, records = Model().train({train}), {{}}
{wrap}
    flex = FlexModel(model, records, tensor_parallel_size=tp, data_parallel_size=dp{settings})
    for index, hook in enumerate(HOOKS):
        name = "register_hook" if hook.kind == "parameter" else f"register_{{hook.kind}}_hook"
        function = HookFunction(
            hook.site, None, EDITS[hook.doing], hook.leaf, output_name=str(index)
        )
        getattr(flex, name)(function)
    for batch, (output, oracles) in zip(BATCHES, expected):
        ours = run(flex, inputs(batch, dp_rank), 1)
        print(f"rank {{dist.get_rank()}}: sum of output {{ours.sum()}}, unsharded {{output.sum()}}")
        for index, values in enumerate(oracles if dist.get_rank() == 0 else ()):
            for value, record in zip(values, records[str(index)]):
                same = value.shape == record.shape and torch.allclose(value, record)
                print(HOOKS[index], "right" if same else "WRONG", [*record.shape], [*value.shape])


main()
'''


def standalone(program: Program, outcome: Outcome) -> str:
    """The program, the hooks under FlexModel, and beside them torch's own on one process."""
    import verdict

    written = write(program)
    text = written.text
    cell = outcome.cell or (program.cells or (None,))[0]
    hooks = [verdict.Hook(**hook) for hook in cell["hooks"]] if cell else []
    summary = " ".join(outcome.text.split()).replace("\\", "/")
    head = HEAD.format(
        mode=program.mode,
        ranks=program.ranks,
        tp=program.tp,
        states=program.layers == "states",
        verdict=outcome.verdict,
        text=summary if len(summary) <= 300 else summary[:300] + "...",
    )
    edits = [e for e in oracle.EDITS.values() if any(verdict.EDITS[h.doing] is e for h in hooks)]
    names = {name: edit and edit.__name__ for name, edit in verdict.EDITS.items()}
    used = [f"{name!r}: {f}" for name, f in names.items() if name in {h.doing for h in hooks}]
    main = MAIN.format(
        hooks=hooks,
        batches=[(list(batch.rows), batch.length) for batch in program.batches],
        arguments=[
            (a.kind, a.high, [dim[0].size for dim in a.dims]) for a in written.code.arguments
        ],
        same_rows=program.same_rows,
        context={"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}.get(
            program.run, "nullcontext()"
        ),
        train=program.run == "train",
        dp=program.dp,
        tp=program.tp,
        wrap="\n".join(f"    {line}" for line in wrap(program, written.code.plan)),
        settings="".join(
            f", {name}={cell[name]!r}"
            for name in ("edit_on", "output_ranks", "dp_batch")
            if cell.get(name) is not None
        ),
    )
    needed = [verdict.Hook, oracle.apply, verdict.seeing, oracle.torch_hook, *edits]
    if oracle.mixing in edits:
        needed.insert(0, models.random)
    parts = [*used_parts(text)]
    sources = [inspect.getsource(part) + "\n" for part in needed]
    notes = [f"# kept as: {json.dumps(program.to_json())}"]
    if cell and cell["is_stated"]:
        notes.append("# with the layout stated: expected_shape, or annotate_layout")
    return "\n".join(
        [head, *parts, text, "", *sources, f"EDITS = {{{', '.join(used)}}}", main, *notes]
    )


def wrap(program: Program, plan: dict[str, str]) -> Iterator[str]:
    """How the rank's model is given to the framework."""
    if program.layers in ("plan", "dtensor"):
        styles = {
            "column": "ColwiseParallel()",
            "column dtensor": "ColwiseParallel(use_local_output=False)",
            "row": "RowwiseParallel()",
            "sequence": "SequenceParallel(use_local_output=True)",
        }
        entries = []
        for name, kind in plan.items():
            to = kind.partition(" to ")[2]
            style = f"RowwiseParallel(output_layouts=Shard({to}))" if to else styles[kind]
            entries.append(f"{name!r}: {style}")
        yield f'parallelize_module(model, mesh["tp"], {{{", ".join(entries)}}})'
    if program.data == "ddp":
        yield "if list(model.parameters()):"
        yield "    model = DistributedDataParallel("
        yield "        model, process_group=dp_group, broadcast_buffers=False"
        yield "    )"
    if program.data == "fsdp2":
        yield 'fully_shard(model, mesh=mesh["dp"])'


def used_parts(text: str) -> Iterator[str]:
    """The definitions of parts.py that a text needs, in their order."""
    source = (HERE / "parts.py").read_text()
    definitions = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    wanted: set[str] = set()
    frontier = {text}
    while frontier:
        found = {
            name
            for name, used_by in itertools.product(definitions, frontier)
            if re.search(rf"\b{name}\b", used_by) and name not in wanted
        }
        wanted |= found
        frontier = {definitions[name] for name in found}
    for name, definition in definitions.items():
        if name in wanted:
            yield definition + "\n\n"
    if "custom." in text:
        yield "import custom  # tests/fuzz/custom.py\n"
