"""Checks that all ranks are at the same call of a hook, before any payload moves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.header import Header
from flex_model.distributed.mesh import Mesh
from flex_model.distributed.placement import Replicate, Shape, ShardLayout
from flex_model.hooks.hook_call import HookCall
from flex_model.hooks.random_state import seed_of_state
from flex_model.layouts import replicas


def check_call(
    communicator: Communicator, call: HookCall, tensor: Tensor, kind: str, axes: Sequence[str] = ()
) -> tuple[list[Shape], list[str]]:
    """Exchange the header of a call and check that all ranks agree. Collective.

    Args:
        axes: Along which all ranks should hold the same values.

    Returns:
        The local shapes of all ranks, and the axes of ``axes`` along which the values differ.

    Raises:
        HookMismatchError: the ranks are at different calls; raised on every rank.
    """
    run, is_first = call.run, communicator.mesh.group_rank == 0
    may_draw = call.registration.draws is not False
    header = Header(
        kind,
        site=call.registration.site,
        seed=run.seed or (seed_of_state() if is_first and may_draw else 0),  # rank 0's counts
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        hash=values.fingerprint(tensor) if axes else None,
    )
    what = "the gradient of the edit of " if kind == "gradient of an edit" else ""
    headers = communicator.check_consistency(header, what + call.describe())
    run.use_seed(headers[0].seed or None)
    shapes, mesh = [header.shape for header in headers], communicator.mesh
    hashes = [header.hash for header in headers]
    differing = [axis for axis in axes if not mesh.equal_along(axis, hashes)]
    if not all(mesh.equal_along(axis, shapes) for axis in differing):
        return shapes, []  # it fits no layout, which ends the call
    return shapes, differing


def replicated_axes(
    mesh: Mesh, call: HookCall, tensor: Tensor, known: ShardLayout | None
) -> list[str]:
    """Return the axes along which all ranks should hold this tensor's values, as far as this rank
    knows before an exchange: in a followed forward, they are compared when the layout is resolved.

    Args:
        known: The layout that a DTensor states; its values are compared as well.
    """
    if (
        call.registration.is_backward
        or call.is_replay
        or not tensor.is_cpu  # the host would wait for the GPU
        or not replicas.are_compared(tensor.shape)
    ):
        return []
    dp, tp = call.evidence.placements if known is None else (known.dp, known.tp)
    axes = ["dp"] if mesh.dp_size > 1 and isinstance(dp, Replicate) else []
    return [*axes, "tp"] if mesh.tp_size > 1 and isinstance(tp, Replicate) else axes
