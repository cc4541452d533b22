"""Compares replicas: ranks' values can refute that a tensor is replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import MAX_HASHED_DIMS
from flex_model.distributed.placement import Shape, Shard, ShardLayout
from flex_model.distributed.transports.host_copies import Ready, ready_now
from flex_model.errors import ReplicasDifferError, agreed, see
from flex_model.layouts.refusal import AXIS_NAMES
from flex_model.layouts.statements import Site


@dataclass(frozen=True, eq=False)
class PendingReplica:
    """The hash of a tensor on a GPU that ranks should share: until their run, or its backward, ends
    and compares it, the host does not wait for the GPU.

    Attributes:
        hash: On the GPU; ``ready``: the event after which it is there.
        check: Raises an error if the fingerprints of all ranks differ.
    """

    site: str
    hash: Tensor
    ready: Ready
    check: Callable[[values.Fingerprints], None]

    @staticmethod
    def of(
        site: str, tensor: Tensor, check: Callable[[values.Fingerprints], None]
    ) -> PendingReplica:
        """Hash a tensor, in the order of the current stream. Local."""
        hashed = values.hash_on_device(tensor)
        return PendingReplica(site, hashed, ready_now(hashed), check)


def compare(communicator: Communicator, pending: Sequence[PendingReplica]) -> None:
    """Compare replicas, of which all ranks have the same number. Collective over the grid where
    there are some.
    """
    if not pending:
        return
    for replica in pending:
        replica.ready.wait(replica.hash)
    table = communicator.exchange(values.on_host([replica.hash for replica in pending])).tolist()
    for i, replica in enumerate(pending):
        replica.check(values.Fingerprints(communicator.mesh, tuple(row[i] for row in table)))


def are_compared(shape: Shape) -> bool:
    """Whether ranks exchange a hash of a tensor of this shape, this rank's, or, where all ranks
    decide alike, the full one: not without elements, or with too many dims to leave room in a
    header.
    """
    return math.prod(shape) > 0 and len(shape) <= MAX_HASHED_DIMS


def reconciled(
    communicator: Communicator,
    site: Site,
    tensor: Tensor,
    axes: Sequence[str],
    source: str = "the operations that made it",
) -> Tensor:
    """Return the first rank's values on all ranks along ``axes``, if they differ by no more than
    sums in another order do; in the autograd graph of this rank's tensor. Collective over the grid.

    Raises:
        ReplicasDifferError: they differ by more. On every rank.
    """
    first, is_close = compared(communicator, tensor.detach(), axes)
    if not is_close:
        words = " and ".join(AXIS_NAMES[axis] for axis in axes)
        raise agreed(
            ReplicasDifferError(
                f"{site.name}: the {words} ranks hold different values of shape "
                f"{tuple(tensor.shape)}, though by {source} all should hold the "
                "same (does each rank draw its own dropout, or is its input not the same on all?); "
                "flex.layouts(why=True) has the proof"
            )
        )
    if not tensor.requires_grad:
        return first
    made = tensor.clone()  # whose gradient is that of the tensor
    made.detach().copy_(first)
    return made


def compared(
    communicator: Communicator, tensor: Tensor, axes: Sequence[str]
) -> tuple[Tensor, bool]:
    """Return the first rank's values along ``axes``, and whether those of all ranks of the grid are
    as close as sums in another order are. Collective over the grid.
    """
    is_close = True
    for axis in axes:
        line = communicator.mesh.ranks_along((axis,))
        shapes = [(1, *tensor.shape)] * len(line)
        plan = ShardLayout(tp=Shard(0)).plan(shapes, 1, len(line), tensor.element_size())
        (stacked,) = communicator.all_gather((axis,), tensor.contiguous().unsqueeze(0), plan)
        first, *others = stacked
        # A row of gradients that cancel is rounding alone, so the scale is the whole tensor's.
        is_close &= not any(values.beyond_rounding(other, first) for other in others)
        tensor = first
    return tensor, bool(communicator.exchange(torch.tensor([is_close], device="cpu")).all())


def check_edit(communicator: Communicator, hook: str, full: Tensor, edited: Tensor) -> None:
    """Check that all ranks have made the same of a full tensor, but for rounding, which is relative
    to what the function got, too: it may leave nothing else of it. Collective over the grid.

    Raises:
        ReplicasDifferError: they have not. On every rank.
    """
    edited = edited.detach()
    first = communicator.broadcast(edited, edited)
    # Relative to each row: one large value elsewhere must not hide what a rank adds.
    largest = values.beyond_rounding(edited, first, full.detach(), dim=-1)
    table = communicator.exchange(torch.tensor(largest, dtype=torch.float64, device="cpu")).tolist()
    ranks = [communicator.mesh.rank_at(i) for i, largest in enumerate(table) if largest]
    if ranks:
        raise agreed(
            ReplicasDifferError(
                f"{hook}: all ranks edit one full tensor, of shape {tuple(full.shape)}, and what "
                f"the editing function makes of it on the ranks {ranks} differs from that on rank "
                f"{communicator.mesh.rank_at(0)}, by up to {max(table):.3g}. "
                "Make the values that it uses the same on all ranks: seed them, broadcast them "
                "from one rank, take a weight by HookFunction(parameters=...), or let rank 0 alone "
                f"run the function, with FlexModel(edit_on='rank0') ({see('replicas-differ')})"
            )
        )
