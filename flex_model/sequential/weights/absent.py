"""Stands in for a weight that is not loaded. Its shape, dtype and the like can be read; any use of
its values is an error, where torch would compute wrong numbers: with the values that the model had
before, or, for a weight on meta, with whatever is in memory.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from flex_model.integrations import torch_private
from flex_model.sequential.weights.inventory import Weight

# Methods that don't need values, besides attributes.
_HARMLESS = (
    *("dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference"),
    *("__hash__", "__len__"),
)


class AbsentWeight(Tensor):
    _name: str
    _weight: Tensor
    _is_param: bool  # what torch reads in isinstance(..., nn.Parameter)

    @staticmethod
    def __new__(cls, weight: Weight) -> AbsentWeight:
        own = weight.tensor
        self: AbsentWeight = torch_private.make_subclass(cls, own.detach(), own.requires_grad)
        self._name, self._weight, self._is_param = weight.names[0], own, weight.is_parameter
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in _HARMLESS:
            with torch_private.DisableSubclassFunction():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):
                return found
        leaves = (*args, *(kwargs or {}).values())
        names = [leaf._name for leaf in leaves if isinstance(leaf, AbsentWeight)]
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
    """Return the stand-in for a weight. A sharded one is its own: no operation mixes it with plain
    tensors.
    """
    is_plain = type(weight.tensor) in (Tensor, nn.Parameter)
    return AbsentWeight(weight) if is_plain else weight.tensor
