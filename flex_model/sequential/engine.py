"""Runs a model target by target: every batch of a window is suspended at the entry of a target
until that target's turn comes.

Batches take turns, one at a time, in their order. Of all targets that batches wait at, the first in
the model's order is served first, so those that are behind (a skipped block, a loop) catch up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn

from flex_model import _C
from flex_model.integrations import torch_private
from flex_model.records.store.input_hashes import hash_of
from flex_model.runs.batches import BatchRun, BatchRuns
from flex_model.runs.interrupts import Deferral, deferrable
from flex_model.sequential.suspension import (
    ModuleAttributes,
    ProcessState,
    SuspendedCall,
    ThreadState,
    is_in_functional_call,
)
from flex_model.sequential.targets import Target
from flex_model.sequential.weights.loader import WeightLoader


@dataclass(eq=False)
class Batch:
    """One batch that is passed through the model.

    Attributes:
        call: The model's call with it, which is suspended at targets.
        hooks: Its state in the hook core; None without hooks.
        process: The state of the process when its last turn ended.
        waits_at: The target at whose entry it is suspended; None before the first and at the end.
        inputs: The arguments of that target.
        path: The targets that it is inside of, outermost first.
    """

    index: int
    arguments: Any
    call: SuspendedCall
    hooks: BatchRun | None
    process: ProcessState
    waits_at: Target | None = None
    inputs: tuple[Any, Any] | None = None
    path: list[Target] = field(default_factory=list)

    def wait(self, target: Target, inputs: tuple[Any, Any]) -> None:
        """Called inside: suspend it until that target's turn."""
        self.waits_at, self.inputs = target, inputs
        try:
            self.call.suspend()
        finally:
            self.waits_at = self.inputs = None


class Engine:
    """One sequential run.

    Args:
        call: Calls the model with a batch.
        hooks: The runs of the batches in the hook core; None for a module without hooks.
        loader, offloader: None if there is nothing to load, or to offload.
        deliver: Called with the batches that are done, in their order.
        on_step: Called after each step.
        on_target_end: Called with a target's name and the batches that left it in a step.
        on_window_end: Called when all batches of a window are done.

    Attributes:
        has_drawn: Whether a batch drew random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: list[Target],
        call: Callable[[Any], Any],
        hooks: BatchRuns | None,
        loader: WeightLoader | None,
        offloader: ActivationOffloader | None,
        *,
        cuda_device: int | None,
        deliver: Callable[[Batch], None],
        on_step: Callable[[], None],
        on_target_end: Callable[[str, list[int]], Any] | None,
        on_window_end: Callable[[], None],
    ) -> None:
        self._targets = {target.module: target for target in targets}
        self._num_steps = max(target.step for target in targets) + 1
        self._call, self._hooks, self._loader, self._offloader = call, hooks, loader, offloader
        self._cuda_device = cuda_device
        self._deliver, self._on_step = deliver, on_step
        self._on_target_end, self._on_window_end = on_target_end, on_window_end
        self._attributes = ModuleAttributes(model)
        self._deferral = Deferral()
        self._ends_matter = loader is not None or on_target_end is not None
        self._ended_from: ThreadState | None = None
        self._away: contextlib.ExitStack | None = None
        self._current: Batch | None = None
        self._step: int | None = None
        self._left: dict[Target, set[int]] = {}
        self._are_several = False
        self._changes_thread = False
        self._safe_depths: set[int] = set()  # of calls that can be suspended
        self._followers: dict[int, int] = {}  # the step that came after a step, as last seen
        self._read: list[tuple[Any, str]] = []  # with the hash of each
        self.has_drawn = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """A copy of the model that is made meanwhile has its hooks, and these this engine."""
        return self

    def run(self, batches: Iterable[Any], window: int, first: int) -> None:
        """Run all batches, numbered from ``first``. An exception of one has its ``batch_index``."""
        self._caller = ThreadState.now()
        source = self._drawn(iter(batches))
        begin_of = ProcessState.now(self._cuda_device).seeder()
        reads_ahead = self._loader is not None and self._loader.prefetch > 0
        with self._suspending():
            with self._reading([], first):
                following = list(itertools.islice(source, window))
            while following:
                self._caller = self._ended_from or ThreadState.now()
                self._are_several = len(following) > 1
                under_way = [
                    self._made(index, arguments, begin_of(index))
                    for index, arguments in enumerate(following, first)
                ]
                failure: Exception | None = None
                following = []
                if reads_ahead:
                    with self._reading([batch.arguments for batch in under_way], first):
                        try:  # so that the first weights of the next window are read ahead
                            following += itertools.islice(source, 1)
                        except Exception as error:  # it is not this window's
                            failure = error
                first += len(under_way)
                self._run_window(under_way, bool(following))
                self._attributes.end_window()
                self.has_drawn |= any(batch.process.has_drawn for batch in under_way)
                with self._deferral.released():
                    self._on_window_end()
                if failure is not None:
                    raise failure
                with self._reading(following, first):
                    following += itertools.islice(source, window - len(following))

    @contextlib.contextmanager
    def _reading(self, waiting: list[Any], first: int) -> Iterator[None]:
        """A context in which batches are read. ValueError if that changes one that has not run:
        one of ``waiting``, the first of which has the number ``first``, or one just read.
        """
        self._read = [(batch, hash_of(batch)) for batch in waiting]
        yield
        read, self._read = self._read, []
        for index, (batch, before) in enumerate(read, first):
            if hash_of(batch) != before:  # a tensor of numpy's memory has no version
                raise ValueError(
                    f"sequential.run: batch {index} was changed by reading a later one, before it "
                    "has run; give each batch tensors and a container of its own, or read one at "
                    "a time, window=1 and prefetch=0"
                )

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            before = ThreadState.now()
            with self._deferral.released():
                batch = next(batches, end)
            if batch is end:
                if ThreadState.now() != before:  # a generator's contexts, its batches' ones, too
                    self._ended_from = before
                return
            self._read.append((batch, hash_of(batch)))
            yield batch

    def _made(self, index: int, arguments: Any, process: ProcessState) -> Batch:
        hooks = None if self._hooks is None else self._hooks.made()

        def function() -> Any:
            if hooks is None or self._hooks is None:
                return self._call(arguments)
            return self._hooks.run(hooks, lambda: self._call(arguments))

        call = SuspendedCall(function, self._caller, self._deferral)
        return Batch(index, arguments, call, hooks, process)

    def _run_window(self, batches: list[Batch], is_followed: bool) -> None:
        todo = list(batches)
        try:
            self._resume(batches)
            self._deliver_done(todo)
            while waiting := [batch for batch in todo if batch.waits_at is not None]:
                self._take_step(waiting, is_followed)
                self._deliver_done(todo)
        except BaseException as error:
            self._abandon(todo)
            if not isinstance(error, Exception):
                # Ctrl-C may have come at the first line of a context's end. Torch's guards in it,
                # which end with its frame, would bring back the batch's state, some time later.
                traceback.clear_frames(error.__traceback__)
                self._caller.restore()
            raise
        finally:
            self._return_to_caller()

    def _deliver_done(self, todo: list[Batch]) -> None:
        while todo and todo[0].call.is_done:
            self._return_to_caller()
            with self._deferral.released():
                self._deliver(todo.pop(0))

    def _take_step(self, waiting: list[Batch], is_followed: bool) -> None:
        """Resume all that wait at the first target; they pass the targets of its step."""
        steps = [batch.waits_at.step for batch in waiting if batch.waits_at]
        self._step = step = min(steps)
        going = [batch for batch, its in zip(waiting, steps) if its == step]
        try:
            if self._loader is not None:
                self._return_to_caller()
                entered = {target.step for batch in waiting for target in batch.path[:-1]}
                ahead = self._steps_after(step, set(steps) - {step}, is_followed)
                with self._deferral.released():
                    self._loader.acquire(entered | {step})
                    self._loader.read_ahead(ahead)
            self._resume(going)
        finally:
            self._step = None
        for batch in going:
            if batch.waits_at is not None:
                self._followers[step] = batch.waits_at.step
        if self._on_target_end is not None:
            left, self._left = self._left, {}
            self._return_to_caller()
            for target, indices in left.items():  # the inner ones first
                with self._deferral.released():
                    self._on_target_end(target.name, sorted(indices))
        self._on_step()

    def _steps_after(self, step: int, waited_for: set[int], is_followed: bool) -> list[int]:
        """The steps that will probably be next: those seen to follow, or that others wait at."""
        ahead: list[int] = []
        for _ in range(0 if self._loader is None else self._loader.prefetch):
            candidates = waited_for - set(ahead)
            following = self._followers.get(step, step + 1)
            if following < self._num_steps or is_followed:
                candidates.add(following % self._num_steps)
            if candidates:
                step = min(candidates)
                ahead.append(step)
        return ahead

    def _resume(self, batches: list[Batch]) -> None:
        """Resume them one after the other, each until it waits at a target of another step or is
        done.
        """
        self._leave_caller()
        for batch in batches:
            if self._offloader is not None:
                self._offloader.bring_back(batch)
            self._take_turn(batch, batch.call.resume)
            if self._offloader is not None and batch.waits_at is not None:
                self._offloader.offload(batch)

    def _take_turn(self, batch: Batch, resume: Callable[[], None]) -> None:
        """Resume it; meanwhile everything is as the batch left it."""
        try:
            batch.process.restore()
            self._attributes.resume(batch.index, batch.call.greenlet)
            self._current = batch
            if self._hooks is not None and batch.hooks is not None:
                self._hooks.resume(batch.hooks)
            resume()
        except BaseException as error:
            vars(error)["batch_index"] = batch.index
            raise
        finally:
            if self._hooks is not None and batch.hooks is not None:
                self._hooks.suspend(batch.hooks)
            self._current = None
            batch.process.update()
            self._changes_thread |= batch.call.has_changed_thread
            if batch.call.is_done:
                self._caller.restore()
                if self._changes_thread and not self._caller.autocast[0]:
                    torch.clear_autocast_cache()  # as the end of the last autocast would

    def _leave_caller(self) -> None:
        """Give the thread the state that it had when the window began, until
        ``_return_to_caller``, before any code of the user's but the batches' own.
        """
        if self._away is None:
            self._away = contextlib.ExitStack()
            if self._hooks is not None:
                self._hooks.caller_went_on()
            self._away.callback(ProcessState.now(self._cuda_device).restore)
            self._away.enter_context(self._caller.during())

    def _return_to_caller(self) -> None:
        away, self._away = self._away, None
        if away is not None:
            away.close()

    def _abandon(self, batches: list[Batch]) -> None:
        """End all that have begun; the last one first, as they would be in one stack."""
        for batch in reversed(batches):
            while not batch.call.is_done:
                # What it raises while it ends is dropped: the first error is raised.
                with contextlib.suppress(BaseException):
                    self._leave_caller()
                    self._take_turn(batch, batch.call.abandon)

    # Called by torch's hooks.

    @contextlib.contextmanager
    def _suspending(self) -> Iterator[None]:
        """A context in which batches can wait, and Ctrl-C does while no code of the user's runs."""
        with (
            deferrable() as self._deferral,
            self._deferral.held(),
            self._attributes.noted(),
            contextlib.ExitStack() as handles,
        ):
            for module in self._targets:
                handles.enter_context(
                    module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                )
                if self._ends_matter:
                    handles.enter_context(
                        module.register_forward_hook(self._leave, always_call=True)
                    )
            yield

    def _current_target(self, module: nn.Module) -> tuple[Batch, Target] | None:
        """The batch and the target of a call; None for a copy of a target, and where no batch can
        wait: in another thread, a recomputation in backward, an editing function's own computation.
        """
        batch, target = self._current, self._targets.get(module)
        if (
            batch is None
            or target is None
            or getcurrent() is not batch.call.greenlet
            or torch_private.current_graph_task() != -1
            or (self._hooks is not None and self._hooks.communicator.edit_of != "")
        ):
            return None
        return batch, target

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        current = self._current_target(module)
        if current is None:
            if self._loader is not None and module in self._targets:
                self._check_is_loaded(self._targets[module])
            return
        batch, target = current
        if self._ends_matter:
            batch.path.append(target)
        if target.step == self._step:
            return  # of one step with the target before, or that one again: its weights are there
        if self._are_several:
            self._check_shares_nothing(target)
        depth = batch.call.depth()
        if depth not in self._safe_depths:
            library = batch.call.unsuspendable_in()
            if library:
                raise RuntimeError(
                    f"sequential.run: the target {target.name!r} is called by way of compiled "
                    f"code, a function of {os.path.basename(library)} (an operator of "
                    "torch.library, say), inside of which a batch can't wait; choose a target "
                    "that holds that call, targets=[...]"
                )
            self._safe_depths.add(depth)
        batch.wait(target, (args, kwargs))

    def _check_is_loaded(self, target: Target) -> None:
        if target.step == self._step:
            return
        if self._hooks is not None and self._hooks.communicator.edit_of:
            raise RuntimeError(
                f"sequential.run: an editing function calls the target {target.name!r}, whose "
                "weights are not there now; compute with HookFunction(parameters=[...]), whose "
                "weights are kept, or with modules of register_trainable_module"
            )
        raise RuntimeError(
            f"sequential.run: the target {target.name!r}, whose weights are not there now, is "
            "called where no batch can wait for them: in another thread, in a backward, in a run "
            "inside the run or in a callback of the run; call it in the batch's own forward"
        )

    def _check_shares_nothing(self, target: Target) -> None:
        shared = ""
        if is_in_functional_call():
            shared = "with functional_call, whose parameters for the model"
        elif torch_private.forward_mode_level() != self._caller.dual_level:
            shared = "in forward-mode differentiation, whose tangents"
        if shared:
            raise RuntimeError(
                f"sequential.run: the target {target.name!r} is called {shared} are one for the "
                "whole process: other batches would change them; run one batch at a time, window=1"
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        current = self._current_target(module)
        if current is None:
            return None
        batch, target = current
        batch.path.pop()
        if self._on_target_end is not None:
            self._left.setdefault(target, set()).add(batch.index)
        if self._loader is None or output is None:  # None: it raised
            return None
        # A target may return a part of its own weights, whose memory the next ones take.
        for index, leaf in enumerate(_C.flatten(output)[0]):
            if self._loader.holds(leaf):
                output = _C.replace_leaf(output, index, leaf.clone())
        return output


class ActivationOffloader:
    """Moves the activations of one run's waiting batches away, and back.

    Args:
        where: ``"cpu"`` or ``"disk"``.
        folder: For ``"disk"``: the folder whose disk is used (default: the system's for temporary
            files).

    Attributes:
        bytes_moved: Bytes that were moved away.
    """

    def __init__(self, model: nn.Module, where: str, folder: str | Path | None) -> None:
        self.bytes_moved = 0
        self._model = model
        self._moved: dict[int, list[tuple[Tensor, torch.device]]] = {}  # with where each one was
        self._folder: Path | None = None
        if where == "disk":
            self._folder = Path(tempfile.gettempdir() if folder is None else folder)
            self._folder.mkdir(parents=True, exist_ok=True)

    def offload(self, batch: Batch) -> None:
        """Move the inputs that the batch waits with."""
        moved = [(tensor, tensor.device) for tensor in self._movable(batch)]
        contents = [_memory_of(tensor) for tensor, _ in moved]
        self.bytes_moved += sum(content.nbytes for content in contents)
        contents = [content.cpu() for content in contents]
        if self._folder is not None:
            contents = _on_disk(contents, self._folder)
        for (tensor, _), content in zip(moved, contents):
            _set_memory(tensor, content)
        self._moved[batch.index] = moved

    def bring_back(self, batch: Batch) -> None:
        """Move them to where they were: to memory of their own, aligned as torch aligns it, on
        which the bits of later results may depend.
        """
        for tensor, device in self._moved.pop(batch.index, ()):
            _set_memory(tensor, _memory_of(tensor).to(device, copy=True))

    def _movable(self, batch: Batch) -> Iterator[Tensor]:
        """Tensors that only the batch's functions hold, as far as can be seen."""
        theirs = {id(tensor) for tensor in self._tensors_of_model()}
        theirs |= {id(tensor) for tensor in _C.flatten(batch.arguments)[0]}
        for tensor in _C.flatten(batch.inputs)[0]:
            if type(tensor) is not Tensor or id(tensor) in theirs or tensor.requires_grad:
                continue
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            if self._folder is None and tensor.device.type == "cpu":
                continue
            if torch_private.is_held_once(tensor):
                theirs.add(id(tensor))
                yield tensor

    def _tensors_of_model(self) -> Iterator[Tensor]:
        """Yield parameters, buffers, and tensors in attributes of modules: caches, tables."""
        for module in self._model.modules():
            for value in vars(module).values():
                items = value.values() if isinstance(value, dict) else value
                items = items if isinstance(value, (dict, list, tuple)) else (value,)
                yield from (item for item in items if isinstance(item, Tensor))


def _on_disk(contents: list[Tensor], folder: Path) -> list[Tensor]:
    """Write tensors to disk; return them memory-mapped. The file has no name: the system deletes it
    with the last mapping, also after a kill.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        torch.save(contents, file)
        file.flush()
        mapped: list[Tensor] = torch.load(
            f"/proc/self/fd/{file.fileno()}", mmap=True, weights_only=True
        )
    return mapped


def _memory_of(tensor: Tensor) -> Tensor:
    """Return all bytes of its storage."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return made.set_(tensor.untyped_storage())


def _set_memory(tensor: Tensor, content: Tensor) -> None:
    """Make the tensor a view of these bytes, with its own offset, sizes and strides."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        made: Any = torch.empty(0, dtype=tensor.dtype, device=content.device)
        made.set_(
            content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        tensor.data = made
