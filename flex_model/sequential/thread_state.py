"""What torch keeps per thread or per process: each batch has its own, by exchange."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _autograd, _functorch
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.utils import _device

from flex_model.sequential.interrupts import deferred

_Ask = Callable[[], Any]


def _refuse_saved_hooks(message: str | None) -> None:
    if message is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(message, False)


# How each is asked, and set. The kernels of attention are one choice for the process.
_SETTINGS: tuple[tuple[_Ask, Callable[[Any], Any]], ...] = (
    (torch._C.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    *(
        (
            functools.partial(torch.get_autocast_dtype, kind),
            functools.partial(torch.set_autocast_dtype, kind),
        )
        for kind in ("cpu", "cuda")
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (
        torch._C._get_dtensor_allow_implicit_replication,
        torch._C._set_dtensor_allow_implicit_replication,
    ),
    (_autograd._saved_tensors_hooks_get_disabled_error_message, _refuse_saved_hooks),
    # What torch.compile has called for each Python frame: last, since ours are none of its own.
    (eval_frame.get_eval_frame_callback, eval_frame.set_eval_frame),
)

# What shows at little cost whether anything has changed.
_ASKED: tuple[_Ask, ...] = (
    *(ask for ask, _ in _SETTINGS),
    torch._C.is_inference_mode_enabled,
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
    torch._C._is_torch_function_enabled,
    torch._C._is_any_autocast_enabled,
    _functorch.get_dynamic_layer_stack_depth,
    functools.partial(_autograd._top_saved_tensors_default_hooks, True),
)


class ThreadState(NamedTuple):
    """What torch keeps per thread, at one moment.

    Attributes:
        functions, dispatches: The stacks of ``TorchFunctionMode`` and ``TorchDispatchMode``.
        function_state: Whether ``__torch_function__`` is called at all.
        transforms: How many transforms of ``torch.func`` are going on.
        saved_hooks: The innermost hooks for saved tensors; those around them aren't told.
        default_device, device_context: Of ``torch.set_default_device`` and ``with torch.device``.
        autocast: Whether it is on anywhere (keys tell where), and its dtypes.
        cuda: Device and stream; None where CUDA is not used.
        has_inference: Autograd's inference mode.
        attention_order: Which kernels of attention are tried first; one order for the process.
        dual_level: Of forward-mode differentiation; one for the process, and not exchanged.
        answers: To what is ``_ASKED``; to begin with, the values of ``_SETTINGS``.
        included, excluded: Keys of torch's dispatcher.
    """

    functions: tuple[Any, ...]
    dispatches: tuple[Any, ...]
    function_state: Any
    transforms: int
    saved_hooks: tuple[Any, Any] | None
    default_device: Any
    device_context: Any
    autocast: tuple[bool, torch.dtype, torch.dtype]
    cuda: tuple[int, dict[str, int]] | None
    has_inference: bool
    attention_order: list[int]
    dual_level: int
    answers: list[Any]
    included: torch._C.DispatchKeySet
    excluded: torch._C.DispatchKeySet

    @staticmethod
    def now() -> ThreadState:
        c: Any = torch._C
        return ThreadState(
            _FUNCTION_MODES.now(),
            _DISPATCH_MODES.now(),
            c._get_torch_function_state(),
            _functorch.get_dynamic_layer_stack_depth(),
            _autograd._top_saved_tensors_default_hooks(True),
            _device.CURRENT_DEVICE,
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
            (
                c._is_any_autocast_enabled(),
                c.get_autocast_dtype("cpu"),
                c.get_autocast_dtype("cuda"),
            ),
            _cuda_now() if torch.cuda.is_initialized() else None,
            c.is_inference_mode_enabled(),
            c._get_sdp_priority_order(),
            forward_ad._current_level,
            [ask() for ask in _ASKED],
            c._dispatch_tls_local_include_set(),
            c._dispatch_tls_local_exclude_set(),
        )

    @property
    def has_autocast(self) -> bool:
        return self.autocast[0]

    @property
    def is_now(self) -> bool:
        """Whether the thread is like this, as far as public functions can have changed it. Asked at
        every turn, of functions that cost little.
        """
        if [ask() for ask in _ASKED] != self.answers:
            return False
        has_details = self.functions or self.dispatches or self.has_autocast or self.cuda
        return not has_details or (
            _FUNCTION_MODES.now() == self.functions
            and _DISPATCH_MODES.now() == self.dispatches
            and torch._C._dispatch_tls_local_exclude_set() == self.excluded
            and (self.cuda is None or _cuda_now() == self.cuda)
        )

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Inside, the thread is as it was at this moment; afterwards, as it is now."""
        if self.is_now:
            yield
            return
        undo = contextlib.ExitStack()
        try:
            with deferred():
                self._take_the_place_of(ThreadState.now(), undo)
            yield
        finally:
            with deferred():
                undo.close()

    def restore(self) -> None:
        """Set what a call has left otherwise. What its context managers have entered is for them to
        leave, which they may not have done where Ctrl-C came at the first line of their end.
        """
        if not self.is_now:
            with deferred():
                _FUNCTION_MODES.set(self.functions)
                _DISPATCH_MODES.set(self.dispatches)
                if torch.is_inference_mode_enabled() != self.has_inference:
                    # It would bring back, at its end, what there is now.
                    _never_ending.append(torch._C._InferenceMode(self.has_inference))
                    _never_ending[-1].__enter__()
                self._set_values()

    def _take_the_place_of(self, found: ThreadState, undo: contextlib.ExitStack) -> None:
        """Args:
        undo: What makes it as it was found; its last step sets values.
        """
        undo.callback(found._set_values)
        if found.autocast != self.autocast:
            # Casts are found by the weight alone: another batch may have another dtype, or no
            # gradients, and the gradients of all would be summed in the low precision.
            torch.clear_autocast_cache()
            undo.callback(torch.clear_autocast_cache)
        _autograd._saved_tensors_hooks_enable()
        self._leave_transforms(found, undo)
        for modes, theirs, mine in (
            (_FUNCTION_MODES, found.functions, self.functions),
            (_DISPATCH_MODES, found.dispatches, self.dispatches),
        ):
            if theirs != mine:
                undo.callback(modes.set, theirs)
                modes.set(mine)
        while _autograd._top_saved_tensors_default_hooks(True) not in (None, self.saved_hooks):
            hooks = _autograd._top_saved_tensors_default_hooks(True)
            _autograd._pop_saved_tensors_default_hooks()
            undo.callback(_autograd._push_saved_tensors_default_hooks, *hooks)
            undo.callback(_autograd._saved_tensors_hooks_enable)
        if found.has_inference != self.has_inference:
            # A guard's end brings back what was there when it was made.
            undo.enter_context(torch._C._InferenceMode(self.has_inference))
        self._set_values()
        undo.enter_context(torch._C._ForceDispatchKeyGuard(self.included, self.excluded))

    def _leave_transforms(self, found: ThreadState, undo: contextlib.ExitStack) -> None:
        if found.transforms < self.transforms:
            raise RuntimeError(
                "sequential.run: a target is called where torch.func has set a transform aside "
                "that the run is inside of; such a call can't be suspended"
            )
        for _ in range(found.transforms - self.transforms):
            layer = _functorch.pop_dynamic_layer_stack()
            undo.callback(_functorch.push_dynamic_layer_stack, layer)

    def _set_values(self) -> None:
        c: Any = torch._C
        c._set_torch_function_state(self.function_state)
        _device.CURRENT_DEVICE = self.default_device
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self.device_context
        for kind, key in (("cpu", c.DispatchKey.AutocastCPU), ("cuda", c.DispatchKey.AutocastCUDA)):
            torch.set_autocast_enabled(kind, not self.excluded.has(key))
        if self.cuda is not None:
            torch.cuda.set_device(self.cuda[0])
            c._cuda_setStream(**self.cuda[1])
        for (_, put), value in zip(_SETTINGS, self.answers):
            put(value)
        c._set_sdp_priority_order(self.attention_order)


_never_ending: list[Any] = []


class _Modes(NamedTuple):
    """One of torch's stacks of modes, which are pushed here, not entered: what entered them leaves
    them.
    """

    size: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def now(self) -> tuple[Any, ...]:
        return tuple(map(self.at, range(self.size())))

    def set(self, modes: tuple[Any, ...]) -> None:
        for _ in range(self.size()):
            self.pop()
        for mode in modes:
            self.push(mode)


_FUNCTION_MODES = _Modes(
    torch._C._len_torch_function_stack,
    torch._C._get_function_stack_at,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
)
_DISPATCH_MODES = _Modes(
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_stack_at,
    functools.partial(torch._C._pop_torch_dispatch_stack, None),  # whatever its kind
    torch._C._push_on_torch_dispatch_stack,
)


def _cuda_now() -> tuple[int, dict[str, int]]:
    stream = torch.cuda.current_stream()
    names = ("stream_id", "device_index", "device_type")
    return stream.device_index, {name: getattr(stream, name) for name in names}


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

    @staticmethod
    def differ(pairs: Sequence[tuple[ProcessState, ProcessState]]) -> bool:
        """Whether random numbers were drawn between the two of any pair."""
        first, second = (torch.stack([pair[i].generator for pair in pairs]) for i in (0, 1))
        return not torch.equal(first, second) or any(
            not torch.equal(before[1], after[1])
            for one, other in pairs
            for before, after in zip(one.cuda_generators, other.cuda_generators)
        )
