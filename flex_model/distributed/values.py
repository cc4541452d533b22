"""What the ranks' values tell: equal on all ranks or not, by hashes of 16 bytes a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model.distributed.mesh import Mesh
from flex_model.distributed.plain import plain


def fingerprint(tensor: Tensor) -> Tensor:
    """Two int64: a hash of the tensor's bytes, and 1 if all its elements are the same. Local."""
    host = plain(tensor.detach()).cpu().contiguous()
    return torch.ops.flex_model.fingerprint(host)


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of one tensor on all ranks of the grid, tp fastest."""

    mesh: Mesh
    hashes: tuple[int, ...]

    @staticmethod
    def of(mesh: Mesh, rows: Sequence[Sequence[int]]) -> Fingerprints:
        """From an exchange of ``fingerprint``: a row a rank."""
        return Fingerprints(mesh, tuple(row[0] for row in rows))

    def equal_along(self, axis: str) -> bool:
        """Whether ranks that differ along ``axis`` only have the same bytes."""
        places = range(len(self.hashes))
        return all(
            self.hashes[place] == self.hashes[self.mesh.members((axis,), place)[0]]
            for place in places
        )
