"""What torch keeps per thread or per process: each batch has its own, exchanged at switches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from flex_model.integrations import torch_private
from flex_model.integrations.torch_private import MODE_STACKS, THREAD_SETTINGS
from flex_model.runs.interrupts import deferred


class ThreadState(NamedTuple):
    """What torch keeps per thread, at one moment.

    Attributes:
        settings: The values of ``THREAD_SETTINGS``.
        modes: The stacks of ``TorchFunctionMode`` and ``TorchDispatchMode``.
        transforms: The number of transforms of ``torch.func`` in progress.
        saved_hooks: The innermost hooks for saved tensors, the only ones that run.
        autocast: Whether it is on for any device, and its dtypes.
        cuda: Device and stream; None if CUDA is not used.
        dual_level: That of forward-mode differentiation: one for the process, not exchanged.
        included, excluded: Keys of torch's dispatcher.
    """

    settings: list[Any]
    modes: list[list[Any]]
    transforms: int
    saved_hooks: tuple[Any, Any] | None
    autocast: tuple[bool, torch.dtype, torch.dtype]
    cuda: tuple[int, dict[str, int]] | None
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
            torch_private.cuda_stream() if torch.cuda.is_initialized() else None,
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
        if self.cuda is not None:
            torch_private.set_cuda_stream(*self.cuda)
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
        """That of the CPU, and of one CUDA device."""
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
        seed = int(torch.ops.flex_model.fingerprint(self._states[torch.default_generator])[0])

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
