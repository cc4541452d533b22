"""Sends what editing functions wrote into ``save_ctx`` on one rank to others, when a run, or a step
of a pipeline, ends.

With ``edit_on="all"`` the ranks of a stage write the same, and nothing is sent. ``save_ctx_on``
chooses the receivers of what only rank 0 wrote, or only one stage of a pipeline.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.serialization import PLAIN, decode, encode
from flex_model.distributed.tensor_dicts import Description, describe, exchange_json, from_rank
from flex_model.errors import agreed, see

#: Attributes of one rank: as JSON, the tensors in them, and which of those are on a GPU.
Encoded = tuple[dict[str, Any], list[Description], list[bool]]

_DELETED = {"deleted": True}  # in the place of a value


# ---- Which attributes were written ---------------------------------------------------------------


def snapshot(context: Namespace) -> dict[str, Any]:
    """Return the state of each attribute, for ``written``."""
    found = {}
    for name, value in vars(context).items():
        try:
            found[name] = _state(value)
        except RecursionError:  # a container of itself
            found[name] = id(value), value
    return found


def written(context: Namespace, before: dict[str, Any]) -> list[str]:
    """Return the attributes that were added, deleted or changed since the snapshot, also in place;
    after a pipeline's step, also those that were set to an equal value.
    """
    was_set = context._flex_set if isinstance(context, StageContext) else ()
    after = snapshot(context)
    changed = [n for n in after if n in was_set or n not in before or before[n] != after[n]]
    return changed + [name for name in before if name not in after]


def _state(value: Any) -> Any:
    """Return a state that is equal for equal values. An object that cannot be compared is equal to
    itself only: its id comes first, and the object after it keeps the id from being reused.
    """
    if isinstance(value, Tensor):
        if _is_hashed(value):
            once = [slice(None) if stride else slice(1) for stride in value.stride()]
            content = values.fingerprint(value.detach()[tuple(once)])
            return value.dtype, value.shape, value.device, content
        return id(value), value, None if value.is_inference() else value._version
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(_state(key), _state(item)) for key, item in value.items()]
    is_data = is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    if isinstance(value, Namespace) or is_data:
        return type(value), _state(vars(value))
    if isinstance(value, (list, tuple, set, deque, bytearray)):
        return type(value), [_state(item) for item in value]
    return repr(value) if isinstance(value, PLAIN) else (id(value), value)


def _is_hashed(tensor: Tensor) -> bool:
    """Return whether a hash detects changes, also those by ``.data`` and numpy. Hashing a tensor on
    a GPU would synchronize: there the tensor's version detects them, if it has one.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized)
        and not (tensor.is_cuda and not tensor.is_inference())
        and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)
    )


# ---- Sending them --------------------------------------------------------------------------------


def encoded(context: Namespace, names: Sequence[str]) -> tuple[Encoded, list[Tensor]]:
    """Encode these attributes for other ranks, with their tensors on the CPU. Local."""
    tensors: list[Tensor] = []
    attributes: dict[str, Any] = {}
    for name in names:
        if name not in vars(context):
            attributes[name] = _DELETED
            continue
        try:
            attributes[name] = encode(vars(context)[name], tensors)
        except TypeError as error:
            attributes[name] = {"unknown": str(error)}
        except RecursionError:
            attributes[name] = {"unknown": "a container of itself"}
    is_on_gpu = [tensor.device.type != "cpu" for tensor in tensors]
    return (attributes, describe(tensors), is_on_gpu), [tensor.cpu() for tensor in tensors]


def check_sendable(rank: int, attributes: dict[str, Any], to: str) -> None:
    """ValueError, on every rank, for attributes that can't be sent."""
    for name, value in attributes.items():
        if _is_unknown(value):
            raise agreed(
                ValueError(
                    f"save_ctx.{name} is {value['unknown']} on rank {rank}, and can't be sent to "
                    f"{to}; keep tensors, numbers, text, and lists and dicts of them"
                )
            )


def _is_unknown(value: Any) -> bool:
    return isinstance(value, dict) and "unknown" in value


def set_received(
    context: Namespace,
    received: Encoded,
    tensors: Sequence[Tensor],
    device: torch.device | None = None,
) -> None:
    """Set, or delete, another rank's attributes; ``device``: for tensors that were on a GPU."""
    attributes, _, is_on_gpu = received
    if device is not None:
        tensors = [t.to(device) if on_gpu else t for t, on_gpu in zip(tensors, is_on_gpu)]
    for name, value in attributes.items():
        if value == _DELETED:
            vars(context).pop(name, None)
        elif not _is_unknown(value):
            vars(context)[name] = decode(value, list(tensors))


class SentToAll:
    """Sends the ``save_ctx`` of functions that only rank 0 runs to the other ranks, when a run or
    its backward ends.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device
        # By the id of a context, which stays alive with it.
        self._before: dict[int, tuple[Namespace, dict[str, Any]]] = {}

    def note(self, context: Namespace) -> None:
        """Take a snapshot before the first function that is called with this context. Local."""
        if id(context) not in self._before:
            self._before[id(context)] = context, snapshot(context)

    def send(self, context: Namespace) -> None:
        """Send the attributes that were written since ``note`` to all ranks: by this run, and by
        those before it that failed. Collective.

        Raises:
            ValueError: something can't be sent, all else was; on every rank.
        """
        before = self._before.get(id(context))
        names = [] if before is None else written(context, before[1])
        local, tensors = encoded(context, names)
        of_first = exchange_json(self._communicator, local, "save_ctx at the end of a run")[0]
        received = from_rank(self._communicator, 0, tensors, of_first[1])
        if self._communicator.mesh.group_rank > 0:
            set_received(context, of_first, received, self._device)
        self._before.pop(id(context), None)
        check_sendable(self._communicator.mesh.rank_at(0), of_first[0], "the others")


# ---- Pipelines -----------------------------------------------------------------------------------


class StageContext(Namespace):
    """The ``save_ctx`` of one rank of a pipeline. During a step it has the attributes that existed
    when the step began, and those that the rank's own stages write, one micro-batch after another.

    It notes which attributes are set: two stages that set one to equal values are in conflict, too.
    """

    __slots__ = ("_flex_set",)

    def __init__(self) -> None:
        super().__init__()
        self._flex_set: set[str] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_flex_set":
            self._flex_set.add(name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"save_ctx.{name} is not set on this rank of the pipeline, which has what was there "
            "before the step and what its own stage writes; write it in one step and read it in "
            f"the next, with save_ctx_on='all' ({see('what-another-stage-wrote')})"
        )


def begin_step(context: Namespace) -> dict[str, Any]:
    """Return the snapshot from which ``written`` finds what a step writes."""
    assert isinstance(context, StageContext)
    context._flex_set.clear()
    return snapshot(context)
