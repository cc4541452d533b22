"""What the ops of `torch.ops.flex_model` return, without data: for torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def register() -> None:
    """To be called once, after the ops are loaded."""
    fakes: dict[str, Callable[..., Tensor]] = {
        "assemble": _assemble,
        "split": _split,
        "pack": _pack,
        "fingerprint": _fingerprint,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"flex_model::{name}", fake)


def _assemble(
    gathered: Tensor, offsets: list[int], plan: list[int], sizes: list[int], dtype: torch.dtype
) -> Tensor:
    return gathered.new_empty(sizes, dtype=dtype)


def _split(full: Tensor, plan: list[int], rank: int, sizes: list[int]) -> Tensor:
    return full.new_empty(sizes)


def _pack(full: Tensor, plan: list[int], offsets: list[int], total: int) -> Tensor:
    return full.new_empty((total,), dtype=torch.uint8)


def _fingerprint(tensor: Tensor) -> Tensor:
    return tensor.new_empty((2,), dtype=torch.int64, device="cpu")
