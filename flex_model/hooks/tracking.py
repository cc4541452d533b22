"""When layouts are followed through a forward: in the first ones after hooks were registered, until
every active hook's layout was settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.channel import Channel
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.inference import UNKNOWN, Splits
from flex_model.distributed.layout import Replicate, Shard, ShardLayout
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.propagation import Split
from flex_model.distributed.tracking import LayoutTracker, named_weights, tensors_of
from flex_model.hooks.registration import Registration
from flex_model.integrations import compiled, dtensor, layers

_MAX_FORWARDS = 8  # for hooks whose module is not reached, or whose layout nothing settles
_SAMPLE = 4096  # elements of a weight that are compared between ranks
_MAX_DIMS = 16


@dataclass(eq=False)
class FollowedForward:
    """What is known of the forward that goes on.

    Attributes:
        depth: Of the wrapped module's calls inside itself.
        numbers: By registration index: how often the hook was called.
        tells: Whether what it shows holds for other forwards, too: not where all data-parallel
            ranks were given the same, and which of these inputs has the batch's rows is not known.
    """

    tracker: LayoutTracker | None = None
    depth: int = 0
    tells: bool = True
    numbers: dict[int, int] = field(default_factory=dict)


class Tracking:
    """Of one wrap. ``begin`` and ``end`` bracket a forward of the wrapped module.

    Attributes:
        forward: Exchanged with that of another batch where several are under way.
    """

    def __init__(self, root: nn.Module, channel: Channel) -> None:
        self._root = root
        self._channel = channel
        self._forwards_left = 0
        self.forward = FollowedForward()

    def hooks_changed(self) -> None:
        """There may be layouts to find."""
        self._forwards_left = _MAX_FORWARDS

    def begin(self, args: Any, kwargs: Any, active: Iterable[Registration]) -> None:
        """A forward of the wrapped module begins. Collective where layouts are to be found."""
        self.forward.depth += 1
        if self.forward.depth > 1:
            return
        self.forward.numbers.clear()
        self.forward.tells = True
        if self._is_wanted(active):
            tracker = LayoutTracker(self._channel.mesh)
            self.seed(tracker, list(tensors_of((args, kwargs))))
            self._forwards_left -= self.forward.tells
            tracker.__enter__()
            self.forward.tracker = tracker

    def end(self) -> None:
        """The forward that began last is over."""
        self.forward.depth = max(0, self.forward.depth - 1)
        if self.forward.depth == 0:
            self._leave()

    def reset(self) -> None:
        """A run begins or is over, whatever became of its forwards."""
        self.forward.depth = 0
        self.forward.numbers.clear()
        self._leave()

    def _leave(self) -> None:
        if self.forward.tracker is not None:
            tracker, self.forward.tracker = self.forward.tracker, None
            tracker.__exit__(None, None, None)

    def _is_wanted(self, active: Iterable[Registration]) -> bool:
        return (
            not self._channel.is_local
            and self._forwards_left > 0
            and any(r.kind != "tensor" and not r.splits for r in active)
            and not compiled.is_compiled(self._root)
        )

    # What hooks ask.

    def number(self, registration: Registration) -> int:
        """Which call of the hook this is in the forward that goes on."""
        number = self.forward.numbers.get(registration.index, 0)
        self.forward.numbers[registration.index] = number + 1
        return number

    @property
    def is_following(self) -> bool:
        """Whether the forward that goes on is followed."""
        return self.forward.tracker is not None

    @property
    def tells(self) -> bool:
        """Whether what the forward shows holds for others, too."""
        return self.forward.tells

    def splits(self, tensor: Tensor) -> Splits:
        """How the tensor is split, as far as it was followed. Local."""
        return UNKNOWN if self.forward.tracker is None else self.forward.tracker.splits(tensor)

    def note(self, tensor: Tensor, layout: ShardLayout) -> None:
        """What a hook found, or put in place of a tensor, is split like this. Local."""
        if self.forward.tracker is not None:
            self.forward.tracker.note_layout(tensor, layout)

    def paused(self) -> AbstractContextManager[None]:
        """What runs inside is no part of the model."""
        return nullcontext() if self.forward.tracker is None else self.forward.tracker.paused()

    # What is known at the start.

    def seed(self, tracker: LayoutTracker, inputs: list[Tensor]) -> None:
        """Tell the tracker of the weights and of the run's inputs. Collective."""
        mesh = self._channel.mesh
        compared: list[Tensor] = []
        for module, name, weight in named_weights(self._root):
            splits = _of_weight(module, name, weight, mesh)
            if splits is None:
                compared.append(weight)
            else:
                tracker.note_parameter(weight, splits)
        rows = [values.fingerprint(_sample(weight)) for weight in compared]
        sketches = [_sketch(tensor) for tensor in inputs]
        what = f"the start of a forward, with {len(inputs)} tensors as inputs"
        header = Header("inputs", site=site_hash(len(compared), len(inputs)))
        self._channel.agree(header, what)
        if rows:
            table = self._channel.exchange(torch.stack(rows)).tolist()
            for i, weight in enumerate(compared):
                told = values.Fingerprints.of(mesh, [rank[i] for rank in table])
                equal = told.equal_along("tp")
                tracker.note_parameter(weight, (Replicate(), Replicate() if equal else None))
        if sketches:
            table = self._channel.exchange(torch.stack(sketches)).tolist()
            self._note_inputs(tracker, inputs, table)

    def _note_inputs(
        self, tracker: LayoutTracker, inputs: list[Tensor], table: list[list[list[int]]]
    ) -> None:
        mesh = self._channel.mesh
        batch: Tensor | None = None  # the first input that has rows of it
        found: list[tuple[Split, Split]] = []
        for i, tensor in enumerate(inputs):
            told = values.Fingerprints.of(mesh, [rank[i][:2] for rank in table])
            shapes = [tuple(rank[i][3 : 3 + rank[i][2]]) for rank in table]
            tp = (
                Replicate() if told.equal_along("tp") and len(set(shapes)) <= mesh.dp_size else None
            )
            dp = _batch_dim(shapes, told)
            if isinstance(dp, Shard) and dp.dim == 0 and batch is None:
                batch = tensor
            found.append((dp, tp))
        if mesh.dp_size > 1 and all(dp == Replicate() for dp, _ in found):
            # Every rank was given the same: rows of one batch all the same, which happen to be
            # equal. In the next forward they may differ, and tell which input has the rows.
            several = [tensor for tensor in inputs if tensor.dim() > 1]
            candidates = several or [tensor for tensor in inputs if tensor.dim()]
            sizes = {tensor.shape[0] for tensor in candidates}
            if len(candidates) == 1 or (len(sizes) == 1 and sizes != {1}):
                batch = candidates[0]
            elif candidates:
                self.forward.tells = False
                found = [(None, tp) for _, tp in found]
        rows = 0 if batch is None else batch.shape[0]
        for tensor, splits in zip(inputs, found):
            # Equal on all dp ranks, but with a row for every row of the batch: a mask of ones.
            is_batch = tensor is batch or (rows > 1 and tensor.dim() and tensor.shape[0] == rows)
            if splits[0] == Replicate() and is_batch and mesh.dp_size > 1:
                splits = (Shard(0), splits[1])
            tracker.note(tensor, splits)


def _batch_dim(shapes: list[tuple[int, ...]], told: values.Fingerprints) -> Split:
    """Where an input is split over the data-parallel ranks: along dim 0, unless all have the same;
    not known where other dims differ, as those of sequences that are not padded to one length.
    """
    if told.mesh.dp_size == 1:
        return Replicate()
    if len({shape[1:] for shape in shapes}) > 1:
        return None
    if len(set(shapes)) == 1 and (told.equal_along("dp") or not shapes[0]):
        return Replicate()
    return Shard(0) if shapes[0] else None


def _of_weight(module: nn.Module, name: str, weight: Tensor, mesh: Mesh) -> Splits | None:
    """How a weight is split, as it or its layer says; None where the ranks must compare it."""
    if mesh.tp_size == 1:
        return Replicate(), Replicate()
    if dtensor.is_dtensor(weight):
        return Replicate(), None  # the tracker asks the DTensor itself
    stated = layers.parameter_layout(module, name, weight, mesh)
    return None if stated is None else (Replicate(), stated.tp)


def _sample(weight: Tensor) -> Tensor:
    """Some of its elements, whatever its size. Meta and empty ones have none."""
    if weight.is_meta or weight.layout != torch.strided:
        return torch.zeros(0)
    flat = weight.detach()
    while flat.dim() > 1 and flat.numel() > _SAMPLE:
        flat = flat[: max(1, _SAMPLE * flat.shape[0] // flat.numel())]
        if flat.numel() > _SAMPLE:
            flat = flat[0]
    return flat[:_SAMPLE] if flat.dim() == 1 else flat


def _sketch(tensor: Tensor) -> Tensor:
    """An input's fingerprint and shape, of a fixed size."""
    row = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64)
    if dtensor.is_dtensor(tensor):
        tensor = dtensor.to_local(tensor)
    if not tensor.is_meta and tensor.layout == torch.strided:
        row[:2] = values.fingerprint(dtensor.wait(tensor))
    shape = tensor.shape[:_MAX_DIMS]
    row[2] = len(shape)
    row[3 : 3 + len(shape)] = torch.tensor(shape, dtype=torch.int64)
    return row
