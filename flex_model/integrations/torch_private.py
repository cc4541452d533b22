"""Private functions of torch that flex_model uses, each named once. Tried with torch 2.11."""

from __future__ import annotations

from torch import Tensor

# ---- pipelining/splitting --------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """What tensors over the same memory have in common, while it lives; on meta too."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper around other tensors
        return id(tensor)
