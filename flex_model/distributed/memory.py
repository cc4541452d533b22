"""CPU tensors in a memory pool that the peers of this process can read and write.

The page faults of fresh memory of many MiB cost several times the copy into it; pooled memory has
none. It returns to the pool when the tensor dies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from flex_model import _C
from flex_model.integrations.torch_private import makes_fakes

POOLED_BYTES = 32 << 10  # below this size, memory of the allocator costs no more

# DLPack's type codes (int 0, uint 1, float 2, bfloat 4, complex 5, bool 6) and bits. Tensors of
# other dtypes are views of bytes.
_CODES = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
}


def empty(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make an uninitialised contiguous CPU tensor, pooled if it is large and the pool has room."""
    num_bytes = dtype.itemsize * math.prod(sizes)
    if num_bytes < POOLED_BYTES:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    capsule = None if makes_fakes() else _C.lease_tensor(*as_leased(sizes, dtype))
    if capsule is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return tensor(capsule, sizes, dtype)


def as_leased(sizes: Sequence[int], dtype: torch.dtype) -> tuple[Sequence[int], int, int]:
    """The sizes, type code and bits of the capsule for a tensor."""
    if dtype in _CODES:
        return sizes, *_CODES[dtype]
    return [dtype.itemsize * math.prod(sizes)], *_CODES[torch.uint8]


def tensor(capsule: Any, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make the tensor of a capsule with the sizes of ``as_leased``."""
    leased = from_dlpack(capsule)
    return leased if dtype in _CODES else leased.view(dtype).view(sizes)


def copy(tensor: Tensor) -> Tensor:
    """Make a contiguous CPU copy of a tensor's values, detached, in memory of its own."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.nbytes < POOLED_BYTES:
        tensor = tensor.resolve_conj().resolve_neg()
        return tensor.clone(memory_format=torch.contiguous_format)
    return empty(tensor.shape, tensor.dtype).copy_(tensor)
