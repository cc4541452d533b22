"""Compares the inputs of a followed forward among the ranks, and notes how they are placed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.padding import RankRows
from flex_model.distributed.placement import Placement, Replicate, Shard
from flex_model.errors import agreed
from flex_model.integrations import dtensor, torch_private
from flex_model.layouts.follow import Follower
from flex_model.layouts.kept import KeptTensors
from flex_model.layouts.replicas import PendingReplica
from flex_model.layouts.sources import AXES, Argument, BatchDim, inputs_along_dp
from flex_model.layouts.statements import Statement

_MAX_DIMS = 16


def seed_inputs(
    follower: Follower,
    communicator: Communicator,
    batch_dim: BatchDim,
    inputs: Sequence[Argument],
    statements: Mapping[int, Statement],
    kept: KeptTensors,
    pads: bool = False,
    has_rows: bool = True,
) -> RankRows | None:
    """Add the inputs of a forward to what the follower knows. Collective.

    Args:
        batch_dim: States which inputs hold rows.
        statements: Those about inputs, by index.
        kept: Tensors of earlier forwards.
        pads: Whether hooks pad tensors of different lengths to one.
        has_rows: Whether the inputs hold rows of the batch here, not those of a stand-in.

    Returns:
        The rows of the data-parallel ranks; None where there is one, or no input has rows.

    Raises:
        ValueError: whether an input holds rows of the batch can't be known. On every rank.
    """
    mesh = communicator.mesh
    with torch.no_grad():
        sketches = [_sketch(one.tensor, has_rows) for one in inputs]
    header = Header("inputs", site=site_hash("follow", len(inputs)))
    communicator.check_consistency(
        header, f"a followed forward with {len(inputs)} tensors as inputs"
    )
    if not sketches:
        return None
    table = communicator.exchange(torch.stack(sketches)).tolist()
    shapes, prints = [], []
    for of_ranks in zip(*table):
        shapes.append([tuple(row[3 : 3 + row[1]]) for row in of_ranks])
        prints.append(values.Fingerprints(mesh, tuple(row[0] for row in of_ranks)))
    passed = [i for i, one in enumerate(inputs) if not one.is_state]
    stated_dp = {i for i, one in statements.items() if one.dp is not None}
    states = [i for i, one in enumerate(inputs) if one.is_state and kept.source(one.tensor) is None]
    along_dp: dict[int, Placement | None] = {}
    rows: RankRows | None = None
    if mesh.dp_size > 1:
        line = mesh.ranks_along(("dp",), 0)
        try:
            found = inputs_along_dp(
                batch_dim,
                [
                    (
                        inputs[i].name,
                        [shapes[i][place] for place in line],
                        prints[i].equal_along("dp"),
                        i in stated_dp or inputs[i].is_kept or inputs[i].is_state,
                        inputs[i].is_listed,
                    )
                    for i in (*passed, *states)
                ],
            )
        except ValueError as error:
            raise agreed(error) from None
        along_dp = dict(zip((*passed, *states), found))
        is_stand_in = [not table[place][0][2] for place in line]
        if any(is_stand_in) and not pads:
            raise agreed(ValueError(refusal_of_stand_in("the active hooks")))
        inputs_along = [(along_dp[i], [shapes[i][place] for place in line]) for i in passed]
        rows = _rows_of(inputs_along, is_stand_in, pads)

    def note(i: int, text: str, dp: Placement | None, tp: Placement | None) -> None:
        stated = statements.get(i)
        if stated is not None:
            dp, tp = stated.dp or dp, stated.tp or tp
        follower.note_input(inputs[i].tensor, text, (dp, tp))

    for i in passed:
        name, _, _, is_kept, _ = inputs[i]
        if is_kept:
            continue
        dp: Placement | None = along_dp.get(i, Replicate())
        tp: Placement | None = Replicate() if prints[i].equal_along("tp") else None
        text = f"input {name!r}, tensor {i}"
        if tp is None:
            text += ", of which the tensor-parallel ranks were given other values"
        note(i, text, dp, tp)
    for i in states:  # of caches that no followed forward left
        name, tensor = inputs[i][:2]
        dp, tp = along_dp.get(i, Replicate()), Replicate() if mesh.tp_size == 1 else None
        if tensor.numel() <= 1:  # a counter, such as the length of a cache: as inputs are
            alike = [prints[i].equal_along(axis) for axis in AXES]
            dp, tp = (Replicate() if equal else None for equal in alike)
        elif mesh.dp_size > 1 and not isinstance(dp, Shard):
            continue
        note(i, f"state in {name!r}, tensor {i}", dp, tp)
    return rows


class SharedInputs:
    """The inputs of a forward whose values the tensor-parallel ranks should share: all that are
    passed, but for those that state how they are placed, or that an earlier forward has placed.
    Every run compares them.

    Args:
        inputs, statements: As of ``seed_inputs``.
    """

    def __init__(self, inputs: Sequence[Argument], statements: Mapping[int, Statement]) -> None:
        stated = {index for index, one in statements.items() if one.tp is not None}
        self._inputs = [
            (f"input {name!r}, tensor {index}", index, tensor)
            for index, (name, tensor, is_state, is_kept, _) in enumerate(inputs)
            if not (is_state or is_kept or index in stated or dtensor.is_dtensor(tensor))
            and _has_values(tensor)
        ]

    def hash(self) -> int:
        """Return a hash of those on the CPU. Local."""
        hashes = tuple(values.fingerprint(one) for _, _, one in self._inputs if one.is_cpu)
        return hash(hashes) & (2**63 - 1)

    def compare(self, communicator: Communicator) -> None:
        """Compare each of those on the CPU, of which all ranks have the same number. Collective.

        Raises:
            ValueError: one of them differs along tp. On every rank.
        """
        on_host = [one for one in self._inputs if one[2].is_cpu]
        header = Header("inputs", site=site_hash("shared", len(on_host)))
        communicator.check_consistency(header, f"a forward with {len(on_host)} tensors as inputs")
        hashes = torch.tensor([values.fingerprint(tensor) for _, _, tensor in on_host])
        table = communicator.exchange(hashes).tolist()
        for i, (text, index, tensor) in enumerate(on_host):
            kinds = communicator.exchange_text(f"{tensor.dtype} {tuple(tensor.shape)}")
            prints = values.Fingerprints(communicator.mesh, tuple(row[i] for row in table))
            self._check(text, index, prints, f" ({'; '.join(dict.fromkeys(kinds))})")

    def pending(self) -> list[PendingReplica]:
        """Return the comparisons of those on GPUs, for which the host does not wait. Local."""
        return [
            PendingReplica.of(text, tensor, functools.partial(self._check, text, index))
            for text, index, tensor in self._inputs
            if tensor.is_cuda and not torch.cuda.is_current_stream_capturing()
        ]

    @staticmethod
    def _check(text: str, index: int, prints: values.Fingerprints, kinds: str = "") -> None:
        if not prints.equal_along("tp"):
            raise agreed(
                ValueError(
                    f"{text}: the tensor-parallel ranks were given different values{kinds}, and "
                    "they compute one model on one batch. Give all ranks of a tensor-parallel "
                    "group the same inputs (a DistributedSampler's rank is the data-parallel one), "
                    "or state how they are split, such as flex.annotate_layout(re.compile('^$'), "
                    f"kind='forward_pre', index={index}, tp=Shard(1))"
                )
            )


def _has_values(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor.is_nested or torch_private.is_functorch_tensor(tensor):
        return False
    return tensor.layout == torch.strided


def refusal_of_stand_in(what: str) -> str:
    """Return the message for a hook that can't leave out the rows of a stand-in."""
    return (
        f"{what}: a data-parallel rank runs in no_rows(), and its rows are not of the batch; leave "
        'them out with FlexModel(dp_batch="global") or "local", or choose no hooks for such runs '
        "with groups=()"
    )


def _rows_of(
    inputs: Sequence[tuple[Placement | None, Sequence[tuple[int, ...]]]],
    is_stand_in: Sequence[bool],
    pads: bool,
) -> RankRows | None:
    """Return the rows of each data-parallel rank; None if no input has rows.

    Args:
        inputs: The placement along dp and the shapes on all data-parallel ranks.
        is_stand_in: By data-parallel rank: whether it has no rows of the batch.
        pads: As of ``seed_inputs``.
    """
    split = [(one.dim, shapes) for one, shapes in inputs if isinstance(one, Shard)]
    if not split:
        return None
    dim, first = split[0]
    rows = tuple(0 if none else shape[dim] for shape, none in zip(first, is_stand_in))
    differs = any(
        len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1 for dim, shapes in split
    )
    return RankRows(rows, pads and (differs or 0 in rows))


def _sketch(tensor: Tensor, has_rows: bool) -> Tensor:
    """An input's fingerprint and shape, of a fixed size."""
    row = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64)
    row[2] = has_rows
    tensor = dtensor.to_local(tensor)
    if _has_values(tensor):
        row[0] = values.fingerprint(dtensor.wait(tensor))
    shape = tensor.shape[:_MAX_DIMS]
    row[1] = len(shape)
    row[3 : 3 + len(shape)] = torch.tensor(shape, dtype=torch.int64)
    return row
