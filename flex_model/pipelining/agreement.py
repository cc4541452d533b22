"""What all ranks agree on before a step of a pipeline, so that nothing is sent where some rank
can't go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import site_hash
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import HookError, HookMismatchError, agreed, see
from flex_model.hooks.core import HookCore
from flex_model.hooks.random_state import seed_of_state
from flex_model.hooks.table import Choice
from flex_model.parameters.trainable import refuse_different
from flex_model.pipelining import chunks
from flex_model.pipelining.stages import Directory

_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, HookError, HookMismatchError)}


@dataclass(eq=False)
class StepCall:
    """What a call of a pipelined FlexModel asks for.

    Attributes:
        appends: Whether records are added to those of the step before.
        until: Names of modules, with kinds of hooks, after which nothing is computed; None: all is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    losses: list[Tensor] | None
    return_outputs: bool
    choice: Choice
    batch_mode: str
    return_on: str
    microbatch_dim: int | Mapping[str, int] | None
    has_backward: bool
    appends: bool
    until: list[tuple[str, str]] | None = None


@dataclass(eq=False)
class Plan:
    """What all ranks agreed on before a step.

    Attributes:
        inputs: What tells one kind of inputs, of all ranks, from another.
        number: Of micro-batches.
        rows: By data-parallel rank: its rows of each micro-batch.
        seed: Of random edits.
    """

    inputs: str
    number: int
    arg_chunks: list[Any]
    kwarg_chunks: list[Any]
    target_chunks: list[Any] | None
    rows: list[list[int]]
    seed: int


def agree(
    call: StepCall,
    schedule: Any,
    stages: Sequence[Any],
    core: HookCore,
    directory: Directory,
    world: Communicator,
) -> Plan:
    """Check the call on all ranks together.

    Raises:
        ValueError, TypeError: inputs that can't be run, on some rank.
        HookMismatchError: ranks call it differently, or have different hooks.
    """
    mesh = core.mesh
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    number = 1 if call.batch_mode == "full" else schedule._n_microbatches
    args = call.args if has_first else ()
    target = call.target if has_last else None
    rows, error = None, None
    try:
        directory.check_kwargs(call.kwargs)
        check_dims(call.microbatch_dim, directory)
        if has_first:
            rows = chunks.num_rows(schedule, args, call.kwargs, number)
            if rows is None and number > 1:
                raise ValueError(
                    "the batch has no tensor that can be split into "
                    f"{number} micro-batches; give the inputs of the whole batch"
                )
        if has_last:
            _check_target(call, schedule, number)
    except (ValueError, TypeError, IndexError) as wrong:
        error = [type(wrong).__name__, str(wrong)]
    compares_modules = core.runs_edits and any(r.edits for r in core.table.chosen(call.choice))
    sites = [registration.site for registration in core.table.registrations]
    alike = {
        "batch_mode": call.batch_mode,
        "return_on": call.return_on,
        "microbatch_dim": str(call.microbatch_dim),
        "groups": str(call.choice),
        "what to run to (run_until)": str(call.until),
        "a backward pass (torch.no_grad, loss_fn)": call.has_backward,
        "names of keyword arguments": sorted(call.kwargs),
        "registered hooks": f"{len(sites)} hooks, digest {site_hash(*sites):x}",
    }
    mine = {
        "alike": alike,
        "error": error,
        "rows": rows,
        "target_rows": target.shape[0] if isinstance(target, Tensor) and target.dim() else None,
        "inputs": [
            chunks.shapes_of(args) if has_first else None,
            chunks.shapes_of(call.kwargs),
            str(torch.get_autocast_dtype(stages[0].device.type))
            if torch.is_autocast_enabled(stages[0].device.type)
            else None,
            sorted({str(p.dtype) for stage in stages for p in stage.submod.parameters()}),
        ],
        "seed": seed_of_state() if mesh.rank == 0 else 0,
        "modules": core.replicas.digest() if compares_modules else None,
    }
    told = exchange_json(world, mine, "the start of a step of the pipeline")
    for what in alike:
        check_alike([of_rank["alike"][what] for of_rank in told], what)
    raise_told([of_rank["error"] for of_rank in told])
    if len({of_rank["modules"] for of_rank in told} - {None}) > 1:
        digests = core.replicas.digests() if compares_modules else None
        refuse_different(exchange_json(world, digests, "the values of trainable modules"))
    grid = len(mesh.stage_ranks)
    first, last = directory.places[0] * grid, directory.places[-1] * grid
    for place in range(grid):
        along = [told[rank]["inputs"][1] for rank in range(place, len(told), grid)]
        check_alike(along, "shapes of keyword arguments along a pipeline")
        _check_target_rows(told[first + place]["rows"], told[last + place]["target_rows"])
    rows_of = [told[first + row * mesh.tp_size]["rows"] or number for row in range(mesh.dp_size)]
    my_rows = told[first + mesh.group_rank]["rows"]
    return Plan(
        json.dumps([number, call.has_backward, [of_rank["inputs"] for of_rank in told]]),
        number,
        chunks.split_args(schedule, args, number),
        chunks.split_kwargs(schedule, call.kwargs, number, my_rows),
        None if target is None else list(torch.tensor_split(target, number)),
        [[of_rank // number] * number for of_rank in rows_of],
        told[0]["seed"],
    )


def _check_target(call: StepCall, schedule: Any, number: int) -> None:
    if call.losses is not None and not isinstance(call.losses, list):
        raise TypeError(f"losses must be a list, got {type(call.losses).__name__}")
    if schedule._loss_fn is None:
        if call.target is not None or call.losses is not None:
            raise ValueError(
                "target or losses were given, but the schedule has no loss_fn; make it with one"
            )
        return
    if call.target is None:
        if call.has_backward:
            raise ValueError(
                "the schedule has a loss_fn, and no target was given on the last stage's rank; "
                "give target=, or run it under torch.no_grad()"
            )
        return
    if not isinstance(call.target, Tensor):
        raise TypeError(f"target must be a Tensor, got {type(call.target).__name__}")
    if call.target.dim() == 0 and number > 1:
        raise ValueError(f"target is one number; give a row for each of {number} micro-batches")
    if call.target.dim():
        chunks.check_divides(call.target.shape[0], number, "target")


def _check_target_rows(rows: int | None, target_rows: int | None) -> None:
    """ValueError where a target is not the batch's: a loss of parts might broadcast them."""
    if rows and target_rows is not None and (target_rows < rows or target_rows % rows):
        raise agreed(
            ValueError(
                f"the batch has {rows} rows, and target {target_rows}; give the target of the "
                "whole batch, with a row for each of the batch's or several"
            )
        )


def check_dims(dims: int | Mapping[str, int] | None, directory: Directory) -> None:
    """That ``microbatch_dim`` is a dim, or dims by names of modules."""
    of_names = dims if isinstance(dims, Mapping) else {"": 0 if dims is None else dims}
    for name, dim in of_names.items():
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(
                "microbatch_dim must be an int, or a dict of ints by module name; got "
                f"{type(dim).__name__}{f' for {name!r}' if name else ''}"
            )
        if name:
            directory.stages_of(name)


# ---- Among ranks ----


def check_alike(values: list[Any], what: str) -> None:
    """HookMismatchError where ranks told different things; on all of them."""
    differ = [rank for rank, value in enumerate(values) if value != values[0]]
    if differ:
        listed = "; ".join(f"rank {rank}: {values[rank]}" for rank in [0, *differ[:3]])
        raise agreed(
            HookMismatchError(
                f"ranks differ in {what}: {listed}. Every rank makes the same calls with the "
                f"same settings ({see('ranks-differ')})"
            )
        )


def raise_told(errors: list[Any]) -> None:
    """What some rank was wrong with, on all."""
    found = [(rank, *error) for rank, error in enumerate(errors) if error]
    if not found:
        return
    texts = list(dict.fromkeys(text for _, _, text in found))
    where = "" if len(found) == len(errors) else f" (on rank {found[0][0]})"
    raise agreed(_ERRORS.get(found[0][1], ValueError)(f"{'; '.join(texts)}{where}"))


def attempt(function: Any) -> tuple[Any, list[str] | None]:
    """What it returns, or what was wrong, for the other ranks to be told."""
    try:
        return function(), None
    except (ValueError, TypeError, HookError) as error:
        return None, [type(error).__name__, str(error)]
