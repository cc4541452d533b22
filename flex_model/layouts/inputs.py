"""Compares the inputs of a followed forward among the ranks, and notes how they are placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.agreement import gather_checked
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header, site_hash
from flex_model.distributed.padding import RankRows
from flex_model.distributed.placement import Placement, Replicate, Shape, Shard
from flex_model.distributed.tensor_dicts import exchange_json
from flex_model.errors import agreed
from flex_model.integrations import dtensor, torch_private
from flex_model.layouts.follow import Follower
from flex_model.layouts.kept import KeptTensors
from flex_model.layouts.replicas import PendingReplica
from flex_model.layouts.sources import (
    AXES,
    Argument,
    BatchDim,
    dims_like_rows,
    inputs_along_dp,
    of_own_rows,
)
from flex_model.layouts.statements import Statement

_MAX_DIMS = 16
_ABSENT = -1  # in place of the fingerprint of an input that a rank was not given


def seed_inputs(
    follower: Follower,
    communicator: Communicator,
    batch_dim: BatchDim,
    inputs: Sequence[Argument],
    check_others: Callable[[], None],
    statements: Mapping[int, Statement],
    kept: KeptTensors,
    pads: bool = False,
    has_rows: bool = True,
) -> RankRows | None:
    """Add the inputs of a forward to what the follower knows. Collective.

    Args:
        batch_dim: States which inputs hold rows.
        check_others: Raises a ValueError where arguments that are no tensors may hold rows.
        statements: Those about inputs, by index.
        kept: Tensors of earlier forwards.
        pads: Whether hooks pad tensors of different lengths to one.
        has_rows: Whether the inputs hold rows of the batch here, not those of a stand-in.

    Returns:
        The rows of the data-parallel ranks; None where there is one, or no input has rows.

    Raises:
        HookMismatchError: tensor-parallel ranks were given other arguments. On every rank.
        ValueError: whether an input holds rows of the batch can't be known. On every rank.
    """
    mesh = communicator.mesh
    order = _order(communicator, inputs)
    with torch.no_grad():
        sketches = [_sketch(None if i is None else inputs[i].tensor, has_rows) for i in order]
    if not sketches:
        if mesh.dp_size > 1:
            gather_checked(communicator, "the inputs of the model", check_others)
        return None
    table = communicator.exchange(torch.stack(sketches)).tolist()
    shapes: dict[int, list[Shape]] = {}
    prints: dict[int, values.Fingerprints] = {}
    for i, of_ranks in zip(order, zip(*table)):
        if i is not None:
            shapes[i] = [tuple(row[3 : 3 + row[1]]) for row in of_ranks]
            prints[i] = values.Fingerprints(mesh, tuple(row[0] for row in of_ranks))
    passed = [i for i in shapes if not inputs[i].is_state]
    placed = {i: one.placed for i, one in enumerate(inputs) if one.placed is not None}
    placed |= {i: one.dp for i, one in statements.items() if one.dp is not None}
    states = [i for i in shapes if inputs[i].is_state and kept.source(inputs[i].tensor) is None]
    along_dp: dict[int, Placement | None] = {}
    rows: RankRows | None = None
    num_rows: list[int] = []  # by data-parallel rank
    if mesh.dp_size > 1:
        line = mesh.ranks_along(("dp",), 0)
        shared = [i for i in (*passed, *states) if _ABSENT not in prints[i].hashes]
        try:
            found = inputs_along_dp(
                batch_dim,
                [
                    (
                        inputs[i].name,
                        [shapes[i][place] for place in line],
                        prints[i].equal_along("dp"),
                        inputs[i].is_kept or inputs[i].is_state,
                        inputs[i].is_listed,
                        placed.get(i),
                    )
                    for i in shared
                ],
            )
        except ValueError as error:
            raise agreed(error) from None
        along_dp = dict(zip(shared, found))
        is_stand_in = [not table[place][0][2] for place in line]
        if any(is_stand_in) and not pads:
            raise agreed(ValueError(refusal_of_stand_in("the active hooks")))
        inputs_along = [
            (along_dp[i], [shapes[i][place] for place in line]) for i in shared if i in passed
        ]
        rows = _rows_of(inputs_along, is_stand_in, pads)
        if not any(isinstance(one, Shard) for one, _ in inputs_along):
            gather_checked(communicator, "the inputs of the model", check_others)
        here = mesh.group_rank // mesh.tp_size
        own = ([s[one.dim] for s in each] for one, each in inputs_along if isinstance(one, Shard))
        num_rows = next(own, [])
        for i in {*passed, *states}.difference(shared):
            shape = shapes[i][mesh.group_rank]
            own_rows = num_rows[here] if num_rows else None
            along_dp[i] = of_own_rows(batch_dim, inputs[i].name, shape, own_rows)

    def note(i: int, text: str, dp: Placement | None, tp: Placement | None) -> None:
        stated, (name, tensor, *_) = statements.get(i), inputs[i]
        is_whole = dp == Replicate() and i not in placed
        open_dims = dims_like_rows(batch_dim, name, tensor.shape, num_rows) if is_whole else ()
        if open_dims:
            says = " or ".join(f"{ {name: dim} }" for dim in (*open_dims, None))
            dp, text = None, f"{text}, whose rows are as FlexModel(batch_dim=...) says: {says}"
        if stated is not None:
            dp, tp = stated.dp or dp, stated.tp or tp
        follower.note_input(tensor, text, (dp, tp), open_dims)

    for i in passed:
        name = inputs[i].name
        if inputs[i].is_kept:
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
            for index, (name, tensor, is_state, is_kept, *_) in enumerate(inputs)
            if not (is_state or is_kept or index in stated or dtensor.is_dtensor(tensor))
            and _has_values(tensor)
        ]

    def hash(self) -> int:
        """Return a hash of those on the CPU. Local."""
        hashes = tuple(values.fingerprint(one) for _, _, one in self._inputs if one.is_cpu)
        return hash(hashes) & (2**63 - 1)

    def compare(self, communicator: Communicator) -> None:
        """Compare each of those on the CPU. Collective.

        Raises:
            HookMismatchError: ranks along tp have other numbers of them. On every rank.
            ValueError: one of them differs along tp. On every rank.
        """
        mesh = communicator.mesh
        own: list[Any] = [
            [text, index, f"{one.dtype} {tuple(one.shape)}", values.fingerprint(one)]
            for text, index, one in self._inputs
            if one.is_cpu
        ]
        table = exchange_json(communicator, own, "the inputs of a forward")
        if not mesh.equal_along("tp", list(map(len, table))):
            where = f"a forward with {'; '.join(one[0] for one in own) or 'no tensors'}"
            raise communicator.mismatch(where, "are at different places")
        for place in mesh.ranks_along(("dp",), 0):
            for of_ranks in zip(*(table[other] for other in mesh.ranks_along(("tp",), place))):
                text, index, _, _ = of_ranks[0]
                kinds = dict.fromkeys(kind for _, _, kind, _ in of_ranks)
                if len({hashed for *_, hashed in of_ranks}) > 1:
                    raise _differ_along_tp(text, index, f" ({'; '.join(kinds)})")

    def pending(self) -> list[PendingReplica]:
        """Return the comparison of those on GPUs, for which the host does not wait: one, of however
        many a data-parallel rank was given. Local.
        """
        on_gpu = [one for one in self._inputs if one[2].is_cuda]
        if not on_gpu or torch.cuda.is_current_stream_capturing():
            return []
        texts, indices, tensors = zip(*on_gpu)
        hashes = [values.hash_on_device(one).to(tensors[0].device) for one in tensors]

        def check(prints: values.Fingerprints) -> None:
            if not prints.equal_along("tp"):
                raise _differ_along_tp("; ".join(texts), indices[0])

        return [PendingReplica.of("the inputs of a forward", torch.stack(hashes), check)]


def _differ_along_tp(text: str, index: int, kinds: str = "") -> ValueError:
    return agreed(
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


def _order(communicator: Communicator, inputs: Sequence[Argument]) -> list[int | None]:
    """Return, by tensor that any rank was given, its index among this rank's, in one order on all:
    first what all were given. None: only other data-parallel ranks were given it, such as a mask of
    padding, which transformers leaves out where nothing is padded. Collective.

    Raises:
        HookMismatchError: of seed_inputs.
    """
    names = [(one.name, one.is_state) for one in inputs]
    keys = [(*name, names[:i].count(name)) for i, name in enumerate(names)]
    listed = ", ".join(dict.fromkeys(one.name for one in inputs))
    where = f"a followed forward with {len(inputs)} tensors as inputs ({listed})"
    header = Header("inputs", site=site_hash("follow"), hash=site_hash(*keys))
    hashes = [other.hash for other in communicator.check_consistency(header, where)]
    if not communicator.mesh.equal_along("tp", hashes):
        raise communicator.mismatch(where, "are at different places")
    if len(set(hashes)) == 1:
        return list(range(len(keys)))
    of_ranks = [
        [tuple(key) for key in of_rank]
        for of_rank in exchange_json(communicator, keys, "the names of a forward's inputs")
    ]
    found = dict.fromkeys(key for of_rank in of_ranks for key in of_rank)
    of_some = [key for key in found if not all(key in of_rank for of_rank in of_ranks)]
    order = [*(key for key in found if key not in of_some), *of_some]
    return [keys.index(key) if key in keys else None for key in order]


def _sketch(tensor: Tensor | None, has_rows: bool) -> Tensor:
    """An input's fingerprint and shape, of a fixed size."""
    row = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64, device="cpu")
    row[2] = has_rows
    if tensor is None:
        row[0] = _ABSENT
        return row
    tensor = dtensor.to_local(tensor)
    if _has_values(tensor):
        row[0] = values.fingerprint(dtensor.wait(tensor))
    shape = tensor.shape[:_MAX_DIMS]
    row[1] = len(shape)
    row[3 : 3 + len(shape)] = torch.tensor(shape, dtype=torch.int64, device="cpu")
    return row
