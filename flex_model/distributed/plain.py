"""Converts any tensor of torch to a plain strided one, the only kind that transfers accept."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flex_model.integrations import dtensor
from flex_model.integrations.torch_private import FakeTensor, makes_fakes

_PLAIN = (Tensor, nn.Parameter)
_NO_DISPATCH = Tensor.__torch_dispatch__


def plain(tensor: Tensor) -> Tensor:
    """Return this rank's plain strided tensor, in the graph; the tensor itself if it is one. Local.

    Takes the local part of a DTensor, waits for an AsyncCollectiveTensor, casts subclasses without
    a ``__torch_dispatch__`` of their own, and computes lazy conjugates and negatives.

    Raises:
        TypeError: the tensor has no plain memory: it is sparse, quantized, nested, meta, or of a
            subclass that stores its values elsewhere.
    """
    kind = kind_of(tensor)
    if kind:
        raise TypeError(
            f"a {kind} tensor can't be moved between ranks; only dense strided tensors with values "
            "can: hook a module whose tensor is one, or convert it in the model"
        )
    if type(tensor) not in _PLAIN and not (type(tensor) is FakeTensor and makes_fakes()):
        return plain(_without_subclass(tensor))
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def kind_of(tensor: Tensor) -> str:
    """The kind of a tensor that has no plain memory; empty for others."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_quantized:
        return "quantized"
    return "meta" if tensor.is_meta else ""


def is_renamed(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that has the memory of a plain tensor."""
    kind = type(tensor)
    return kind not in _PLAIN and kind.__torch_dispatch__ is _NO_DISPATCH


def _without_subclass(tensor: Tensor) -> Tensor:
    if dtensor.is_dtensor(tensor):
        return dtensor.to_local(tensor)
    waited = dtensor.wait(tensor)
    if type(waited) in _PLAIN:
        return waited
    if is_renamed(waited):
        return waited.as_subclass(Tensor)
    raise TypeError(
        f"a tensor of the class {type(tensor).__name__} can't be moved between ranks: where it "
        "keeps its values is not known; hook a module whose tensor is a plain one, or convert it "
        "in the model"
    )
