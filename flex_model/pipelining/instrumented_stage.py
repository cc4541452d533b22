"""One rank's stages under torch's schedules: run a step in micro-batches or as one, to its end
whatever fails.

Torch's schedules are used as they are. Methods of the stages are replaced on their instances: hooks
see which micro-batch is computed, and an exception in the middle of a schedule leaves no other
stage waiting, for zeros replace what failed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from flex_model.hooks.core import HookCore
from flex_model.hooks.table import Choice
from flex_model.integrations import torch_pipelining
from flex_model.integrations.torch_pipelining import to_meta
from flex_model.pipelining.gradients import Gradients
from flex_model.pipelining.row_proofs import StageRecording
from flex_model.pipelining.stages import accepted_kwargs
from flex_model.pipelining.stand_ins import OwnTensor
from flex_model.runs.graphs import leaves_between
from flex_model.runs.settings import Settings
from flex_model.runs.step import MicrobatchState
from flex_model.runs.until import Site, ended_at

_REPLACED = (
    "forward_one_chunk",
    "forward_maybe_with_nosync",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "scale_grads",
    "get_local_bwd_output",
    "set_local_bwd_input",
    "_validate_fwd_input",  # torch 2.11 has it
)


@dataclass(eq=False)
class StepCall:
    """The arguments of one step.

    Attributes:
        choice: The hooks that are active in it.
        appends: Whether records are added to those of the step before.
        until: Names of modules, with kinds of hooks, after which nothing is computed; None: all is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    choice: Choice
    settings: Settings
    has_backward: bool
    appends: bool
    target: Tensor | None = None
    losses: list[Tensor] | None = None
    return_outputs: bool = True
    until: list[tuple[str, str]] | None = None


@dataclass(eq=False)
class StepPlan:
    """The plan of a step.

    Attributes:
        inputs: The hash of the inputs on all ranks, except for the values of their tensors, and of
            modes.
        is_prepared: Whether every rank's stages have buffers for these inputs.
        conditions: A hash of the inputs, and, with micro-batches, of the modules, their hooks and
            attributes, and torch's modes, on all ranks.
        number: The number of micro-batches.
        rows: By data-parallel rank: its number of rows in each micro-batch.
        seed: The seed of random edits.
    """

    inputs: int
    is_prepared: bool
    conditions: int
    number: int
    arg_chunks: list[Any]
    kwarg_chunks: list[Any]
    target_chunks: list[Any] | None
    rows: list[list[int]]
    seed: int


class StageStep(NamedTuple):
    """What one stage does in a step.

    Attributes:
        is_skipped: Whether the step needs nothing of the stage.
        sites: The modules after which its forwards end; None: they run to their end.
        edited: The step's gradients, where hooks edit activations of this rank's stages.
        recording: What records the step's micro-batches, if anything does.
    """

    has_backward: bool = False
    is_skipped: bool = False
    sites: list[Site] | None = None
    edited: Gradients | None = None
    recording: StageRecording | None = None


class InstrumentedStage:
    """A stage of torch's that never raises during a step."""

    def __init__(self, stage: Any, state: MicrobatchState, core: HookCore) -> None:
        self.stage, self.index = stage, stage.stage_index
        self._state, self._core = state, core
        self._accepted = accepted_kwargs(stage.submod)
        self._step = StageStep()
        self._failed: set[int] = set()  # micro-batches that continue with zeros
        self._num_backwards = 0
        #: The inputs and outputs that the user made the stage for, on meta; None: it takes any.
        self.stated_shapes = torch_pipelining.stated_shapes(stage)
        self._inputs, self._outputs = self.stated_shapes or ((), ())
        self._before = {
            name: vars(stage)[name] for name in torch_pipelining.STATE if name in vars(stage)
        }
        # DDP and FSDP reduce gradients after a whole backward only: where a zero-bubble schedule
        # splits it, torch leaves some gradients out of the reduction.
        self._may_split_backward = not any(
            isinstance(module, (DistributedDataParallel, FSDPModule))
            for module in stage.submod.modules()
        )
        self._splits_backward = self._may_split_backward  # in the running step

    def restore(self) -> None:
        """Leave the stage as it was."""
        vars(self.stage).update(self._before)

    @contextlib.contextmanager
    def with_own_methods(self) -> Iterator[None]:
        """A context in which torch's schedule runs the methods here. Outside of it the stage is
        torch's own: another schedule may run it.
        """
        vars(self.stage).update({name: getattr(self, name.lstrip("_")) for name in _REPLACED})
        try:
            yield
        finally:
            self._step = StageStep()  # a recording holds the operations of all micro-batches
            for name in _REPLACED:
                vars(self.stage).pop(name, None)

    def begin(self, step: StageStep) -> None:
        """Begin a step."""
        self._step = step
        self._failed.clear()
        self._num_backwards = 0
        # A split backward finds the parameters behind what the stage received, and an edit may put
        # another tensor in its place.
        self._splits_backward = self._may_split_backward and step.edited is None
        self.stage.has_backward = step.has_backward
        self.stage.clear_runtime_states()

    def prepare(
        self, number: int, has_backward: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Make the buffers of torch's stage for a step of ``number`` micro-batches."""
        shapes = self._inputs, self._outputs
        torch_pipelining.prepare(self.stage, number, has_backward, *shapes, args, kwargs)
        if torch_pipelining.is_traced(self.stage):
            self._outputs = torch_pipelining.outputs_of_graph(self.stage)

    def set_shapes(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Set the shapes of its inputs and outputs, in place of torch's own inference."""
        self._inputs, self._outputs = inputs, outputs

    def accepted(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """Return those of the step's keyword arguments that this stage takes."""
        return {
            name: value
            for name, value in (kwargs or {}).items()
            if self._accepted is None or name in self._accepted
        }

    def _of_torch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.stage), name)(self.stage, *args, **kwargs)

    # The replaced methods, with torch's signatures.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        # A split backward computes gradients of parameters and received tensors only.
        given = pytree.tree_leaves(kwargs)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
            self._splits_backward = False
        with self._state.at(self.index, fwd_chunk_id):
            try:
                if not self._step.is_skipped:
                    with ended_at(self._step.sites, self.stage.submod):
                        output = self._of_torch(
                            "forward_one_chunk",
                            fwd_chunk_id,
                            args,
                            self.accepted(kwargs),
                            save_forward_output=save_forward_output,
                        )
                        given += pytree.tree_leaves(args) if self.stage.is_first else []
                        self._keep_tensors(fwd_chunk_id, given, output)
                        return output
            except BaseException as error:
                self._fail(fwd_chunk_id, error)
            torch_pipelining.drop_received(self.stage.args_recv_info, fwd_chunk_id)
            return self._make_zero_output(fwd_chunk_id, save_forward_output)

    def _keep_tensors(self, microbatch: int, of_step: Sequence[Any], output: Any) -> None:
        """Drop the inputs that are not tensors: a split backward reads ``requires_grad`` of each.
        After a backward torch sets their gradients to None, which those of the step's own inputs
        (``of_step``) are to keep.
        """
        own = set(map(id, of_step))

        def keep(inputs: list[Any]) -> list[Tensor]:
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            if self._step.edited is not None:
                self._step.edited.include(leaves_between([*of_step, *tensors], output))
            return [value.detach() if id(value) in own else value for value in tensors]

        torch_pipelining.keep_inputs(self.stage, microbatch, keep)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        core = self._core
        if self._state.is_silent:
            return sendable(self._of_torch("forward_maybe_with_nosync", *args, **kwargs))
        core.tracking.begin(args, kwargs, core.table.active_hooks, stage=self.index)
        output = None

        def forward() -> Any:
            return self._of_torch("forward_maybe_with_nosync", *args, **kwargs)

        try:
            recording = self._step.recording
            if recording is None:
                output = forward()
            else:
                output = recording.run(self._state.microbatch, forward, args, kwargs)
        finally:
            core.tracking.end(output)
        return sendable(output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        stage = self.stage
        if not stage.has_backward:
            return
        self._num_backwards += 1
        if not self._splits_backward:
            full_backward, last_backward = True, self._num_backwards == stage.chunks
        if self._run_backward(
            "backward_one_chunk",
            bwd_chunk_id,
            loss=loss,
            full_backward=full_backward,
            last_backward=last_backward,
        ):
            # Gloo sends contiguous ones; those of a backward in two parts have an edit's strides.
            if bwd_chunk_id in stage.bwd_cache:
                stage.bwd_cache[bwd_chunk_id] = tuple(
                    None if grad is None else grad.contiguous()
                    for grad in stage.bwd_cache[bwd_chunk_id]
                )
        else:
            torch_pipelining.drop_forward(stage, bwd_chunk_id)
            torch_pipelining.drop_received(stage.grad_recv_info, bwd_chunk_id)
            stage.bwd_cache[bwd_chunk_id] = torch_pipelining.zero_gradients(stage, bwd_chunk_id)
            stage.dw_runner[bwd_chunk_id] = lambda: None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._splits_backward and not self._run_backward(
            "backward_weight_one_chunk", bwd_chunk_id, last_backward=last_backward
        ):
            self.stage.dw_runner.pop(bwd_chunk_id, None)
            self.stage.backward_state.pop(bwd_chunk_id, None)

    def _run_backward(self, name: str, microbatch: int, **kwargs: Any) -> bool:
        """Run torch's method; return whether the micro-batch has not failed."""
        with self._state.at(self.index, microbatch):
            if microbatch not in self._failed:
                try:
                    self._of_torch(name, microbatch, **kwargs)
                except BaseException as error:
                    self._fail(microbatch, error)
        return microbatch not in self._failed

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return nothing where the step has no backward: V schedules call this all the same."""
        if self.stage.has_backward:
            return self._of_torch("get_local_bwd_output", mb_index)
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.stage.has_backward:
            self._of_torch("set_local_bwd_input", next_stage_bwd_outputs, mb_index)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: ``Gradients`` scales, once for a parameter of two stages, and not what was
        there before the step.
        """

    def validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Do nothing: all ranks agreed on the inputs before the step."""

    # After a failure.

    def _fail(self, microbatch: int, error: BaseException) -> None:
        self._failed.add(microbatch)
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        self._state.fail_in_model(cause)

    def _make_zero_output(self, microbatch: int, save_forward_output: bool) -> Any:
        stage = self.stage
        outputs = tuple(
            torch.zeros(
                meta.shape,
                dtype=meta.dtype,
                device=stage.device,
                requires_grad=stage.has_backward and meta.dtype.is_floating_point,
            )
            for meta in self._outputs
        )
        output = outputs[0] if len(outputs) == 1 else outputs
        torch_pipelining.keep_outputs(stage, microbatch, outputs)
        if stage.is_last and save_forward_output:
            stage.output_chunks.append(output)
        return output


def sendable(output: Any) -> Any:
    """Return a stage's output as it can be sent and, later, detached in place: contiguous, no view,
    and not an input of the stage itself.
    """
    if type(output) in (tuple, list):
        return type(output)(sendable(item) for item in output)
    if not isinstance(output, Tensor):
        return output
    if output.stride() != to_meta(output).stride():  # of dims of size 1, too: torch compares them
        output = output.clone(memory_format=torch.contiguous_format)
    if output.requires_grad and (output._is_view() or output.grad_fn is None):
        return OwnTensor.apply(output)
    return output


_FLAGS = [
    f"_{stages}_{direction}_initialized"
    for stages in ("stage", "stages")
    for direction in ("forward", "backward")
]


def stages_of(schedule: Any) -> list[Any]:
    """Return this rank's stages, in their order."""
    stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
    return sorted(stages, key=lambda stage: stage.stage_index)


class LocalSchedule:
    """This rank's part of a schedule.

    Attributes:
        stages: Torch's stages.
        instrumented: Those with their methods replaced.
        needs_shapes: Whether the shapes of what stages send must be known before a step.
        calls_roots: See `StageIndex`.
    """

    needs_shapes = True
    calls_roots = True

    def __init__(self, schedule: Any, state: MicrobatchState, core: HookCore) -> None:
        self._schedule, self._state = schedule, state
        self.stages = stages_of(schedule)
        self.has_last = any(stage.is_last for stage in self.stages)
        self.instrumented = [InstrumentedStage(stage, state, core) for stage in self.stages]
        self._is_connected = False
        self._before = {
            name: vars(schedule)[name]
            for name in ("_loss_fn", "_has_backward", *_FLAGS)
            if name in vars(schedule)
        }

    def close(self) -> None:
        """Leave stages and schedule as they were."""
        for stage in self.instrumented:
            stage.restore()
        vars(self._schedule).update(self._before)

    def check_inputs(self, kwargs: dict[str, Any]) -> None:
        """ValueError for an argument of torch's own ``step`` that steps with hooks don't have."""
        other = set(torch_pipelining.own_arguments(self._schedule)) & set(kwargs)
        if other:
            raise ValueError(
                f"step() got {', '.join(sorted(other))}, which steps with hooks don't take; give "
                "the whole batch, target=, losses= and return_outputs=, or restore() the FlexModel"
            )

    def connect(self, number: int, has_backward: bool, args: Any, kwargs: Any) -> None:
        """Make the buffers for a step of ``number`` micro-batches; the stages' shapes are known.
        Collective over the pipeline the first time.
        """
        if not self._is_connected:
            torch_pipelining.connect(self._schedule, self.stages)
            self._is_connected = True
        for stage in self.instrumented:
            stage.prepare(number, has_backward, args, kwargs)
        vars(self._schedule).update(
            {name: "forward" in name or has_backward for name in _FLAGS if name in self._before}
        )

    def run(self, call: StepCall, plan: StepPlan, losses: list[Tensor]) -> Any:
        """Run a step of stages that have begun it: in micro-batches along the schedule, or as one
        by a loop over the stages where there is one chunk for several. Return the merged output of
        the last stage, if it is on this rank.

        Args:
            losses: Gets those of the micro-batches, where the step has a target.
        """
        schedule, targets = self._schedule, plan.target_chunks
        schedule._internal_losses.clear()
        loss_fn = None if targets is None else self._guarded(schedule._loss_fn)
        before = {"_has_backward": schedule._has_backward, "_loss_fn": schedule._loss_fn}
        run = schedule._step_microbatches
        if plan.number != schedule._n_microbatches:
            run = self._run_as_one
        # Torch's schedules take these in their constructor only.
        vars(schedule).update(_has_backward=call.has_backward, _loss_fn=loss_fn)
        try:
            filled = None if targets is None else losses
            with contextlib.ExitStack() as stack:
                for stage in self.instrumented:
                    stack.enter_context(stage.with_own_methods())
                run(plan.arg_chunks, plan.kwarg_chunks, targets, filled, call.return_outputs)
        finally:
            vars(schedule).update(before)
        if self.has_last and call.return_outputs and not self._state.failure.has_error:
            return schedule._merge_outputs(self.stages[-1].output_chunks)
        return None

    def _guarded(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(output: Any, target: Any) -> Tensor:
            try:
                return loss_fn(output, target)
            except BaseException as error:
                self._state.fail_in_model(error, "loss function")
                floats = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
                return floats[0].sum() * 0

        return compute

    def _run_as_one(
        self,
        arg_chunks: list[Any],
        kwarg_chunks: list[Any],
        target_chunks: list[Any] | None,
        losses: list[Tensor] | None,
        return_outputs: bool,
    ) -> None:
        """Run the whole batch through all stages, and back: a schedule may refuse so few chunks."""
        sends: list[Any] = []
        by_index = {stage.stage_index: stage for stage in self.stages}
        for index, stage in by_index.items():
            if index - 1 not in by_index:
                self._wait(schedules._sorted_batch_p2p(stage.get_fwd_recv_ops(0)))
            output = stage.forward_one_chunk(
                0, arg_chunks[0], kwarg_chunks[0], save_forward_output=return_outputs
            )
            if index + 1 in by_index:
                by_index[index + 1].set_local_fwd_input(output, 0)
            else:
                sends.append(schedules._sorted_batch_p2p(stage.get_fwd_send_ops(0)))
            self._schedule._maybe_compute_loss(stage, output, target_chunks, 0)
        for index, stage in reversed(by_index.items()) if self._schedule._has_backward else ():
            if index + 1 not in by_index:
                self._wait(schedules._sorted_batch_p2p(stage.get_bwd_recv_ops(0)))
            loss = self._schedule._maybe_get_loss(stage, 0)
            stage.backward_one_chunk(0, loss=loss, last_backward=True)
            if index - 1 in by_index:
                by_index[index - 1].set_local_bwd_input(stage.get_local_bwd_output(0), 0)
            else:
                sends.append(schedules._sorted_batch_p2p(stage.get_bwd_send_ops(0)))
            stage.perform_reduce_grad(1)
        for works in sends:
            self._wait(works)
        if losses is not None and self.has_last:
            losses[:] = self._schedule._internal_losses
        self._schedule._internal_losses.clear()

    @staticmethod
    def _wait(works: dict[int, list[dist.Work]]) -> None:
        for work in itertools.chain.from_iterable(works.values()):
            work.wait()
