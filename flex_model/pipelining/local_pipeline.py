"""This rank's part of a pipeline with hooks: how it reaches the other ranks, what the path of its
micro-batches depends on, and the plan of a step, on which all ranks agree before it, so that
nothing is sent where some rank can't continue.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flex_model.distributed.agreement import check_equal, gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import site_hash
from flex_model.distributed.mesh import Mesh, group_ranks
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import agreed, check_type
from flex_model.hooks.core import HookCore
from flex_model.hooks.random_state import seed_of_state
from flex_model.hooks.save_ctx import StageContext
from flex_model.integrations.mesh_sources import Source
from flex_model.layouts.arguments import describe
from flex_model.layouts.cache import Conditions
from flex_model.layouts.inputs import SharedInputs
from flex_model.layouts.kept import Attributes, KeptTensors
from flex_model.layouts.sources import Constants, named_inputs
from flex_model.parameters.trainable import refuse_different
from flex_model.pipelining import microbatches
from flex_model.pipelining.instrumented_stage import LocalSchedule, StepCall, StepPlan, stages_of
from flex_model.pipelining.stages import (
    LocalStages,
    PipelineParameters,
    StageIndex,
    StageParameters,
    describe_stage,
)
from flex_model.runs.settings import Settings
from flex_model.runs.step import MicrobatchState


class LocalPipeline:
    """This rank's part of a pipeline. The constructor is collective over all ranks.

    Attributes:
        core: The engine of the hooks on this rank's stages.
        root: This rank's stages as one module.
        state: The state of the step that runs.
        conditions: Describes what the path of a step depends on.
        mesh: The ranks of a step.
        world, line: Communicators to all ranks of a step, and to those of this rank's pipeline.
        everyone: The communicator to all ranks of the model.
        local: This rank's part of the schedule.
        index: The modules and parameters of all stages, by name.
        parameters: Reads and writes the parameters of all stages in full.
    """

    def __init__(self, schedule: Any, settings: Settings, local_class: Any = LocalSchedule) -> None:
        stages = stages_of(schedule)
        if settings.dp_batch == "global":
            raise ValueError(
                'FlexModel: dp_batch="global" is not for a pipeline, whose micro-batches are '
                'joined to one batch; leave it out and pad the inputs, or use dp_batch="local"'
            )
        if "step" in vars(schedule):
            raise TypeError("the schedule is that of a FlexModel already; restore() it first")
        self.schedule, self.settings, self.state = schedule, settings, MicrobatchState()
        self.root, ranks = LocalStages(stages), group_ranks(stages[0].group)
        stages_mesh = Mesh(ranks, ranks.index(dist.get_rank()), pp_size=len(ranks))
        source = Source("the stages' process group", stages_mesh, is_exact=False)
        whole = settings.find_mesh(self.root, [source])
        own = replace(settings, output_ranks="rank0")  # of each stage, from where records are sent
        context, modules = StageContext(), nn.ModuleDict()
        core = HookCore(self.root, whole, {}, context, modules, own, self.state, StageParameters)
        self.core = core
        self.mesh = mesh = core.mesh
        self.conditions = StepConditions(self.root)
        with contextlib.ExitStack() as stack:
            stack.callback(core.close)
            timeout_s, along = core.communicator.timeout_s, mesh.axis_ranks("pp")
            self.world = self.line = self.everyone = Communicator(_flat(mesh), timeout_s)
            stack.callback(self.world.close)
            if whole is not mesh:
                self.everyone = Communicator(_flat(whole), timeout_s)
                stack.callback(self.everyone.close)
            if len(along) < mesh.num_ranks:
                line = Mesh(along, mesh.coordinates["pp"], tp_size=len(along))
                self.line = Communicator(line, timeout_s)
                stack.callback(self.line.close)
            self.local = local_class(schedule, self.state, core)
            stack.callback(self.local.close)
            self.index = self._index_stages()
            self.parameters = PipelineParameters(core.parameters, self.index, self.world, self.line)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Leave the stages as they were, and free groups. Local."""
        self._stack.close()

    def pp_rank_of(self, rank: int) -> int:
        """Return the place of a rank's stages along the pipeline."""
        return rank // len(self.mesh.stage_ranks)

    def _index_stages(self) -> StageIndex:
        schedule, settings = self.schedule, self.settings
        equal = {
            "the schedule of a pipeline": [
                type(schedule).__name__,
                schedule._n_microbatches,
                schedule._loss_fn is not None,
                schedule.scale_grads,
                schedule._num_stages,
            ],
            "the settings of a pipeline": [
                settings.edit_on,
                settings.output_ranks,
                self.mesh.describe(),
                settings.save_ctx_on,
            ],
        }
        gathered = gather_checked(
            self.world,
            "FlexModel over a schedule: its stages",
            lambda: [describe_stage(stage) for stage in self.local.stages],
            equal,
        )
        described: dict[int, Any] = {}
        pp_ranks: dict[int, int] = {}
        for rank, stages in enumerate(gathered):
            for stage in stages:
                index, pp_rank = stage["index"], self.pp_rank_of(rank)
                if pp_ranks.setdefault(index, pp_rank) != pp_rank:
                    raise agreed(
                        ValueError(
                            f"FlexModel: stage {index} is at the places {pp_ranks[index]} and "
                            f"{pp_rank} of the pipeline; give each stage to one rank of a "
                            "pipeline, and data_parallel_size or tensor_parallel_size where "
                            "several ranks hold it"
                        )
                    )
                described[index] = stage
        order = range(schedule._num_stages)
        missing = [index for index in order if index not in described]
        if missing:
            raise agreed(ValueError(f"FlexModel: no rank of the pipeline has the stages {missing}"))
        return StageIndex(
            [described[i] for i in order], [pp_ranks[i] for i in order], self.local.calls_roots
        )


def _flat(mesh: Mesh) -> Mesh:
    """Return the mesh of the same ranks as one stage."""
    return Mesh(mesh.ranks, mesh.rank, tp_size=mesh.num_ranks, left_out=mesh.left_out)


class StepConditions:
    """Describes it for one rank's stages. Local: ranks describe it differently."""

    def __init__(self, root: nn.Module) -> None:
        self._conditions = Conditions(root)
        self._attributes = Attributes(root, Constants(root), KeptTensors())

    def digest(self) -> int:
        """Return a hash of the modules, their hooks and attributes, and of torch's modes."""
        form, sizes = self._conditions.form((), {}, 0, self._attributes)
        return site_hash(form, *sizes)

    def note_attributes(self) -> None:
        """Find the attributes in which the modules have kept tensors, after a step."""
        self._attributes.scan()


def digest_of_inputs(args: Any, kwargs: dict[str, Any]) -> int:
    """Return a hash of the inputs, except for the values of tensors."""
    parts: list[Any] = []
    sizes: list[int] = []
    describe((args, kwargs), parts, sizes)
    return site_hash(*parts, *sizes)


def plan_step(call: StepCall, pipeline: LocalPipeline, prepared: int | None) -> StepPlan:
    """Check the call on all ranks, and split its inputs. Collective.

    Args:
        prepared: ``StepPlan.inputs`` of the step that made this rank's buffers.

    Raises:
        ValueError, TypeError: inputs that can't be run, on some rank.
        HookMismatchError: ranks call it differently, or have different hooks.
    """
    core, schedule, index = pipeline.core, pipeline.schedule, pipeline.index
    settings = call.settings
    mesh, stages, world = core.mesh, pipeline.local.stages, pipeline.world
    has_first, has_last = stages[0].is_first, stages[-1].is_last
    number = 1 if settings.batch_mode == "full" else schedule._n_microbatches
    args = call.args if has_first else ()
    target = call.target if has_last else None
    has_edits = core.runs_edits and any(r.edits for r in core.table.chosen(call.choice))
    registrations = core.table.registrations
    sites = site_hash(*(registration.site for registration in registrations))
    shown = "; ".join(registration.describe() for registration in registrations[:16])
    equal = {
        "batch_mode": settings.batch_mode,
        "return_on": settings.return_on,
        "microbatch_dim": str(settings.microbatch_dim),
        "groups": str(call.choice),
        "the modules of run_until": str(call.until),
        "a backward pass (torch.no_grad, loss_fn)": call.has_backward,
        "names of keyword arguments": sorted(call.kwargs),
        "registered hooks": f"{len(registrations)}, digest {sites:x}: {shown or 'none'}",
    }

    def describe() -> dict[str, Any]:
        index.check_kwargs(call.kwargs)
        pipeline.local.check_inputs(call.kwargs)
        check_dims(settings.microbatch_dim, index)
        rows = None
        if has_first:
            rows = microbatches.num_rows(schedule, args, call.kwargs, number)
            if rows is None and number > 1:
                raise ValueError(
                    "the batch has no tensor that can be split into "
                    f"{number} micro-batches; give the inputs of the whole batch"
                )
        if has_last:
            _check_target(call, schedule, number)
        device = stages[0].device.type
        autocast = torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
        return {
            "rows": rows,
            "target_rows": target.shape[0] if isinstance(target, Tensor) and target.dim() else None,
            "inputs": [
                microbatches.shapes_of(call.kwargs),
                digest_of_inputs(args, call.kwargs),
                autocast,
                sorted({str(p.dtype) for stage in stages for p in stage.submod.parameters()}),
            ],
            "values": _shared_values(call, core, args) if mesh.tp_size > 1 else 0,
            "seed": seed_of_state() if mesh.rank == 0 else 0,
            "modules": core.replicas.digest() if has_edits else None,
            "prepared": prepared,
            "conditions": number > 1 and pipeline.conditions.digest(),
        }

    gathered = gather_checked(world, "the start of a step of the pipeline", describe, equal)
    if len({of_rank["modules"] for of_rank in gathered} - {None}) > 1:
        digests = core.replicas.digests() if has_edits else None
        refuse_different(exchange_json(world, digests, "the values of trainable modules"))
    for start in range(0, len(gathered), mesh.tp_size):
        along = [of_rank["values"] for of_rank in gathered[start : start + mesh.tp_size]]
        check_equal(along, "the values of inputs, which tensor-parallel ranks share (as hashes)")
    num_ranks = len(mesh.stage_ranks)
    first, last = index.pp_ranks[0] * num_ranks, index.pp_ranks[-1] * num_ranks
    for rank in range(num_ranks):
        along = [of_rank["inputs"][0] for of_rank in gathered[rank::num_ranks]]
        check_equal(along, "shapes of keyword arguments along a pipeline")
        _check_target_rows(gathered[first + rank]["rows"], gathered[last + rank]["target_rows"])
    rows = [gathered[first + i * mesh.tp_size]["rows"] or number for i in range(mesh.dp_size)]
    of_ranks = [of_rank["inputs"] for of_rank in gathered]
    inputs = site_hash(json.dumps([number, call.has_backward, of_ranks]))
    own_rows = gathered[first + mesh.group_rank]["rows"]
    arg_chunks, kwarg_chunks = microbatches.split(schedule, args, call.kwargs, number, own_rows)
    return StepPlan(
        inputs,
        all(of_rank["prepared"] == inputs for of_rank in gathered),
        site_hash(inputs, *(of_rank["conditions"] for of_rank in gathered)),
        number,
        arg_chunks,
        kwarg_chunks,
        None if target is None else list(torch.tensor_split(target, number)),
        [[of_rank // number] * number for of_rank in rows],
        gathered[0]["seed"],
    )


def _shared_values(call: StepCall, core: HookCore, args: tuple[Any, ...]) -> int:
    """Return a hash of the inputs that tensor-parallel ranks share. Local."""
    stated = core.tracking.statements.of_inputs("", core.module)
    return SharedInputs(named_inputs(core.module, args, call.kwargs), stated).hash()


def _check_target(call: StepCall, schedule: Any, number: int) -> None:
    check_type("losses must be a list", call.losses, list | None)
    if schedule._loss_fn is None:
        if call.target is not None or call.losses is not None:
            raise ValueError(
                "target or losses were passed, but the schedule has no loss_fn; make it with one"
            )
        return
    if call.target is None:
        if call.has_backward:
            raise ValueError(
                "the schedule has a loss_fn, and no target was passed on the last stage's rank; "
                "give target=, or run it under torch.no_grad()"
            )
        return
    check_type("target must be a Tensor", call.target, Tensor)
    if call.target.dim() == 0 and number > 1:
        raise ValueError(f"target is one number; give a row for each of {number} micro-batches")
    if call.target.dim():
        microbatches.check_divides(call.target.shape[0], number, "target")


def _check_target_rows(rows: int | None, target_rows: int | None) -> None:
    """ValueError for a target of other rows than the batch's: a loss of parts might broadcast
    them.
    """
    if rows and target_rows is not None and (target_rows < rows or target_rows % rows):
        raise agreed(
            ValueError(
                f"the batch has {rows} rows, and target {target_rows}; give the target of the "
                "whole batch, with a row for each of the batch's or several"
            )
        )


def check_dims(dims: int | Mapping[str, int | None] | None, index: StageIndex) -> None:
    """TypeError, or ValueError for an unknown name, unless ``microbatch_dim`` is a dim, or dims by
    names of modules.
    """
    by_name = dims if isinstance(dims, Mapping) else {"": 0 if dims is None else dims}
    for name, dim in by_name.items():
        if isinstance(dim, bool) or not isinstance(dim, (int, type(None))):
            raise TypeError(
                "microbatch_dim must be an int, or a dict of ints or None by module name; got "
                f"{type(dim).__name__}{f' for {name!r}' if name else ''}"
            )
        if name:
            index.stages_of(name)
