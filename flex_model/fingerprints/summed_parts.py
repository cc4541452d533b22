"""Sums up each rank's own part of a tensor, and joins the sums of all ranks: the tensors themselves
stay where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import GRID
from flex_model.distributed.placement import Shard
from flex_model.distributed.transports import buffer_layout
from flex_model.fingerprints.summary import Summary, moments_of, num_reals, positions, sums_of
from flex_model.layouts import replicas, resolve
from flex_model.layouts.tensor_site import Site

_CPU = torch.device("cpu")


@dataclass(eq=False)
class Held:
    """Describes the part of a full tensor that a rank holds.

    Attributes:
        index: Where the values at the full tensor's ``positions`` are in its flat shard, of those
            that it holds; ``places``: which of them these are.
        share: The part of its flat shard that it sums up, among the ranks that hold the same.
        copy: Its index among these ranks; ``num_copies``: their number.
        layout, splits: As of a `Summary`.
    """

    index: Tensor
    places: Tensor
    share: tuple[int, int]
    copy: int = 0
    num_copies: int = 1
    layout: str = ""
    splits: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def whole(full: Tensor) -> Held:
        """Return what a process holds that has all."""
        index = positions(tuple(full.shape), full.device)
        return Held(index, index, (0, full.numel()))

    @staticmethod
    def of(spec: TensorSpec, device: torch.device) -> Held:
        """Return what this rank holds of a tensor that is in parts."""
        mesh, shape = spec.communicator.mesh, spec.plan.shard_sizes[spec.rank]
        lines = [mesh.ranks_along(spec.axes, place) for place in range(len(mesh.stage_ranks))]
        copies = [place for place, line in enumerate(lines) if line.index(place) == spec.rank]
        at = positions(spec.full_shape, _CPU)
        found = [at.new_empty(2, 0)]
        for box in (one for one in spec.boxes if one[0] == spec.rank):
            rest, is_inside, index, stride = at, at >= 0, 0 * at, 1
            for full, local, *of_box in reversed([*zip(spec.full_shape, shape, *box[1:])]):
                start, local_start, size = of_box
                offset, rest = rest % max(full, 1) - start, rest // max(full, 1)
                is_inside = is_inside & (offset >= 0) & (offset < size)
                index, stride = index + (offset + local_start) * stride, stride * local
            places = is_inside.nonzero().flatten()
            found.append(torch.stack([index[places], places]))
        index, places = torch.cat(found, 1)
        numel, copy, number = torch.Size(shape).numel(), copies.index(mesh.group_rank), len(copies)
        share = numel * copy // number, numel * (copy + 1) // number
        return Held(index.to(device), places, share, copy, number, *layout_of(spec))


def layout_of(spec: TensorSpec) -> tuple[str, dict[str, Any]]:
    """Return the layout in words; by axis, the dim along which its ranks hold consecutive parts,
    and their sizes.
    """
    layout, sizes, mesh = spec.layout, spec.plan.shard_sizes, spec.communicator.mesh
    num_tp = len({place % mesh.tp_size for place in mesh.ranks_along(spec.axes)})
    found = {}
    for axis, along in ("dp", sizes[::num_tp]), ("tp", sizes[:num_tp]):
        split = getattr(layout, axis)
        if isinstance(split, Shard) and split == Shard(split.dim) and not layout.splits_one_dim:
            found[axis] = split.dim, [shape[split.dim] for shape in along]
    return str(layout), found


class Part(NamedTuple):
    """Holds what a rank knows of one tensor from its own part: sums in place of the moments, and of
    the sample those values that it holds. ``spec`` is None on one process.
    """

    summary: Summary
    held: Held
    spec: TensorSpec | None
    site: Site


def summed_up(tensor: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """Return the sums and the sample of what a rank holds. Local.

    Nothing of it is kept for a module that gets the same tensor: as long as a tensor lives, its
    memory is not used again, and the page faults of other memory take longer than its sums.
    """
    flat = tensor.contiguous().view(-1)
    return sums_of(flat[held.share[0] : held.share[1]]), flat.index_select(0, held.index)


def joined(communicator: Communicator, parts: Sequence[Part]) -> list[Summary]:
    """Return the summaries of full tensors, of which all ranks have parts. Collective.

    Raises:
        ReplicasDifferError: ranks that should hold the same have other values. On every rank.
    """
    if not parts:
        return []
    sums = torch.stack([part.summary.moments.cpu() for part in parts])
    samples = [part.summary.sample for part in parts]
    if not communicator.is_local:
        hashes = [
            int(values.fingerprint(one)[0]) if part.held.num_copies > 1 else 0
            for part, one in zip(parts, samples)
        ]
        row = torch.cat([sums.view(torch.int64), torch.tensor(hashes)[:, None]], 1)
        table = communicator.exchange(row)
        for part, of_ranks in zip(parts, table[..., 3].t().tolist()):
            if part.held.num_copies > 1 and part.spec is not None and len(set(of_ranks)) > 1:
                prints = values.Fingerprints(communicator.mesh, tuple(of_ranks))
                axes = resolve.differing_axes(part.spec.layout, prints)
                if axes:
                    replicas.reconciled(communicator, part.site, part.summary.sample, axes)
        found = table[..., :3].contiguous().view(torch.float64)
        sums = torch.cat([found[..., :2].sum(0), found[..., 2:].amax(0)], 1)
        samples = _joined_samples(communicator, parts)
    counts = torch.tensor([num_reals(part.summary) for part in parts])
    return [
        replace(one, moments=moments, sample=sample, layout=held.layout, splits=held.splits)
        for (one, held, *_), moments, sample in zip(parts, moments_of(sums, counts), samples)
    ]


def _joined_samples(communicator: Communicator, parts: Sequence[Part]) -> list[Tensor]:
    """Return the full samples: each value is of one rank, and zero on the others in a sum."""
    kinds = [(one.dtype, len(positions(one.shape, _CPU))) for one, *_ in parts]
    sizes = [number * dtype.itemsize for dtype, number in kinds]
    starts = [0, *itertools.accumulate(map(buffer_layout.aligned, sizes))]
    data = torch.zeros(starts[-1], dtype=torch.uint8)
    for (one, held, *_), start, size in zip(parts, starts, sizes):
        if held.copy == 0 and size:
            rows = buffer_layout.as_bytes(one.sample.cpu()).view(-1, one.dtype.itemsize)
            data[start : start + size].view(-1, one.dtype.itemsize)[held.places] = rows
    data = communicator.all_reduce_sum(GRID, data)
    spans = zip(kinds, starts, sizes)
    return [data[start : start + size].view(dtype) for (dtype, _), start, size in spans]
