"""Sums up each rank's own part of a tensor, and joins the sums of all ranks: the tensors themselves
stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import GRID
from flex_model.distributed.placement import Shard, located
from flex_model.distributed.transports.buffer_layout import as_bytes
from flex_model.fingerprints.summary import Summary, finished, positions, sums_of
from flex_model.layouts import replicas, resolve
from flex_model.layouts.statements import Site


@dataclass(eq=False)
class Held:
    """Describes the part of a full tensor that a rank holds.

    Attributes:
        index: Where the values at the full tensor's ``positions`` are in its flat shard; of those
            that it does not hold, any place.
        is_given: By byte of these values, 1 if it is this rank that gives it to the full sample.
        share: The part of its flat shard that it sums up, among the ranks that hold the same.
        axes: The axes along which ranks hold the same.
        described: What a `Summary` has of the layout.
    """

    index: Tensor
    is_given: Tensor
    share: tuple[int, int]
    axes: tuple[str, ...]
    described: dict[str, Any]

    @staticmethod
    def of(spec: TensorSpec, tensor: Tensor) -> Held:
        """Return what this rank holds of a tensor that is in parts."""
        mesh, shard = spec.communicator.mesh, spec.plan.shard_sizes[spec.rank]
        lines = [mesh.ranks_along(spec.axes, place) for place in range(len(mesh.stage_ranks))]
        copies = [place for place, line in enumerate(lines) if line.index(place) == spec.rank]
        copy, numel = copies.index(mesh.group_rank), torch.Size(shard).numel()
        chosen = positions(spec.full_shape, torch.device("cpu"))
        is_held, index = torch.zeros_like(chosen, dtype=torch.bool), torch.zeros_like(chosen)
        indices = torch.unravel_index(chosen, spec.full_shape)
        for box in (one for one in spec.boxes if one[0] == spec.rank):
            is_inside, place = located(indices, box, shard)
            is_held, index = is_held | is_inside, index.where(~is_inside, place)
        is_given = (is_held & (copy == 0)).to(torch.uint8).repeat_interleave(tensor.itemsize)
        share = numel * copy // len(copies), numel * (copy + 1) // len(copies)
        axes = tuple(resolve.axes_of_replicas(spec.layout, mesh))
        return Held(index.to(tensor.device), is_given, share, axes, described(spec))

    def summed(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums and the sample of what the rank holds. Local.

        Nothing of it is kept for a module that gets the same tensor: as long as a tensor lives, its
        memory is not used again, and the page faults of other memory take longer than its sums.
        """
        flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        held = flat if len(flat) else flat.new_zeros(1)
        return sums_of(flat[slice(*self.share)]), as_bytes(held.index_select(0, self.index))


def described(spec: TensorSpec) -> dict[str, Any]:
    """Return the layout in words; by axis, the dim along which its ranks hold consecutive parts,
    and their sizes.
    """
    layout, sizes, mesh = spec.layout, spec.plan.shard_sizes, spec.communicator.mesh
    num_tp = len({place % mesh.tp_size for place in mesh.ranks_along(spec.axes)})
    splits = {}
    for axis, along in ("dp", sizes[::num_tp]), ("tp", sizes[:num_tp]):
        split = getattr(layout, axis)
        if isinstance(split, Shard) and split == Shard(split.dim) and not layout.splits_one_dim:
            splits[axis] = split.dim, [shape[split.dim] for shape in along]
    return {"layout": str(layout), "splits": splits}


class Part(NamedTuple):
    """A summary, not `finished`, of what a rank holds of a tensor. ``held`` is None where that is
    all of it, which the other ranks need not have.
    """

    summary: Summary
    held: Held | None = None
    site: Site | None = None


def joined(communicator: Communicator, parts: Sequence[Part]) -> list[Summary]:
    """Return the finished summaries of the full tensors. Collective.

    Raises:
        ReplicasDifferError: ranks that should hold the same have other values. On every rank.
    """
    shared = [(one.summary, one.held, one.site) for one in parts if one.held and one.site]
    full = iter(_full(communicator, *zip(*shared)) if shared else ())
    return finished([one.summary if one.held is None else next(full) for one in parts])


def _full(
    communicator: Communicator,
    summaries: Sequence[Summary],
    held: Sequence[Held],
    sites: Sequence[Site],
) -> list[Summary]:
    """Return the summaries of tensors of which all ranks have parts, not finished."""
    mesh = communicator.mesh
    samples = [one.sample.cpu() for one in summaries]
    groups: dict[tuple[str, ...], list[int]] = {}  # of tensors that have replicas along these axes
    for i, part in enumerate(held):
        groups.setdefault(part.axes, []).append(i)
    joint = [torch.cat([samples[i] for i in group]) for group in groups.values()]
    hashes = torch.tensor([values.fingerprint(one) for one in joint], device="cpu")
    sums = torch.stack([one.moments.cpu() for one in summaries])
    table = communicator.exchange(torch.cat([sums.view(torch.int64).flatten(), hashes]))
    for (axes, group), of_ranks in zip(groups.items(), table[:, sums.numel() :].t().tolist()):
        prints = values.Fingerprints(mesh, tuple(of_ranks))
        differing = [axis for axis in axes if not prints.equal_along(axis)]
        for i in group if differing else ():
            replicas.reconciled(communicator, sites[i], summaries[i].values, differing)
    found = table[:, : sums.numel()].view(torch.float64).unflatten(1, sums.shape)
    sums = torch.cat([found[..., :2].sum(0), found[..., 2:].amax(0)], 1)
    # Each byte of the samples is one rank's, and zero on the others.
    data = torch.cat(samples).mul_(torch.cat([part.is_given for part in held]))
    data = communicator.all_reduce_sum(GRID, data)
    full = data.split([len(one) for one in samples])
    return [
        replace(one, moments=of_one, sample=sample)
        for one, of_one, sample in zip(summaries, sums, full)
    ]
