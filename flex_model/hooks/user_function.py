"""Runs the user's editing function with the same random state on every rank; checks its result."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.errors import HookError
from flex_model.hooks.context import Call, RandomState, seed_of_call, throw_away
from flex_model.hooks.function import name_of
from flex_model.hooks.save_ctx import begin_call, end_call
from flex_model.integrations import dtensor

if TYPE_CHECKING:
    from flex_model.hooks.edit_path import EditInput
    from flex_model.hooks.registration import Registration

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]

_AMBIGUOUS = -1  # the number of a call with the same input as another


Observer = Callable[[str, Call], Callable[[], None]]  # see `HookCaller`
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
        modules: nn.ModuleDict,
        observers: Sequence[Observer],
    ) -> None:
        self._communicator, self._observers = communicator, observers
        self._save_ctx, self._modules = save_ctx, modules

    def context_of(self, call: Call) -> Namespace:
        """Return the ``save_ctx`` of the call's run: the FlexModel's, or a batch's own."""
        return self._save_ctx if call.run.save_ctx is None else call.run.save_ctx

    def run(self, inputs: Sequence[EditInput], parameters: Parameters) -> Edits:
        """Call the function on the full tensors; return the result for each, None if unchanged.

        Raises:
            TypeError, ValueError: it returned something that can't replace the tensor.
            Exception: whatever the function raised.
        """
        call, leaf = inputs[-1].call, inputs[-1].leaf
        fulls = [one.full for one in inputs]
        versions = [full._version for full in fulls]
        outer = self._communicator.edit_of
        ends: Sequence[Callable[[], None]] = ()
        try:
            self._communicator.set_edit(call.describe())
            if self._observers:
                ends = [begin("edit", call) for begin in self._observers]
            return self._call(call, fulls, versions, leaf, parameters)
        finally:
            self._communicator.set_edit(outer)
            for end in ends:
                end()
            for one, full, version in zip(inputs, fulls, versions):
                one.call.registration.note_writes(full._version != version)

    def _call(
        self,
        call: Call,
        fulls: Sequence[Tensor],
        versions: Sequence[int],
        leaf: Tensor,
        parameters: Parameters,
    ) -> Edits:
        """As ``run``; ``leaf``: this rank's local tensor, which identifies the call among those of
        its hook.
        """
        function = call.registration.given
        assert function.editing_function is not None
        number = _number_of(call, leaf)
        seed = seed_of_call(call.run.seed or 0, call.registration.seed, number)
        save_ctx = self.context_of(call)
        if call.is_replay:
            save_ctx = throw_away(save_ctx)
        kinds = [kind_of(full) for full in fulls]
        passed = tuple(fulls) if function.members else fulls[0]
        function.parameters = parameters
        try:
            with RandomState(seed, fulls[0].device) as random:
                begin_call(save_ctx, call.registration.index)
                result = function.editing_function(call.module, passed, save_ctx, self._modules)
                end_call(save_ctx)
        finally:
            function.parameters = {}
        if random.consumed and not call.is_replay:
            call.run.consumed = True
            numbers = call.run.random_calls.setdefault(call.registration.index, {})
            key = _fingerprint(leaf)
            numbers[key] = _AMBIGUOUS if key in numbers else number
        elif random.consumed and number == _AMBIGUOUS:
            raise HookError(
                f"{call.describe()}: the editing function draws random numbers, and the model is "
                "recomputed in backward (checkpointing) for one of several calls with the same "
                "input, or for one that is not remembered, so its random numbers can't be drawn "
                "again; do without checkpointing there"
            )
        results = results_of(call.registration, result)
        return [
            _changed(call.registration, full, version, expected, result)
            for full, version, expected, result in zip(fulls, versions, kinds, results)
        ]


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


def _changed(
    registration: Registration, full: Tensor, version: int, expected: Kind, result: object
) -> Tensor | None:
    """Return the tensor that replaces ``full``; None if the function did not change it."""
    if result is None or result is full:
        result = full
        if kind_of(full) == expected:
            return full if full._version != version else None
    if isinstance(result, FakeTensor):
        raise TypeError(
            f"{_what(registration)} a tensor without values, which it kept when flex.dry_run() "
            "called it; delete what it keeps after a dry run, or keep it in save_ctx"
        )
    check_result(registration, result, expected)
    assert isinstance(result, Tensor)
    return result


def kind_of(tensor: Tensor) -> Kind:
    """Return what an edit must not change: shape, dtype and device."""
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _number_of(call: Call, leaf: Tensor) -> int:
    """Return the number of this call among those of the hook in its run; a recomputed call has the
    number of the original one.

    Calls are identified by their inputs: recomputation gives the same bits.
    """
    index = call.registration.index
    if call.is_replay:
        return call.run.random_calls.get(index, {}).get(_fingerprint(leaf), _AMBIGUOUS)
    number = call.run.calls.get(index, 0)
    call.run.calls[index] = number + 1
    return number


def _fingerprint(tensor: Tensor) -> int:
    return int(values.fingerprint(tensor)[0])


def _what(registration: Registration) -> str:
    function = registration.given.editing_function
    return f"{registration.describe()}: the editing function {name_of(function)!r} returned"


def check_result(registration: Registration, result: object, expected: Kind) -> None:
    """TypeError or ValueError for a result that can't replace the tensor."""
    what = _what(registration)
    if not isinstance(result, Tensor):
        raise TypeError(
            f"{what} a {type(result).__name__}; expected a torch.Tensor of shape {expected[0]}, "
            "or None"
        )
    if dtensor.is_dtensor(result):
        raise TypeError(
            f"{what} a DTensor; expected a plain full torch.Tensor of shape {expected[0]}"
        )
    for attribute, needed, got in zip(("shape", "dtype", "device"), expected, kind_of(result)):
        if needed != got:
            raise ValueError(f"{what} a tensor of {attribute} {got}; expected {attribute} {needed}")
