"""The forward of a stage that is made of the model's own code."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flex_model import pytree
from flex_model.pipelining.own_tensor import OwnTensor
from flex_model.pipelining.splitting.absent_tensor import AbsentError, answering, names_in
from flex_model.pipelining.splitting.placeholder import Placeholder

_current: ContextVar[StageCall | None] = ContextVar("flex_model_stage_call", default=None)


def current_call() -> StageCall | None:
    """The run of a stage that this is a part of; None outside, as in a recomputation."""
    return _current.get()


class StageCall:
    """One run of a stage's forward: what belongs to its micro-batch.

    Attributes:
        hidden: What the stage has received; None for the first.
    """

    def __init__(self, hidden: Tensor | None) -> None:
        self.hidden = hidden

    def receive(self, stand_in: Tensor) -> Tensor:
        """What the stage has received, in place of ``stand_in``."""
        hidden = self.hidden
        assert hidden is not None
        if hidden.requires_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "the hidden state that a pipeline stage has received would lose its gradient: the "
                "model runs the block there without gradients. If it checkpoints blocks, pass "
                "use_reentrant=False"
            )
        if stand_in.shape != hidden.shape:
            raise RuntimeError(
                f"a pipeline stage has received a hidden state of sizes {tuple(hidden.shape)}, and "
                f"the model would run its first block on {tuple(stand_in.shape)}: its sizes do not "
                "follow from the example's; give pipeline() an example of these sizes"
            )
        return hidden


class StageEnd(BaseException):  # no Exception: model code that catches those is not meant
    """Ends a stage's forward; it carries what the next stage is given."""

    def __init__(self, call: StageCall, hidden: Tensor) -> None:
        super().__init__("the end of a pipeline stage")
        self.call = call
        self.hidden = hidden


class StageForward:
    """The function that replaces the ``forward`` of a stage's module.

    Args:
        forward: The model's.
        is_first: It takes the model's inputs; the others take the hidden state first.
        is_last: It returns the model's output; the others the hidden state.
        signature: Of the model's forward.
        num_positional: How many positional arguments the first stage gets.
        absent: Placeholders for them in a later stage, by parameter name.
        fixed: Keyword arguments that are always these (``use_cache=False``).
        example: The keyword arguments on which the stage was examined.
        answer: What Python reads for values that are not here, with these keyword arguments: where
            it makes no difference to the output. None: that is an error.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        is_first: bool,
        is_last: bool,
        signature: inspect.Signature,
        num_positional: int,
        absent: Mapping[str, Placeholder],
        fixed: Mapping[str, Any],
        example: Mapping[str, Any],
        answer: int | None,
    ) -> None:
        self._forward = forward
        self._is_first, self._is_last = is_first, is_last
        self._signature = signature
        self._num_positional = num_positional
        self._absent = dict(absent)
        self._fixed = dict(fixed)
        self._example, self._answer = _names_given(example), answer
        self.__name__ = "forward"
        self.__signature__ = signature if is_first else _later_signature(signature, absent)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _names_given({**kwargs, **self._fixed})
        with answering(self._answer if given == self._example else None):
            output = self._run(args, kwargs)
        needed = names_in(output)
        if needed:
            raise AbsentError(
                needed,
                f"a pipeline stage needs {', '.join(sorted(needed))}, which it does not have, when "
                f"the keyword arguments are {given}; give pipeline() an example with these, and by "
                "keyword what every stage needs",
            )
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = StageCall(None if self._is_first else self._hidden(args))
        token = _current.set(call)
        try:
            if call.hidden is not None:
                args, kwargs = self._complete(call.hidden, kwargs)
            elif len(args) > self._num_positional:
                raise TypeError(
                    f"a pipeline stage got {len(args)} positional arguments, and the example given "
                    f"to pipeline() had {self._num_positional}: later stages would lack what was "
                    "a keyword argument there; give it by keyword"
                )
            output = self._forward(*args, **{**kwargs, **self._fixed})
        except StageEnd as end:
            if end.call is not call:
                raise
            return end.hidden.contiguous()  # torch sends nothing else
        finally:
            _current.reset(token)
        if not self._is_last:
            raise RuntimeError(
                "the model came to its end without calling the block where this pipeline stage "
                "ends; it ran otherwise on the example given to pipeline()"
            )
        return as_tensors(output)

    def _hidden(self, args: tuple[Any, ...]) -> Tensor:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise TypeError(
                "a later pipeline stage takes the hidden state, one tensor, and keyword "
                f"arguments of the model; got {len(args)} positional arguments"
            )
        hidden = args[0]
        if not hidden.requires_grad:
            return hidden
        return OwnTensor.apply(hidden) if torch.is_grad_enabled() else hidden.detach()

    def _complete(
        self, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, with placeholders for those that this stage does not get."""
        kwargs, filled = dict(kwargs), OrderedDict[str, Any]()
        for name, absent in self._absent.items():
            if name in kwargs:
                filled[name] = kwargs.pop(name)
            else:
                filled[name] = absent.make(hidden, {f"input {name}"})
        bound = inspect.BoundArguments(self._signature, filled)
        return bound.args, {**bound.kwargs, **kwargs}


def _names_given(kwargs: Mapping[str, Any]) -> list[str]:
    return sorted(name for name, value in kwargs.items() if value is not None)


def _later_signature(
    signature: inspect.Signature, absent: Mapping[str, Placeholder]
) -> inspect.Signature:
    hidden = inspect.Parameter("hidden_states", inspect.Parameter.POSITIONAL_ONLY)
    others = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            others.append(parameter)
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = None if name in absent else parameter.default
            others.append(parameter.replace(kind=parameter.KEYWORD_ONLY, default=default))
        if name == hidden.name:
            hidden = hidden.replace(name=f"received_{name}")
    return inspect.Signature([hidden, *others])


def as_tensors(output: Any) -> Any:
    """A model's output as pipelines pass it: its tensor, or its tensors in order."""
    leaves = pytree.flatten(output)[0]
    return leaves[0] if len(leaves) == 1 else tuple(leaves)
