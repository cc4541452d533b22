"""Calls that can be suspended anywhere inside and resumed later: each runs in a greenlet.

A greenlet has its own stack, C's included, in the caller's thread, so any code can be suspended
from within, and a switch costs about a microsecond. What torch keeps per thread is exchanged if a
call has changed it (`thread_state.ThreadState`); context variables are each greenlet's own.

A call can't be suspended inside C++ that has called Python through pybind11, which keeps a list of
its calls in progress per thread, and ends the process if they don't end in order.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import mmap
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet
from torch import Generator, Tensor, nn

from flex_model import _C
from flex_model.errors import Control
from flex_model.integrations import torch_private
from flex_model.integrations.torch_private import MODE_STACKS, THREAD_SETTINGS
from flex_model.runs.interrupts import Deferral, deferred

_PYBIND11_MARK = b"pybind11_internals"  # in each library that is made with it


class AbandonedError(Control):
    """Raised in a suspended call that won't be resumed, so that its contexts are left."""


class SuspendedCall:
    """``function()``, which the first ``resume()`` begins.

    Args:
        before: The state of the caller's thread when a call begins, is resumed or suspended.
        deferral: Defers Ctrl-C while the caller runs, not while the call does.

    Attributes:
        is_done: Whether it has returned or raised.
        has_changed_thread: Whether it was suspended where the thread was not in state ``before``.
        greenlet: The greenlet that it runs in.
    """

    def __init__(
        self, function: Callable[[], Any], before: ThreadState, deferral: Deferral
    ) -> None:
        self.is_done = False
        self.has_changed_thread = False
        self._value: Any = None
        self._function = function
        self._before = before
        self._deferral = deferral
        self._base = 0  # of its stack
        self.greenlet = greenlet(functools.partial(contextvars.copy_context().run, self._run))

    def resume(self) -> None:
        """Run it until it is suspended or done. Raises what it raises."""
        self._enter(self.greenlet.switch)

    def suspend(self) -> None:
        """Called inside: switch to the caller, until the next ``resume()``."""
        self._deferral.hold()
        parent = self.greenlet.parent
        assert parent is not None
        with self._before.during() as has_changed:
            self.has_changed_thread |= has_changed
            parent.switch()
        self._deferral.release()

    def abandon(self) -> None:
        """End it where it is suspended. Raises what it raises."""
        if self.greenlet:  # begun, not done
            self._enter(functools.partial(self.greenlet.throw, AbandonedError))
        else:
            self.is_done = True

    def _enter(self, switch: Callable[[], Any]) -> None:
        try:
            ended_by = switch()
        finally:
            self._deferral.hold()
        if ended_by:  # a GreenletExit, which a greenlet returns
            raise ended_by

    def take_value(self) -> Any:
        """Return what it returned, and drop it here."""
        value, self._value = self._value, None
        return value

    def depth(self) -> int:
        """Called inside: the bytes on C's stack. They differ if C has called Python elsewhere."""
        return self._base - _C.stack_pointer()

    def unsuspendable_in(self) -> str:
        """Called inside: the library inside which it can't be suspended; "" if there is none."""
        # All functions that pybind11 makes in one library begin at one address; these two have two.
        begins_at = dict(map(_C.code_of, (torch_private.PYBIND11_FUNCTION, _C.flatten)))
        for file, function in _C.native_frames(self._base):
            if function == begins_at.get(file, function) and _is_made_with_pybind11(file):
                return file
        return ""

    def _run(self) -> None:
        self._base = _C.stack_pointer()
        try:
            with contextlib.suppress(AbandonedError):
                self._deferral.release()
                self._value = self._function()
        finally:
            self.is_done = True
            del self._function  # and with it a batch


def is_in_functional_call() -> bool:
    """Whether the running call is inside ``functional_call``, which puts other parameters into the
    model.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch_private.functional_call_code:
        frame = frame.f_back
    return frame is not None


@functools.cache
def _is_made_with_pybind11(file: str) -> bool:
    try:
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(_PYBIND11_MARK) >= 0
    except (OSError, ValueError):  # no file: the kernel's own code
        return False


class ThreadState(NamedTuple):
    """What torch keeps per thread, at one moment.

    Attributes:
        settings: The values of ``THREAD_SETTINGS``.
        modes: The stacks of ``TorchFunctionMode`` and ``TorchDispatchMode``.
        transforms: The number of transforms of ``torch.func`` in progress.
        saved_hooks: The innermost hooks for saved tensors, the only ones that run.
        autocast: Whether it is on for any device, and its dtypes.
        cuda: The stream; None if CUDA is not used.
        dual_level: That of forward-mode differentiation: one for the process, not exchanged.
        included, excluded: Keys of torch's dispatcher.
    """

    settings: list[Any]
    modes: list[list[Any]]
    transforms: int
    saved_hooks: tuple[Any, Any] | None
    autocast: tuple[bool, torch.dtype, torch.dtype]
    cuda: Any
    has_inference: bool
    dual_level: int
    included: torch._C.DispatchKeySet
    excluded: torch._C.DispatchKeySet

    @staticmethod
    def now() -> ThreadState:
        """The state of this thread. Read at every turn; cheap."""
        return ThreadState(
            [read() for read, _ in THREAD_SETTINGS],
            [stack.read() for stack in MODE_STACKS],
            torch_private.num_transforms(),
            torch_private.top_saved_hooks(),
            (
                torch_private.is_any_autocast_enabled(),
                torch.get_autocast_dtype("cpu"),
                torch.get_autocast_dtype("cuda"),
            ),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
            torch.is_inference_mode_enabled(),
            torch_private.forward_mode_level(),
            torch_private.included_dispatch_keys(),
            torch_private.excluded_dispatch_keys(),
        )

    @contextlib.contextmanager
    def during(self) -> Iterator[bool]:
        """A context in which the thread has this state, and its present one again afterwards.
        Yields whether they differ.
        """
        found, undo = ThreadState.now(), contextlib.ExitStack()
        if found == self:
            yield False
            return
        try:
            with deferred():
                self._replace_state(found, undo)
            yield True
        finally:
            with deferred():
                undo.close()

    def restore(self) -> None:
        """Set what a call has changed. Its context managers must leave what they entered, which
        they may not have done if a Ctrl-C came at the first line of their end.
        """
        if ThreadState.now() != self:
            with deferred():
                for stack, modes in zip(MODE_STACKS, self.modes):
                    stack.write(modes)
                self._pop_saved_hooks()
                if torch.is_inference_mode_enabled() != self.has_inference:
                    # Its end would restore the present state.
                    _never_ending.append(torch_private.InferenceMode(self.has_inference))
                    _never_ending[-1].__enter__()
                self._set_values()

    def _replace_state(self, found: ThreadState, undo: contextlib.ExitStack) -> None:
        """Replace the state ``found`` by this one; ``undo`` reverses it, values last."""
        undo.callback(found._set_values)
        if found.autocast != self.autocast:
            # Casts are cached by the weight alone: another batch may have another dtype, or no
            # gradients, and the gradients of all would be summed in the low precision.
            torch.clear_autocast_cache()
            undo.callback(torch.clear_autocast_cache)
        if found.transforms < self.transforms:
            raise RuntimeError(
                "sequential.run: a target is called where torch.func has set a transform aside "
                "that the run is inside of; such a call can't be suspended"
            )
        for _ in range(found.transforms - self.transforms):
            undo.callback(torch_private.push_transform, torch_private.pop_transform())
        for stack, old, new in zip(MODE_STACKS, found.modes, self.modes):
            if old != new:
                undo.callback(stack.write, old)
                stack.write(new)
        for hooks in self._pop_saved_hooks():
            undo.callback(torch_private.push_saved_hooks, *hooks)
            undo.callback(torch_private.enable_saved_hooks)
        if found.has_inference != self.has_inference:
            undo.enter_context(torch_private.InferenceMode(self.has_inference))
        self._set_values()
        undo.enter_context(torch_private.ForceDispatchKeys(self.included, self.excluded))

    def _pop_saved_hooks(self) -> list[tuple[Any, Any]]:
        """Pop the hooks for saved tensors that are inside this state's; return them."""
        popped: list[tuple[Any, Any]] = []
        torch_private.enable_saved_hooks()
        while (hooks := torch_private.top_saved_hooks()) not in (None, self.saved_hooks):
            torch_private.pop_saved_hooks()
            popped.append(hooks)
        return popped

    def _set_values(self) -> None:
        torch.cuda.set_stream(self.cuda)  # with its device; nothing without one
        for (_, write), value in zip(THREAD_SETTINGS, self.settings):
            write(value)


_never_ending: list[Any] = []


class ProcessState:
    """What torch keeps for the whole process, of one batch: random states and the default dtype.

    Args:
        states: The state of each generator. A batch begins with them.
    """

    def __init__(self, default_dtype: torch.dtype, states: dict[Generator, Tensor]) -> None:
        self._default_dtype = default_dtype
        self._first = self._states = states

    @staticmethod
    def now(cuda_device: int | None) -> ProcessState:
        """Return the current state, with the generators of the CPU and of one CUDA device."""
        generators = [torch.default_generator]
        if cuda_device is not None:
            generators.append(torch.cuda.default_generators[cuda_device])
        states = {generator: generator.get_state() for generator in generators}
        return ProcessState(torch.get_default_dtype(), states)

    def update(self) -> None:
        """Replace it by the present one."""
        self._default_dtype = torch.get_default_dtype()
        self._states = {generator: generator.get_state() for generator in self._states}

    def restore(self) -> None:
        if self._default_dtype != torch.get_default_dtype():
            torch.set_default_dtype(self._default_dtype)
        for generator, state in self._states.items():
            generator.set_state(state)

    def seeder(self) -> Callable[[int], ProcessState]:
        """Return the function from a batch's index to the state that it begins with: for the first
        batch this one. The others have their own, the same for every window, since what the
        batches before them draw isn't known yet.
        """
        seed = _C.hash_of(self._states[torch.default_generator])

        def state_of(index: int) -> ProcessState:
            states = self._states
            if index:
                own = (seed + index) & (2**63 - 1)
                states = {g: Generator(g.device).manual_seed(own).get_state() for g in states}
            return ProcessState(self._default_dtype, states)

        return state_of

    @property
    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since it was made."""
        return any(not torch.equal(self._first[g], state) for g, state in self._states.items())


_ABSENT = object()


class ModuleAttributes:
    """The plain attributes of a model's modules while the batches of a window take turns. A batch
    finds the value that it has set itself, else that of the last one before it, as in a loop. Not
    parameters, buffers and children, nor what compiled code sets.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = set(model.modules())
        self._batch, self._greenlet = -1, None
        # What each batch has set, -1 before all, and which of these the module has.
        self._values: dict[tuple[nn.Module, str], dict[int, Any]] = {}
        self._present: dict[tuple[nn.Module, str], int] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which it is noted what batches set and delete."""
        methods = nn.Module.__setattr__, nn.Module.__delattr__
        noting = self._noting(methods[0]), self._noting(methods[1])
        nn.Module.__setattr__, nn.Module.__delattr__ = noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            if nn.Module.__setattr__ is noting[0]:  # else a run that began meanwhile calls it
                nn.Module.__setattr__, nn.Module.__delattr__ = methods  # type: ignore[method-assign]
            self._modules.clear()

    def _noting(self, method: Callable[..., None]) -> Callable[..., None]:
        def __setattr__(module: nn.Module, name: str, *value: Any) -> None:  # noqa: N807
            if torch.compiler.is_compiling() or getcurrent() is not self._greenlet:
                method(module, name, *value)
                return
            before = vars(module).get(name, _ABSENT)
            method(module, name, *value)
            if module in self._modules:
                values = self._values.setdefault((module, name), {-1: before})
                values[self._batch] = vars(module).get(name, _ABSENT)
                self._present[module, name] = self._batch

        return __setattr__  # torch.compile runs functions of this name as they are

    def resume(self, batch: int, greenlet: Any = None) -> None:
        """Give the modules what a batch finds, which goes on in a greenlet."""
        self._batch, self._greenlet = batch, greenlet
        for (module, name), values in self._values.items():
            found = batch if batch in values else max(one for one in values if one < batch)
            if self._present[module, name] != found:
                self._present[module, name] = found
                if values[found] is _ABSENT:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = values[found]

    def end_window(self) -> None:
        """Leave what the last batch that set it has left, and forget the others."""
        self.resume(sys.maxsize)
        self._values.clear()
        self._present.clear()
