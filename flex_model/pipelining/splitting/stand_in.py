"""Modules that stand in for those of other stages, in a stage that runs the model's own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from flex_model.pipelining.pass_through import PassThrough
from flex_model.pipelining.splitting.absent_tensor import names_in
from flex_model.pipelining.splitting.placeholder import Placeholder, without_values
from flex_model.pipelining.splitting.stage_forward import StageEnd, current_call


class StandIn(PassThrough):
    """A module of another stage, in a stage whose model code still calls it.

    It returns placeholders of what the module returned on the example. Attributes that model code
    reads are there: plain ones (``layer_idx``), modules in it as stand-ins too, sizes and dtypes of
    its parameters (``embed.weight.dtype``), and the module's own (``tower.dtype``,
    ``tower.device``).

    Args:
        original: The module; nothing of it is kept alive.
        name: Its name in the model.
        outputs: What modules returned on the example, by name, without values.
        received: The hidden state that the stage received on it; None: none.
        part: The name of what another stage has as a whole: this module, or one that it is in.
        ends: Which of its arguments is the hidden state, of the block after the stage's last one: a
            call of it ends the stage's forward.
    """

    def __init__(
        self,
        original: nn.Module,
        name: str,
        outputs: Mapping[str, Any],
        received: Tensor | None,
        part: str,
        ends: int | None = None,
    ) -> None:
        super().__init__()
        # None of it is registered: what is in __dict__ is no parameter or module of the stage.
        kept = {key: value for key, value in original.__dict__.items() if _is_plain(value)}
        for key, child in original._modules.items():
            inner = f"{name}.{key}"
            kept[key] = None if child is None else StandIn(child, inner, outputs, received, part)
        self.__dict__.update({**kept, **self.__dict__, "training": original.training})
        self.stands_for = f"{name}: {type(original).__name__}"
        self._name, self._part, self._ends = name, part, ends
        self._output = Placeholder(outputs[name], received) if name in outputs else None
        tensors = (*original._parameters.items(), *original._buffers.items())
        self._tensors = {
            key: Placeholder(without_values(tensor), received, is_fixed=True)
            for key, tensor in tensors
            if tensor is not None
        }
        first = next(original.parameters(), None)
        if first is not None and {"dtype", "device"} <= set(dir(type(original))):
            self._first = Placeholder(without_values(first), received)  # a Hugging Face model's

    def __getattr__(self, name: str) -> Any:
        call, own = current_call(), self.__dict__
        hidden = None if call is None else call.hidden
        if name in ("dtype", "device") and "_first" in own:
            return getattr(self._first.make(hidden, ()), name)
        if name in own.get("_tensors", ()):
            return self._tensors[name].make(hidden, {self._part})
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call is None:
            return super().forward(*args, **kwargs)
        if self._ends is not None:
            raise StageEnd(call, _pytree.tree_leaves((args, kwargs))[self._ends])
        if self._output is None:
            raise RuntimeError(
                f"a pipeline stage calls {self._name!r}, which another stage has, and the example "
                "given to pipeline() did not call it; give an example that does"
            )
        return self._output.make(call.hidden, {self._part} | names_in((args, kwargs)))

    def extra_repr(self) -> str:
        return f"for {self.stands_for}"


class Entry:
    """A forward-pre hook: the hidden state that a stage's first block is given is what the stage
    has received.

    Args:
        leaf: Which of the block's arguments is the hidden state.
    """

    def __init__(self, leaf: int) -> None:
        self._leaf = leaf
        self._received = WeakTensorKeyDictionary()  # by what it was given instead

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry, (self._leaf,)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        call, stand_in = current_call(), leaves[self._leaf]
        if call is not None:
            self._received[stand_in] = call.receive(stand_in)
        elif stand_in not in self._received:
            # A checkpointed block is computed again in the backward, on the very same tensor.
            raise RuntimeError(
                "the first block of a pipeline stage was run outside of its stage; if the model "
                "checkpoints several blocks at once, checkpoint each on its own"
            )
        leaves[self._leaf] = self._received[stand_in]
        return _pytree.tree_unflatten(leaves, spec)


def _is_plain(value: Any) -> bool:
    """Whether it can be kept without keeping modules or weights alive."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return not isinstance(value, (nn.Module, Tensor)) and not callable(value)
