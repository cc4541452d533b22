"""What stands where other stages have their modules, in a stage that runs the model's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from flex_model.pipelining.pass_through import PassThrough
from flex_model.pipelining.splitting.stage_forward import StageEnd, current_call
from flex_model.pipelining.splitting.templates import Observed, TreeTemplate


class StandIn(PassThrough):
    """A module of another stage, in a stage whose model code still calls it.

    What it returns is of the structure, sizes and dtypes that the module returns and without
    meaning: NaN, so that a value that should not be used is seen. What model code reads of it is
    there: plain attributes (``layer_idx``), modules in it as stand-ins too, sizes and dtypes of
    its parameters (``embed.weight.dtype``). None of it is registered.

    Args:
        original: The module; nothing of it is kept alive.
        name: Its name in the model.
        outputs: What it returns, per call in one run of the model.
    """

    def __init__(
        self, original: nn.Module, name: str, outputs: Sequence[TreeTemplate] = ()
    ) -> None:
        super().__init__()
        own = set(self.__dict__)
        for key, value in original.__dict__.items():
            if key not in own and _is_plain(value):
                self.__dict__[key] = value
        self.training = original.training
        self.stands_for = f"{name}: {type(original).__name__}"
        self._name = name
        self._outputs = tuple(outputs)
        self._parts: dict[str, Any] = {
            key: StandIn(child, f"{name}.{key}")
            for key, child in original._modules.items()
            if child is not None
        }
        for key, tensor in (*original._parameters.items(), *original._buffers.items()):
            if tensor is not None:
                self._parts[key] = Observed.of(tensor).leaves[0]

    def __getattr__(self, name: str) -> Any:
        part = self.__dict__.get("_parts", {}).get(name)
        if part is None:
            return super().__getattr__(name)
        if isinstance(part, StandIn):
            return part
        call = current_call()
        tensor = part.nothing(None if call is None else call.hidden)
        if call is not None and call.labels is not None:
            call.labels.mark(tensor, self._name)
        return tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call is None or not self._outputs:
            return super().forward(*args, **kwargs)
        index = call.count(self)
        return call.make(self._outputs[min(index, len(self._outputs) - 1)], self._name)

    def extra_repr(self) -> str:
        return f"for {self.stands_for}"


class Entry(StandIn):
    """The block before a stage's first one: it returns what the stage has received.

    Args:
        output: What the block returns.
        leaf: Which of its leaves is the hidden state.
    """

    def __init__(self, original: nn.Module, name: str, output: TreeTemplate, leaf: int) -> None:
        super().__init__(original, name, (output,))
        self._leaf = leaf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        hidden = None if call is None else call.receive()
        if call is None or hidden is None:
            return PassThrough.forward(self, *args, **kwargs)
        return call.make(self._outputs[0], self._name, {self._leaf: hidden})


class Exit(StandIn):
    """The block after a stage's last one: a call of it ends the stage's forward.

    Args:
        leaf: Which of its arguments is the hidden state.
    """

    def __init__(self, original: nn.Module, name: str, leaf: int) -> None:
        super().__init__(original, name)
        self._leaf = leaf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call is None:
            return PassThrough.forward(self, *args, **kwargs)
        raise StageEnd(call, _pytree.tree_leaves((args, kwargs))[self._leaf])


class ReceiveAtEntry:
    """A forward-pre hook: the block's hidden state is what the stage has received.

    Args:
        leaf: Which of its arguments is the hidden state.
        is_behind_entry: On the example it was what the block before it returned. It is not where
            the model does more between the blocks, for an argument that the example did not have:
            the stage before has done that.
    """

    def __init__(self, leaf: int, *, is_behind_entry: bool) -> None:
        self._leaf = leaf
        self._is_behind_entry = is_behind_entry

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        call = current_call()
        if call is not None and leaves[self._leaf] is call.hidden:
            return None
        if call is None:
            # A checkpointed block computed once more, during the backward: it is given the very
            # tensor that it was given then.
            hidden = getattr(leaves[self._leaf], "_flex_model_received", None)
            if hidden is None and self._is_behind_entry:
                return None
            if hidden is None:
                raise RuntimeError(
                    "the first block of a pipeline stage was called outside of its stage"
                )
        else:
            hidden = call.receive()
            leaves[self._leaf]._flex_model_received = hidden
        leaves[self._leaf] = hidden
        return _pytree.tree_unflatten(leaves, spec)


class LeaveAtExit:
    """A forward hook: the stage ends with what this block, the model's last one, returns."""

    def __init__(self, leaf: int) -> None:
        self._leaf = leaf

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        call = current_call()
        if call is not None:
            raise StageEnd(call, _pytree.tree_leaves(output)[self._leaf])


def _is_plain(value: Any) -> bool:
    """Whether it can be kept without keeping modules or weights alive."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return not isinstance(value, (nn.Module, Tensor)) and not callable(value)
