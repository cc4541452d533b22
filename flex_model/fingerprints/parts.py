"""What each rank sums up of its own part of a tensor, and how that of all ranks is joined: the
tensors themselves stay where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.gather import TensorSpec
from flex_model.distributed.mesh import GRID
from flex_model.distributed.placement import Shape, Shard
from flex_model.distributed.transports import buffer_layout
from flex_model.fingerprints.summary import Summary, moments_of, num_reals, positions, sums_of
from flex_model.layouts import replicas, resolve
from flex_model.layouts.tensor_site import Site

_REMEMBERED = 8  # tensors: the input of three projections, and what they made
_ALIGNED = 16  # bytes


@dataclass(eq=False)
class Held:
    """What a rank holds of a full tensor.

    Attributes:
        index: Where the values at the full tensor's ``positions`` are in its flat shard, of those
            that it holds; ``places``: which of them these are.
        share: The part of its flat shard that it sums up, among the ranks that hold the same.
        is_first: Whether it is the first of these ranks; ``has_copies``: whether there are others.
        layout, splits: As of a `Summary`.
    """

    index: Tensor
    places: Tensor
    share: tuple[int, int]
    is_first: bool = True
    has_copies: bool = False
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
        at = positions(spec.full_shape, torch.device("cpu"))
        found = []
        for _, *box in (one for one in spec.boxes if one[0] == spec.rank):
            rest, is_inside, index, stride = at, torch.ones_like(at, dtype=torch.bool), 0 * at, 1
            for size, local, start, local_start, extent in reversed(
                list(zip(spec.full_shape, shape, *box))
            ):
                offset = rest % max(size, 1) - start
                is_inside = is_inside & (offset >= 0) & (offset < extent)
                index, stride, rest = (
                    index + (offset + local_start) * stride,
                    stride * local,
                    rest // max(size, 1),
                )
            places = is_inside.nonzero().flatten()
            found.append(torch.stack([index[places], places]))
        index, places = torch.cat([at.new_empty(2, 0), *found], 1)
        numel, own = torch.Size(shape).numel(), copies.index(mesh.group_rank)
        share = numel * own // len(copies), numel * (own + 1) // len(copies)
        layout, splits = layout_of(spec)
        return Held(
            index.to(device), places, share, own == 0, len(copies) > 1, layout=layout, splits=splits
        )


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


@dataclass(eq=False)
class Part:
    """What a rank knows of one tensor, from its own part of it.

    Attributes:
        key: Of a `Summary`; ``dtype``, ``shape``: of the full tensor.
        spec: How the tensor is placed; None on one process.
    """

    key: tuple[str, str, int]
    dtype: torch.dtype
    shape: Shape
    site: Site
    spec: TensorSpec | None
    held: Held
    sums: Tensor
    sample: Tensor


class Sums:
    """Sums up parts of tensors; one that was just summed up is not again: a module's output is the
    next one's input.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[Tensor, int, Tensor, Tensor]] = {}

    def of(self, tensor: Tensor, held: Held) -> tuple[Tensor, Tensor]:
        """Return sums and sample of what a rank holds. Local."""
        flat = tensor.contiguous().view(-1)
        sample = flat.index_select(0, held.index)
        own = flat[held.share[0] : held.share[1]]
        if not tensor.is_cpu or tensor.is_inference():  # the host would wait; without a version
            return sums_of(own), sample
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), held.share
        seen = self._seen.get(key)  # its memory is kept, so that no other tensor has its address
        # A kernel may have written to it without torch's knowledge: so its sample is compared.
        if seen and seen[1] == tensor._version and torch.equal(seen[2], sample):
            return seen[3], sample
        sums = sums_of(own)
        self._seen[key] = tensor, tensor._version, sample, sums
        while len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return sums, sample


def joined(communicator: Communicator, parts: Sequence[Part]) -> list[Summary]:
    """Return the summaries of full tensors, of which all ranks have parts. Collective.

    Raises:
        ReplicasDifferError: ranks that should hold the same have other values. On every rank.
    """
    if not parts:
        return []
    sums, samples = torch.stack([part.sums.cpu() for part in parts]), [one.sample for one in parts]
    if not communicator.is_local:
        hashes = [
            int(values.fingerprint(one.sample)[0]) if one.held.has_copies else 0 for one in parts
        ]
        row = torch.cat([sums.view(torch.int64), torch.tensor(hashes)[:, None]], 1)
        table = communicator.exchange(row)
        _check_copies(communicator, parts, table[..., 3].tolist())
        found = table[..., :3].contiguous().view(torch.float64)
        sums = torch.cat([found[..., :2].sum(0), found[..., 2:].amax(0)], 1)
        samples = _joined_samples(communicator, parts)
    counts = torch.tensor([num_reals(part.dtype, part.shape) for part in parts])
    return [
        Summary(
            *part.key,
            part.dtype,
            part.shape,
            moments,
            sample,
            layout=part.held.layout,
            splits=part.held.splits,
        )
        for part, moments, sample in zip(parts, moments_of(sums, counts), samples)
    ]


def _check_copies(
    communicator: Communicator, parts: Sequence[Part], hashes: list[list[int]]
) -> None:
    for part, *of_ranks in zip(parts, *hashes):
        if part.held.has_copies and part.spec is not None:
            prints = values.Fingerprints(communicator.mesh, tuple(of_ranks))
            axes = resolve.differing_axes(part.spec.layout, prints)
            if axes and replicas.are_compared(part.shape):
                replicas.reconciled(communicator, part.site, part.sample, axes)


def _joined_samples(communicator: Communicator, parts: Sequence[Part]) -> list[Tensor]:
    """Return the full samples: each value is of one rank, and zero on the others in a sum."""
    kinds = [(part.dtype, len(positions(part.shape, torch.device("cpu")))) for part in parts]
    sizes = [number * dtype.itemsize for dtype, number in kinds]
    starts = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
    data = torch.zeros(starts[-1], dtype=torch.uint8)
    for part, start, size in zip(parts, starts, sizes):
        if part.held.is_first and size:
            rows = buffer_layout.as_bytes(part.sample.cpu()).view(-1, part.dtype.itemsize)
            data[start : start + size].view(-1, part.dtype.itemsize)[part.held.places] = rows
    data = communicator.all_reduce_sum(GRID, data)
    return [
        data[start : start + size].view(dtype)
        for (dtype, _), start, size in zip(kinds, starts, sizes)
    ]
