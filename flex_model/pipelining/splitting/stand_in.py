"""Modules that stand in for those of other stages, in a stage that runs the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.weak import WeakTensorKeyDictionary

from flex_model.pipelining.pass_through import PassThrough
from flex_model.pipelining.splitting.dependence import mark_absent
from flex_model.pipelining.splitting.stage_forward import StageEnd, current_call
from flex_model.pipelining.splitting.templates import Seen, Template


class StandIn(PassThrough):
    """A module of another stage, in a stage whose model code still calls it.

    It returns placeholders of the structure, sizes and dtypes that the module returns: NaN, so that
    one that should not be used is seen. Attributes that model code reads are there: plain ones
    (``layer_idx``), modules in it as stand-ins too, sizes and dtypes of its parameters
    (``embed.weight.dtype``), and the module's own (``tower.dtype``, ``tower.device``).

    Args:
        original: The module; nothing of it is kept alive.
        name: Its name in the model.
        outputs_of: What modules return, by name: per call in one run of the model.
        part: The name of what another stage has as a whole: this module, or one that it is in.
        ends: Which of its arguments is the hidden state, of the block after the stage's last one: a
            call of it ends the stage's forward.
    """

    def __init__(
        self,
        original: nn.Module,
        name: str,
        outputs_of: Callable[[str], Sequence[Template]],
        part: str,
        ends: int | None = None,
    ) -> None:
        super().__init__()
        # None of it is registered: what is in __dict__ is no parameter or module of the stage.
        kept = {key: value for key, value in original.__dict__.items() if _is_plain(value)}
        for key, child in original._modules.items():
            kept[key] = None if child is None else StandIn(child, f"{name}.{key}", outputs_of, part)
        self.__dict__.update({**kept, **self.__dict__, "training": original.training})
        self.stands_for = f"{name}: {type(original).__name__}"
        self._name, self._part, self._ends = name, part, ends
        self._outputs = tuple(outputs_of(name))
        tensors = (*original._parameters.items(), *original._buffers.items())
        self._tensors = {key: Seen.of(tensor) for key, tensor in tensors if tensor is not None}
        first = next(original.parameters(), None)
        if first is not None and {"dtype", "device"} <= set(dir(type(original))):
            self._first = Seen.of(first)  # of which a Hugging Face model has them

    def __getattr__(self, name: str) -> Any:
        is_of_first = name in ("dtype", "device") and "_first" in self.__dict__
        seen = self._first if is_of_first else self.__dict__.get("_tensors", {}).get(name)
        if seen is None:
            return super().__getattr__(name)
        call, dtype, device = current_call(), seen.dtype, seen.device
        if call is not None and call.hidden is not None:
            dtype = call.hidden.dtype if dtype.is_floating_point else dtype
            device = call.hidden.device
        if is_of_first:
            return dtype if name == "dtype" else device
        tensor = torch.full((), seen.fill, dtype=dtype, device=device).expand(seen.sizes)
        mark_absent(tensor, self._part)
        return tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call is None:
            return super().forward(*args, **kwargs)
        if self._ends is not None:
            raise StageEnd(call, _pytree.tree_leaves((args, kwargs))[self._ends])
        if not self._outputs:
            raise RuntimeError(
                f"a pipeline stage calls {self._name!r}, which another stage has, and the example "
                "given to pipeline() did not call it; give an example that does"
            )
        output = self._outputs[min(call.counts[self], len(self._outputs) - 1)].make(call.hidden)
        call.counts[self] += 1
        mark_absent(output, self._part, (args, kwargs))
        return output

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
    return not isinstance(value, (nn.Module, torch.Tensor)) and not callable(value)
