"""What torch keeps per thread or per process, taken from the caller to each batch and back."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import Any

import torch
import torch.overrides
from torch.utils import _python_dispatch


class CallerState:
    """The caller's grad mode, inference mode, autocast, modes, default device, saved-tensor hooks,
    CUDA device and stream, and context variables, for another thread to begin with.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast_cache = torch.is_autocast_cache_enabled()
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._stream = torch.cuda.current_stream() if has_cuda else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ]
        self._saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._function_modes = torch.overrides._get_current_function_mode_stack()
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self._num_threads = torch.get_num_threads()
        self.context = contextvars.copy_context()

    @contextlib.contextmanager
    def entered(self):
        """Inside, this thread is as the caller's was."""
        with contextlib.ExitStack() as stack:
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, is_enabled, dtype in self._autocast:
                if is_enabled:
                    stack.enter_context(
                        torch.autocast(kind, dtype, cache_enabled=self._autocast_cache)
                    )
            if self._saved_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_hooks))
            for pushed, push, pop in (
                (self._function_modes, torch.overrides._push_mode, torch.overrides._pop_mode),
                (self._dispatch_modes, _python_dispatch._push_mode, _python_dispatch._pop_mode),
            ):
                for mode in pushed:  # pushed, not entered: the caller's thread has entered them
                    push(mode)
                    stack.callback(pop)
            yield


class ProcessState:
    """What is one for the whole process, so that each batch has its own by exchange: torch's
    random states and default dtype.
    """

    def __init__(
        self,
        default_dtype: torch.dtype,
        generator: torch.Tensor,
        cuda_generators: tuple[tuple[Any, torch.Tensor], ...] = (),
    ) -> None:
        self.default_dtype, self.generator = default_dtype, generator
        self.cuda_generators = cuda_generators

    @staticmethod
    def now(cuda_device: int | None) -> ProcessState:
        """Of the CPU, and of one CUDA device."""
        state = ProcessState(torch.get_default_dtype(), torch.default_generator.get_state())
        if cuda_device is not None:
            generator = torch.cuda.default_generators[cuda_device]
            state.cuda_generators = ((generator, generator.get_state()),)
        return state

    def restore(self) -> None:
        if self.default_dtype != torch.get_default_dtype():
            torch.set_default_dtype(self.default_dtype)
        torch.default_generator.set_state(self.generator)
        for generator, state in self.cuda_generators:
            generator.set_state(state)

    @functools.cached_property
    def _seed(self) -> int:
        return int(torch.ops.flex_model.fingerprint(self.generator)[0])

    def of_batch(self, index: int) -> ProcessState:
        """What batch ``index`` begins with. The first has the caller's random state; the others
        have their own, whatever the window, since what the batches before draw isn't known yet.
        """
        if index == 0:
            return self
        made = []
        for generator, _ in (((torch.default_generator, None)), *self.cuda_generators):
            before = generator.get_state()
            generator.manual_seed((self._seed + index) & (2**63 - 1))
            made.append((generator, generator.get_state()))
            generator.set_state(before)
        return ProcessState(self.default_dtype, made[0][1], tuple(made[1:]))

    def has_drawn_since(self, before: ProcessState) -> bool:
        """Whether random numbers were drawn between the two."""
        pairs = zip(self.cuda_generators, before.cuda_generators)
        return not torch.equal(self.generator, before.generator) or any(
            not torch.equal(mine[1], theirs[1]) for mine, theirs in pairs
        )
