"""What torch hands over as a tensor, as a plain strided one: all that enters a transfer is that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flex_model.integrations import dtensor

_PLAIN = (Tensor, nn.Parameter)
_NO_DISPATCH = Tensor.__torch_dispatch__


def plain(tensor: Tensor) -> Tensor:
    """This rank's plain strided tensor, with memory of its own process, in the graph; the tensor
    itself if it is one. Local.

    Of a DTensor it is the local part; an AsyncCollectiveTensor is waited for; subclasses that are
    tensors by another name are taken as such; lazy conjugates and negatives are computed.

    Raises:
        TypeError: a tensor that has no such memory: sparse, quantized, nested, meta, or of a
            subclass that keeps its values elsewhere.
    """
    kind = kind_of(tensor)
    if kind:
        raise TypeError(
            f"a {kind} tensor can't be moved between ranks; only dense strided tensors with values "
            "can: hook a module whose tensor is one, or convert it in the model"
        )
    if type(tensor) not in _PLAIN:
        return plain(_without_subclass(tensor))
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def kind_of(tensor: Tensor) -> str:
    """What is special about a tensor that has no plain memory; empty for others."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_quantized:
        return "quantized"
    return "meta" if tensor.is_meta else ""


def is_renamed(tensor: Tensor) -> bool:
    """Whether it is of a subclass that has the memory of a plain tensor."""
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
