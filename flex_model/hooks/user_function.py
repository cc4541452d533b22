"""Runs the user's editing function with the same random state on every rank; checks its result."""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_model.distributed.communicator import Communicator
from flex_model.distributed.plain import is_renamed, plain
from flex_model.errors import HookError
from flex_model.hooks.function import name_of
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.random_state import DrawWatch, RandomCalls, RandomState, seed_of_state
from flex_model.integrations import dtensor, profiler
from flex_model.integrations.torch_private import FakeTensor

if TYPE_CHECKING:
    from flex_model.hooks.registration import Registration
    from flex_model.runs.run import Run

Kind = tuple[tuple[int, ...], torch.dtype, torch.device, torch.layout]
Before = tuple[int, tuple[int, ...], torch.dtype, torch.device, torch.layout]  # version, kind

Observer = Callable[[str, HookCall], Callable[[], None]]  # see `HookExecutor`
Parameters = dict[str, Tensor]  # the full parameters that the editing function named
Edits = list[Tensor | None]  # the result for each tensor of an edit; None: unchanged


class UserFunction:
    """Calls editing functions with ``save_ctx``, ``modules`` and parameters, during which the model
    must not run. Local.
    """

    def __init__(
        self,
        communicator: Communicator,
        save_ctx: Namespace,
        modules: Any,
        observers: Sequence[Observer],
    ) -> None:
        self._communicator, self._observers = communicator, observers
        self._save_ctx, self._modules = save_ctx, modules

    def context_of(self, run: Run) -> Namespace:
        """Return the ``save_ctx`` of a run: the FlexModel's, or a batch's own."""
        return self._save_ctx if run.save_ctx is None else run.save_ctx

    def settle(self, registration: Registration) -> None:
        """Let the dispatcher call the hook's function, where it is called as in this call."""
        function = registration.given.editing_function
        registration.hook.settle(function, self._save_ctx, self._modules)

    def run(
        self, call: HookCall, fulls: Sequence[Tensor], leaf: Tensor, parameters: Parameters
    ) -> Edits:
        """Call the function on the full tensors; return the result for each, None if unchanged.

        Args:
            leaf: This rank's local tensor, which identifies the call among those of its hook.

        Raises:
            TypeError, ValueError: it returned something that can't replace the tensor.
            Exception: whatever the function raised.
        """
        registration, run, communicator = call.registration, call.run, self._communicator
        function, draws = registration.given, registration.draws
        save_ctx = self._save_ctx if run.save_ctx is None else run.save_ctx
        index = registration.index
        if call.is_replay:
            save_ctx = copy_for_replay(save_ctx)
            number = 0 if draws is False else _number_of_replay(call, leaf)
        else:
            number = run.calls.get(index, 0)
            run.calls[index] = number + 1
        passed: Any = tuple(fulls) if function.members else fulls[0]
        before: list[Before] = [(one._version, *kind_of(one)) for one in fulls]
        references = _num_references(fulls) if torch.is_grad_enabled() else ()
        outer, random = communicator.edit_of, None
        ends = profiler.begun(self._observers, profiler.begin_span, "edit", call)
        try:
            communicator.set_edit(registration.description)
            if parameters:
                function.pass_parameters(parameters)
            random = (
                DrawWatch(fulls[0])
                if draws is False
                else RandomState(_seed_of(run), registration.seed, number, fulls[0])
            )
            result: object = function.editing_function(  # type: ignore[misc]
                call.module, passed, save_ctx, self._modules
            )
        finally:
            has_drawn = random is not None and random.end()
            communicator.set_edit(outer)
            if parameters:
                function.pass_parameters({})
            for end in ends:
                end()
        if draws is None and not isinstance(fulls[0], FakeTensor):
            registration.note_first_call(has_drawn)
        if has_drawn:
            if draws is False:
                raise late_draws(registration)
            _note_draws(call, leaf, number)
        if not communicator.is_local:
            has_written = any(full._version != of_full[0] for full, of_full in zip(fulls, before))
            for one in function._registrations:
                one.note_writes(has_written)
        results = results_of(registration, result)
        replaced = [None if one is full else one for full, one in zip(fulls, results)]
        del result, results  # or they would count
        is_kept = _are_kept(fulls, references) if references else [False] * len(fulls)
        return [changed(registration, *one) for one in zip(fulls, before, replaced, is_kept)]


def _seed_of(run: Run) -> int:
    seed = run.seed
    if seed is None:  # on one process; ranks have exchanged it
        run.use_seed(seed := seed_of_state())
    return seed


def _are_kept(tensors: Sequence[Tensor], references: Sequence[int]) -> list[bool]:
    """Whether there are more references to each tensor than there were, or a hook on it."""
    return [
        tensor.requires_grad and (now > once or bool(tensor._backward_hooks))
        for tensor, once, now in zip(tensors, references, _num_references(tensors))
    ]


def _num_references(tensors: Sequence[Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


def _note_draws(call: HookCall, leaf: Tensor, number: int) -> None:
    """Note that a call drew random numbers, so that its recomputation draws them again."""
    run, index = call.run, call.registration.index
    if not call.is_replay:
        run.note_draws()
        run.random_calls.setdefault(index, RandomCalls()).note(leaf, number)
    elif number == RandomCalls.AMBIGUOUS:
        raise HookError(
            f"{call.describe()}: the editing function draws random numbers, and the model is "
            "recomputed in backward (checkpointing) for one of several calls with the same "
            "input, or for one that is not remembered, so its random numbers can't be drawn "
            "again; do without checkpointing there. A draw by another thread during the call "
            "looks the same; give that thread a torch.Generator() of its own"
        )


def late_draws(registration: Registration) -> HookError:
    """The error of a function that is not seeded, since it drew nothing in its first call."""
    return HookError(
        f"{registration.describe()}: the editing function draws random numbers, and drew none in "
        "its first call, so it is not seeded, and other ranks or shardings would draw others; "
        "register it with HookFunction(..., draws=True). If it draws none, another thread of this "
        "process drew from torch's global generator during the call, which looks the same; give "
        "that thread a generator of its own (torch.Generator())"
    )


def results_of(registration: Registration, result: object) -> Sequence[object]:
    """Return the function's result for each of its tensors. TypeError if the number is wrong."""
    size = len(registration.given.members)
    if not size:
        return [result]
    if result is None:
        return [None] * size
    if not isinstance(result, (tuple, list)) or len(result) != size:
        length = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise TypeError(
            f"{_what(registration)} a {type(result).__name__}{length}; expected a tuple of {size} "
            "tensors, with None for those that stay as they are, or None"
        )
    return result


def changed(
    registration: Registration, full: Tensor, before: Before, result: object, is_kept: bool
) -> Tensor | None:
    """Return the tensor that replaces ``full``; None if the model continues with its own.

    Args:
        before: Version, shape, dtype, device and layout of ``full`` before the call.
        result: What the function returned, None for ``full`` itself.
        is_kept: Whether the function kept ``full``, or a hook on it: its gradient is then that of
            what the model continues with, as in torch's own hooks.
    """
    version, shape, dtype, device, layout = before
    kind = tuple(shape), dtype, device, layout
    if result is None:
        result = full
        if kind_of(full) == kind:
            return full if is_kept or full._version != version else None
    if isinstance(result, FakeTensor) and not isinstance(full, FakeTensor):
        raise TypeError(
            f"{_what(registration)} a tensor without values, which it kept when flex.dry_run() "
            "called it; delete what it keeps after a dry run, or keep it in save_ctx"
        )
    check_result(registration, result, kind)
    assert isinstance(result, Tensor)
    # Transfers, and the model, take no class that the function brought in.
    return plain(result) if is_renamed(result) else result


def kind_of(tensor: Tensor) -> Kind:
    """Return what an edit must not change: shape, dtype, device and layout."""
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout


def _number_of_replay(call: HookCall, leaf: Tensor) -> int:
    """Return the number of the call that a recomputed one repeats. Calls are identified by their
    inputs: recomputation gives the same bits.
    """
    calls = call.run.random_calls.get(call.registration.index)
    return RandomCalls.AMBIGUOUS if calls is None else calls.number_of(leaf)


def _what(registration: Registration) -> str:
    function = registration.given.editing_function
    return f"{registration.describe()}: the editing function {name_of(function)!r} returned"


def check_result(registration: Registration, result: object, expected: Kind) -> None:
    """TypeError or ValueError for a result that can't replace the tensor."""
    if not isinstance(result, Tensor):
        raise TypeError(
            f"{_what(registration)} a {type(result).__name__}; expected a torch.Tensor of shape "
            f"{expected[0]}, or None"
        )
    if dtensor.is_dtensor(result):
        raise TypeError(
            f"{_what(registration)} a DTensor; expected a plain full torch.Tensor of shape "
            f"{expected[0]}"
        )
    attributes = "shape", "dtype", "device", "layout"
    for attribute, needed, got in zip(attributes, expected, kind_of(result)):
        if needed != got:
            raise ValueError(
                f"{_what(registration)} a tensor of {attribute} {got}; expected {attribute} "
                f"{needed}"
            )


@contextlib.contextmanager
def on_copy(save_ctx: Namespace) -> Iterator[None]:
    """A context in which ``save_ctx`` holds copies of what it holds."""
    kept = dict(vars(save_ctx))
    vars(save_ctx).update(vars(copy_for_replay(save_ctx)))
    try:
        yield
    finally:
        vars(save_ctx).clear()
        vars(save_ctx).update(kept)


def copy_for_replay(save_ctx: Namespace) -> Namespace:
    """Copy ``save_ctx`` for a recomputed edit: the edit has run before, and what it adds to tensors
    and containers must not be added twice. Other objects are shared, not copied.
    """
    return Namespace(**{name: _copied(value) for name, value in vars(save_ctx).items()})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    twin: Any
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key in twin:
            twin[key] = _copied(twin[key])
        return twin
    if isinstance(value, (list, collections.deque)):
        twin = copy.copy(value)
        for index, item in enumerate(value):
            twin[index] = _copied(item)
        return twin
    if type(value) is tuple:
        return tuple(_copied(item) for item in value)
    if isinstance(value, set) or type(value).__module__ == "numpy":
        return copy.copy(value)
    return value
