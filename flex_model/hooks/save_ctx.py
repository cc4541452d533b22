"""Sends what editing functions wrote into ``save_ctx`` on one rank to others, when a run, or a step
of a pipeline, ends.

With ``edit_on="all"`` the ranks of a stage write the same, and nothing is sent. ``save_ctx_on``
chooses the receivers of what only rank 0 wrote, or only one stage of a pipeline.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flex_model.distributed import values
from flex_model.distributed.communicator import Communicator
from flex_model.distributed.serialization import PLAIN, decode, encode
from flex_model.distributed.tensor_dicts import Description, describe, exchange_json, from_rank
from flex_model.errors import HookError, agreed, see
from flex_model.runs.step import current_microbatch

#: Attributes of one rank: as JSON, the tensors in them, and which of those are on a GPU.
Encoded = tuple[dict[str, Any], list[Description], list[bool]]

_DELETED = {"deleted": True}  # in the place of a value


# ---- Which attributes were written ---------------------------------------------------------------


def snapshot(context: Namespace) -> dict[str, Any]:
    """Return the state of each attribute, for ``written``."""
    return {name: _state(value) for name, value in vars(context).items()}


def written(context: Namespace, before: dict[str, Any]) -> list[str]:
    """Return the attributes that were added, deleted or changed since the snapshot, also in place;
    after a pipeline's step, also those that were set to an equal value.
    """
    assigned = (use_of(context).writes or ()) if isinstance(context, StageContext) else ()
    after = snapshot(context)
    changed = [n for n in after if n in assigned or n not in before or before[n] != after[n]]
    return changed + [name for name in before if name not in after]


def _state(value: Any) -> Any:
    """Return a state that is equal for equal values. An object that cannot be compared is equal to
    itself only: its id comes first, and the object after it keeps the id from being reused.
    """
    if isinstance(value, Tensor):
        if _is_hashed(value):
            once = [slice(None) if stride else slice(1) for stride in value.stride()]
            content = values.fingerprint(value.detach()[tuple(once)]).tolist()
            return value.dtype, value.shape, value.device, content
        return id(value), value, None if value.is_inference() else value._version
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Namespace):
        return Namespace, _state(vars(value))
    if isinstance(value, dict):
        return type(value), [(_state(key), _state(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)):
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
    is_on_gpu = [tensor.device.type != "cpu" for tensor in tensors]
    return (attributes, describe(tensors), is_on_gpu), [tensor.cpu() for tensor in tensors]


def check_sendable(rank: int, attributes: dict[str, Any], to: str) -> None:
    """ValueError, on every rank, for attributes that can't be sent."""
    for name, value in attributes.items():
        if isinstance(value, dict) and "unknown" in value:
            raise agreed(
                ValueError(
                    f"save_ctx.{name} is {value['unknown']} on rank {rank}, and can't be sent to "
                    f"{to}; keep tensors, numbers, text, and lists and dicts of them"
                )
            )


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
        else:
            vars(context)[name] = decode(value, list(tensors))
            if isinstance(context, StageContext):
                use_of(context).note_write(name)


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
        """Send the attributes that were written since ``note`` to all ranks. Collective.

        Raises:
            ValueError: something that can't be sent; on every rank.
        """
        before = self._before.pop(id(context), None)
        names = [] if before is None else written(context, before[1])
        local, tensors = encoded(context, names)
        of_first = exchange_json(self._communicator, local, "save_ctx at the end of a run")[0]
        check_sendable(self._communicator.mesh.rank_at(0), of_first[0], "the others")
        received = from_rank(self._communicator, 0, tensors, of_first[1])
        if self._communicator.mesh.group_rank > 0:
            set_received(context, of_first, received, self._device)

    def forget(self) -> None:
        """Drop the snapshots: the run failed, and its writes are not sent. Local."""
        self._before.clear()


# ---- Pipelines -----------------------------------------------------------------------------------


class StageContext(Namespace):
    """The ``save_ctx`` of one rank of a pipeline. During a step it has the attributes that existed
    when the step began, and those that the rank's own stages write, one micro-batch after another.

    Reading an attribute is an error where its value differs from the unsplit model's:

    - one that another rank wrote in an earlier step, and did not send: HookError, which ``hasattr``
      and defaults do not suppress;
    - one that another rank writes in the same step, which is missing or old here:
      ``StageUse.end_step`` returns the attributes that were read, for an error on every rank;
    - one that another hook wrote for another micro-batch: ``StageUse.end_call`` raises, unless the
      function then wrote it itself, such as a sum over micro-batches.

    The contents of containers are not tracked.
    """

    __slots__ = ("_flex_use",)

    def __init__(self) -> None:
        super().__init__()
        self._flex_use = StageUse()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith(("__", "_flex_")):
            super().__getattribute__("_flex_use").note_read(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_flex_")):
            raise AttributeError(name)
        raise self._flex_use.error_of_missing(name)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_flex_"):
            self._flex_use.note_write(name)
        super().__setattr__(name, value)


class StageUse:
    """How the editing functions of a rank of a pipeline use its ``save_ctx`` in a step. An object
    of its own, since the context's attributes are the user's.

    Attributes:
        writes: By attribute set in the step: the call that set it; None between steps.
    """

    def __init__(self) -> None:
        self.writes: dict[str, Any] | None = None
        self._elsewhere: dict[str, int] = {}  # by attribute: the rank that has it
        self._read: set[str] = set()  # read in the current or last step, before being set
        self._call: tuple[int, int | None] | None = None  # the hook, and the micro-batch
        self._other: dict[str, int | None] = {}  # read in the call: the writer's micro-batch

    def note_read(self, name: str) -> None:
        """Note that an attribute is read."""
        if self.writes is None:
            return
        if name not in self.writes:
            self._read.add(name)
        by, call = self.writes.get(name), self._call
        if by is not None and call is not None and by[0] != call[0] and by[1] != call[1]:
            self._other[name] = by[1]

    def note_write(self, name: str) -> None:
        """Note that an attribute is set."""
        self._elsewhere.pop(name, None)
        self._other.pop(name, None)
        if self.writes is not None:
            self.writes[name] = self._call

    def error_of_missing(self, name: str) -> Exception:
        """Return the error for reading an attribute that is not set here."""
        rank = self._elsewhere.get(name)
        if rank is not None:
            return (AttributeError if self.writes is None else HookError)(
                f"save_ctx.{name} was written on rank {rank} of the pipeline and sent to rank 0 "
                "only; make the model with FlexModel(schedule, save_ctx_on='all') to have it on "
                f"every rank ({see('what-another-stage-wrote')})"
            )
        return AttributeError(
            f"save_ctx.{name} is not set on this rank of the pipeline; a stage sees what was there "
            "before the step and what it writes itself. What another stage writes in one step, "
            f"read in the next, with save_ctx_on='all' ({see('what-another-stage-wrote')})"
        )

    def begin_step(self) -> None:
        """Begin to note reads and writes."""
        self.writes, self._call = {}, None
        self._read.clear()

    def end_step(self) -> list[str]:
        """Stop, and return the attributes that the step read before it wrote them."""
        self.writes = self._call = None
        return sorted(self._read)

    def begin_call(self, hook: int) -> None:
        """Begin a call of a hook's editing function, for the micro-batch being computed."""
        self._call = hook, current_microbatch()
        self._other.clear()

    def end_call(self) -> None:
        """HookError where the function read an attribute that another hook wrote for another
        micro-batch, and did not write it itself.
        """
        assert self._call is not None
        (_, microbatch), self._call = self._call, None
        for name, other in self._other.items():
            now = "the whole batch" if microbatch is None else f"micro-batch {microbatch}"
            raise HookError(
                f"save_ctx.{name} was written for micro-batch {other} and read for {now}: the "
                "micro-batches of a step share save_ctx; keep a value for each, as "
                f"save_ctx.{name}[current_microbatch()] in a dict made before the step, or use "
                f"batch_mode='full' ({see('what-another-stage-wrote')})"
            )

    def is_elsewhere(self, name: str, rank: int) -> None:
        """Note that another rank has the value of an attribute, and did not send it."""
        self._elsewhere[name] = rank


def use_of(context: Namespace) -> StageUse:
    """Return how the functions of a rank of a pipeline use its ``save_ctx``."""
    assert isinstance(context, StageContext)
    return context._flex_use


def begin_step(context: Namespace) -> dict[str, Any]:
    """Begin to track reads and writes; return the snapshot for ``end_step``."""
    use_of(context).begin_step()
    return snapshot(context)


def end_step(context: Namespace, before: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the attributes that the step wrote, and those that it read before."""
    names = written(context, before)
    return names, use_of(context).end_step()


def set_elsewhere(context: Namespace, attributes: dict[str, Any], rank: int) -> None:
    """Remove the attributes that this rank wrote, or deleted, and did not send: an older value must
    not be read in their place.
    """
    for name, value in attributes.items():
        vars(context).pop(name, None)
        if value != _DELETED:
            use_of(context).is_elsewhere(name, rank)
