"""What the ops of `torch.ops.flex_model` return, without data: for torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    """To be called once, after the ops are loaded."""
    fakes: dict[str, Callable[..., Any]] = {
        "assemble": _assemble,
        "split": _split,
        "pack": _pack,
        "pack_tensors": _pack_tensors,
        "assemble_tensors": _assemble_tensors,
        "moments": lambda tensor: tensor.new_empty((3,), dtype=torch.float64),
    }
    # What they write is an argument, or no tensor.
    fakes |= dict.fromkeys(["pull_", "push", "copy_to_host", "peer_barrier"], _nothing)
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


def _pack_tensors(tensors: list[Tensor], offsets: list[int], total: int) -> Tensor:
    return tensors[0].new_empty((total,), dtype=torch.uint8)


def _assemble_tensors(
    gathered: Tensor, offsets: list[int], plans: list[int], sizes: list[int], like: list[Tensor]
) -> list[Tensor]:
    fulls, at = [], 0
    for tensor in like:
        end = at + 1 + sizes[at]
        fulls.append(gathered.new_empty(sizes[at + 1 : end], dtype=tensor.dtype))
        at = end
    return fulls


def _nothing(*args: object) -> None:
    return None
