"""Compares values over ranks, by hashes of 8 bytes per rank, and measures their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flex_model import _C
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.plain import plain
from flex_model.distributed.transports import buffer_layout
from flex_model.integrations.torch_private import FakeTensor

if TYPE_CHECKING:
    from flex_model.distributed.communicator import Communicator

# Odd numbers without a pattern: the fractional digits of pi.
_MIXERS = (0x243F6A8885A308D3, 0x13198A2E03707345, 0x082EFA98EC4E6C89)
_CHUNK_BYTES = 64 << 20  # hashed at once on a GPU, which takes twice as much memory
_FILLED = 1e3  # times a usual magnitude: scores hardly are that low, masks are at most -1e4


def fingerprint(tensor: Tensor) -> int:
    """Return 63 bits of a hash of the tensor's bytes, in the order of its elements; 0 in a run on
    shapes. Local.
    """
    host = plain(tensor.detach()).cpu().contiguous()
    return 0 if isinstance(host, FakeTensor) else _C.hash_of(host)


def hash_on_device(tensor: Tensor) -> Tensor:
    """An int64 hash of the tensor's bytes, in the order of its elements, on its device; another
    one than ``fingerprint``'s. The host waits for nothing. Local.
    """
    data = buffer_layout.as_bytes(plain(tensor.detach()))
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        if part.numel() % 8 or part.data_ptr() % 8:
            padded = part.new_zeros(-(-part.numel() // 8) * 8)
            padded[: part.numel()].copy_(part)
            part = padded
        # Each word is mixed with its place, so that the sum depends on the order.
        first, words = start // 8 + 1, part.view(torch.int64)
        mixed = torch.arange(first, first + len(words), device=data.device).mul_(_MIXERS[0])
        mixed.bitwise_xor_(words)
        for mixer in _MIXERS:
            mixed.mul_(mixer).bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


def hashed(tensor: Tensor, is_of_gpu: bool) -> Tensor:
    """An int64 hash, on the tensor's device: ``hash_on_device`` for a tensor that is on a GPU, or
    was, so that its hash is the same wherever it is by now. Local.
    """
    return hash_on_device(tensor) if is_of_gpu else torch.tensor(fingerprint(tensor), device="cpu")


def on_host(hashes: Sequence[Tensor]) -> Tensor:
    """Stack hashes, on the CPU; the host waits once for each GPU that has some. Local."""
    found = list(hashes)
    for device in {one.device for one in hashes if not one.is_cpu}:
        places = [i for i, one in enumerate(hashes) if one.device == device]
        for i, one in zip(places, torch.stack([hashes[i] for i in places]).cpu()):
            found[i] = one
    return torch.stack(found)


def difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest absolute difference of elements, and the largest of ``theirs``, but for
    ``without_fills``. NaN is one number, infinities of one sign are equal. Tensors of one shape,
    with elements. Local.
    """
    largest = apart(ours, theirs).max().item()
    return largest, without_fills(ours, theirs).abs().max().item()


def without_fills(ours: Tensor, theirs: Tensor) -> Tensor:
    """``theirs``, with zeros for what says nothing of the scale of the others: what is not finite,
    and numbers far below the others that both have, as masks put before a softmax. Local.
    """
    found = theirs.to(_wide(theirs)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    real = found.real.flatten()
    others = real[(real > real.min() / 2) & (real != 0)] if len(real) else real
    if not len(others):
        return found
    # They are equal, so they add nothing to a difference. Probabilities near 1 beside tiny ones
    # are a scale, those by which softmax rounds: so only what is below.
    is_low = found.real < -_FILLED * others.abs().median()
    return found.masked_fill(is_low & (ours == theirs), 0.0)


def apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """The absolute differences of elements, as in ``difference``. Local."""
    wide = _wide(ours, theirs)
    same = (ours.isnan() & theirs.isnan()) | (ours == theirs)
    found = (ours.to(wide) - theirs.to(wide)).abs()
    if not (ours.is_floating_point() or ours.is_complex()):
        found = found.clamp(min=1)  # of large integers, float64 drops the last bits
    return found.masked_fill(same, 0.0).nan_to_num(nan=torch.inf)


def beyond_rounding(
    ours: Tensor, theirs: Tensor, *sources: Tensor, dim: int | None = None
) -> float:
    """The largest of the differences that sums in another order don't explain; 0 without one. They
    explain ``tolerance`` of an element of ``theirs`` or of the ``sources``, or of the root mean
    square along ``dim`` (None: of all): that of what was summed. Local.
    """
    scale = torch.zeros((), dtype=torch.float64, device=ours.device)
    for one in (theirs, *sources):
        size = without_fills(ours, one).abs()
        scale = scale.maximum(size).maximum(size.square().mean(dim, keepdim=True).sqrt())
    found = apart(ours, theirs)
    return found.masked_fill(found <= tolerance(ours) * scale, 0.0).max().item()


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.complex128 if any(t.is_complex() for t in tensors) else torch.float64


def tolerance(*tensors: Tensor) -> float:
    """The tolerance for sums in another order, relative to the largest value: the two-thirds power
    of the coarser dtype's ``eps``; 0 for integers.
    """
    eps = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()]
    return max(eps, default=0.0) ** (2 / 3)


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of one tensor on all ranks of the stage, tp fastest."""

    mesh: Mesh
    hashes: tuple[int, ...]

    def equal_along(self, axis: str) -> bool:
        """Whether ranks that differ along ``axis`` only hold the same bytes."""
        return self.mesh.equal_along(axis, self.hashes)


def exchanged(communicator: Communicator, tensor: Tensor) -> Fingerprints:
    """Return the fingerprints of a tensor on all ranks. Collective."""
    hashes = communicator.exchange(torch.tensor(fingerprint(tensor), device="cpu")).tolist()
    return Fingerprints(communicator.mesh, tuple(hashes))
