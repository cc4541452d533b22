"""Steps of a pipeline with hooks: agreed on by all ranks before anything is sent, run along the
schedule, and brought to an end together.

Nothing of ours crosses stages while the schedule runs: records, ``save_ctx``, gradients of
trainable modules and errors do when it is over, through groups of our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed.channel import Channel
from flex_model.distributed.header import site_hash
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.tensor_dicts import (
    describe,
    exchange_json,
    from_rank,
    gather_to_first,
)
from flex_model.errors import HookError, HookMismatchError, agreed, is_agreed, see
from flex_model.hooks.context import RunContext, advance_generator, seed_of_state
from flex_model.hooks.core import HookCore
from flex_model.hooks.registration import Registration
from flex_model.hooks.step import Step
from flex_model.hooks.table import Choice
from flex_model.pipelining import chunks, contexts, records, shapes
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.schedule import StageRunner
from flex_model.pipelining.stages import Directory, StageParameters
from flex_model.pipelining.stages import describe as describe_stage

_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, HookError, HookMismatchError)}


@dataclass(eq=False)
class StepCall:
    """What a call of a pipelined FlexModel asks for.

    Attributes:
        appends: Whether records are added to those of the step before.
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


@dataclass(eq=False)
class _Plan:
    """What all ranks agreed on before a step.

    Attributes:
        number: Of micro-batches.
        rows: By data-parallel rank: its rows of each micro-batch.
        seed: Of random edits.
    """

    number: int
    arg_chunks: list[Any]
    kwarg_chunks: list[Any]
    target_chunks: list[Any] | None
    rows: list[list[int]]
    seed: int


class Pipeline:
    """The stages of a schedule over all ranks. The constructor and ``run`` are collective over
    them.

    Args:
        core: Of this rank's stages.
        timeout_s: Of one wait for other ranks.

    Attributes:
        world, line: Channels to all ranks, and to those of this rank's pipeline.
        settings: What must be alike on all ranks, besides what a call says.
    """

    def __init__(
        self,
        schedule: Any,
        core: HookCore,
        step: Step,
        timeout_s: float,
        settings: list[Any],
        on_all_ranks: bool,
    ) -> None:
        mesh = core.mesh
        self.schedule, self.core, self.settings = schedule, core, settings
        self._step, self._on_all_ranks = step, on_all_ranks
        along = mesh.line("pp")
        self.world = Channel(Mesh(mesh.ranks, mesh.rank, tp_size=mesh.num_ranks), timeout_s)
        self.line = (
            self.world
            if len(along) == mesh.num_ranks
            else Channel(Mesh(along, mesh.coordinates["pp"], tp_size=len(along)), timeout_s)
        )
        self.runner = StageRunner(schedule, step, core, core.modules)
        self.parameters = StageParameters(self.runner.stages, core.channel)
        core.parameters = self.parameters
        try:
            self.directory = self._meet()
        except BaseException:
            self.close()
            raise
        self._connected: str | None = None  # for which inputs
        self._have_rows: tuple[Any, dict[int, bool]] | None = None

    def close(self) -> None:
        """Leave stages and schedule as they were, and give groups back. Local."""
        for name in ("step", "eval"):
            self.schedule.__dict__.pop(name, None)
        for stage in self.runner.stages:
            if stage.__dict__.pop("_settled", False):
                stage.inputs_meta = stage._outputs_meta = None
        self.runner.close()
        self.core.close()
        for channel in {self.world, self.line}:
            channel.close()

    def _meet(self) -> Directory:
        """Tell all ranks of this rank's stages, and hear of theirs."""
        schedule = self.schedule
        mine = {
            "stages": [describe_stage(stage) for stage in self.runner.stages],
            "schedule": [
                type(schedule).__name__,
                schedule._n_microbatches,
                schedule._loss_fn is not None,
                schedule.scale_grads,
                schedule._num_stages,
            ],
            "settings": self.settings,
        }
        told = exchange_json(self.world, mine, "FlexModel over a schedule: its stages")
        for what in ("schedule", "settings"):
            self._check_alike([of_rank[what] for of_rank in told], f"the {what} of a pipeline")
        grid = len(self.core.mesh.grid)
        described: dict[int, Any] = {}
        places: dict[int, int] = {}
        for rank, of_rank in enumerate(told):
            for stage in of_rank["stages"]:
                index, place = stage["index"], rank // grid
                if places.setdefault(index, place) != place:
                    raise agreed(
                        ValueError(
                            f"FlexModel: stage {index} is at the places {places[index]} and "
                            f"{place} of the pipeline; give each stage to one rank of a pipeline, "
                            "and data_parallel_size or tensor_parallel_size where several ranks "
                            "hold it"
                        )
                    )
                described[index] = stage
        missing = [i for i in range(schedule._num_stages) if i not in described]
        if missing:
            raise agreed(ValueError(f"FlexModel: no rank of the pipeline has the stages {missing}"))
        order = range(schedule._num_stages)
        return Directory([described[i] for i in order], [places[i] for i in order])

    def _check_alike(self, values: list[Any], what: str) -> None:
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

    # A step.

    def run(self, call: StepCall, output_ptr: dict[str, list[Tensor]]) -> Any:
        """Run one step; what the call returns on this rank."""
        plan = self._agree(call)
        core, step = self.core, self._step
        step.is_running, step.is_silent, step.failure, step.is_of_model = True, True, None, False
        try:
            self._prepare(call, plan)
            step.is_silent = False
            core.records.output_ptr.clear()
            if not call.appends:
                for registration in self._chosen(call):
                    output_ptr.pop(registration.hook_function.record_name, None)
            return self._run(call, plan, output_ptr)
        finally:
            step.is_running = step.is_silent = False
            core.records.output_ptr.clear()

    def _chosen(self, call: StepCall) -> list[Registration]:
        """The hooks that are active in this step, on whichever rank."""
        table = self.core.table
        return [r for r in table.registrations if table.is_chosen(r, call.choice)]

    def _agree(self, call: StepCall) -> _Plan:
        """Check the call on all ranks together.

        Raises:
            ValueError, TypeError: inputs that can't be run, on some rank.
            HookMismatchError: ranks call it differently, or have different hooks.
        """
        schedule, mesh = self.schedule, self.core.mesh
        stages = self.runner.stages
        has_first = any(stage.is_first for stage in stages)
        has_last = any(stage.is_last for stage in stages)
        number = 1 if call.batch_mode == "full" else schedule._n_microbatches
        args = call.args if has_first else ()
        rows, error = None, None
        try:
            self.directory.check_kwargs(call.kwargs)
            if has_first:
                rows = chunks.num_rows(schedule, args, call.kwargs)
                _check_rows(rows, number, "the batch")
            if has_last:
                self._check_target(call, number)
        except (ValueError, TypeError, IndexError) as wrong:
            error = [type(wrong).__name__, str(wrong)]
        sites = [registration.site for registration in self.core.table.registrations]
        alike = {
            "batch_mode": call.batch_mode,
            "return_on": call.return_on,
            "microbatch_dim": str(call.microbatch_dim),
            "groups": str(call.choice),
            "a backward pass (torch.no_grad, loss_fn)": call.has_backward,
            "names of keyword arguments": sorted(call.kwargs),
            "registered hooks": f"{len(sites)} hooks, digest {site_hash(*sites):x}",
        }
        mine = {
            "alike": alike,
            "error": error,
            "rows": rows,
            "inputs": [
                chunks.shapes_of(args) if has_first else None,
                chunks.shapes_of(call.kwargs),
                str(torch.get_autocast_dtype(stages[0].device.type))
                if torch.is_autocast_enabled(stages[0].device.type)
                else None,
            ],
            "seed": seed_of_state() if mesh.rank == 0 else 0,
        }
        told = exchange_json(self.world, mine, "the start of a step of the pipeline")
        for what in alike:
            self._check_alike([of_rank["alike"][what] for of_rank in told], what)
        self._raise_told([of_rank["error"] for of_rank in told])
        grid = len(mesh.grid)
        first = self.directory.places[0] * grid
        rows_of = [
            told[first + row * mesh.tp_size]["rows"] or number for row in range(mesh.dp_size)
        ]
        my_rows = told[first + mesh.place]["rows"]
        self._inputs = json.dumps(
            [number, call.has_backward, [of_rank["inputs"] for of_rank in told]]
        )
        target = call.target if has_last else None
        return _Plan(
            number,
            chunks.split_args(schedule, args, number),
            chunks.split_kwargs(schedule, call.kwargs, number, my_rows),
            None if target is None else list(torch.tensor_split(target, number)),
            [[of_rank // number] * number for of_rank in rows_of],
            told[0]["seed"],
        )

    def _check_target(self, call: StepCall, number: int) -> None:
        if call.losses is not None and not isinstance(call.losses, list):
            raise TypeError(f"losses must be a list, got {type(call.losses).__name__}")
        if self.schedule._loss_fn is None:
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
        _check_rows(call.target.shape[0] if call.target.dim() else None, number, "target")

    def _raise_told(self, errors: list[Any]) -> None:
        """What some rank was wrong with, on all."""
        found = [(rank, *error) for rank, error in enumerate(errors) if error]
        if not found:
            return
        texts = list(dict.fromkeys(text for _, _, text in found))
        where = "" if len(found) == len(errors) else f" (on rank {found[0][0]})"
        raise agreed(_ERRORS.get(found[0][1], ValueError)(f"{'; '.join(texts)}{where}"))

    def _prepare(self, call: StepCall, plan: _Plan) -> None:
        """Shapes and buffers for these inputs, where they are not those of the step before."""
        if self._connected != self._inputs:
            self._connected = None
            with torch.inference_mode(False):
                args, kwargs = plan.arg_chunks[0], plan.kwarg_chunks[0]
                error = shapes.settle(
                    self.runner.overlaid, self.directory, self.line, args, kwargs, call.has_backward
                )
                told = exchange_json(self.world, error, "the shapes of the pipeline's stages")
                if any(told):
                    text = next(text for text in told if text)
                    raise agreed(ValueError(f"the pipeline can't run these inputs: {text}"))
                self.runner.connect(plan.number, call.has_backward, args, kwargs)
            self._connected = self._inputs

    def _run(self, call: StepCall, plan: _Plan, output_ptr: dict[str, list[Tensor]]) -> Any:
        core, step, schedule = self.core, self._step, self.schedule
        have_rows = self._find_rows(call, plan)
        self._read_parameters(call)
        before = contexts.snapshot(core.save_ctx)
        run = core.begin(call.choice)
        run.seed = plan.seed
        divisor = plan.number if schedule.scale_grads else 1
        core.caller.gradient_scale = core.mesh.dp_size * divisor
        gradients = Gradients(core, core.modules)
        losses: list[Tensor] = []
        output = None
        try:
            output = self.runner.run(
                plan.arg_chunks,
                plan.kwarg_chunks,
                plan.target_chunks,
                losses,
                call.return_outputs,
                call.has_backward,
            )
            if call.has_backward and not step.is_silent:
                gradients.run_hooks()
        except BaseException as error:
            step.fail_in_model(error, "schedule")
        consumed = self._end_run(run)
        found = self._join_records(call, plan, have_rows)
        try:
            texts = self._finish(
                call, plan, found, before, gradients, consumed, output, divisor, output_ptr
            )
        except BaseException:
            gradients.put_back(is_failed=True)
            raise
        gradients.put_back(is_failed=bool(texts))
        if texts:
            self._connected = None
            self._raise_failure(texts)
        if call.losses is not None and plan.target_chunks is not None:
            call.losses[:] = losses
        return self._output

    def _find_rows(self, call: StepCall, plan: _Plan) -> dict[tuple[str, str], bool]:
        """By record's name and kind: whether there are rows of the batch in it; for micro-batches
        of one row only.
        """
        in_all = sum(of_rank[0] for of_rank in plan.rows)
        if plan.number == 1 or in_all != 1:
            return {}
        mine = [r for r in self._chosen(call) if r.module is not None]
        key = (self._inputs, tuple(r.index for r in mine))
        if self._have_rows is None or self._have_rows[0] != key:
            self._step.is_silent = True
            found = shapes.have_rows(
                self.runner.overlaid,
                [r for r in mine if r.kind != "tensor"],
                plan.arg_chunks[0],
                plan.kwarg_chunks[0],
                lambda registration: self._dim(call, registration.hook_function.record_name),
            )
            self._step.is_silent = False
            self._have_rows = key, found
        told = self._have_rows[1]
        return {
            (r.hook_function.record_name, r.kind): told[r.index] for r in mine if r.index in told
        }

    def _dim(self, call: StepCall, name: str) -> int:
        given = call.microbatch_dim
        if isinstance(given, int):
            return given
        default = chunks.batch_dim(self.schedule)
        if given is None:
            return default
        modules = [r.name for r in self._chosen(call) if r.hook_function.record_name == name]
        return next((given[module] for module in modules if module in given), default)

    def _read_parameters(self, call: StepCall) -> None:
        """Full parameters that hooks named, whichever stage has them, before the schedule runs."""
        names = {
            name: None
            for registration in self._chosen(call)
            for name in registration.hook_function.parameter_names
        }
        found = {name: self.parameter(name, None, sharded=False) for name in names}
        self.core.caller.full_parameter = found.__getitem__

    def _end_run(self, run: RunContext) -> bool:
        """Records of the stage's ranks to its first; whether an edit drew random numbers here."""
        consumed, run.consumed = run.consumed, False
        try:
            self.core.end(run, None)
        except HookError as error:
            self._step.fail(str(error), error)
        self.core.table.forget_calls()
        return consumed

    def _join_records(
        self, call: StepCall, plan: _Plan, have_rows: dict[tuple[str, str], bool]
    ) -> list[records.StageRecords]:
        if self._step.failure or not self.core.records.keeps:
            return []
        try:
            return records.joined(
                self.core.records.output_ptr,
                plan.number,
                plan.rows,
                lambda name: self._dim(call, name),
                lambda name, kind: have_rows.get((name, kind)),
            )
        except ValueError as error:
            self._step.fail(str(error), error)
            return []

    def _finish(
        self,
        call: StepCall,
        plan: _Plan,
        found: list[records.StageRecords],
        before: dict[str, Any],
        gradients: Gradients,
        consumed: bool,
        output: Any,
        divisor: int,
        output_ptr: dict[str, list[Tensor]],
    ) -> list[tuple[int, str]]:
        """Bring to the ranks what belongs there; failures of ranks, by rank, if there are any."""
        core, mesh = self.core, self.core.mesh
        is_leader = mesh.place == 0
        has_last = any(stage.is_last for stage in self.runner.stages)
        sent: list[Tensor] = []
        written = contexts.written(core.save_ctx, before) if is_leader else []
        encoded = {}
        for name in written:
            try:
                encoded[name] = contexts.encode(getattr(core.save_ctx, name), sent)
            except TypeError as error:
                encoded[name] = {"unknown": str(error)}
        outputs: list[Tensor] = []
        structure = None
        if call.return_on == "all" and has_last and not self._step.failure:
            try:
                structure = contexts.encode(output, outputs)
            except TypeError as error:
                self._step.fail(f"return_on='all': the last stage returns {error}", error)
        failure = self._step.failure
        mine = {
            "error": None if failure is None else _told_failure(failure, self._step, is_leader),
            "consumed": consumed,
            "records": records.told(found),
            "written": [encoded, describe(sent)],
            "gradients": gradients.told(),
            "output": [structure, describe(outputs)],
        }
        told = exchange_json(self.world, mine, "the end of a step of the pipeline")
        if any(of_rank["consumed"] for of_rank in told):
            advance_generator()
        failed = [(r, of_rank["error"]) for r, of_rank in enumerate(told) if of_rank["error"]]
        if failed or self._step.failure:
            return failed or [(mesh.rank, ["HookError", "a stage failed"])]
        self._check_written([of_rank["written"][0] for of_rank in told])
        records.deliver(
            self.world, found, [r["records"] for r in told], self._on_all_ranks, output_ptr
        )
        self._merge_contexts([of_rank["written"] for of_rank in told], sent)
        along = [told[rank] for rank in self._along()]
        gradients.add_stages(self.line, [r["gradients"] for r in along], divisor)
        self._output = output
        if call.return_on == "all" and call.return_outputs:
            last = self.directory.places[-1]
            structure, described = along[last]["output"]
            tensors = from_rank(self.line, last, outputs, described)
            device = self.runner.stages[0].device
            tensors = [tensor.detach().to(device) for tensor in tensors]
            self._output = contexts.decode(structure, tensors)
        return []

    def _along(self) -> list[int]:
        """This pipeline's ranks, as places among all."""
        grid = len(self.core.mesh.grid)
        return list(range(self.core.mesh.place, self.core.mesh.num_ranks, grid))

    def _check_written(self, written: list[dict[str, Any]]) -> None:
        """ValueError, on every rank, for attributes of save_ctx that can't be merged."""
        writers: dict[str, list[int]] = {}
        for rank, attributes in enumerate(written):
            for name, value in attributes.items():
                writers.setdefault(name, []).append(rank)
                if rank and isinstance(value, dict) and "unknown" in value:
                    raise agreed(
                        ValueError(
                            f"save_ctx.{name} is {value['unknown']} on rank {rank}, and can't be "
                            "sent to rank 0; keep tensors, numbers, text, and lists and dicts of "
                            "them"
                        )
                    )
        twice = [f"save_ctx.{n} by the ranks {r}" for n, r in writers.items() if len(r) > 1]
        if twice:
            raise agreed(
                ValueError(
                    f"several stages wrote one attribute: {'; '.join(twice)}; a pipeline's stages "
                    "have no save_ctx in common while a step runs: give each hook an attribute of "
                    "its own, and put them together after the step"
                )
            )

    def _merge_contexts(self, written: list[Any], sent: list[Tensor]) -> None:
        """Rank 0's save_ctx gets what the other stages wrote."""
        if self.world.is_local or not any(attributes for attributes, _ in written[1:]):
            return
        received = gather_to_first(self.world, sent, [described for _, described in written])
        for (attributes, _), tensors in zip(written[1:], (received or [])[1:]):
            for name, value in attributes.items():
                setattr(self.core.save_ctx, name, contexts.decode(value, tensors))

    def _raise_failure(self, told: list[Any]) -> None:
        step = self._step
        own = step.failure[1] if step.failure else None
        if own is not None and step.is_of_model:
            raise own
        if own is not None and not isinstance(own, Exception):
            raise own
        texts: dict[str, None] = {}
        kinds = set()
        for rank, (kind, text) in told:
            kinds.add(kind)
            texts[text if text.startswith("rank ") else f"rank {rank}: {text}"] = None
        kind = HookMismatchError if "HookMismatchError" in kinds else HookError
        error = agreed(
            kind(
                f"{'; '.join(texts)}. The step was finished without edits from there on; the "
                "gradients that it left mean nothing: zero them"
            )
        )
        raise error from own

    # Parameters.

    def parameter(self, name: str, expected_shape: Any, sharded: bool = True) -> Tensor:
        """A full parameter, from the first stage that has it. Collective."""
        return self._read(name, lambda p: p.get(name, expected_shape, sharded=sharded))

    def gradient(self, name: str, expected_shape: Any) -> Tensor | None:
        """A parameter's full gradient, from the first stage that has it. Collective."""
        return self._read(name, lambda p: p.gradient(name, expected_shape))

    def _read(self, name: str, read: Any) -> Any:
        first = self.directory.holders_of_parameter(name)[0]
        place = self.directory.places[first]
        value, error = None, None
        if first in self.parameters.of_stage:
            value, error = _attempt(lambda: read(self.parameters.of_stage[first]))
        tensors = [] if value is None else [value]
        told = exchange_json(self.line, [error, describe(tensors)], f"parameter {name!r}")
        self._raise_told([of_rank[0] for of_rank in told])
        received = from_rank(self.line, place, tensors, told[place][1])
        return received[0] if received else None

    def set_parameter(self, name: str, full: Tensor) -> None:
        """Write a full parameter on all stages that have it. Collective."""
        error = None
        for stage in self.directory.holders_of_parameter(name):
            mine = self.parameters.of_stage.get(stage)
            if mine is not None and error is None:
                _, error = _attempt(lambda mine=mine: mine.set(name, full))
        self._raise_told(exchange_json(self.world, error, f"a new value of parameter {name!r}"))


def _attempt(function: Any) -> tuple[Any, list[str] | None]:
    """What it returns, or what was wrong, for the other ranks to be told."""
    try:
        return function(), None
    except (ValueError, TypeError, HookError) as error:
        return None, [type(error).__name__, str(error)]


def _told_failure(
    failure: tuple[str, BaseException], step: Step, is_leader: bool
) -> list[str] | None:
    text, cause = failure
    if is_agreed(cause) and not is_leader:
        return None  # all ranks of the stage know of it, and its first tells
    return [type(cause).__name__, text]


def _check_rows(rows: int | None, number: int, what: str) -> None:
    """ValueError where a batch can't be cut into this many micro-batches of one size."""
    if number == 1:
        return
    if rows is None:
        raise ValueError(
            f"{what} has no tensor that can be split into {number} micro-batches; give the inputs "
            "of the whole batch"
        )
    if rows < number or rows % number:
        raise ValueError(
            f"{what} has {rows} rows, and the schedule cuts it into {number} micro-batches of one "
            f"size; give a multiple of {number} rows, or use batch_mode='full'"
        )
