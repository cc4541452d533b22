"""What modules have in the place of weights that are not loaded: it tells what the weight is like,
and any use of its values is an error. Torch's own answer would be wrong numbers: those that the
model had before, or, of a weight on meta, whatever lies in memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.sequential.weights.inventory import Weight

# Besides attributes; they don't need values.
_HARMLESS = (
    *("dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference"),
    *("__hash__", "__len__"),
)


class _Absent(Tensor):
    _name: str
    _weight: Tensor
    _is_param: bool  # what torch asks for in isinstance(..., nn.Parameter)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):
                return found
        leaves = (*args, *(kwargs or {}).values())
        names = [leaf._name for leaf in leaves if isinstance(leaf, _Absent)]
        raise RuntimeError(
            f"sequential.run: the weight {names[0] if names else '(one of several)'!r} is used "
            "outside of the call of its target, and is not there now; choose targets=[...] without "
            "that target, so that its weights stay, or with one that holds that use"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._weight, memo)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<the weight {self._name!r}, which is not loaded>"


def absent(weight: Weight) -> Tensor:
    """In its place while it is not loaded."""
    own = weight.tensor
    if type(own) not in (Tensor, nn.Parameter):  # shards, which no operation mixes with tensors
        return own
    made = Tensor._make_subclass(_Absent, own.detach(), own.requires_grad)
    made._name, made._weight, made._is_param = weight.names[0], own, weight.is_parameter
    return made
