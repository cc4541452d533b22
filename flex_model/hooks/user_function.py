"""Running the user's editing function: the same random state on every rank, a checked result."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.errors import HookError
from flex_model.hooks.context import Call, RandomState, seed_of_call, throw_away
from flex_model.hooks.function import name_of
from flex_model.integrations import dtensor

_AMBIGUOUS = -1  # the number of a call that can't be told from another


class UserFunction:
    """What every editing function gets besides its tensor, and how it is called. Local."""

    def __init__(self, save_ctx: Namespace, modules: nn.ModuleDict) -> None:
        self._save_ctx = save_ctx
        self._modules = modules

    def run(
        self, call: Call, full: Tensor, leaf: Tensor, parameters: dict[str, Tensor]
    ) -> Tensor | None:
        """Call it on ``full``; what it made of that, or None if nothing changed.

        Args:
            leaf: This rank's own part, which tells calls of one hook apart.

        Raises:
            TypeError, ValueError: what it returned can't go on in the model.
            Exception: whatever the function raised.
        """
        function = call.registration.hook_function
        assert function.editing_function is not None
        number = _number_of(call, leaf)
        seed = seed_of_call(call.run.seed or 0, call.registration.seed, number)
        save_ctx = self._save_ctx if call.run.save_ctx is None else call.run.save_ctx
        if call.is_replay:
            save_ctx = throw_away(save_ctx)
        version = full._version
        expected = _kind_of(full)
        function.parameters = parameters
        try:
            with RandomState(seed, full.device) as random:
                result = function.editing_function(call.module, full, save_ctx, self._modules)
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
                "computed once more in backward (checkpointing) for one of several calls with the "
                "same input, or for one that is not remembered: which numbers it drew is not "
                "known; do without checkpointing there"
            )
        if result is None or result is full:
            result = full
            if _kind_of(full) == expected:
                return full if full._version != version else None
        _check(call, result, expected)
        return result


def _kind_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _number_of(call: Call, leaf: Tensor) -> int:
    """Counts the calls of a hook in its run; a recomputed call has the number that it had.

    Where there were several, they are told apart by what they were given: recomputation gives the
    same bits.
    """
    index = call.registration.index
    if call.is_replay:
        return call.run.random_calls.get(index, {}).get(_fingerprint(leaf), _AMBIGUOUS)
    number = call.run.calls.get(index, 0)
    call.run.calls[index] = number + 1
    return number


def _fingerprint(tensor: Tensor) -> int:
    return int(values.fingerprint(tensor)[0])


def _check(
    call: Call, result: object, expected: tuple[tuple[int, ...], torch.dtype, torch.device]
) -> None:
    function = call.registration.hook_function.editing_function
    what = f"{call.describe()}: the editing function {name_of(function)!r} returned"
    if not isinstance(result, Tensor):
        raise TypeError(
            f"{what} a {type(result).__name__}; expected a torch.Tensor of shape {expected[0]}, "
            "or None"
        )
    if dtensor.is_dtensor(result):
        raise TypeError(
            f"{what} a DTensor; expected a plain full torch.Tensor of shape {expected[0]}"
        )
    for attribute, wanted, got in zip(("shape", "dtype", "device"), expected, _kind_of(result)):
        if wanted != got:
            raise ValueError(f"{what} a tensor of {attribute} {got}; expected {attribute} {wanted}")
