"""Converts DTensor weights to this rank's part and back; plain ones are their own part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flex_model.integrations import dtensor, torch_private


def local_of(tensor: Any) -> Tensor:
    """Return the plain tensor that this rank holds, or would hold, on meta."""
    if not dtensor.is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return dtensor.to_local(tensor).detach()


def part_of(full: Tensor, tensor: Any) -> Tensor:
    """Return this rank's part of ``full``, sharded as ``tensor`` is: a view."""
    if not dtensor.is_dtensor(tensor):
        return full
    sizes, starts = torch_private.local_shape_and_offset(tensor)
    for dim, (size, start) in enumerate(zip(sizes, starts)):
        full = full.narrow(dim, start if size else 0, size)
    return full


def with_local(tensor: Any, local: Tensor) -> Tensor:
    """Return ``tensor`` with ``local`` as this rank's part."""
    return dtensor.like(local, tensor) if dtensor.is_dtensor(tensor) else local
