"""The forward of a stage that is made of the model's own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flex_model import pytree
from flex_model.pipelining.own_tensor import OwnTensor
from flex_model.pipelining.splitting.templates import TreeTemplate

_current: ContextVar[StageCall | None] = ContextVar("flex_model_stage_call", default=None)


def current_call() -> StageCall | None:
    """The run of a stage that this is a part of; None outside, as in a recomputation."""
    return _current.get()


class Labels(Protocol):
    """Told of every value that stands in for one that a stage does not have."""

    def mark(self, tensor: Tensor, label: str) -> None: ...


class StageCall:
    """One run of a stage's forward: all that it must know of its micro-batch.

    Args:
        hidden: What the stage has received; None for the first.
        labels: Told of stand-ins' values, while a split is examined.
    """

    def __init__(self, hidden: Tensor | None, labels: Labels | None = None) -> None:
        self.hidden = hidden
        self.labels = labels
        self._counts: dict[int, int] = {}
        self._made: dict[Any, Tensor] = {}

    def receive(self) -> Tensor | None:
        """What the stage has received, at the place where it goes on."""
        hidden = self.hidden
        if hidden is not None and hidden.requires_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "the hidden state that a pipeline stage has received would lose its gradient: the "
                "model runs the block there without gradients. If it checkpoints blocks, pass "
                "use_reentrant=False"
            )
        return hidden

    def count(self, module: nn.Module) -> int:
        """How often it was called before, in this run."""
        count = self._counts.get(id(module), 0)
        self._counts[id(module)] = count + 1
        return count

    def make(
        self, template: TreeTemplate, label: str, given: Mapping[int, Tensor] | None = None
    ) -> Any:
        """A tree of values without meaning, but for the leaves given."""
        made = None if self.labels else self._made
        tree = template.make(self.hidden, given or {}, made)
        if self.labels is not None:
            for index, leaf in enumerate(template.tensors_of(tree)):
                if leaf is not None and index not in (given or {}):
                    self.labels.mark(leaf, label)
        return tree

    def __enter__(self) -> StageCall:
        self._token = _current.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _current.reset(self._token)


class StageEnd(BaseException):  # no Exception: model code that catches those is not meant
    """Ends a stage's forward; it carries what the next stage is given."""

    def __init__(self, call: StageCall, hidden: Tensor) -> None:
        super().__init__("the end of a pipeline stage")
        self.call = call
        self.hidden = hidden


class StageForward:
    """What a stage's module has as ``forward``.

    Args:
        module: The stage's module tree.
        is_first: It takes the model's inputs; the others take the hidden state first.
        is_last: It returns the model's output; the others the hidden state.
        signature: Of the model's forward.
        absent: What a later stage gives the model for inputs that only the first stage gets, by
            parameter name.
        absent_parameters: Names of other stages' parameters, for which there is a buffer.
        fixed: Keyword arguments that are always these (``use_cache=False``).
        leaving: The block after whose hooks the stage ends, where no later block is called.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        *,
        is_first: bool,
        is_last: bool,
        signature: inspect.Signature,
        absent: Mapping[str, TreeTemplate],
        absent_parameters: Sequence[str],
        fixed: Mapping[str, Any],
        leaving: tuple[nn.Module, int] | None = None,
    ) -> None:
        self._module = module
        self._forward = forward
        self.is_first, self.is_last = is_first, is_last
        self.labels: Labels | None = None
        self._parameters = dict(signature.parameters)
        self._absent = dict(absent)
        self.absent_parameters = tuple(absent_parameters)
        self._fixed = dict(fixed)
        self._leaving = leaving
        self.__name__ = "forward"
        self.__signature__ = signature if is_first else _later_signature(signature, absent)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = None
        if not self.is_first:
            hidden, args, kwargs = self._later_inputs(args, kwargs)
        kwargs.update(self._fixed)
        if self._leaving is not None:  # after all hooks that others have put there
            block, key = self._leaving
            block._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]
        call = StageCall(hidden, self.labels)
        try:
            with call:
                if hidden is not None:
                    args, kwargs = self._fill(call, kwargs)
                output = self._forward(*args, **kwargs)
        except StageEnd as end:
            if end.call is not call:
                raise
            return end.hidden.contiguous()  # torch sends nothing else
        if not self.is_last:
            raise RuntimeError(
                f"{type(self._module).__name__} came to its end without calling the block where "
                "this pipeline stage ends; it ran otherwise on the example given to pipeline()"
            )
        return as_tensors(output)

    def _later_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise TypeError(
                "a later pipeline stage takes the hidden state, one tensor, and keyword "
                f"arguments of the model; got {len(args)} positional arguments"
            )
        hidden = args[0]
        if hidden.requires_grad:
            hidden = OwnTensor.apply(hidden) if torch.is_grad_enabled() else hidden.detach()
        return hidden, (), kwargs

    def _fill(self, call: StageCall, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The model's arguments, with something of the right size for those that are not here."""
        positional: list[Any] = []
        for name, template in self._absent.items():
            if name in kwargs:
                continue
            value = call.make(template, f"input {name}")
            parameter = self._parameters.get(name)
            if parameter is None or parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                positional.extend(value)
            else:
                kwargs[name] = value
        if positional:  # what comes before *args is positional too
            head = []
            for name, parameter in self._parameters.items():
                if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                    break
                if not any(p.kind is p.VAR_POSITIONAL for p in self._parameters.values()):
                    break
                if name not in kwargs:
                    break
                head.append(kwargs.pop(name))
            positional = head + positional
        return tuple(positional), kwargs


def _later_signature(
    signature: inspect.Signature, absent: Mapping[str, TreeTemplate]
) -> inspect.Signature:
    hidden = inspect.Parameter("hidden_states", inspect.Parameter.POSITIONAL_ONLY)
    others = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            others.append(parameter)
            continue
        default = None if name in absent else parameter.default
        if name == hidden.name:
            hidden = hidden.replace(name=f"received_{name}")
        others.append(parameter.replace(kind=parameter.KEYWORD_ONLY, default=default))
    return inspect.Signature([hidden, *others])


def as_tensors(output: Any) -> Any:
    """A model's output as pipelines pass it: its tensor, or its tensors in order."""
    leaves = pytree.flatten(output)[0]
    return leaves[0] if len(leaves) == 1 else tuple(leaves)
